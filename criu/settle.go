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
	"github.com/agentbox/agentbox/internal/proc"
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
	// settleLimit is how long Settle tries. A program that keeps starting others succeeds after a
	// few tries; one whose child never gets to its program does not.
	settleLimit = 5 * time.Second
	// glance is how often a thread is looked at that is just on its way into the freezer.
	glance = 5
)

// Settle makes sure that no thread of a frozen container is in an instant that cannot be dumped:
// it thaws the container for some milliseconds and freezes it again, until none is. So it does,
// for youngLimit at most, where a process works in a directory that was made a moment ago, or
// walks a tree. It returns when the last freeze began; zero: nothing had to be waited for. On
// error the container may be thawed, and a *DumpError says which thread it was.
func (r Runtime) Settle(ctx context.Context, initPid int) (frozen time.Time, err error) {
	begun := time.Now()
	end := begun.Add(settleLimit)
	var walks walkers
	for pause := time.Millisecond; ; pause = min(pause+time.Millisecond, 10*time.Millisecond) {
		members, err := Members(initPid)
		if err != nil {
			return frozen, err
		}
		at := between(members)
		if now := time.Now(); at == nil && now.Sub(begun) < youngLimit {
			if at = inYoung(members, now); at == nil {
				at = walks.next(members)
			}
		}
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
	tid int
	why instantKind
}

type instantKind int

const (
	vforkInstant    instantKind = iota // it waits for a vfork
	killedInstant                      // it has a SIGKILL to end of, or is on its way out
	headlessInstant                    // it has ended, and another thread is about to execute a program in its place
	youngInstant                       // it works in a directory that was made a moment ago; see inYoung
	walkInstant                        // it walks a tree; see walkers
)

// passing is the error of a thread that is in such an instant.
func (at *instant) passing(id string) *DumpError {
	what, text := "waits for a vfork",
		"has begun a process by vfork, which has not executed its program yet, and can be stopped by nothing until then"
	switch at.why {
	case killedInstant:
		what, text = "is ending", "is being ended and has not ended yet"
	case headlessInstant:
		what, text = "has ended", "is the first of its process and has ended, while others of that go on: CRIU cannot dump that"
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
	return errors.As(err, &d) && (d.Code == codeInstant && !d.waited || d.Code == "traced" && d.Log != "" ||
		d.Code == "timeout" && d.Log != "")
}

// between returns the instant that a thread of frozen processes is in; nil: none is.
func between(pids []int) *instant {
	for _, p := range pids {
		tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p))
		if err != nil {
			continue // it has ended
		}
		now, err := proc.Read(p)
		if err != nil {
			continue
		}
		switch ended := now.Ended(); {
		case !ended && (now.Ending || killed(p)):
			return &instant{tid: p, why: killedInstant}
		case ended && freezer.ThreadsLive(p):
			return &instant{tid: p, why: headlessInstant}
		}
		for _, t := range tasks {
			if tid, _ := strconv.Atoi(t.Name()); tid != 0 && waitsForVfork(p, tid) {
				return &instant{tid: tid, why: vforkInstant}
			}
		}
	}
	return nil
}

// killed reports whether a process has a SIGKILL to end of. The kernel gives one to all of
// its threads when a signal ends it without a core dump, so that the first stands for the
// others.
func killed(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(data)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		if set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64); err == nil &&
			set&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
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
