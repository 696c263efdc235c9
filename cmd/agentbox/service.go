package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/doctor"
	"github.com/agentbox/agentbox/runtime/oci"
	"github.com/agentbox/agentbox/runtime/store"
)

// Where state lives unless --root says otherwise.
const (
	defaultRoot = "/var/lib/agentbox"
	defaultRun  = "/run/agentbox"
)

// dirs returns where lasting and transient state live.
func (g globals) dirs() (root, run string) {
	if g.Root == "" || g.Root == defaultRoot {
		return defaultRoot, defaultRun
	}
	return g.Root, filepath.Join(g.Root, "run")
}

// openService makes the embedded engine. It is the only place that names a
// concrete backend.
func openService(ctx context.Context, g globals) (_ runtime.Service, err error) {
	root, run := g.dirs()
	st, err := store.Open(ctx, root)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, st.Close())
		}
	}()
	img, err := images.Open(root)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	backend, err := oci.Open(oci.Options{Root: root, Run: run, Self: self})
	if err != nil {
		return nil, err
	}
	engine := runtime.New(runtime.Options{Run: run, Store: st, Images: img, Backend: backend})
	if g.reaping {
		return engine, nil
	}
	if _, err := engine.RecoverInterrupted(ctx); err != nil {
		// It must not keep the user from other sandboxes, or from looking.
		slog.Error("recovery failed; `agentbox recover` tries again", "err", err)
	}
	return engine, nil
}

// examine checks the host for `agentbox doctor`.
func examine(ctx context.Context, g globals) doctor.Report {
	root, _ := g.dirs()
	return doctor.Examine(ctx, root)
}
