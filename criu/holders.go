package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/criu/cut"
	"github.com/agentbox/agentbox/criu/freezer"
	"github.com/agentbox/agentbox/internal/guard"
)

// EndHolders kills the OCI runtimes and CRIUs that keep a file open which DumpOptions.Hold
// was, and reports whether there were any. Processes that such a CRIU works on may end with it.
func EndHolders(path string) (ended bool) {
	for _, p := range holders(path) {
		ended = syscall.Kill(p, syscall.SIGKILL) == nil || ended
	}
	return ended
}

// AssistHolders helps a CRIU that keeps such a file open, and whose overseer was killed, past
// stopped processes and past a stop of its own, until the returned function is called. initPid is
// the container's first process.
func AssistHolders(path string, initPid int) (end func()) {
	box, err := freezer.Of(initPid)
	if err != nil {
		return func() {} // it has ended
	}
	quit, done := make(chan struct{}), make(chan struct{})
	guard.Go(func() {
		defer close(done)
		for {
			for _, p := range holders(path) {
				if asleep(p) {
					_ = syscall.Kill(p, syscall.SIGCONT)
				}
				if comm(p) == "criu" {
					_, _ = box.Unstick(p) // it stands then, until it is ended
				}
			}
			select {
			case <-quit:
				return
			case <-time.After(seldom):
			}
		}
	})
	return sync.OnceFunc(func() { close(quit); <-done }) // no thread is on its way then
}

// Abandon undoes what a killed dump, whose CRIU has ended, may have left: stopped threads outside
// of the container's cgroup, and CRIU's hold on the network.
func (r Runtime) Abandon(initPid int) error {
	c, err := freezer.Open(r.stateRoot(), r.ID)
	if err == nil {
		err = c.Gather()
	}
	return errors.Join(err, unlockNetwork(initPid))
}

// unlockNetwork ends the hold of a CRIU that was killed on the network of a process.
func unlockNetwork(pid int) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(cut.Unlock(ns), ns.Close())
}

// holders lists the OCI runtimes and CRIUs that keep a file open.
func holders(path string) (list []int) {
	all, err := hostPids()
	if err != nil {
		return nil
	}
	for _, p := range all {
		if name := comm(p); name != "criu" && !strings.HasPrefix(name, "runc") && name != "crun" && name != "exe" {
			continue
		}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p))
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p, fd.Name())); err == nil &&
				link == path && p != os.Getpid() {
				list = append(list, p)
				break
			}
		}
	}
	return list
}
