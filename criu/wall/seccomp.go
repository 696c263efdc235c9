package wall

import (
	"encoding/binary"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
)

// filter is an entry of seccomp.img: a program, and the filter that was there before it.
type filter struct {
	text    string // of the program
	program []instruction
	prev    int // -1: none
	flags   uint32
}

// shared reports whether all threads of the process have the filter; then their images name none.
func (f filter) shared() bool { return f.flags&flagTsync != 0 }

// filterRef is where a thread says which filter it has.
type filterRef struct {
	image       string
	mode, chain uint32
	old         bool // for the process as a whole, as old images say it
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
		f := filter{text: data, prev: -1, flags: e.number(3)}
		if e.has(2) {
			// CRIU follows this without end otherwise.
			if f.prev = int(e.number(2)); f.prev >= i {
				return refuse(name, "prev", "filter %d is said to lie over filter %d", i, f.prev)
			}
		}
		for b := []byte(data); len(b) > 0; b = b[instructionSize:] {
			f.program = append(f.program, instruction{
				binary.NativeEndian.Uint16(b), b[2], b[3], binary.NativeEndian.Uint32(b[4:]),
			})
		}
		j.filters = append(j.filters, f)
	}
	return nil
}

// checkFilters proves that each thread has a filter, and that it refuses what the container's does.
// The container's own is compiled by the OCI runtime, and a process of another engine's has
// that engine's. So each number of a call that the spec refuses whatever its arguments are is tried on
// the filters of the images. Those that let a call through that no engine does are refused; over
// those that let others through one is laid that refuses these.
func (j *judge) checkFilters() error {
	shared := map[string]bool{}
	for _, ref := range j.filterR {
		shared[ref.image] = shared[ref.image] || ref.mode == modeFilter && int64(ref.chain) < int64(len(j.filters)) &&
			j.filters[ref.chain].shared()
	}
	t := tries{list: j.filters, known: map[string][][]bool{}}
	if j.spec.filtered() {
		t.want = j.spec.refusals()
	}
	over := map[uint32]uint32{} // by what it lies over
	had := len(j.filters)
	for _, ref := range j.filterR {
		if ref.mode != modeFilter {
			if j.spec.filtered() && !shared[j.leaders[ref.image]] {
				return refuse(ref.image, "seccomp_mode",
					"it is %d, and the container's processes have a filter", ref.mode)
			}
			continue
		}
		if int64(ref.chain) >= int64(had) {
			return refuse(ref.image, "seccomp_filter", "there is no filter %d", ref.chain)
		}
		if _, judged := over[ref.chain]; judged {
			continue
		}
		over[ref.chain] = ref.chain
		lacks, err := t.lacks(ref)
		if err != nil {
			return err
		}
		if lacks == nil {
			continue
		}
		program, err := refusing(lacks)
		if err != nil {
			return refuse(ref.image, "seccomp_filter", "filter %d: %v", ref.chain, err)
		}
		over[ref.chain] = uint32(len(j.filters))
		j.filters = append(j.filters, filter{
			text: program, prev: int(ref.chain), flags: j.filters[ref.chain].flags & flagTsync,
		})
	}
	if len(j.filters) == had {
		return nil
	}
	return j.layFilters(j.filters[had:], over)
}

// layFilters adds filters to the images, and has each thread begin with the one that lies over its own.
func (j *judge) layFilters(list []filter, over map[uint32]uint32) error {
	const name, task, thread = "seccomp.img", 3, 5
	err := j.rewrite(name, magicSeccomp, func(entry []byte) []byte {
		for _, f := range list {
			b := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), f.text)
			b = withNumber(withNumber(b, 2, uint64(f.prev)), 3, uint64(f.flags))
			entry = protowire.AppendBytes(protowire.AppendTag(entry, 1, protowire.BytesType), b)
		}
		return entry
	})
	if err != nil {
		return err
	}
	for _, ref := range j.filterR {
		if ref.mode != modeFilter || over[ref.chain] == ref.chain {
			continue
		}
		outer, inner := protowire.Number(thread), protowire.Number(12)
		if ref.old {
			outer = task
		}
		err := j.rewrite(ref.image, magicCore, func(entry []byte) []byte {
			return changing(entry, outer, func(m []byte) []byte {
				return withNumber(changing(m, inner, nil), inner, uint64(over[ref.chain]))
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func withNumber(b []byte, n protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
}

// rewrite changes an image, judged before, that has one entry.
func (j *judge) rewrite(name string, magic uint32, change func([]byte) []byte) error {
	data, err := j.read(name)
	if err != nil {
		return err
	}
	out := head(magic)
	err = eachEntry(name, data, magic, 1, func(entry []byte) error {
		entry = change(entry)
		out = append(protowire.AppendFixed32(out, uint32(len(entry))), entry...)
		return nil
	})
	if err != nil || slices.Equal(out, data) {
		return err
	}
	return host.Replace(filepath.Join(j.dir, name), out)
}

// entry is a way to call the kernel: its numbers begin with first.
type entry struct {
	name        string
	arch, first uint32
	calls       map[uint32]string
}

// numbers of each entry that are tried; no kernel has more.
const numbers = 1 << 10

// Actions of a filter, and what of one is the action.
const (
	actionMask   = 0xffff0000
	actionKill   = 0x00000000
	actionAll    = 0x80000000 // kill the process
	actionTrap   = 0x00030000
	actionErrno  = 0x00050000
	actionNotify = 0x7fc00000
	actionTrace  = 0x7ff00000
	actionLog    = 0x7ffc0000
	actionAllow  = 0x7fff0000
)

// passes reports whether a call may be made after an action.
func passes(action uint32) bool {
	switch action & actionMask {
	case actionAllow, actionLog, actionTrace, actionNotify:
		return true
	}
	return false
}

// escapes lead out of a container, or to the kernel's insides, and no engine's usual filter allows
// them: a process of another engine's has that engine's, which allows others than ours.
var escapes = []string{
	"open_by_handle_at", "bpf", "init_module", "finit_module", "delete_module", "kexec_load", "swapon", "acct",
	"perf_event_open", "quotactl", "settimeofday",
}

// tries are filters tried with calls.
type tries struct {
	list []filter
	// by entry and number: what the spec does with a call; actionAllow: more than one thing, or lets it through
	want  [][]uint32
	known map[string][][]bool // by program, entry, number: whether it refuses a call
	steps int
}

// maxSteps bounds how long filters are tried: some seconds. An engine's filter takes a thousandth of it.
const maxSteps = 1 << 31

// refuses returns by entry and number whether a program refuses a call, whatever its arguments are.
func (t *tries) refuses(f filter) ([][]bool, error) {
	if is := t.known[f.text]; is != nil {
		return is, nil
	}
	is := make([][]bool, len(entries()))
	for i, e := range entries() {
		is[i] = make([]bool, numbers)
		for n := range uint32(numbers) {
			if t.want == nil || t.want[i][n] == actionAllow {
				continue
			}
			r := run{program: f.program, left: maxRun, is: true}
			binary.NativeEndian.PutUint32(r.data[0:], e.first|n)
			binary.NativeEndian.PutUint32(r.data[4:], e.arch)
			err := r.from(0, value{}, value{}, [16]value{})
			if t.steps += maxRun - r.left; t.steps > maxSteps {
				return nil, fmt.Errorf("the filters are too long to be tried")
			}
			if err != nil {
				return nil, err
			}
			is[i][n] = r.is
		}
	}
	t.known[f.text] = is
	return is, nil
}

// lacks returns by entry and number what the spec does with calls that a thread's filters let through;
// nil: there are none.
func (t *tries) lacks(ref filterRef) (list [][]uint32, err error) {
	if t.want == nil {
		return nil, nil
	}
	refused := make([][]bool, len(entries()))
	for i := range refused {
		refused[i] = make([]bool, numbers)
	}
	for at, n := int(ref.chain), 0; at >= 0; at, n = t.list[at].prev, n+1 {
		if n == maxChain {
			return nil, refuse(ref.image, "seccomp_filter",
				"filter %d: more than %d filters lie over each other", ref.chain, maxChain)
		}
		is, err := t.refuses(t.list[at])
		if err != nil {
			return nil, refuse(ref.image, "seccomp_filter", "filter %d: %v", ref.chain, err)
		}
		for i := range is {
			for n := range is[i] {
				refused[i][n] = refused[i][n] || is[i][n]
			}
		}
	}
	any := false
	list = make([][]uint32, len(entries()))
	for i, e := range entries() {
		list[i] = make([]uint32, numbers)
		for n := range uint32(numbers) {
			list[i][n] = actionAllow
			if refused[i][n] || t.want[i][n] == actionAllow {
				continue
			}
			if name := e.calls[e.first|n]; slices.Contains(escapes, name) {
				return nil, refuse("seccomp.img", "filter",
					"that of %s allows %s, which the container's refuses", ref.image, name)
			}
			list[i][n], any = t.want[i][n], true
		}
	}
	if !any {
		return nil, nil
	}
	return list, nil
}

// refusing compiles a filter that does with calls what a list has, by entry and number, and lets all
// others through.
func refusing(list [][]uint32) (string, error) {
	const (
		load   = 0x20 // ld [k]
		equal  = 0x15
		atMost = 0x25 // jgt, with its branches exchanged
		least  = 0x35 // jge
		skip   = 0x05
		ret    = 0x06
	)
	out := []instruction{{load, 0, 0, 4}}
	for at := 0; at < len(list); {
		arch := entries()[at].arch
		body := []instruction{{load, 0, 0, 0}}
		for ; at < len(list) && entries()[at].arch == arch; at++ {
			first := entries()[at].first
			for n := 0; n < numbers; {
				action, last := list[at][n], n
				for last+1 < numbers && list[at][last+1] == action {
					last++
				}
				if action != actionAllow {
					body = append(body, instruction{least, 0, 2, first | uint32(n)},
						instruction{atMost, 1, 0, first | uint32(last)}, instruction{ret, 0, 0, action})
				}
				n = last + 1
			}
		}
		body = append(body, instruction{ret, 0, 0, actionAllow})
		out = append(out, instruction{equal, 1, 0, arch}, instruction{skip, 0, 0, uint32(len(body))})
		out = append(out, body...)
	}
	out = append(out, instruction{ret, 0, 0, actionAllow})
	if len(out) > maxProgram {
		return "", fmt.Errorf("what it lets through takes %d instructions to refuse", len(out))
	}
	var b []byte
	for _, i := range out {
		b = binary.NativeEndian.AppendUint16(b, i.code)
		b = binary.NativeEndian.AppendUint32(append(b, i.jt, i.jf), i.k)
	}
	return string(b), nil
}

// refusals returns by entry and number what the spec's filter does with calls that it refuses whatever
// their arguments are; actionAllow of others.
func (s *Spec) refusals() (list [][]uint32) {
	const noCall = 38 // ENOSYS
	f := s.Linux.Seccomp
	byDefault := actionOf(f.DefaultAction, f.DefaultErrno)
	byName := map[string]uint32{}
	for _, rule := range f.Syscalls {
		action := actionOf(rule.Action, rule.Errno)
		for _, name := range rule.Names {
			if is, has := byName[name]; has && passes(is) {
				continue
			}
			if byName[name] = action; len(rule.Args) > 0 || passes(action) {
				byName[name] = actionAllow
			}
		}
	}
	// i386 has calls that stand for many, which the OCI runtime's library lets through by their
	// first argument.
	for name, many := range multiplexed {
		for _, n := range many {
			if is, has := byName[n]; has && passes(is) || !has && passes(byDefault) {
				byName[name] = actionAllow
			}
		}
	}
	// One that this version does not know may have any of the numbers that it does not know.
	news := false
	known := map[string]bool{}
	for _, e := range entries() {
		for _, name := range e.calls {
			known[name] = true
		}
	}
	for name, action := range byName {
		news = news || passes(action) && !known[name]
	}
	for i, e := range entries() {
		list = append(list, make([]uint32, numbers))
		foreign := i > 0 && !slices.Contains(f.Architectures, "SCMP_ARCH_"+e.name)
		for n := range uint32(numbers) {
			name, is := e.calls[e.first|n]
			action, has := byName[name]
			switch {
			case foreign: // what the OCI runtime's library does with an entry that is not named
				action = actionKill
			case is && has:
			case is:
				action = byDefault
			case news || passes(byDefault):
				action = actionAllow
			case byDefault&actionMask == actionErrno:
				action = actionErrno | noCall
			default:
				action = byDefault
			}
			if passes(action) {
				action = actionAllow
			}
			list[i][n] = action
		}
	}
	return list
}

var multiplexed = map[string][]string{
	"socketcall": {"socket", "bind", "connect", "listen", "accept", "getsockname", "getpeername", "socketpair", "send",
		"recv", "sendto", "recvfrom", "shutdown",
		"setsockopt", "getsockopt", "sendmsg", "recvmsg", "accept4", "recvmmsg", "sendmmsg"},
	"ipc": {
		"semop", "semget", "semctl", "semtimedop", "msgsnd", "msgrcv", "msgget", "msgctl", "shmat",
		"shmdt", "shmget", "shmctl",
	},
}

func actionOf(name string, errno *uint32) uint32 {
	switch name {
	case "SCMP_ACT_KILL", "SCMP_ACT_KILL_THREAD":
		return actionKill
	case "SCMP_ACT_KILL_PROCESS":
		return actionAll
	case "SCMP_ACT_TRAP":
		return actionTrap
	case "SCMP_ACT_ERRNO":
		if errno != nil {
			return actionErrno | *errno&0xffff
		}
		return actionErrno | 1 // EPERM
	}
	return actionAllow
}

// value is a number in a filter; what depends on a call's arguments is not known.
type value struct {
	n       uint32
	unknown bool
}

// run is the kernel's interpreter, for what it lets a filter of system calls be. A jump on what is not
// known is made and not made. Jumps lead forward only, so that it ends.
type run struct {
	program []instruction
	data    [8]byte // the number and the entry of struct seccomp_data, which are known
	left    int     // steps
	is      bool    // each way refuses the call
}

// maxRun bounds the steps with one call: of a filter with more ways than that it is not known what it refuses.
const maxRun = 1 << 16

func (r *run) from(pc int, a, x value, mem [16]value) error {
	for ; pc < len(r.program); pc++ {
		if r.left--; r.left <= 0 {
			r.is = false
		}
		if !r.is {
			return nil
		}
		i := r.program[pc]
		operand := value{n: i.k}
		if i.code&8 != 0 {
			operand = x
		}
		switch class := i.code & 7; class {
		case 0, 1: // ld, ldx
			var v value
			switch i.code &^ 7 {
			case 0x20: // abs
				if i.k%4 != 0 || i.k > 60 {
					return fmt.Errorf("it reads past the call")
				}
				if v.unknown = i.k > 4; !v.unknown {
					v.n = binary.NativeEndian.Uint32(r.data[i.k:])
				}
			case 0x00: // imm
				v.n = i.k
			case 0x60: // mem
				if i.k >= 16 {
					return fmt.Errorf("it reads past its memory")
				}
				v = mem[i.k]
			case 0x80: // len
				v.n = 64
			default:
				return fmt.Errorf("it has an instruction %#x", i.code)
			}
			if class == 0 {
				a = v
			} else {
				x = v
			}
		case 2, 3: // st, stx
			if i.k >= 16 {
				return fmt.Errorf("it writes past its memory")
			}
			if mem[i.k] = a; class == 3 {
				mem[i.k] = x
			}
		case 4: // alu
			was := a
			switch a.unknown = a.unknown || operand.unknown; i.code & 0xf0 {
			case 0x00:
				a.n += operand.n
			case 0x10:
				a.n -= operand.n
			case 0x20:
				a.n *= operand.n
			case 0x30:
				switch {
				case operand.unknown: // by 0 it ends the thread, which is no more than the other way
				case operand.n == 0:
					return nil
				default:
					a.n /= operand.n
				}
			case 0x40:
				a.n |= operand.n
			case 0x50:
				a.n &= operand.n
			case 0x60:
				a.n <<= operand.n & 31
			case 0x70:
				a.n >>= operand.n & 31
			case 0x80:
				a = value{-was.n, was.unknown}
			case 0xa0:
				a.n ^= operand.n
			default:
				return fmt.Errorf("it has an instruction %#x", i.code)
			}
		case 5: // jmp
			if i.code&0xf0 == 0 {
				if i.k > maxProgram {
					return fmt.Errorf("it jumps past its end")
				}
				pc += int(i.k)
				continue
			}
			var is bool
			switch i.code & 0xf0 {
			case 0x10:
				is = a.n == operand.n
			case 0x20:
				is = a.n > operand.n
			case 0x30:
				is = a.n >= operand.n
			case 0x40:
				is = a.n&operand.n != 0
			default:
				return fmt.Errorf("it has an instruction %#x", i.code)
			}
			if a.unknown || operand.unknown {
				if err := r.from(pc+1+int(i.jt), a, x, mem); err != nil {
					return err
				}
				is = false
			}
			if is {
				pc += int(i.jt)
			} else {
				pc += int(i.jf)
			}
		case 6: // ret
			said := value{n: i.k}
			if i.code&0x18 == 0x10 {
				said = a
			}
			if said.unknown || passes(said.n) {
				r.is = false
			}
			return nil
		case 7: // misc
			if i.code&0xf8 == 0 {
				x = a
			} else {
				a = x
			}
		}
	}
	return fmt.Errorf("it does not return")
}
