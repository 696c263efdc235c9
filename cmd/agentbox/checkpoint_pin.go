package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCheckpointPinCommand(a *app) *cobra.Command {
	return pinCommand(a, true, &cobra.Command{
		Use:     "pin CHECKPOINT...",
		Short:   "Keep checkpoints whatever prune's rules say",
		Long:    "Pin makes 'agentbox prune' keep checkpoints whatever its rules say, and prints what was pinned. 'checkpoint rm' still removes them.",
		Example: "  agentbox checkpoint pin c@before-upgrade",
	})
}

func newCheckpointUnpinCommand(a *app) *cobra.Command {
	return pinCommand(a, false, &cobra.Command{
		Use:     "unpin CHECKPOINT...",
		Short:   "Leave pinned checkpoints to prune's rules again",
		Long:    "Unpin takes pins back and prints what is not pinned any more.",
		Example: "  agentbox checkpoint unpin c@before-upgrade",
	})
}

func pinCommand(a *app, pinned bool, cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = exits(exitUsage, exitNotFound, exitState, exitDenied)
	cmd.Args = args(1, -1)
	cmd.ValidArgsFunction = a.completeCheckpoints
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.service(cmd.Context(), func(svc runtime.Service) error {
			return runCheckpointPin(cmd.Context(), args, pinned, svc, a.stdout)
		})
	}
	return cmd
}

func runCheckpointPin(
	ctx context.Context, checkpoints []string, pinned bool, svc runtime.Service, out io.Writer,
) error {
	return eachNamed(ctx, checkpoints, out, func(name string) error { return svc.PinCheckpoint(ctx, name, pinned) })
}
