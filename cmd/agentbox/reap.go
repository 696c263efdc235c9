package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

// A reaper tears down what an exited sandbox no longer needs. Only a Service
// that runs on this host is one.
type reaper interface {
	Reap(ctx context.Context, id string) error
}

// newReapCommand is what the monitor of a sandbox calls after its exit; no
// user needs it.
func newReapCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "reap ID",
		Short:       "Tear down an exited sandbox (called by its monitor)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.globals.reaping, a.globals.by = true, "reap"
			return a.engine(cmd.Context(), func(svc runtime.Service) error {
				return runReap(cmd.Context(), args[0], svc)
			})
		},
	}
}

func runReap(ctx context.Context, id string, svc runtime.Service) error {
	r, ok := svc.(reaper)
	if !ok {
		return fmt.Errorf("reap %s: %w", id, runtime.ErrUnsupported)
	}
	return r.Reap(ctx, id)
}
