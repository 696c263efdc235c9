package criu

import (
	"fmt"
	"os"
	goruntime "runtime"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
)

// SetHostname names the UTS namespace of a process. CRIU has restored the one
// of the dump there. A process in the caller's own namespace is refused.
func SetHostname(pid int, name string) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/uts", pid))
	if err != nil {
		return err
	}
	defer ns.Close()
	var own, its unix.Stat_t
	if err := unix.Stat("/proc/self/ns/uts", &own); err != nil {
		return err
	}
	if err := unix.Fstat(int(ns.Fd()), &its); err != nil {
		return err
	}
	if own.Ino == its.Ino && own.Dev == its.Dev {
		return fmt.Errorf("process %d has the hostname of this host", pid)
	}
	err = <-guard.Start(func() error {
		// Not unlocked: the thread ends with the goroutine, and nothing else
		// ever runs in that namespace.
		goruntime.LockOSThread()
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWUTS)
		if err == nil {
			err = unix.Sethostname([]byte(name))
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("set the hostname of process %d: %w", pid, err)
	}
	return nil
}
