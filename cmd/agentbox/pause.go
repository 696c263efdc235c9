package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newPauseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "pause SANDBOX...",
		Short:             "Freeze all processes of sandboxes",
		Long:              "Pause freezes every process of running sandboxes where it stands and prints their names.",
		Example:           "  agentbox pause c",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runPause(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runPause(ctx context.Context, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return each(ctx, sandboxes, func(name string) error {
		if err := svc.Pause(ctx, name); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, name)
		return err
	})
}
