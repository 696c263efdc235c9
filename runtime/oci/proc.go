package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// monitor returns the conmon that left its pid in a bundle, to be closed; nil when
// it has ended.
func monitor(bundle string) (*kernel.Process, error) {
	pid, err := kernel.PidFile(filepath.Join(bundle, "conmon.pid"))
	if pid == 0 {
		return nil, err
	}
	p, err := kernel.OpenProcess(pid)
	if kernel.Gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if ours, err := kernel.Names(pid, bundle); err != nil || !ours || !p.Alive() {
		p.Close()
		return nil, err
	}
	return p, nil
}

// isEngine reports whether a process is one of the programs that work for us, and not, say, a
// pager on one of our files. A runtime may run from a copy of itself in memory, which keeps
// its name.
func isEngine(pid int) bool {
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	for _, program := range []string{"conmon", "runc", "crun", "criu", "agentbox", "nsenter"} {
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
	spared := kernel.Ancestors()
	bundles, execs := b.box.RunDir(id, "bundle"), b.box.RunDir(id, "exec")
	var errs []error
	names := func(pid int, paths ...string) bool {
		is, err := kernel.Names(pid, paths...)
		if err != nil {
			errs = append(errs, err)
		}
		return is
	}
	ours := func(pid int) bool { return !spared[pid] && names(pid, bundles, execs) && isEngine(pid) }
	// Again until none is found, twice: a killed one may just have started
	// another, and one that forks and ends, as conmon does, while the list of
	// processes is read has its child missed.
	clean := 0
	for range 20 {
		pids, err := kernel.AllPids()
		if err != nil {
			return err
		}
		var parents map[int]int
		var found []*kernel.Process
		for _, pid := range pids {
			if !ours(pid) {
				continue
			}
			p, err := kernel.OpenProcess(pid)
			if err != nil {
				if !kernel.Gone(err) {
					errs = append(errs, err)
				}
				continue
			}
			if !ours(pid) {
				p.Close()
				continue
			}
			found = append(found, p)
			// Conmon's other children are its exit command and the container's processes, which
			// the cgroup lists better.
			if names(pid, b.conmon) {
				continue
			}
			if parents == nil {
				if parents, err = kernel.AllParents(); err != nil {
					errs = append(errs, err)
				}
			}
			for _, child := range kernel.Descendants(parents, pid) {
				if p, err := kernel.OpenProcess(child); err == nil {
					found = append(found, p)
				}
			}
		}
		if len(found) == 0 {
			if clean++; clean == 2 {
				break
			}
			continue
		}
		clean = 0
		for _, p := range found {
			b.log.Debug("stray process not killed", "sandbox", id, "pid", p.Pid)
			errs = append(errs, p.Kill(unix.SIGKILL))
		}
		for _, p := range found {
			errs = append(errs, p.WaitFor(ctx, box.Grace))
			p.Close()
		}
	}
	return errors.Join(errs...)
}
