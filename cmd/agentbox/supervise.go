package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
)

// A supervisor holds sandboxes to their limits, restarts them, takes their checkpoints and
// ends leases. Only a Service that runs on this host is one.
type supervisor interface {
	Supervise(ctx context.Context, s *engine.Supervision) error
}

// newSuperviseCommand is the process that supervises a root. What first needs it starts it.
func newSuperviseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:         "supervise",
		Short:       "Hold sandboxes to their limits and end leases (started with the first that needs it)",
		Hidden:      true,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			a.globals.by = "auto" // of interval checkpoints: all else is recorded as a part's that acts on its own
			a.globals.supervising = true
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			_, run := g.dirs()
			own, err := engine.TakeSupervision(run)
			if err != nil || own == nil {
				return err
			}
			slog.SetDefault(slog.New(slog.NewTextHandler(own, nil)))
			err = a.engine(cmd.Context(), func(svc runtime.Service) error {
				s, ok := svc.(supervisor)
				if !ok {
					return fmt.Errorf("supervise: %w", runtime.ErrUnsupported)
				}
				return s.Supervise(cmd.Context(), own)
			})
			if errors.Is(err, runtime.ErrNotFound) {
				return nil // with the root all that it supervised is gone
			}
			return err
		},
	}
}
