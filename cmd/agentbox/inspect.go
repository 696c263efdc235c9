package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type inspectOptions struct{ Format string }

func (o *inspectOptions) addFlags(fl *pflag.FlagSet) { addFormat(fl, &o.Format, formatJSON) }

func newInspectCommand(a *app) *cobra.Command {
	var opts inspectOptions
	cmd := &cobra.Command{
		Use:   "inspect [flags] SANDBOX...",
		Short: "Print all that is known of sandboxes, as JSON",
		Long: `Inspect prints a JSON array with one object per sandbox. Its fields only ever grow in
number: id, name, status (created, running, paused, exited), pid (0 unless it runs),
exit_code, upperdir, image, image_digest, backend, head (the checkpoint it was last at),
attempt, created, started, finished, labels, address, spec; oom_killed and limit_hits once a limit has come into force; expires
and expired with --ttl; lease (its id) and group, where it has them; restarts with --restart
(count, last_exit, last_end, stopped, given_up, error).
spec.ids are the user ids on the host (base, size) of its user namespace; without them it has
the host's, and spec.host_ids says why, unless that was asked for (--userns host).`,
		Example: `  agentbox inspect c
  agentbox inspect c | jq -r '.[0].upperdir'`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runInspect(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runInspect(ctx context.Context, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return inspectEach(ctx, sandboxes, out, func(name string) (runtime.Sandbox, error) {
		sb, err := svc.Sandbox(ctx, name)
		return documented(sb), err
	})
}
