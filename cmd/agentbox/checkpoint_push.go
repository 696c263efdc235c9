package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointPushOptions struct {
	PlainHTTP bool
	Format    string
}

func (o *checkpointPushOptions) addFlags(fl *pflag.FlagSet) {
	addPlainHTTP(fl, &o.PlainHTTP)
	o.Format = "reference"
	fl.Var(choice(&o.Format, "reference", formatJSON), "format", "print as `FORMAT`: reference or json")
}

func addPlainHTTP(fl *pflag.FlagSet, p *bool) {
	fl.BoolVar(p, "plain-http", false, "speak HTTP without TLS, also to another machine")
}

func newCheckpointPushCommand(a *app) *cobra.Command {
	var opts checkpointPushOptions
	cmd := &cobra.Command{
		Use:   "push [flags] CHECKPOINT REFERENCE",
		Short: "Store a checkpoint in a registry",
		Long: `Push stores a checkpoint in an OCI registry, with the credentials that Docker or Podman have for
it, and prints the reference by digest. Only what the registry does not have yet travels. A
checkpoint holds the memory of processes, and with it their secrets: whoever can pull from
there can read them. With --format json it prints one object: reference, bytes (that
travelled), skipped (bytes that were there).`,
		Example:           "  agentbox checkpoint push c@before-upgrade registry.example.com/agents/c:good",
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied, exitUnsupported),
		Args:              args(2, 2),
		ValidArgsFunction: a.completeOneCheckpoint(noFiles),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointPush(cmd.Context(), opts, args[0], args[1], svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runCheckpointPush(
	ctx context.Context, opts checkpointPushOptions, checkpoint, reference string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	update, end := watch(stderr, "push")
	defer end()
	p, err := svc.PushCheckpoint(ctx, checkpoint, reference,
		runtime.RegistryOptions{PlainHTTP: opts.PlainHTTP, Progress: update})
	end()
	if err != nil {
		return err
	}
	if isTerminalWriter(stderr) {
		fmt.Fprintf(stderr, "%s sent, %s were there already\n", sizeText(p.Bytes), sizeText(p.Skipped))
	}
	if opts.Format == formatJSON {
		return printJSON(stdout, p)
	}
	_, err = fmt.Fprintln(stdout, p.Reference)
	return err
}
