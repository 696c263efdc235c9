// Package kernel has what a backend asks of the kernel, whatever engine runs its containers. A
// Process is a pid that cannot be reused while it is held (OpenProcess); Cgroups identify, freeze
// and end the processes of a container (Hierarchies); a Watcher reports changes to files (Watch).
package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/proc"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Process is a process that cannot turn into another: a pidfd.
type Process struct {
	Pid int
	f   *os.File
}

// OpenProcess pins a process by its pid; close it.
func OpenProcess(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	// Non-blocking, so that the Go poller waits for it without a thread.
	return &Process{pid, os.NewFile(uintptr(fd), "pidfd")}, nil
}

// Gone reports whether an error proves that a process, or the file that names it, does not
// exist. Other errors, such as a lack of descriptors, prove nothing.
func Gone(err error) bool {
	// EINVAL: a thread has the number now, or what had it has just been reaped.
	return errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || errors.Is(err, fs.ErrNotExist)
}

// notGone returns err, or nil if it proves that a process does not exist.
func notGone(err error) error {
	if Gone(err) {
		return nil
	}
	return err
}

// OpenMember is OpenProcess for a process in the cgroup path; it returns nil if there is none.
func OpenMember(pid int, path string) (*Process, error) {
	p, err := OpenProcess(pid)
	if err != nil {
		return nil, notGone(err)
	}
	if in, err := p.InCgroup(path); err != nil || !in {
		p.Close()
		return nil, err
	}
	return p, nil
}

// Close lets the process go.
func (p *Process) Close() { _ = p.f.Close() }

// Kill sends a signal; a process that has ended takes any.
func (p *Process) Kill(sig unix.Signal) error {
	c, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	var e error
	err = c.Control(func(fd uintptr) { e = unix.PidfdSendSignal(int(fd), sig, nil, 0) })
	if err = errors.Join(err, e); errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// Alive is false for a zombie too.
func (p *Process) Alive() bool {
	c, err := p.f.SyscallConn()
	if err != nil {
		return false
	}
	gone := true
	_ = c.Control(func(fd uintptr) { gone = readable(int(fd)) })
	return !gone
}

func readable(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// Wait blocks until the process has ended.
func (p *Process) Wait(ctx context.Context) error {
	c, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	// A wait that was given up has left its deadline behind.
	if err := p.f.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	over := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = p.f.SetReadDeadline(time.Unix(1, 0))
		close(over)
	})
	err = c.Read(func(fd uintptr) bool { return readable(int(fd)) })
	if !stop() {
		<-over
		if err != nil {
			return ctx.Err()
		}
	}
	return err
}

// Either waits until a descriptor can be read or has lost its last writer, or
// the process has ended.
func (p *Process) Either(ctx context.Context, fd int) error {
	c, err := p.f.SyscallConn()
	if err != nil {
		return err
	}
	for {
		n := 0
		cerr := c.Control(func(pidfd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(pidfd), Events: unix.POLLIN}}
			n, err = unix.Poll(fds, 100) // so often the context is asked
		})
		switch {
		case cerr != nil:
			return cerr
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case n > 0:
			return nil
		case err != nil && err != unix.EINTR:
			return err
		}
	}
}

// Executed waits until a process that was forked, as the first one of a container by its
// runtime, has executed a program, or has ended. A process restored by CRIU never does.
func (p *Process) Executed(ctx context.Context) error {
	for pause := 100 * time.Microsecond; p.Alive(); pause = min(2*pause, 10*time.Millisecond) {
		stat, err := proc.Read(p.Pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			break // it has ended since
		}
		if err != nil {
			return fmt.Errorf("process %d: %w: %w", p.Pid, fault.ErrUnsupported, err)
		}
		if !stat.Forked {
			return nil
		}
		t := time.NewTimer(pause) // only a tracer learns of an exec
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		}
	}
	return nil
}

// Waits returns the name of what the process waits for in the kernel, or "" if it waits for
// nothing or the kernel does not say.
func (p *Process) Waits() string {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/wchan", p.Pid))
	if at := strings.TrimSpace(string(data)); err == nil && at != "0" && p.Alive() {
		return at
	}
	return ""
}

// InCgroup reports whether the process is in a cgroup of that path, or below it, in any hierarchy.
func (p *Process) InCgroup(path string) (bool, error) {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cgroup", p.Pid))
	if err != nil {
		return false, notGone(err)
	}
	for line := range strings.Lines(string(data)) {
		at := strings.Index(line, path)
		if at < 0 {
			continue
		}
		if rest := strings.TrimSpace(line[at+len(path):]); rest == "" || rest[0] == '/' {
			return p.Alive(), nil
		}
	}
	return false, nil
}

// PidFile reads a pid that a program left; 0 when it has left none.
func PidFile(path string) (int, error) {
	data, _, err := record.Read(path)
	if err != nil {
		return 0, notGone(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid < 0 {
		return 0, nil // it was killed while it wrote
	}
	return pid, nil
}

// Arguments are those of a process; one that has ended has none.
func Arguments(pid int) []string {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return nil
	}
	return strings.Split(string(data), "\x00")
}

// Names reports whether an argument of a process is one of the paths or lies
// below it.
func Names(pid int, paths ...string) (bool, error) {
	data, _, err := record.Read(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false, notGone(err)
	}
	for arg := range bytes.SplitSeq(data, []byte{0}) {
		for _, path := range paths {
			rest, ok := strings.CutPrefix(string(arg), path)
			if ok && (rest == "" || rest[0] == '/' || rest[0] == '.') {
				return true, nil
			}
		}
	}
	return false, nil
}

// AllParents maps every process to its parent.
func AllParents() (map[int]int, error) {
	pids, err := AllPids()
	if err != nil {
		return nil, err
	}
	parents := make(map[int]int, len(pids))
	for _, pid := range pids {
		if parent, ok := ParentOf(pid); ok {
			parents[pid] = parent
		}
	}
	return parents, nil
}

// Descendants lists what a process has started, directly or not.
func Descendants(parents map[int]int, of int) (list []int) {
	for pid, parent := range parents {
		if parent == of && pid != of {
			list = append(append(list, pid), Descendants(parents, pid)...)
		}
	}
	return list
}

// ParentOf returns the parent of a process.
func ParentOf(pid int) (int, bool) {
	p, err := proc.Read(pid)
	return p.Parent, err == nil
}

// SharesNamespaces reports whether a process is in this one's namespaces of some kinds, such as
// "pid". A process of a container is not in all of them.
func SharesNamespaces(pid int, kinds ...string) bool {
	for _, kind := range kinds {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
		if err != nil {
			return false
		}
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil || theirs != ours {
			return false
		}
	}
	return true
}

// WaitFor is Wait with a limit of its own.
func (p *Process) WaitFor(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return p.Wait(ctx)
}

// Ask sends the process a signal and reports whether it has ended of it in time.
func (p *Process) Ask(ctx context.Context, sig unix.Signal, limit time.Duration) (ended bool, err error) {
	if err := p.Kill(sig); err != nil {
		return false, fmt.Errorf("signal process %d: %w", p.Pid, err)
	}
	err = p.WaitFor(ctx, limit)
	return err == nil, ctx.Err()
}

// AllPids lists the processes of this host.
func AllPids() ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, name := range entries {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Ancestors are this process and all above it.
func Ancestors() map[int]bool {
	set := map[int]bool{}
	for pid, ok := os.Getpid(), true; ok && pid > 1 && !set[pid]; pid, ok = ParentOf(pid) {
		set[pid] = true
	}
	return set
}

// Root pins the root directory that the process sees.
func (p *Process) Root() (*os.File, error) {
	f, err := OpenRoot(fmt.Sprintf("/proc/%d/root", p.Pid))
	if err != nil {
		return nil, err
	}
	// Had the process ended before, the number could have been another's.
	if !p.Alive() {
		return nil, errors.Join(fmt.Errorf("process %d has ended: %w", p.Pid, fault.ErrState), f.Close())
	}
	return f, nil
}

// OpenRoot pins a root filesystem, so that it cannot be exchanged between two
// look-ups.
func OpenRoot(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY, 0)
}

// StartTicks returns the start time of a process: hundredths of a second since the host's boot, on
// every Linux. With its pid it identifies the process, within one boot.
func StartTicks(pid int) (int64, error) {
	p, err := proc.Read(pid)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	return int64(p.Start), nil
}

// Started returns the start time of a process, to some hundredths of a second; zero when it has
// ended.
func Started(pid int) time.Time {
	ticks, err := StartTicks(pid)
	if err != nil {
		return time.Time{}
	}
	var since unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &since); err != nil {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(ticks)*10*time.Millisecond - time.Duration(since.Nano()))
}

// OtherClock reports whether a process is in another time namespace than this one, as
// restored ones are: monotonic clocks differ between the two.
func OtherClock(pid int) bool {
	theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/time", pid))
	if err != nil {
		return false // it has ended, or the kernel has no time namespaces
	}
	ours, err := os.Readlink("/proc/self/ns/time")
	return err == nil && theirs != ours
}
