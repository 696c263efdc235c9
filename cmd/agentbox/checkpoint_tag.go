package main

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newCheckpointTagCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "tag CHECKPOINT TAG",
		Short: "Give a checkpoint one more name",
		Long: `Tag gives a checkpoint one more name in its sandbox: SANDBOX@TAG. A tag that another
checkpoint of the sandbox has moves to this one. Prune keeps tagged checkpoints.`,
		Example: `  agentbox checkpoint tag c@before-upgrade good
  agentbox restore c good`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:              args(2, 2),
		ValidArgsFunction: a.completeOneCheckpoint(noFiles),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkName("TAG", args[1]); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return svc.TagCheckpoint(cmd.Context(), args[0], args[1])
			})
		},
	}
}

func newCheckpointUntagCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:               "untag SANDBOX@TAG...",
		Short:             "Take tags away",
		Long:              "Untag takes tags away, not the checkpoints that had them, and prints what was taken away.",
		Example:           "  agentbox checkpoint untag c@good",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeTags,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, arg := range args {
				if sandbox, tag := splitState(arg); sandbox == "" || tag == "" || !strings.Contains(arg, "@") {
					return usageErrorf("%q is no tag of a sandbox; write SANDBOX@TAG", arg)
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointUntag(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
}

func runCheckpointUntag(ctx context.Context, tags []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, tags, out, func(tag string) error { return svc.UntagCheckpoint(ctx, tag) })
}
