package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/fault"
)

// A thread that has begun a process by vfork, as dash, Python's subprocess and
// posix_spawn do, waits in the kernel until that has executed its program. No tracer
// can stop it there, and frozen the wait has no end. So whatever is in such an instant
// is let go on for some milliseconds, before CRIU is started.
//
// So is a process that was killed and has not ended yet: under cgroup v1 it stays frozen
// with the SIGKILL, ends when CRIU thaws it, and would be alive on record and dead in the
// images.

const (
	// settleLimit is how long Settle tries. A program that begins others without end
	// is out of them after a few tries; one whose child does not get to its program
	// never is.
	settleLimit = 5 * time.Second
	// glance is how often a thread is looked at that is just on its way into the freezer.
	glance = 5
)

// Settle sees to it that no thread of a frozen container is in an instant that cannot
// be dumped: it thaws the container for some milliseconds and freezes it again, until
// none is. It returns when the last freeze began; zero: nothing had to be waited for.
// On error the container may be thawed, and a *DumpError says which thread it was.
func (r Runtime) Settle(ctx context.Context, initPid int) (frozen time.Time, err error) {
	end := time.Now().Add(settleLimit)
	for pause := time.Millisecond; ; pause = min(pause+time.Millisecond, 10*time.Millisecond) {
		members, err := Members(initPid)
		if err != nil {
			return frozen, err
		}
		at := between(members)
		if at == nil {
			return frozen, nil
		}
		if time.Now().After(end) {
			err := at.passing(r.ID)
			err.waited = true
			return frozen, err
		}
		if err := r.Resume(ctx); err != nil {
			return frozen, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return frozen, fmt.Errorf("wait for thread %d of container %s: %w", at.tid, r.ID, context.Cause(ctx))
		}
		frozen = time.Now()
		if err := r.Pause(ctx); err != nil {
			return frozen, err
		}
	}
}

// instant is what a thread is in that cannot be dumped.
type instant struct {
	tid    int
	killed bool // it has a SIGKILL to end of; else it waits for a vfork
}

// passing is the error of a thread that is in such an instant.
func (at *instant) passing(id string) *DumpError {
	what, text := "waits for a vfork", "has begun a process by vfork, which has not executed its program yet, and can be stopped by nothing until then"
	if at.killed {
		what, text = "is ending", "was killed and has not ended yet"
	}
	return &DumpError{
		Diagnosis: Diagnosis{
			Code:   codeInstant,
			Reason: fmt.Sprintf("thread %d (%s) %s", at.tid, cmdline(at.tid), text),
			Hint:   "Try again in a moment; a paused sandbox has to be unpaused for that.",
		},
		Err: fmt.Errorf("dump %s: thread %d %s: %w", id, at.tid, what, fault.ErrBusy),
	}
}

// codeInstant is the Code of what is over in some milliseconds.
const codeInstant = "instant"

// Passing reports whether a dump has failed by what is over in some milliseconds.
func Passing(err error) bool {
	var d *DumpError
	return errors.As(err, &d) && (d.Code == codeInstant && !d.waited || d.Code == "traced" && d.Log != "" || d.Code == "timeout" && d.Log != "")
}

// between returns the instant that a thread of frozen processes is in; nil: none is.
func between(pids []int) *instant {
	for _, p := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		if err != nil {
			continue // it has ended
		}
		ended := true // all threads up to here
		for _, t := range tasks {
			tid, _ := strconv.Atoi(t.Name())
			if tid == 0 {
				continue
			}
			if ended {
				var is bool
				if is, ended = killed(p, tid); is {
					return &instant{tid: tid, killed: true}
				}
			}
			if waitsForVfork(p, tid) {
				return &instant{tid: tid}
			}
		}
	}
	return nil
}

// killed reports whether a thread has a SIGKILL to end of. The kernel gives one to all
// threads of a process that a fatal signal ends without a core dump, so that the first
// stands for the others as long as it has not ended by itself.
func killed(pid, tid int) (is, ended bool) {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "task", strconv.Itoa(tid), "status"))
	if err != nil {
		return false, true
	}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		switch value = strings.TrimSpace(value); name {
		case "State": // a zombie may have kept its signals
			if strings.HasPrefix(value, "Z") || strings.HasPrefix(value, "X") {
				return false, true
			}
		case "SigPnd", "ShdPnd":
			if set, err := strconv.ParseUint(value, 16, 64); err == nil && set&(1<<(unix.SIGKILL-1)) != 0 {
				return true, false
			}
		}
	}
	return false, false
}

// waitsForVfork reports whether a thread of a frozen process waits in the call that
// made another. One that is only on its way out of that call waits in the freezer.
func waitsForVfork(pid, tid int) bool {
	for range glance {
		data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "task", strconv.Itoa(tid), "syscall"))
		if err != nil {
			return false
		}
		nr, _, _ := strings.Cut(strings.TrimSpace(string(data)), " ")
		if n, err := strconv.Atoi(nr); nr != "running" && (err != nil || !slices.Contains(makesProcess, n)) {
			return false
		}
		switch where := freezer.Waits(tid); {
		case freezer.Halts(where), where == "do_signal_stop":
			return false
		case where != "" && nr != "running":
			return true
		}
		time.Sleep(100 * time.Microsecond) // it is still on its way to where it will wait
	}
	return false
}

// stopped lists the threads of frozen processes that a signal has stopped.
func stopped(pids []int) (list []int) {
	for _, p := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		if err != nil {
			continue // it has ended
		}
		for _, t := range tasks {
			if tid, _ := strconv.Atoi(t.Name()); tid != 0 && freezer.Stopped(tid) {
				list = append(list, tid)
			}
		}
	}
	return list
}

// ready looks for what would fail a dump of frozen processes, or hold it up while
// everything stands still.
func (r Runtime) ready(ctx context.Context, members []int) error {
	// CRIU would try for all its timeout, 10 s.
	if pid, tracer := traced(members); pid != 0 {
		return &DumpError{
			Diagnosis: Diagnosis{
				Code:   "traced",
				Reason: fmt.Sprintf("process %d (%s) is being traced by process %d (%s), and a process can have one tracer only", pid, cmdline(pid), tracer, cmdline(tracer)),
				Hint:   "Detach the debugger, strace or gdb, then try again.",
			},
			Err: fmt.Errorf("dump %s: process %d is traced: %w", r.ID, pid, fault.ErrState),
		}
	}
	if at := between(members); at != nil {
		return at.passing(r.ID)
	}
	list := stopped(members)
	if len(list) == 0 {
		return nil
	}
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err == nil {
		err = c.PlainStops(ctx, list)
	}
	return err
}
