package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

type pruneOptions struct {
	KeepLast   int
	KeepWithin string
	KeepHourly int
	KeepDaily  int
	KeepWeekly int
	MaxBytes   string
	DryRun     bool
	Force      bool
	Format     string
}

func (o *pruneOptions) addFlags(fl *pflag.FlagSet) {
	fl.IntVar(&o.KeepLast, "keep-last", 0, "keep the newest `N` of each sandbox; here and below, -1 is all")
	fl.StringVar(&o.KeepWithin, "keep-within", "",
		"keep those at most `DURATION` older than the newest, e.g. 12h, 2d, 1w")
	fl.IntVar(&o.KeepHourly, "keep-hourly", 0, "keep the newest of each of the last `N` hours that have any")
	fl.IntVar(&o.KeepDaily, "keep-daily", 0, "keep the newest of each of the last `N` days that have any")
	fl.IntVar(&o.KeepWeekly, "keep-weekly", 0, "keep the newest of each of the last `N` weeks that have any")
	fl.StringVar(&o.MaxBytes, "max-bytes", "", "then remove the oldest until all take at most `SIZE`, e.g. 10g")
	fl.BoolVar(&o.DryRun, "dry-run", false, "only show what would go")
	fl.BoolVarP(&o.Force, "force", "f", false, "do not ask")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func (o *pruneOptions) parse() (opts runtime.PruneOptions, err error) {
	opts = runtime.PruneOptions{
		KeepLast: o.KeepLast, KeepHourly: o.KeepHourly, KeepDaily: o.KeepDaily,
		KeepWeekly: o.KeepWeekly, DryRun: o.DryRun,
	}
	for _, f := range []struct {
		flag string
		n    int
	}{{"last", o.KeepLast}, {"hourly", o.KeepHourly}, {"daily", o.KeepDaily}, {"weekly", o.KeepWeekly}} {
		if f.n < -1 {
			return opts, usageErrorf("--keep-%s %d: must be a number of checkpoints, or -1 for all", f.flag, f.n)
		}
	}
	if o.KeepWithin != "" {
		if opts.KeepWithin, err = policy.ParseDuration(o.KeepWithin); err != nil || opts.KeepWithin == 0 {
			return opts, usageErrorf("--keep-within %q: not a duration; write for example 12h, 2d or 1w", o.KeepWithin)
		}
	}
	if o.MaxBytes != "" {
		if opts.MaxBytes, err = units.RAMInBytes(o.MaxBytes); err != nil || opts.MaxBytes <= 0 {
			return opts, usageErrorf("--max-bytes %q: not a size; write for example 500m or 10g", o.MaxBytes)
		}
	}
	return opts, nil
}

func newPruneCommand(a *app) *cobra.Command {
	var opts pruneOptions
	cmd := &cobra.Command{
		Use:   "prune [flags] [SANDBOX]",
		Short: "Remove checkpoints that no rule keeps, and free their space",
		Long: `Prune removes the checkpoints, of one sandbox or of each, that no rule keeps, and frees the
space of all that nothing needs any more. A checkpoint stays if any of the rules keeps it.
Pinned and tagged ones always stay, and the one that a sandbox was last at. Without a rule
those of the sandboxes' policies count; where there are none either, only space is freed. The records of failed ones go after a day, or once
a newer checkpoint of the sandbox is ready.

On a terminal it shows what would go and asks first, unless --force is given. Sizes have
Docker's units: 10g is 10 x 2^30 bytes. With --format json it prints one object: removed and
kept (checkpoint, reasons), freed, packs (deleted or rewritten), before and after (bytes at
rest), dry_run.`,
		Example: `  agentbox prune --keep-last 10 --keep-daily 7 --dry-run
  agentbox prune --keep-within 2d --max-bytes 10g c
  agentbox prune`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			po, err := opts.parse()
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if args[0] == "" {
					return usageErrorf("SANDBOX is empty; leave it out for all")
				}
				po.Sandbox = args[0]
			}
			ask := isTerminal(a.stdin) && isTerminal(a.stderr) && !opts.Force && !opts.DryRun
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				if ask {
					going, err := confirmPrune(cmd.Context(), po, svc, a.stdin, a.stderr, a.now())
					if err != nil || !going {
						return err
					}
				}
				return runPrune(cmd.Context(), po, opts.Format, svc, a.stdout, a.stderr, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// hasRules reports whether checkpoints may go.
func hasRules(o runtime.PruneOptions) bool {
	return o.KeepLast != 0 || o.KeepWithin > 0 || o.KeepHourly != 0 || o.KeepDaily != 0 ||
		o.KeepWeekly != 0 || o.MaxBytes > 0
}

// confirmPrune shows what would go and asks whether it shall.
func confirmPrune(
	ctx context.Context, opts runtime.PruneOptions, svc runtime.Service, stdin *os.File,
	stderr io.Writer, now time.Time,
) (bool, error) {
	opts.DryRun = true
	plan, err := svc.Prune(ctx, opts)
	ready := func(p runtime.PrunedCheckpoint) bool { return p.Checkpoint.Status == runtime.CheckpointReady }
	if err != nil || !slices.ContainsFunc(plan.Removed, ready) {
		return err == nil, err
	}
	if err := printPruned(plan, stderr, now); err != nil {
		return false, err
	}
	fmt.Fprintf(stderr, "Remove %s? [y/N] ", countText(int64(len(plan.Removed)), "checkpoint"))
	err = confirmed(ctx, stdin, stderr, "nothing was removed")
	return err == nil, err
}

// confirmed waits for the answer to a question; anything but a yes is the error otherwise.
func confirmed(ctx context.Context, stdin *os.File, stderr io.Writer, otherwise string) error {
	return confirmedBy(ctx, stdin, stderr, otherwise, "y", "yes")
}

// confirmedBy is confirmed by one of some answers.
func confirmedBy(ctx context.Context, stdin *os.File, stderr io.Writer, otherwise string, answers ...string) error {
	answer := make(chan string, 1)
	go func() {
		s, _ := bufio.NewReader(stdin).ReadString('\n')
		answer <- s
	}()
	select {
	case s := <-answer:
		if slices.Contains(answers, strings.ToLower(strings.TrimSpace(s))) {
			return nil
		}
		return errors.New(otherwise)
	case <-ctx.Done():
		// A read of a terminal cannot be called off.
		fmt.Fprintln(stderr)
		return context.Cause(ctx)
	}
}

func runPrune(
	ctx context.Context, opts runtime.PruneOptions, format string, svc runtime.Service, stdout,
	stderr io.Writer, now time.Time,
) error {
	update, end := watch(stderr, "prune")
	defer end()
	opts.Progress = update
	p, err := svc.Prune(ctx, opts)
	end()
	if err != nil && len(p.Removed) == 0 {
		return err
	}
	if format == formatJSON {
		p.Removed, p.Kept = notNull(p.Removed), notNull(p.Kept)
		for _, list := range [][]runtime.PrunedCheckpoint{p.Removed, p.Kept} {
			for i := range list {
				list[i].Checkpoint, list[i].Reasons = documentedCheckpoint(list[i].Checkpoint), notNull(list[i].Reasons)
			}
		}
		return both(err, printJSON(stdout, p))
	}
	if hasRules(opts) || len(p.Removed) > 0 {
		if e := printPruned(p, stdout, now); e != nil {
			return both(err, e)
		}
	}
	_, e := fmt.Fprintln(stdout, pruneSummary(p, hasRules(opts)))
	return both(err, e)
}

// printPruned lists what goes and what stays, newest first.
func printPruned(p runtime.Pruned, out io.Writer, now time.Time) error {
	type row struct {
		runtime.PrunedCheckpoint
		action string
	}
	var rows []row
	for _, c := range p.Removed {
		rows = append(rows, row{c, "remove"})
	}
	for _, c := range p.Kept {
		rows = append(rows, row{c, "keep"})
	}
	slices.SortStableFunc(rows, func(a, b row) int { return b.Checkpoint.Created.Compare(a.Checkpoint.Created) })
	t := newTable(out, "ACTION", "ID", "NAME", "SANDBOX", "TRIGGER", "CREATED", "SIZE", "REASONS")
	for _, r := range rows {
		c := r.Checkpoint
		t.row(r.action, shortID(c.ID), c.Name, c.SandboxName, c.Trigger, ago(now, c.Created), sizeText(c.Bytes),
			strings.Join(r.Reasons, ", "))
	}
	return t.flush()
}

func pruneSummary(p runtime.Pruned, rules bool) string {
	var s []string
	if rules || len(p.Removed) > 0 { // failed ones go without a rule
		s = append(s, countText(int64(len(p.Removed)), "checkpoint")+" removed")
	}
	if rules {
		s = append(s, fmt.Sprintf("%d kept", len(p.Kept)))
	}
	s = append(s, fmt.Sprintf("%s freed in %s", sizeText(p.Freed), countText(int64(p.Packs), "pack")),
		sizeText(p.After)+" left")
	text := strings.Join(s, ", ")
	if p.DryRun {
		text = "dry run: " + text
	}
	return text
}
