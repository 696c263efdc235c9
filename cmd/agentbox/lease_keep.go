package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
)

// A leaseEnder removes what belongs to leases that have ended. Only a Service
// that runs on this host is one.
type leaseEnder interface {
	EndLeases(ctx context.Context) (did []string, err error)
	KeepLeases(ctx context.Context) error
}

// newKeepLeasesCommand is the process that ends leases, one for a root. Creating a lease starts
// it.
func newKeepLeasesCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "keep-leases",
		Short:       "End leases that are not held any more (started with the first of them)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.globals.by = "keeper"
			a.globals.reaping = true // what they left half-done KeepLeases sees to
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			return a.engine(ctx, func(svc runtime.Service) error {
				k, ok := svc.(leaseEnder)
				if !ok {
					return fmt.Errorf("keep leases: %w", runtime.ErrUnsupported)
				}
				_, run := g.dirs()
				for {
					lock, err := lockOne(ctx, filepath.Join(run, "leases"), engine.KeeperName)
					if err != nil || lock == nil {
						return err
					}
					slog.SetDefault(slog.New(slog.NewTextHandler(lock, nil)))
					err = k.KeepLeases(ctx)
					lock.unlock()
					if errors.Is(err, runtime.ErrNotFound) {
						return nil // with the root all leases are gone, though we still see them
					}
					if err != nil {
						return err
					}
					// A lease created in the moment before, by a process that saw us running, is
					// ours to keep.
					list, err := svc.Leases(ctx, false)
					if err != nil || len(list) == 0 {
						return errors.Join(err, ctx.Err())
					}
				}
			})
		},
	}
}
