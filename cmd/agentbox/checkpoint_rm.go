package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCheckpointRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "rm CHECKPOINT...",
		Short:             "Remove checkpoints",
		Long:              "Rm removes checkpoints and prints what was removed. Pending and failed ones can be removed as well.",
		Example:           "  agentbox checkpoint rm c@before-upgrade",
		Annotations:       exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointRm(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runCheckpointRm(ctx context.Context, checkpoints []string, svc runtime.Service, out io.Writer) error {
	return each(ctx, checkpoints, func(name string) error {
		if err := svc.RemoveCheckpoint(ctx, name); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, name)
		return err
	})
}
