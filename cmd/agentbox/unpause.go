package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newUnpauseCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "unpause SANDBOX...",
		Short:             "Thaw paused sandboxes",
		Long:              "Unpause lets the processes of paused sandboxes go on and prints their names.",
		Example:           "  agentbox unpause c",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isPaused),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runUnpause(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runUnpause(ctx context.Context, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return each(ctx, sandboxes, func(name string) error {
		if err := svc.Unpause(ctx, name); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, name)
		return err
	})
}
