package main

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type stopOptions struct {
	Seconds int
	set     bool
}

func (o *stopOptions) addFlags(fl *pflag.FlagSet) {
	fl.IntVarP(&o.Seconds, "timeout", "t", 10, "`SECONDS` between the stop signal and SIGKILL; 0: SIGKILL at once")
	// Docker's name for it before it was --timeout.
	fl.IntVar(&o.Seconds, "time", 10, "the same as --timeout")
	_ = fl.MarkHidden("time")
}

// timeout is what Service.Stop takes: negative for its default.
func (o *stopOptions) timeout() (time.Duration, error) {
	if !o.set {
		return -1, nil
	}
	if o.Seconds < 0 {
		return 0, usageErrorf("--timeout %d: must not be negative", o.Seconds)
	}
	return time.Duration(o.Seconds) * time.Second, nil
}

func (o *stopOptions) changed(fl *pflag.FlagSet) {
	o.set = fl.Changed("timeout") || fl.Changed("time")
}

func newStopCommand(a *app) *cobra.Command {
	var opts stopOptions
	cmd := &cobra.Command{
		Use:   "stop [flags] SANDBOX...",
		Short: "Stop sandboxes",
		Long: `Stop sends the stop signal to the sandbox's first process, waits, and kills what is left.
It prints the names. A sandbox that does not run stays as it is.`,
		Example: `  agentbox stop c
  agentbox stop -t 0 c d`,
		Annotations:       exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.changed(cmd.Flags())
			timeout, err := opts.timeout()
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runStop(cmd.Context(), timeout, args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runStop(ctx context.Context, timeout time.Duration, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, sandboxes, out, func(name string) error { return svc.Stop(ctx, name, timeout) })
}
