package main

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newRestartCommand(a *app) *cobra.Command {
	var opts stopOptions
	cmd := &cobra.Command{
		Use:               "restart [flags] SANDBOX...",
		Short:             "Stop sandboxes and start them again",
		Long:              "Restart stops sandboxes as 'agentbox stop' does, starts their command afresh and prints their names. One that could not start, because a secret is missing perhaps, is not stopped.",
		Example:           "  agentbox restart -t 1 c",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.changed(cmd.Flags())
			timeout, err := opts.timeout()
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runRestart(cmd.Context(), timeout, args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runRestart(
	ctx context.Context, timeout time.Duration, sandboxes []string, svc runtime.Service, out io.Writer,
) error {
	return eachNamed(ctx, sandboxes, out, func(name string) error { return svc.Restart(ctx, name, timeout) })
}
