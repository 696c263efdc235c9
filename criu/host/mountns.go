package host

import (
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// InMountsOf runs do in the mount namespace of a container's process, on a thread of
// its own. fs.ErrNotExist: the process has ended, and its number is a host process's.
func InMountsOf(pid int, do func() error) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	theirs, err := ns.Stat()
	if err != nil {
		return err
	}
	ours, err := os.Stat("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	if os.SameFile(theirs, ours) {
		return fmt.Errorf("process %d: %w", pid, fs.ErrNotExist)
	}
	return <-guard.Start(func() error {
		runtime.LockOSThread() // without Unlock: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
		return do()
	})
}
