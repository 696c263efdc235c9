// Package local opens the Engine of this host with all that belongs to it: the records, the
// backends, the audit log, and the recovery of what a killed process has left.
//
//	eng, err := local.Open(ctx, local.Options{})
//	if err != nil {
//		return err
//	}
//	defer eng.Close()
//
// The agentbox command opens it so, and a Go program may. It needs root, and the programs
// agentbox and agentbox-runtime. A program that drives the service of a host, which needs
// neither, uses package api instead; both are a runtime.Service.
package local

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

// HostPolicies is the directory of the policies of the host's owner; a root has its own
// beside them.
const HostPolicies = "/etc/agentbox/policies"

// Policies returns what finds the policies of a root.
func Policies(root string) policy.Finder {
	root, _ = runtime.Dirs(root)
	return policy.Finder{Dirs: []string{filepath.Join(root, "policies"), HostPolicies}}
}

// Options modify Open.
type Options struct {
	Root    string // where all state is kept, an absolute path; empty: as runtime.Dirs says
	Backend string // of new sandboxes; empty: "oci"

	// Program is the agentbox command. Processes of it supervise sandboxes and leases, and free
	// what has exited. Empty: the one in PATH.
	Program string

	// By says in the audit log which process this is; empty: "command".
	By string

	// Observers see each verb, outside of the audit log.
	Observers []runtime.Observer

	// NoRecovery leaves to others what killed processes have left.
	NoRecovery bool

	// Existing has a root that is not there be ErrNotFound, instead of making it.
	Existing bool
}

// Open returns the Engine of a root, which it makes if it is not there. What cannot be
// recovered is logged: it does not keep the caller from other sandboxes.
func Open(ctx context.Context, opts Options) (_ *engine.Engine, err error) {
	root, run := runtime.Dirs(opts.Root)
	p := place{root: root, run: run, program: opts.Program, existing: opts.Existing}
	if p.program == "" {
		if p.program, err = exec.LookPath("agentbox"); err != nil {
			return nil, &fault.Error{
				Op: "open " + root, Err: fmt.Errorf("%w: %w", fault.ErrNotFound, err),
				Hint: "Install agentbox, or name the program.",
			}
		}
	}
	open := store.Open
	if opts.Existing {
		open = store.OpenExisting
	}
	st, err := open(ctx, root)
	if err != nil {
		return nil, err
	}
	by := cmp.Or(opts.By, "command")
	backend := cmp.Or(opts.Backend, "oci")
	helper := helper{p.program, opts.Root, backend}
	eng := engine.New(engine.Options{
		Run: run, Store: st, Backend: backend, Policies: Policies(opts.Root),
		Supervisor: func(lock *os.File) error { return helper.start([]*os.File{lock}, "supervise") },
		Observers:  append(opts.Observers[:len(opts.Observers):len(opts.Observers)], audit.Open(root).Observer(by)),
		Open: func(name string) (engine.Host, error) {
			if st.Gone() { // a backend would make its directories, and so the root, again
				return engine.Host{}, fmt.Errorf("%s was removed: %w", root, runtime.ErrNotFound)
			}
			return openBackend(name, p)
		},
	})
	if !opts.NoRecovery {
		recoverAll(ctx, eng)
	}
	return eng, nil
}

func recoverAll(ctx context.Context, eng *engine.Engine) {
	if _, err := eng.RecoverInterrupted(ctx); err != nil {
		slog.Error("recovery failed; `agentbox recover` retries", "err", err)
	}
	if _, err := eng.EndLeases(ctx); err != nil {
		slog.Error("lease members not removed; `agentbox recover` retries", "err", err)
	}
	if err := eng.ReviveOfBoot(ctx); err != nil {
		slog.Error("supervision not resumed; `agentbox recover` retries", "err", err)
	}
}
