package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// process is a process that cannot turn into another: a pidfd.
type process struct {
	pid int
	f   *os.File
}

func openProcess(pid int) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	// Non-blocking, so that the Go poller waits for it without a thread.
	return &process{pid, os.NewFile(uintptr(fd), "pidfd")}, nil
}

func (p *process) close() { _ = p.f.Close() }

func (p *process) kill(sig unix.Signal) error {
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

// alive is false for a zombie too.
func (p *process) alive() bool {
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

// wait blocks until the process has ended.
func (p *process) wait(ctx context.Context) error {
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

// either waits until a descriptor can be read or has lost its last writer, or
// the process has ended.
func (p *process) either(ctx context.Context, fd int) error {
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
			return ctx.Err()
		case n > 0:
			return nil
		case err != nil && err != unix.EINTR:
			return err
		}
	}
}

// inCgroup tells whether the process belongs to a container.
func (p *process) inCgroup(id string) bool {
	data, _, err := readSmall(fmt.Sprintf("/proc/%d/cgroup", p.pid))
	if err != nil {
		return false
	}
	want := cgroupPath(id)
	for line := range strings.Lines(string(data)) {
		at := strings.Index(line, want)
		if at < 0 {
			continue
		}
		rest := strings.TrimSpace(line[at+len(want):])
		if (rest == "" || rest[0] == '/') && p.alive() {
			return true
		}
	}
	return false
}

// pidFile reads a pid that a program left.
func pidFile(path string) (int, bool) {
	data, _, err := readSmall(path)
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	return pid, err == nil && pid > 0
}

// first returns the first process of run n, if it lives; close it.
func (b *Backend) first(id string, n int) (*process, bool) {
	pid, ok := pidFile(b.bundle(id, n, "pid"))
	if !ok {
		return nil, false
	}
	p, err := openProcess(pid)
	if err != nil {
		return nil, false
	}
	if !p.inCgroup(id) {
		p.close()
		return nil, false
	}
	return p, true
}

// monitor returns the conmon that left its pid in a bundle, if it lives.
func monitor(bundle string) (*process, bool) {
	pid, ok := pidFile(filepath.Join(bundle, "conmon.pid"))
	if !ok {
		return nil, false
	}
	p, err := openProcess(pid)
	if err != nil {
		return nil, false
	}
	if !names(pid, bundle) || !p.alive() {
		p.close()
		return nil, false
	}
	return p, true
}

// names tells whether an argument of a process is one of the paths or lies
// below it.
func names(pid int, paths ...string) bool {
	data, _, err := readSmall(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	for arg := range bytes.SplitSeq(data, []byte{0}) {
		for _, path := range paths {
			rest, ok := strings.CutPrefix(string(arg), path)
			if ok && (rest == "" || rest[0] == '/' || rest[0] == '.') {
				return true
			}
		}
	}
	return false
}

// isEngine tells whether a process is one of the programs that work for us,
// and not, say, somebody's pager on one of our files. A runtime may run from a
// copy of itself in memory, which keeps its name.
func isEngine(pid int) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	for _, program := range []string{"conmon", "runc", "crun", "criu", "agentbox"} {
		if strings.Contains(exe, program) {
			return true
		}
	}
	return false
}

// killStrays ends every conmon and runtime call that works for a container,
// found by the bundles in their arguments, and what a runtime call has started:
// CRIU does not end with the runc that uses it. A conmon that we are a child
// of, as its exit command, is spared: it only waits for us.
func (b *Backend) killStrays(ctx context.Context, id string) error {
	spared := ancestors()
	bundles, execs := b.runDir(id, "bundle"), b.runDir(id, "exec")
	ours := func(pid int) bool { return !spared[pid] && names(pid, bundles, execs) && isEngine(pid) }
	var errs []error
	// Again until none is found: a killed one may just have started another.
	for range 20 {
		pids, err := allPids()
		if err != nil {
			return err
		}
		var parents map[int]int
		var found []*process
		for _, pid := range pids {
			if !ours(pid) {
				continue
			}
			p, err := openProcess(pid)
			if err != nil {
				continue
			}
			if !ours(pid) {
				p.close()
				continue
			}
			found = append(found, p)
			// Conmon's other children are the container's processes, which
			// the cgroup tells better, and its exit command.
			if names(pid, b.conmon) {
				continue
			}
			if parents == nil {
				if parents, err = allParents(); err != nil {
					errs = append(errs, err)
				}
			}
			for _, child := range descendants(parents, pid) {
				if p, err := openProcess(child); err == nil {
					found = append(found, p)
				}
			}
		}
		if len(found) == 0 {
			break
		}
		for _, p := range found {
			b.log.Debug("kill a stray", "sandbox", id, "pid", p.pid)
			errs = append(errs, p.kill(unix.SIGKILL))
		}
		for _, p := range found {
			errs = append(errs, p.waitFor(ctx, grace))
			p.close()
		}
	}
	return errors.Join(errs...)
}

// unattended tells whether a conmon or a runtime call may be at work for a
// container with no one waiting for it: where a verb was cut off half-way, its
// run was not noted as started, or its exec session was not cleared away. To
// look for them is to read every process's arguments, which takes longer than
// all else that ends a container, so it is not done for nothing.
func (b *Backend) unattended(v view) bool {
	if len(v.dirty) > 0 || v.run.Number > 0 && !v.noted {
		return true
	}
	sessions, err := os.ReadDir(b.runDir(v.Spec.ID, "exec"))
	return len(sessions) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// allParents maps every process to its parent.
func allParents() (map[int]int, error) {
	pids, err := allPids()
	if err != nil {
		return nil, err
	}
	parents := make(map[int]int, len(pids))
	for _, pid := range pids {
		if parent, ok := parentOf(pid); ok {
			parents[pid] = parent
		}
	}
	return parents, nil
}

func descendants(parents map[int]int, of int) (list []int) {
	for pid, parent := range parents {
		if parent == of && pid != of {
			list = append(append(list, pid), descendants(parents, pid)...)
		}
	}
	return list
}

func parentOf(pid int) (int, bool) {
	data, _, err := readSmall(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name in parentheses may hold anything; what follows is fixed.
	fields := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))
	if len(fields) < 2 {
		return 0, false
	}
	parent, err := strconv.Atoi(fields[1])
	return parent, err == nil
}

// waitFor is wait with a limit of its own.
func (p *process) waitFor(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return p.wait(ctx)
}

func allPids() ([]int, error) {
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

// ancestors are this process and all above it.
func ancestors() map[int]bool {
	set := map[int]bool{}
	for pid, ok := os.Getpid(), true; ok && pid > 1 && !set[pid]; pid, ok = parentOf(pid) {
		set[pid] = true
	}
	return set
}
