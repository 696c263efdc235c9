package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCheckpointVerifyCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "verify CHECKPOINT...",
		Short:             "Reread checkpoints and compare with their digests",
		Long:              "Verify reads all of each checkpoint from disk, compares it with its digests and prints the names of those that are whole.",
		Example:           "  agentbox checkpoint verify c@before-upgrade",
		Annotations:       exits(exitUsage, exitNotFound, exitCorrupt, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointVerify(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runCheckpointVerify(ctx context.Context, checkpoints []string, svc runtime.Service, out io.Writer) error {
	return each(ctx, checkpoints, func(name string) error {
		if err := svc.VerifyCheckpoint(ctx, name); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, name)
		return err
	})
}
