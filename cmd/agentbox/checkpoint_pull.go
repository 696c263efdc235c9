package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointPullOptions struct {
	PlainHTTP bool
	Format    string
}

func (o *checkpointPullOptions) addFlags(fl *pflag.FlagSet) {
	addPlainHTTP(fl, &o.PlainHTTP)
	addIDFormat(fl, &o.Format)
}

func newCheckpointPullCommand(a *app) *cobra.Command {
	var opts checkpointPullOptions
	cmd := &cobra.Command{
		Use:   "pull [flags] REFERENCE",
		Short: "Bring a checkpoint back from a registry",
		Long: `Pull brings a checkpoint from an OCI registry that 'agentbox checkpoint push' stored there, and
prints its id. Only what the store does not have yet travels. Its sandbox, where it is not
there, is not made yet: 'agentbox restore NAME' does that.`,
		Example:     "  agentbox checkpoint pull registry.example.com/agents/c:good && agentbox restore c",
		Annotations: exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:        args(1, 1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointPull(cmd.Context(), opts, args[0], svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runCheckpointPull(
	ctx context.Context, opts checkpointPullOptions, reference string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	update, end := watch(stderr, "pull")
	defer end()
	c, err := svc.PullCheckpoint(ctx, reference, runtime.RegistryOptions{PlainHTTP: opts.PlainHTTP, Progress: update})
	end()
	if err != nil {
		return err
	}
	return printArrived(opts.Format, c, stdout, stderr)
}
