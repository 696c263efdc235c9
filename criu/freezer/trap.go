package freezer

import (
	"context"
	"errors"
	"fmt"
	goruntime "runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// trapLimit is how long Trap waits for a thread to stop, which needs a processor.
const trapLimit = limit

// Trap calls fn for each of some threads of the frozen container, with it in a
// stop of ptrace, where its registers can be read and set. Nothing of the
// container's runs meanwhile, and it is frozen when Trap returns; on error it
// may be thawed. Threads that have ended are left out. Should the caller die,
// the kernel lets go of them.
func (c Container) Trap(ctx context.Context, threads []int, fn func(tid int) error) error {
	if is, err := c.Frozen(); err != nil || !is {
		return errors.Join(err, fmt.Errorf("container %s is not frozen", c.ID))
	}
	var err error
	onThread(func() {
		if c.v2 { // stops in the freezer
			err = errors.Join(c.trap(threads, fn), c.refreeze(ctx))
			return
		}
		// v1 wakes nothing that is frozen, so it has to be thawed, and all that
		// would run then be stopped before.
		end := c.assist()
		var all []int
		if all, err = c.members("tasks"); err == nil {
			err = c.trapV1(ctx, all, threads, fn)
		}
		err = errors.Join(err, end())
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

// onThread runs fn on a thread of its own, which ends with it: the kernel then
// lets go of what it still traces.
func onThread(fn func()) {
	done := make(chan struct{})
	var panicked any
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				panicked = fmt.Sprintf("%v\n%s", v, debug.Stack())
			}
		}()
		goruntime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // which would not end
			onThread(fn)
			goruntime.UnlockOSThread()
			return
		}
		fn()
	}()
	if <-done; panicked != nil { // it is the caller's
		panic(panicked)
	}
}

func (c Container) refreeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errLimit)
	defer cancel()
	if c.v2 {
		return c.freezeV2(ctx)
	}
	return c.freezeV1(ctx)
}

// trap stops threads one after the other.
func (c Container) trap(threads []int, fn func(tid int) error) error {
	for _, tid := range threads {
		held, err := seize(tid)
		if err != nil {
			return err
		}
		if !held {
			continue
		}
		if held, err = stops(tid); err != nil {
			return err
		}
		if !held {
			continue
		}
		if err := errors.Join(fn(tid), unix.PtraceDetach(tid)); err != nil && !gone(tid) {
			return fmt.Errorf("thread %d: %w", tid, err)
		}
	}
	return nil
}

// trapV1 stops all threads and calls fn for those wanted.
func (c Container) trapV1(ctx context.Context, all, wanted []int, fn func(tid int) error) (err error) {
	return c.stopAll(ctx, all, wanted, func(held []int) error {
		for _, tid := range held {
			if e := fn(tid); e != nil && !gone(tid) {
				return fmt.Errorf("thread %d: %w", tid, e)
			}
		}
		return nil
	})
}

// stopAll stops all threads, by their tracer instead of the freezer, while fn is called with those wanted.
func (c Container) stopAll(ctx context.Context, all, wanted []int, fn func(held []int) error) (err error) {
	var held []int
	for _, tid := range all {
		ok, err := seize(tid)
		if err != nil {
			return err // the rest is still frozen, and goes with this thread
		}
		if ok {
			held = append(held, tid)
		}
	}
	if err := c.set(false); err != nil {
		return err
	}
	stopped, halted := map[int]bool{}, map[int]bool{}
	for _, tid := range held {
		ok, status, e := stopsBy(tid)
		if err = e; err != nil {
			break
		}
		stopped[tid], halted[tid] = ok, ok && status.StopSignal() != unix.SIGTRAP
	}
	if err == nil {
		err = fn(slices.DeleteFunc(slices.Clone(wanted), func(tid int) bool { return !stopped[tid] }))
	}
	detach := func(tid int) {
		if e := unix.PtraceDetach(tid); e != nil && !gone(tid) {
			err = errors.Join(err, fmt.Errorf("thread %d: %w", tid, e))
		}
	}
	// A thread that a signal had stopped goes back into that stop, and is frozen in it as before.
	for tid, is := range halted {
		if is {
			detach(tid)
			for begun := time.Now(); !Stopped(tid) && !gone(tid) && time.Since(begun) < outLimit; {
				time.Sleep(50 * time.Microsecond)
			}
		}
	}
	// Before anything else is let go: it goes from one into the other.
	err = errors.Join(err, c.set(true))
	for tid, is := range stopped {
		if is && !halted[tid] {
			detach(tid)
		}
	}
	return errors.Join(err, c.refreeze(ctx))
}

// seize makes this thread the tracer of another and has that stop. One that
// has ended is false.
func seize(tid int) (bool, error) {
	if gone(tid) {
		return false, nil
	}
	err := unix.PtraceSeize(tid)
	if err == nil {
		err = unix.PtraceInterrupt(tid)
	}
	switch {
	case err == nil:
		return true, nil
	case gone(tid):
		return false, nil
	}
	return false, fmt.Errorf("trace thread %d: %w", tid, err)
}

func gone(tid int) bool {
	state, _, ok := thread(tid)
	return !ok || state == "Z" || state == "X"
}

// stops waits until a seized thread has stopped; one that ends is false.
func stops(tid int) (bool, error) {
	held, _, err := stopsBy(tid)
	return held, err
}

// stopsBy is stops with the status of the stop.
func stopsBy(tid int) (held bool, status unix.WaitStatus, err error) {
	begun := time.Now()
	for try := 0; ; try++ {
		pid, err := unix.Wait4(tid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD && gone(tid), err == nil && pid == tid && !status.Stopped():
			return false, status, nil
		case err != nil:
			return false, status, fmt.Errorf("wait for thread %d: %w", tid, err)
		case pid == tid && int(status)>>16 == unix.PTRACE_EVENT_STOP:
			return true, status, nil
		case pid == tid: // a signal comes first, and is to be delivered
			if err := unix.PtraceCont(tid, int(status.StopSignal())); err != nil && !gone(tid) {
				return false, status, fmt.Errorf("thread %d: %w", tid, err)
			}
			continue
		}
		switch { // it needs microseconds, and a processor
		case try < 100:
			_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		case time.Since(begun) > trapLimit:
			return false, status, fmt.Errorf("thread %d does not stop", tid)
		default:
			time.Sleep(100 * time.Microsecond)
		}
	}
}
