package host

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// ownerEnv is set in the programs that agentbox starts to dump and restore, and in the
// CRIUs that these start: the process of agentbox, as PID:START. START is the time since
// boot in clock ticks, which tells a process from a later one of the same pid.
const ownerEnv = "AGENTBOX_CRIU_OWNER"

// self is the value of ownerEnv for this process.
var self = sync.OnceValue(func() string {
	name, err := nameOf(os.Getpid())
	if err != nil {
		return ""
	}
	return name
})

// endLimit is how long a killed orphan has to end, in which it closes its files.
const endLimit = time.Second

// EndOrphans kills the orphans of CRIUs that agentbox had started and that were killed, and
// returns their number. At its start CRIU probes in child processes how the kernel behaves. A
// child whose CRIU is killed meanwhile stays stopped, or sleeps, for ever, and keeps open what it
// has inherited: the lock of a sandbox, the output that a caller reads. An orphan that traces a
// process is left alone, because it is a CRIU at work, and so is a process in another pid
// namespace, because it is being restored.
func EndOrphans() (ended int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		was, err := EndOrphan(pid)
		if was {
			ended++
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("end CRIU's orphan %d: %w", pid, err))
		}
	}
	return ended, errors.Join(errs...)
}

// EndOrphan kills a process if it is such an orphan, and waits for its end.
func EndOrphan(pid int) (was bool, err error) {
	if !orphaned(pid) {
		return false, nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	before, err := proc.Read(pid)
	if err != nil {
		return false, err
	}

	// The observations may be from before and after it has executed a program, such as a tool
	// that CRIU has just started. Stopped, it executes nothing, and cannot begin to trace between
	// the check and the kill.
	if err := unix.PidfdSendSignal(fd, unix.SIGSTOP, nil, 0); err != nil {
		return false, err
	}
	tracing := false
	if was = stands(pid) && orphaned(pid); was {
		tracing, err = traces(pid)
	}
	if !was || tracing || err != nil {
		if before.State != 'T' {
			err = errors.Join(err, unix.PidfdSendSignal(fd, unix.SIGCONT, nil, 0))
		}
		return false, err
	}

	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		return false, err
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(endLimit); ; {
		n, err := unix.Poll(poll, int(max(0, time.Until(end).Milliseconds())))
		switch {
		case n > 0:
			return true, nil
		case err != nil && err != unix.EINTR:
			return true, err
		case time.Until(end) <= 0:
			return true, errors.New("it has not ended yet")
		}
	}
}

// stands waits until a process that was sent SIGSTOP has stopped, and reports whether it has.
func stands(pid int) bool {
	for end := time.Now().Add(endLimit); time.Now().Before(end); time.Sleep(time.Millisecond) {
		switch p, err := proc.Read(pid); {
		case err != nil || p.Ended():
			return false
		case p.State == 'T':
			return true
		}
	}
	return false
}

// isCRIU reports whether a process runs CRIU, or is a restored one that is still CRIU.
func isCRIU(pid int) bool {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && string(name) == "criu\n"
}

// orphaned reports whether agentbox owned a CRIU that has lost its parent: a child process whose
// parent is not a CRIU, or a CRIU whose parent is neither its owner nor a program with the same
// owner. For a process that goes on meanwhile the answer can be wrong.
func orphaned(pid int) bool {
	if !isCRIU(pid) {
		return false
	}
	owner := ownerOf(pid)
	if owner == "" {
		return false
	}
	ours, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return false
	}
	if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)); err != nil || its != ours {
		return false
	}
	p, err := proc.Read(pid)
	if err != nil {
		return false
	}
	if p.Forked {
		return !isCRIU(p.Parent) // an OCI runtime may have adopted it
	}
	if ownerOf(p.Parent) == owner {
		return false
	}
	parent, err := nameOf(p.Parent)
	return err == nil && parent != owner
}

// ownerOf returns the owner in the environment of a process; empty: it has none.
func ownerOf(pid int) string {
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return ""
	}
	for _, kv := range bytes.Split(env, []byte{0}) {
		if owner, ok := bytes.CutPrefix(kv, []byte(ownerEnv+"=")); ok {
			return string(owner)
		}
	}
	return ""
}

// nameOf names a process as ownerEnv does.
func nameOf(pid int) (string, error) {
	p, err := proc.Read(pid)
	return fmt.Sprintf("%d:%d", pid, p.Start), err
}

// traces reports whether a process traces another one.
func traces(pid int) (bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, err
	}
	line := []byte(fmt.Sprintf("\nTracerPid:\t%d\n", pid))
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		// One that has ended since it was listed reads as an error.
		if status, err := os.ReadFile("/proc/" + e.Name() + "/status"); err == nil && bytes.Contains(status, line) {
			return true, nil
		}
	}
	return false, nil
}
