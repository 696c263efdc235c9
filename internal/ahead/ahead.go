// Package ahead has short work that somebody waits for go before what keeps the
// processors busy. On a host whose sandboxes and restores have all of them a list would
// else wait for its turn again and again, for ten times as long as it takes.
package ahead

import (
	goruntime "runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// by is how much nicer than it the others are, in units of nice(2), where it does
	// not go before all of them.
	by = 10
	// longest is how long one piece of work goes before all others.
	longest = 50 * time.Millisecond
	// all such work has a quarter of one processor, or much at once and then less.
	share = 4
	most  = 100 * time.Millisecond
)

// What a thread makes, a thread or a process, has none of it.
var (
	ordinary = unix.SchedAttr{Size: unix.SizeofSchedAttr}
	nicer    = unix.SchedAttr{Size: unix.SizeofSchedAttr, Nice: -by, Flags: unix.SCHED_FLAG_RESET_ON_FORK}
	first    = unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}
)

// left is the processor time in which work may go before all others. A host with one
// processor has none to spare.
var left = &budget{rest: most, none: goruntime.NumCPU() < 2}

// Do runs f on a thread that goes before those of ordinary processes, which takes
// CAP_SYS_NICE; without it, and where this process is to be nice or in real time, as
// any other. It goes before all of them (SCHED_FIFO) for as long as there is a budget
// for that, and then before those beside it (nice). Other goroutines are as they were.
func Do(f func()) {
	goruntime.LockOSThread()
	end := raise()
	if end == nil {
		goruntime.UnlockOSThread()
		f()
		return
	}
	defer func() {
		// A thread that would stay as it is ends with its goroutine.
		if end() == nil {
			goruntime.UnlockOSThread()
		}
	}()
	f()
}

// raise has the calling thread go before others until end; nil where it cannot.
func raise() (end func() error) {
	if a, err := unix.SchedGetAttr(0, 0); err != nil || a.Policy != unix.SCHED_NORMAL || a.Nice != 0 {
		return nil
	}
	lower := func() error { return set(0, ordinary) }
	began, err := used()
	if err != nil || !left.any() || set(0, first) != nil {
		if set(0, nicer) != nil {
			return nil
		}
		return lower
	}
	var mu sync.Mutex
	ended, thread := false, unix.Gettid()
	timer := time.AfterFunc(longest, func() {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			_ = set(thread, nicer)
		}
	})
	return func() error {
		timer.Stop()
		mu.Lock()
		ended = true
		mu.Unlock()
		if now, err := used(); err == nil {
			left.spend(now - began)
		}
		return lower()
	}
}

// set has a thread scheduled by a, a copy: the call writes to it.
func set(thread int, a unix.SchedAttr) error { return unix.SchedSetAttr(thread, &a, 0) }

// used is the processor time that the calling thread has had.
func used() (time.Duration, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts)
	return time.Duration(ts.Nano()), err
}

// budget is time that is spent, and comes back: one part of share of what passes.
type budget struct {
	none bool

	mu   sync.Mutex
	rest time.Duration // below 0 where several spent at once
	seen time.Time
}

func (b *budget) any() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if !b.seen.IsZero() {
		b.rest = min(b.rest+now.Sub(b.seen)/share, most)
	}
	b.seen = now
	return b.rest > 0 && !b.none
}

func (b *budget) spend(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rest -= d
}
