package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type startOptions struct {
	attachOptions
	Attach bool
}

func (o *startOptions) addFlags(fl *pflag.FlagSet) {
	o.attachOptions.addFlags(fl)
	o.addSigProxy(fl)
	fl.BoolVarP(&o.Attach, "attach", "a", false, "connect to its output and end with its exit code")
	fl.BoolVarP(&o.Interactive, "interactive", "i", false, "connect stdin too (implies --attach)")
}

func newStartCommand(a *app) *cobra.Command {
	var opts startOptions
	cmd := &cobra.Command{
		Use:   "start [flags] SANDBOX...",
		Short: "Start created or exited sandboxes",
		Long: `Start starts the command of sandboxes that do not run and prints their names. Their files
are as they were left. With --attach, of one sandbox only, it ends as 'agentbox run' does.`,
		Example: `  agentbox start c
  agentbox start -ai work`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:              args(1, -1),
		ValidArgsFunction: a.completeSandboxes(isStopped),
		RunE: func(cmd *cobra.Command, args []string) error {
			opts.Attach = opts.Attach || opts.Interactive
			if opts.Attach {
				if len(args) > 1 {
					return usageErrorf("--attach takes one sandbox")
				}
				for k, v := range passes() {
					cmd.Annotations[k] = v
				}
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				if opts.Attach {
					return runStartAttached(cmd.Context(), opts, args[0], svc, a)
				}
				return runStart(cmd.Context(), args, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runStart(ctx context.Context, sandboxes []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, sandboxes, out, func(name string) error {
		_, err := svc.Start(ctx, name, nil)
		return err
	})
}

func runStartAttached(ctx context.Context, opts startOptions, sandbox string, svc runtime.Service, a *app) error {
	sb, err := svc.Sandbox(ctx, sandbox)
	if err != nil {
		return err
	}
	opts.TTY = sb.Spec.Terminal
	opts.Interactive = opts.Interactive && sb.Spec.OpenStdin
	sess, err := a.newSession(opts.attachOptions)
	if err != nil {
		return err
	}
	_, err = sess.follow(ctx, svc, "start", sb, func(streams runtime.Streams) (func() error, error) {
		return svc.Start(ctx, sb.ID, &streams)
	})
	return err
}
