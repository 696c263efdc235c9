package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCheckpointRmCommand(a *app) *cobra.Command {
	var filter runtime.CheckpointFilter
	var labels []string
	cmd := &cobra.Command{
		Use:   "rm [flags] [CHECKPOINT...]",
		Short: "Remove checkpoints",
		Long: `Rm removes checkpoints and prints what was removed. Pending and failed ones can be removed as well.

With --sandbox or --policy it removes all that match, in every state, and prints their ids;
--trigger and --label narrow that down. Pinned ones stay, and are told on stderr.`,
		Example: `  agentbox checkpoint rm c@before-upgrade
  agentbox checkpoint rm --policy agents --label run=7
  agentbox checkpoint rm --sandbox c --trigger tool:apt`,
		Annotations:       exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:              args(0, -1),
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if filter.Labels, err = parseLabels("--label", labels); err != nil {
				return err
			}
			given := filter.Sandbox != "" || filter.Policy != "" || filter.Trigger != "" || len(labels) > 0
			switch {
			case given && len(args) > 0:
				return usageErrorf("CHECKPOINT and what selects checkpoints exclude each other")
			case !given && len(args) == 0:
				return usageErrorf("name a CHECKPOINT, or select by --sandbox or --policy")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				if given {
					return runCheckpointRmMatching(cmd.Context(), filter, svc, a.stdout, a.stderr)
				}
				return runCheckpointRm(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&filter.Sandbox, "sandbox", "", "all of this `SANDBOX`, which may be a removed one")
	fl.StringVar(&filter.Policy, "policy", "", "all of sandboxes made under the policy `NAME`")
	fl.StringVar(&filter.Trigger, "trigger", "", "of those, the ones that this `NAME` asked for")
	fl.VarP(list(&labels), "label", "l", "of those, the ones with this label `KEY=VALUE`")
	completeFlags(cmd)
	a.completePolicyFlag(cmd)
	return cmd
}

func runCheckpointRmMatching(
	ctx context.Context, filter runtime.CheckpointFilter, svc runtime.Service, stdout, stderr io.Writer,
) error {
	got, err := svc.RemoveCheckpoints(ctx, filter)
	for _, id := range got.Pinned {
		fmt.Fprintf(stderr, "%s stays: it is pinned\n", shortID(id))
	}
	for _, id := range got.Removed {
		if _, e := fmt.Fprintln(stdout, id); e != nil {
			return both(err, e)
		}
	}
	return err
}

func runCheckpointRm(ctx context.Context, checkpoints []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, checkpoints, out, func(name string) error { return svc.RemoveCheckpoint(ctx, name) })
}
