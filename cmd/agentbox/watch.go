package main

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

// A watcher holds a sandbox to the limits of its files and its lifetime. Only a
// Service that runs on this host is one.
type watcher interface {
	Watch(ctx context.Context, id string) error
}

// newWatchCommand is the process that holds a sandbox to --storage-size, --ttl
// and --idle; the start of the sandbox starts it.
func newWatchCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "watch ID",
		Short:       "Hold a sandbox to its limits (started with the sandbox)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitNotFound, exitDenied),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.globals.by = "watch"
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			return a.engine(cmd.Context(), func(svc runtime.Service) error {
				w, ok := svc.(watcher)
				if !ok {
					return fmt.Errorf("watch %s: %w", args[0], runtime.ErrUnsupported)
				}
				sb, err := svc.Sandbox(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				// There, and not in RUN, so that the mark outlives the host.
				root, _ := g.dirs()
				lock, err := lockOne(cmd.Context(), filepath.Join(root, "watch"), sb.ID)
				if err != nil || lock == nil {
					return err
				}
				err = w.Watch(cmd.Context(), sb.ID)
				if cmd.Context().Err() == nil {
					lock.unlock()
				} // else it is still to be watched: the next command finds out
				return err
			})
		},
	}
}
