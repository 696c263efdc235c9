package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type recoverOptions struct{ Format string }

func (o *recoverOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newRecoverCommand(a *app) *cobra.Command {
	var opts recoverOptions
	cmd := &cobra.Command{
		Use:     "recover [flags]",
		Aliases: []string{"reconcile"},
		Short:   "Finish or undo what an interrupted command left",
		Long: `Recover rolls verbs that were cut off (kill -9, a crash, no more space) forward or back,
compares what is recorded with the kernel and the engines, and says what it did: sandboxes
that have ended unseen get their end on record and lose what they held; containers, mounts,
cgroups, links, rules, processes and files of sandboxes that are gone are freed; limits,
restarts and checkpoints at intervals are supervised again; leases that
are over end. What a command is at work on, and what is another root's, is left alone. So is a
sandbox that is whole and that state.db does not know, which is named. Every command does the
first part by itself when it finds the need; a service (agentbox serve) does all each minute,
but for sandboxes whose container is gone from its engine, or from its disk, which may only not
be mounted: it names them, and recover, as somebody asked for it, takes them off the records.

With --format json it prints one object: actions (the sentences), findings (kind, sandbox,
action, error, left: nothing was done, again: the service found it the last time, too), counts
(findings by kind), failed, sandboxes (looked at), took_ns. Kinds are

  interrupted   a verb that was cut off             lease     a lease that is over
  store         unfinished checkpoints and packs    unknown   whole, but not on record
  ended         it ended, and that went unseen      monitor   what keeps its output is dead
  gone          its container is gone               staged    a restore that will not be started
  stray         what is left of one that is gone    host      rules, bridges, helpers of all`,
		Example: `  agentbox recover
  agentbox recover --format json | jq .counts`,
		Annotations: exits(exitUsage, exitBusy, exitCorrupt, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runRecover(cmd.Context(), opts, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runRecover(ctx context.Context, opts recoverOptions, svc runtime.Service, out io.Writer) error {
	// Findings from before an error are worth printing, too.
	rec, err := svc.Reconcile(ctx)
	if opts.Format == formatJSON {
		return both(err, printJSON(out, rec))
	}
	if len(rec.Findings) == 0 {
		if err == nil {
			_, err = fmt.Fprintln(out, "nothing to recover")
		}
		return err
	}
	t := newTable(out, "KIND", "SANDBOX", "WHAT")
	for _, f := range rec.Findings {
		t.row(f.Kind, cmp.Or(shortID(f.Sandbox), "-"), cmp.Or(f.Action, f.Error))
	}
	return errors.Join(err, t.flush())
}
