package main

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type effectLsOptions struct {
	All     bool
	Quiet   bool
	NoTrunc bool
	Format  string
}

func (o *effectLsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "those that were compensated or removed, too")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "print ids only")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "print whole ids and commands")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newEffectLsCommand(a *app) *cobra.Command {
	var opts effectLsOptions
	cmd := &cobra.Command{
		Use:     "ls [flags] SANDBOX",
		Aliases: []string{"list"},
		Short:   "List the ledger of a sandbox",
		Long: `Ls lists what is still to be compensated of what a sandbox did outside of itself, newest
first: outstanding; failed, which is outstanding yet; unknown, whose undo command was killed and
may have had its way. The sandbox may have been removed, if it has left checkpoints.

With --format json it prints an array of objects: id, sandbox, head (the checkpoint that the
sandbox was at), group, label, command, on_failure, timeout_ns, created, status, and of the last
time that the undo command was run checkpoint, tries, ended, error, output.`,
		Example: `  agentbox effect ls c
  agentbox effect ls --all --format json c | jq '.[] | select(.status=="failed")'`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runEffectLs(cmd.Context(), args[0], opts, svc, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runEffectLs(
	ctx context.Context, sandbox string, opts effectLsOptions, svc runtime.Service, out io.Writer, now time.Time,
) error {
	list, err := svc.Effects(ctx, sandbox, opts.All)
	if err != nil {
		return err
	}

	id := idText(opts.NoTrunc)
	return listing[runtime.Effect]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(f runtime.Effect) string { return id(f.ID) },
		header: []string{"EFFECT", "STATUS", "CREATED", "GROUP", "ON-FAILURE", "LABEL", "UNDO-COMMAND"},
		row: func(f runtime.Effect) []string {
			command := oneLine(strings.Join(f.Command, " "))
			if !opts.NoTrunc {
				command = shorten(command, 60)
			}
			return []string{id(f.ID), f.Status, ago(now, f.Created), f.Group, f.OnFailure, f.Label, command}
		},
	}.print(out, list)
}

// effectText is an effect in one line.
func effectText(f runtime.Effect) string {
	s := "effect " + shortID(f.ID)
	if f.Label != "" {
		s += " (" + f.Label + ")"
	}
	s += ": " + f.Status
	if f.Error != "" {
		s += ": " + f.Error
	}
	return oneLine(s)
}

// warnOutstanding says of a sandbox that is about to be removed what it leaves.
func warnOutstanding(ctx context.Context, sandbox string, checkpoints bool, svc runtime.Service) []string {
	list, err := svc.Effects(ctx, sandbox, false)
	if err != nil || len(list) == 0 {
		return nil // the removal says what is wrong
	}
	s := countText(int64(len(list)), "effect") + " of " + sandbox + " had not been compensated"
	if !checkpoints {
		s += "; a restore of it, while it has checkpoints, still does"
	}
	if checkpoints {
		s += ", and the ledger is gone with it"
	}
	for _, f := range list[:min(len(list), 10)] {
		s += "\n  " + effectText(f)
	}
	return []string{s}
}
