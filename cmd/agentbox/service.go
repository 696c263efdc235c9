package main

import (
	"cmp"
	"context"
	"os"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/doctor"
	"github.com/agentbox/agentbox/runtime/doctor/checks"
	"github.com/agentbox/agentbox/runtime/local"
)

// dirs returns where lasting and transient state are kept.
func (g globals) dirs() (root, run string) { return runtime.Dirs(g.Root) }

// checkBackend refuses a --backend that does not exist.
func (g globals) checkBackend() error {
	if names := local.Backends(); !slices.Contains(names, g.Backend) {
		return usageErrorf("unknown backend %q: choose %s", g.Backend, strings.Join(names, ", "))
	}
	return nil
}

// openService opens the embedded engine.
func openService(ctx context.Context, g globals) (runtime.Service, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return local.Open(ctx, local.Options{
		Root: g.Root, Backend: g.Backend, Program: self, By: g.by,
		NoRecovery: g.reaping || g.supervising, Existing: g.reaping || g.supervising,
		Observers: []runtime.Observer{g.traces.Observer(cmp.Or(g.by, "command"))},
	})
}

// examine checks the host for `agentbox doctor`.
func examine(ctx context.Context, g globals) doctor.Report {
	root, _ := g.dirs()
	return checks.Examine(ctx, root)
}
