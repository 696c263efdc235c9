package main

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type attachCmdOptions struct {
	attachOptions
	NoStdin bool
}

func (o *attachCmdOptions) addFlags(fl *pflag.FlagSet) {
	o.attachOptions.addFlags(fl)
	o.addSigProxy(fl)
	fl.BoolVar(&o.NoStdin, "no-stdin", false, "do not connect stdin")
}

func newAttachCommand(a *app) *cobra.Command {
	var opts attachCmdOptions
	cmd := &cobra.Command{
		Use:   "attach [flags] [SANDBOX]",
		Short: "Connect to a running sandbox's first process",
		Long: `Attach connects the caller to the input and output of the command a sandbox was made
for, and ends with its exit code. With a terminal, Ctrl-P Ctrl-Q detaches and the
command goes on. When another command restores the sandbox, attach, run -it and start -a stay
connected, say so, and go on with the restored process.`,
		Example: `  agentbox run -dit --name work busybox
  agentbox attach work`,
		Annotations:       passes(),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(isRunning),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.onSandbox(cmd.Context(), args, func(svc runtime.Service, sandbox string, _ []string) error {
				return runAttach(cmd.Context(), opts, sandbox, svc, a)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	return cmd
}

func runAttach(ctx context.Context, opts attachCmdOptions, sandbox string, svc runtime.Service, a *app) error {
	sb, err := svc.Sandbox(ctx, sandbox)
	if err != nil {
		return err
	}
	opts.TTY = sb.Spec.Terminal
	opts.Interactive = sb.Spec.OpenStdin && !opts.NoStdin
	sess, err := a.newSession(opts.attachOptions)
	if err != nil {
		return err
	}
	_, err = sess.follow(ctx, svc, "attach", sb, func(streams runtime.Streams) (func() error, error) {
		return func() error { return svc.Attach(ctx, sb.ID, streams) }, nil
	})
	return err
}
