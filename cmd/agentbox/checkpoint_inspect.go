package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointInspectOptions struct{ Format string }

func (o *checkpointInspectOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatJSON)
}

func newCheckpointInspectCommand(a *app) *cobra.Command {
	var opts checkpointInspectOptions
	cmd := &cobra.Command{
		Use:   "inspect [flags] CHECKPOINT...",
		Short: "Print all that is known of checkpoints, as JSON",
		Long: `Inspect prints a JSON array with one object per checkpoint. Its fields only ever grow in
number: id, name, sandbox, sandbox_name, kind (files, full), status (pending, ready,
failed), error, parent, trigger, message, policy, created, files, processes, bytes, digest, image_digest,
labels, frozen_ns, added (bytes it brought to the store), unchanged (it brought none), pinned,
tags, damaged (what the last verify found), warnings, attached (host files: path, size in bytes,
absent), foreign (it comes from elsewhere; created is when it came), command (what a foreign one
runs) and asks (what its spec asks for, and gets only from 'agentbox restore --trust-spec' and
the like).`,
		Example: `  agentbox checkpoint inspect 3f2a
  agentbox checkpoint inspect c@before-upgrade | jq -r '.[0].digest'`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeCheckpoints,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointInspect(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runCheckpointInspect(ctx context.Context, checkpoints []string, svc runtime.Service, out io.Writer) error {
	return inspectEach(ctx, checkpoints, out, func(name string) (runtime.Checkpoint, error) {
		c, err := svc.CheckpointInfo(ctx, name)
		return documentedCheckpoint(c), err
	})
}
