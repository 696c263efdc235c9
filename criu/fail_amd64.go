package criu

import (
	"fmt"
	"os"
	goruntime "runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// failLimit is how long failWrite waits for a write.
const failLimit = time.Second

// failWrite has the next write of a file in a directory that a process makes fail, as
// on a disk that is broken. It reports whether there was one.
func failWrite(pid int, dir string) (failed bool) {
	err := <-guard.Start(func() error {
		goruntime.LockOSThread() // and never unlocked: the thread ends, and with it all tracing
		failed = failWriteOf(pid, dir)
		return nil
	})
	return failed && err == nil
}

func failWriteOf(pid int, dir string) bool {
	if unix.PtraceSeize(pid) != nil || unix.PtraceInterrupt(pid) != nil {
		return false
	}
	until := time.Now().Add(failLimit)
	if !stopsUntil(pid, until) {
		return false
	}
	defer unix.PtraceDetach(pid)
	if unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACESYSGOOD) != nil {
		return false
	}
	const (
		no     = ^uint64(0)               // the number of no call
		enters = ^uint64(unix.ENOSYS) + 1 // the result at the entry of a call
		broken = ^uint64(unix.EIO) + 1
	)
	for {
		var regs unix.PtraceRegs
		if unix.PtraceGetRegs(pid, &regs) != nil {
			return false
		}
		if regs.Rax == enters && writes(pid, &regs, dir) {
			regs.Orig_rax = no
			if unix.PtraceSetRegs(pid, &regs) != nil || unix.PtraceSyscall(pid, 0) != nil ||
				!stopsUntil(pid, time.Now().Add(failLimit)) {
				return false
			}
			if unix.PtraceGetRegs(pid, &regs) != nil {
				return false
			}
			regs.Rax = broken
			return unix.PtraceSetRegs(pid, &regs) == nil
		}
		if unix.PtraceSyscall(pid, 0) != nil {
			return false
		}
		if !stopsUntil(pid, until) {
			// It waits in a call. To let go of it, it has to be stopped.
			_ = unix.PtraceInterrupt(pid)
			stopsUntil(pid, time.Now().Add(failLimit))
			return false
		}
	}
}

// stopsUntil reports whether a thread that this one traces stops before until.
func stopsUntil(pid int, until time.Time) bool {
	for {
		var status unix.WaitStatus
		p, err := unix.Wait4(pid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return false
		case p == pid && !status.Stopped():
			return false
		case p == pid && int(status)>>16 != unix.PTRACE_EVENT_STOP && status.StopSignal() != unix.SIGTRAP|0x80:
			if unix.PtraceCont(pid, int(status.StopSignal())) != nil { // a signal is to be delivered
				return false
			}
		case p == pid:
			return true
		case time.Now().After(until):
			return false
		default:
			time.Sleep(50 * time.Microsecond)
		}
	}
}

// writes reports whether a call makes or writes a file in a directory.
func writes(pid int, regs *unix.PtraceRegs, dir string) bool {
	fd := regs.Rdi
	switch regs.Orig_rax {
	case unix.SYS_OPENAT:
		return regs.Rdx&unix.O_CREAT != 0
	case unix.SYS_SPLICE:
		fd = regs.Rdx
	case unix.SYS_WRITE, unix.SYS_WRITEV, unix.SYS_PWRITE64:
	default:
		return false
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, int32(fd)))
	return err == nil && strings.HasPrefix(path, dir+"/") && strings.HasSuffix(path, ".img")
}
