package criu

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
)

// Results by which the kernel, before a thread is back in its program, ends the
// call with EINTR if a handler runs first, and otherwise makes it again, or
// goes on with it by restart_syscall until the instant noted in the thread.
const (
	restartNoHandler = ^uint64(514) + 1
	restartBlock     = ^uint64(516) + 1
)

// continueWaits has the threads of a frozen container go on with the calls that
// a dump has interrupted; see waits.go. pids are its processes.
func (r Runtime) continueWaits(ctx context.Context, pids []int) error {
	first := map[int]bool{} // of its process
	var threads []int
	for _, p := range pids {
		dir := filepath.Join("/proc", strconv.Itoa(p), "task")
		tasks, err := os.ReadDir(dir)
		if err != nil {
			continue // it has ended
		}
		for _, t := range tasks {
			tid, _ := strconv.Atoi(t.Name())
			data, err := os.ReadFile(filepath.Join(dir, t.Name(), "syscall"))
			if err != nil || tid == 0 {
				continue
			}
			first[tid] = tid == p
			if w, ok := parseWait(data); ok && w.result(tid == p, &w.nr) != 0 {
				threads = append(threads, tid)
			}
		}
	}
	if len(threads) == 0 {
		return nil
	}
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err != nil {
		return err
	}
	return c.Trap(ctx, threads, func(tid int) error {
		var regs unix.PtraceRegs
		if err := unix.PtraceGetRegs(tid, &regs); err != nil {
			return err
		}
		if regs.Cs != codeOf64 || regs.Rax != eintr {
			return nil
		}
		w := wait{regs.Orig_rax, regs.Rdi, regs.Rsi, regs.Rdx, regs.R10}
		if regs.Rax = w.result(first[tid], &regs.Orig_rax); regs.Rax == 0 {
			return nil
		}
		return unix.PtraceSetRegs(tid, &regs)
	})
}

// result returns by which result the kernel goes on with the call, 0 when it
// is to stay interrupted, and sets the number of the call to make again.
func (w wait) result(first bool, nr *uint64) uint64 {
	again, exact, ok := w.again()
	switch {
	case !first && w.blocks() && !(ok && exact):
		// CRIU runs its own code in the first thread of a process and ends it
		// with sigreturn, by which the kernel forgets the instant. In others
		// it is still noted.
		return restartBlock
	case ok:
		*nr = again
		return restartNoHandler
	}
	return 0
}

// parseWait reads /proc/PID/task/TID/syscall.
func parseWait(data []byte) (w wait, ok bool) {
	f := bytes.Fields(data)
	if len(f) < 7 {
		return w, false // it runs, or waits for no call
	}
	var errs []error
	number := func(i, base int) uint64 {
		n, err := strconv.ParseUint(string(bytes.TrimPrefix(f[i], []byte("0x"))), base, 64)
		errs = append(errs, err)
		return n
	}
	w = wait{nr: number(0, 10), di: number(1, 16), si: number(2, 16), dx: number(3, 16), r10: number(4, 16)}
	return w, errors.Join(errs...) == nil
}
