// Package ahead has short work that somebody waits for go before what keeps the
// processors busy. On a host whose sandboxes and restores have all of them a list would
// else wait for its turn again and again, for ten times as long as it takes.
package ahead

import (
	goruntime "runtime"

	"golang.org/x/sys/unix"
)

// by is how much nicer than it the others are, in units of nice(2).
const by = 10

// Do runs f on a thread that goes before those of ordinary processes, which takes
// CAP_SYS_NICE; without it, and where this process is to be nice, as any other. Other
// goroutines are as they were, and so are the threads made meanwhile: Go makes those
// that a locked one asks for from another. A child that f starts goes before others for all its life.
func Do(f func()) {
	goruntime.LockOSThread()
	if nice, err := unix.Getpriority(unix.PRIO_PROCESS, 0); err != nil || nice != 20 || unix.Setpriority(unix.PRIO_PROCESS, 0, -by) != nil {
		goruntime.UnlockOSThread()
		f()
		return
	}
	defer func() {
		// A thread that would stay as it is ends with its goroutine.
		if unix.Setpriority(unix.PRIO_PROCESS, 0, 0) == nil {
			goruntime.UnlockOSThread()
		}
	}()
	f()
}
