package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type killOptions struct{ Signal string }

func (o *killOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVarP(&o.Signal, "signal", "s", "SIGKILL", "`SIGNAL` by name or number")
}

func newKillCommand(a *app) *cobra.Command {
	var opts killOptions
	cmd := &cobra.Command{
		Use:   "kill [flags] SANDBOX...",
		Short: "Send a signal to sandboxes",
		Long:  "Kill sends a signal, SIGKILL unless told otherwise, to the first process of running sandboxes and prints their names.",
		Example: `  agentbox kill c
  agentbox kill -s HUP web`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := parseSignal("--signal", opts.Signal); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runKill(cmd.Context(), opts, args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runKill(ctx context.Context, opts killOptions, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, sandboxes, out, func(name string) error { return svc.Kill(ctx, name, opts.Signal) })
}
