package wall

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// filter is an entry of seccomp.img: a program, and the filter that was there before it.
type filter struct {
	program []instruction
	prev    int  // -1: none
	shared  bool // by all threads of the process, whose images then name none
}

// filterRef is where a thread says which filter it has.
type filterRef struct {
	image       string
	mode, chain uint32
}

// instruction is one of classic BPF.
type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

const (
	maxFilters      = 1 << 16
	maxProgram      = 4096 // instructions, as the kernel has it
	maxChain        = 1 << 10
	instructionSize = 8
	modeFilter      = 2
	flagTsync       = 1
)

func (j *judge) seccomp(name string) error {
	m, err := j.one(name, magicSeccomp, "seccomp_entry")
	if err != nil {
		return err
	}
	list, err := m.inners(1, "seccomp_filter")
	if err != nil {
		return err
	}
	if len(list) > maxFilters {
		return fmt.Errorf("image %s has %d filters: %w", name, len(list), fault.ErrCorrupt)
	}
	for i, e := range list {
		if err := e.once(fields(2, 3), fields(1)); err != nil {
			return err
		}
		data := e.text(1)
		if len(data)%instructionSize != 0 || len(data) == 0 || len(data)/instructionSize > maxProgram {
			return fmt.Errorf("image %s: a filter of %d bytes: %w", name, len(data), fault.ErrCorrupt)
		}
		f := filter{prev: -1, shared: e.number(3)&flagTsync != 0}
		if e.has(2) {
			// CRIU follows this without end otherwise.
			if f.prev = int(e.number(2)); f.prev >= i {
				return refuse(name, "prev", "filter %d is said to lie over filter %d", i, f.prev)
			}
		}
		for b := []byte(data); len(b) > 0; b = b[instructionSize:] {
			f.program = append(f.program, instruction{binary.NativeEndian.Uint16(b), b[2], b[3], binary.NativeEndian.Uint32(b[4:])})
		}
		j.filters = append(j.filters, f)
	}
	return nil
}

// checkFilters proves that each thread has a filter that refuses what the container's does.
// The container's own is not there to be compared with: it is compiled by the OCI runtime.
// So calls that lead out of a container are tried on those of the images.
func (j *judge) checkFilters() error {
	judged := map[uint32]error{}
	shared := map[string]bool{}
	for _, ref := range j.filterR {
		shared[ref.image] = ref.mode == modeFilter && int64(ref.chain) < int64(len(j.filters)) && j.filters[ref.chain].shared
	}
	for _, ref := range j.filterR {
		if ref.mode != modeFilter {
			if j.spec.filtered() && !shared[j.leaders[ref.image]] {
				return refuse(ref.image, "seccomp_mode", "it is %d, and the container's processes have a filter", ref.mode)
			}
			continue
		}
		if int64(ref.chain) >= int64(len(j.filters)) {
			return refuse(ref.image, "seccomp_filter", "there is no filter %d", ref.chain)
		}
		err, known := judged[ref.chain]
		if !known {
			err = j.tryFilter(ref)
			judged[ref.chain] = err
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Actions of a filter, and what of one is the action.
const (
	actionMask  = 0xffff0000
	actionAllow = 0x7fff0000
	actionLog   = 0x7ffc0000
	actionTrace = 0x7ff00000
	actionErrno = 0x00050000
)

func (j *judge) tryFilter(ref filterRef) error {
	if !j.spec.filtered() {
		return nil
	}
	for _, c := range calls {
		if j.spec.allows(c.name) {
			continue
		}
		for _, at := range c.numbers {
			action, err := j.run(int(ref.chain), at)
			if err != nil {
				return refuse(ref.image, "seccomp_filter", "filter %d: %v", ref.chain, err)
			}
			if action == actionAllow || action == actionLog {
				return refuse("seccomp.img", "filter", "that of %s allows %s, which the container's refuses", ref.image, c.name)
			}
		}
	}
	return nil
}

// allows reports whether a call may be made by the container's filter, if only with
// some arguments.
func (s *Spec) allows(name string) bool {
	passes := func(action string) bool {
		switch strings.TrimPrefix(action, "SCMP_ACT_") {
		case "ERRNO", "KILL", "KILL_PROCESS", "KILL_THREAD", "TRAP":
			return false
		}
		return true
	}
	found := false
	for _, rule := range s.Linux.Seccomp.Syscalls {
		for _, n := range rule.Names {
			if n != name {
				continue
			}
			if passes(rule.Action) || len(rule.Args) > 0 {
				return true
			}
			found = true
		}
	}
	return !found && passes(s.Linux.Seccomp.DefaultAction)
}

// run returns what a chain of filters says of a call: the strictest of their actions.
func (j *judge) run(at int, c callNumber) (uint32, error) {
	var data [64]byte // struct seccomp_data; the arguments are 0
	binary.NativeEndian.PutUint32(data[0:], c.number)
	binary.NativeEndian.PutUint32(data[4:], c.arch)
	strictest := uint32(actionAllow)
	for n := 0; at >= 0; n++ {
		if n == maxChain {
			return 0, fmt.Errorf("more than %d filters lie over each other", maxChain)
		}
		action, err := run(j.filters[at].program, data)
		if err != nil {
			return 0, err
		}
		if action &= actionMask; int32(action) < int32(strictest) {
			strictest = action
		}
		at = j.filters[at].prev
	}
	return strictest, nil
}

// run is the kernel's interpreter, for what it lets a filter of system calls be. Jumps
// lead forward only, so that it ends.
func run(program []instruction, data [64]byte) (uint32, error) {
	var a, x uint32
	var mem [16]uint32
	for pc := 0; pc < len(program); pc++ {
		i := program[pc]
		class, src := i.code&7, i.code&8
		operand := i.k
		if src != 0 {
			operand = x
		}
		switch class {
		case 0, 1: // ld, ldx
			var v uint32
			switch i.code &^ 7 {
			case 0x20: // abs
				if i.k%4 != 0 || i.k > 60 {
					return 0, fmt.Errorf("it reads past the call")
				}
				v = binary.NativeEndian.Uint32(data[i.k:])
			case 0x00: // imm
				v = i.k
			case 0x60: // mem
				if i.k >= 16 {
					return 0, fmt.Errorf("it reads past its memory")
				}
				v = mem[i.k]
			case 0x80: // len
				v = 64
			default:
				return 0, fmt.Errorf("it has an instruction %#x", i.code)
			}
			if class == 0 {
				a = v
			} else {
				x = v
			}
		case 2, 3: // st, stx
			if i.k >= 16 {
				return 0, fmt.Errorf("it writes past its memory")
			}
			if mem[i.k] = a; class == 3 {
				mem[i.k] = x
			}
		case 4: // alu
			switch i.code & 0xf0 {
			case 0x00:
				a += operand
			case 0x10:
				a -= operand
			case 0x20:
				a *= operand
			case 0x30:
				if operand == 0 {
					return 0, nil
				}
				a /= operand
			case 0x40:
				a |= operand
			case 0x50:
				a &= operand
			case 0x60:
				a <<= operand & 31
			case 0x70:
				a >>= operand & 31
			case 0x80:
				a = -a
			case 0xa0:
				a ^= operand
			default:
				return 0, fmt.Errorf("it has an instruction %#x", i.code)
			}
		case 5: // jmp
			if i.code&0xf0 == 0 {
				if i.k > maxProgram {
					return 0, fmt.Errorf("it jumps past its end")
				}
				pc += int(i.k)
				continue
			}
			var is bool
			switch i.code & 0xf0 {
			case 0x10:
				is = a == operand
			case 0x20:
				is = a > operand
			case 0x30:
				is = a >= operand
			case 0x40:
				is = a&operand != 0
			default:
				return 0, fmt.Errorf("it has an instruction %#x", i.code)
			}
			if is {
				pc += int(i.jt)
			} else {
				pc += int(i.jf)
			}
		case 6: // ret
			if i.code&0x18 == 0x10 {
				return a, nil
			}
			return i.k, nil
		case 7: // misc
			if i.code&0xf8 == 0 {
				x = a
			} else {
				a = x
			}
		}
	}
	return 0, fmt.Errorf("it does not return")
}

// call is a system call by its name and numbers.
type call struct {
	name    string
	numbers []callNumber
}

type callNumber struct{ arch, number uint32 }
