package freezer

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// CanInject reports whether Inject works on this kind of machine.
const CanInject = true

// Tracee is a thread, in a stop of ptrace, that calls the kernel for us.
type Tracee struct {
	tid     int
	saved   unix.PtraceRegs
	mask    uint64 // of blocked signals
	rseq    uint64 // address of its pointer to a critical section; 0: none is registered
	section uint64 // what is there
	call    uint64 // address of a syscall instruction
	page    uint64 // of ours in its memory; 0: not mapped yet
	touched bool
	stop    bool // a SIGSTOP has come meanwhile, and is to be sent again
}

// Constants that package unix lacks.
const (
	ptraceGetSigmask     = 0x420a
	ptraceSetSigmask     = 0x420b
	ptraceGetRseq        = 0x420f
	optionSuspendSeccomp = 1 << 21
	nativeCode           = 0x33 // the code segment of 64-bit programs
	pageSize             = 4096
)

// tracee makes a stopped thread ready for calls.
func tracee(tid int) (*Tracee, error) {
	t := &Tracee{tid: tid}
	if err := unix.PtraceGetRegs(tid, &t.saved); err != nil {
		return nil, err
	}
	if t.saved.Cs != nativeCode {
		return nil, fmt.Errorf("thread %d runs a 32-bit program", tid)
	}
	var err error
	if t.call, err = vdsoCall(tid); err != nil {
		return nil, err
	}
	var rseq struct {
		at               uint64
		size, sig, flags uint32
		_                uint32
	}
	if e := ptrace(ptraceGetRseq, tid, unsafe.Sizeof(rseq), unsafe.Pointer(&rseq)); e == nil && rseq.at != 0 {
		t.rseq = rseq.at + 8
		var word [8]byte
		if _, err := unix.PtracePeekData(tid, uintptr(t.rseq), word[:]); err != nil {
			return nil, err
		}
		t.section = binary.LittleEndian.Uint64(word[:])
	}
	return t, nil
}

// vdsoCall finds a syscall instruction in a thread's vDSO.
func vdsoCall(tid int) (uint64, error) {
	dir := "/proc/" + strconv.Itoa(tid)
	maps, err := os.ReadFile(dir + "/maps")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if !strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			continue
		}
		var from, to uint64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil || to-from > 1<<20 {
			break
		}
		mem, err := os.Open(dir + "/mem")
		if err != nil {
			return 0, err
		}
		defer mem.Close()
		code := make([]byte, to-from)
		if _, err := mem.ReadAt(code, int64(from)); err != nil {
			return 0, err
		}
		if at := bytes.Index(code, []byte{0x0f, 0x05}); at >= 0 {
			return from + uint64(at), nil
		}
	}
	return 0, fmt.Errorf("thread %d has no vDSO", tid)
}

func ptrace(request, tid int, addr uintptr, data unsafe.Pointer) error {
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, uintptr(data), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// ID returns the thread's id on the host.
func (t *Tracee) ID() int { return t.tid }

// enter blocks all signals of the thread, and has its seccomp filters stand aside.
func (t *Tracee) enter() error {
	if !t.touched {
		if err := ptrace(ptraceGetSigmask, t.tid, 8, unsafe.Pointer(&t.mask)); err != nil {
			return err
		}
		err := unix.PtraceSetOptions(t.tid, unix.PTRACE_O_TRACESYSGOOD|optionSuspendSeccomp)
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
			err = unix.PtraceSetOptions(t.tid, unix.PTRACE_O_TRACESYSGOOD)
		}
		if err != nil {
			return err
		}
		t.touched = true
	}
	all := ^uint64(0)
	return ptrace(ptraceSetSigmask, t.tid, 8, unsafe.Pointer(&all))
}

// back gives the thread its own registers and signals again. The kernel lets it go on with
// those if its tracer dies.
func (t *Tracee) back() error {
	return errors.Join(unix.PtraceSetRegs(t.tid, &t.saved), ptrace(ptraceSetSigmask, t.tid, 8, unsafe.Pointer(&t.mask)))
}

// Call has the thread make a system call.
func (t *Tracee) Call(nr uintptr, args ...uint64) (result uint64, err error) {
	if err := t.enter(); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, t.back()) }()
	var a [6]uint64
	copy(a[:], args)
	regs := t.saved
	regs.Rip, regs.Rax, regs.Orig_rax = t.call, uint64(nr), ^uint64(0)
	regs.Rdi, regs.Rsi, regs.Rdx, regs.R10, regs.R8, regs.R9 = a[0], a[1], a[2], a[3], a[4], a[5]
	if err := unix.PtraceSetRegs(t.tid, &regs); err != nil {
		return 0, err
	}
	for range 2 { // into the call, and out of it
		if err := unix.PtraceSyscall(t.tid, 0); err != nil {
			return 0, err
		}
		if err := t.inCall(); err != nil {
			return 0, err
		}
	}
	if err := unix.PtraceGetRegs(t.tid, &regs); err != nil {
		return 0, err
	}
	if n := int64(regs.Rax); n < 0 && n > -4096 {
		return 0, unix.Errno(-n)
	}
	return regs.Rax, nil
}

// inCall waits until the thread is on its way into a call or out of it. It is blocked
// for all signals but SIGSTOP, with which CRIU restores a stopped process.
func (t *Tracee) inCall() error {
	for {
		status, err := t.wait()
		switch {
		case err != nil:
			return err
		case status.StopSignal() == unix.SIGTRAP|0x80:
			return nil
		case status.StopSignal() != unix.SIGSTOP:
			return fmt.Errorf("thread %d stopped by signal %d in a call", t.tid, status.StopSignal())
		}
		t.stop = true
		if err := unix.PtraceSyscall(t.tid, 0); err != nil {
			return err
		}
	}
}

// Page returns the address of a page of memory for arguments, which begins with data.
func (t *Tracee) Page(data []byte) (uint64, error) {
	if len(data) > pageSize {
		return 0, fmt.Errorf("%d bytes do not fit into a page", len(data))
	}
	if t.page == 0 {
		at, err := t.Call(unix.SYS_MMAP, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0), 0)
		if err != nil {
			return 0, fmt.Errorf("map a page: %w", err)
		}
		t.page = at
	}
	_, err := unix.PtracePokeData(t.tid, uintptr(t.page), data)
	return t.page, err
}

// Peek reads from the thread's memory.
func (t *Tracee) Peek(at uint64, size int) ([]byte, error) {
	data := make([]byte, size)
	_, err := unix.PtracePeekData(t.tid, uintptr(at), data)
	return data, err
}

// wait waits for the thread's next stop.
func (t *Tracee) wait() (status unix.WaitStatus, err error) {
	for begun := time.Now(); ; {
		pid, err := unix.Wait4(t.tid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return status, err
		case pid == t.tid && !status.Stopped():
			return status, fmt.Errorf("thread %d has ended: %w", t.tid, unix.ESRCH)
		case pid == t.tid:
			return status, nil
		case time.Since(begun) > trapLimit:
			return status, fmt.Errorf("thread %d does not come back from a call", t.tid)
		default:
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

// leave puts the thread back to where it stood: into a stop on its way out of the
// kernel, where the kernel still decides whether to make an interrupted call again.
func (t *Tracee) leave() error {
	if !t.touched {
		return nil
	}
	var errs []error
	if t.page != 0 {
		_, err := t.Call(unix.SYS_MUNMAP, t.page, pageSize)
		errs = append(errs, err)
	}
	errs = append(errs, t.enter(), unix.PtraceInterrupt(t.tid), unix.PtraceCont(t.tid, 0))
	for range 3 {
		status, err := t.wait()
		if err != nil || int(status)>>16 == unix.PTRACE_EVENT_STOP {
			errs = append(errs, err)
			break
		}
		t.stop = t.stop || status.StopSignal() == unix.SIGSTOP
		errs = append(errs, unix.PtraceCont(t.tid, 0))
	}
	if t.rseq != 0 && t.section != 0 {
		_, err := unix.PtracePokeData(t.tid, uintptr(t.rseq), binary.LittleEndian.AppendUint64(nil, t.section))
		errs = append(errs, err)
	}
	if t.stop {
		errs = append(errs, unix.Kill(t.tid, unix.SIGSTOP))
	}
	return errors.Join(append(errs, t.back())...)
}
