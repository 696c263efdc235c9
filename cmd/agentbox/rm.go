package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type rmOptions struct {
	Force       bool
	Checkpoints bool
}

func (o *rmOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Force, "force", "f", false, "kill it first if it runs")
	fl.BoolVar(&o.Checkpoints, "checkpoints", false, "remove its checkpoints too")
}

func newRmCommand(a *app) *cobra.Command {
	var opts rmOptions
	cmd := &cobra.Command{
		Use:     "rm [flags] SANDBOX...",
		Aliases: []string{"remove"},
		Short:   "Remove sandboxes",
		Long: `Rm removes sandboxes with all they hold on the host and prints their names. Their
checkpoints stay unless --checkpoints is given: 'agentbox restore NAME' makes the
sandbox again. What they did outside of themselves and was not compensated (see 'agentbox
effect') is told.

A sandbox that state.db does not know, as when an older state.db was put back, is
removed by its full id, with --force.`,
		Example: `  agentbox rm c
  agentbox rm -f --checkpoints c d`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runRm(cmd.Context(), opts, args, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runRm(ctx context.Context, opts rmOptions, sandboxes []string, svc runtime.Service, out, stderr io.Writer) error {
	return eachNamed(ctx, sandboxes, out, func(name string) error {
		left := warnOutstanding(ctx, name, opts.Checkpoints, svc)
		if err := svc.Remove(ctx, name, runtime.RemoveOptions{
			Force: opts.Force, Checkpoints: opts.Checkpoints,
		}); err != nil {
			return err
		}
		warn(stderr, left)
		return nil
	})
}
