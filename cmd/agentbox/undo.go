package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

type undoOptions struct {
	redo      bool
	List      bool
	Paths     []string
	FilesOnly bool
	DryRun    bool
	NoEffects bool
	NoAttach  bool
	Timeout   time.Duration
	Format    string
}

func (o *undoOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.List, "list", "l", false, "list where undo and redo lead; on a terminal, to choose one")
	if !o.redo {
		fl.Var(list(&o.Paths), "path",
			"put back only `PATH` and what is below it; the processes go on (up to 100 times)")
	}
	fl.BoolVar(&o.FilesOnly, "files", false, "leave the processes out; the command starts afresh")
	fl.BoolVar(&o.DryRun, "dry-run", false, "only show what would change")
	fl.BoolVar(&o.NoEffects, "no-effects", false, "run no undo commands of effects; they stay on the ledger")
	fl.BoolVar(&o.NoAttach, "no-attached", false, "leave the host files alone that belong to the checkpoint")
	fl.DurationVar(&o.Timeout, "timeout", 0, "give up after this `DURATION`, e.g. 60s")
	o.Format = "name"
	fl.Var(choice(&o.Format, "name", formatJSON), "format", "print as `FORMAT`: name or json")
}

func newUndoCommand(a *app) *cobra.Command {
	return undoCommand(a, &undoOptions{}, &cobra.Command{
		Use:   "undo [flags] [SANDBOX] [N]",
		Short: "Put a sandbox back by N steps",
		Long: `Undo goes one step back, or N: to a checkpoint, with its files and its processes. When files have
changed since the checkpoint that the sandbox is at (HEAD), the first step leads there, else to the
one before it. 'agentbox redo' goes forward again, to where the first undo began, until there is a
new checkpoint or another restore.

It is a restore, with all that 'agentbox restore' says: what it replaces is kept first, undo
commands of effects are run (--no-effects: not), host files are put back (--no-attached: not), and
what cannot be proven changes nothing. 'agentbox restore --undo' takes the last one back.

--path puts back some files or directories alone, in place: the sandbox stands still meanwhile,
and its processes go on. What it had is an undo checkpoint of files, HEAD stays where it is, and no
effects are compensated. What a process has open stays the file that it was.

Checkpoints are steps, whatever took them: 'agentbox checkpoint', a prompt of 'agentbox shell',
--checkpoint-every, and in a sandbox with a workspace each exec that has changed a file.

--list shows the steps: how many back each one is, what it was, how many paths were added (+),
modified (~) and deleted (-) since the step before it, and its age. "now" is where the sandbox
is, and redo 1 where redo leads. On a terminal, unless --format is given, it is a list to choose
from, with what has changed since each step beside or below it: the arrows, j and k move, space
and b scroll, enter goes there after a question, q leaves and changes nothing. --dry-run shows what
would change, as that of 'agentbox restore' does.

It prints the sandbox's name; with --format json what 'agentbox restore' prints, and redo: how many
steps redo can go. With --list it is one object: sandbox, sandbox_name, changed (files changed
since HEAD) and steps, which are as 'agentbox checkpoint inspect' prints them, with back.`,
		Example: `  agentbox undo c
  agentbox undo c 3
  agentbox undo 3                           # in the directory of a workspace
  agentbox undo --list c                    # on a terminal, choose a step
  agentbox undo --dry-run c
  agentbox undo --files c
  agentbox undo --path /work/src c 2
  agentbox undo --path src/main.c           # in the directory of a workspace
  agentbox undo --list --format json c | jq -r '.steps[] | select(.back == 2) | .id'`,
	})
}

func newRedoCommand(a *app) *cobra.Command {
	return undoCommand(a, &undoOptions{redo: true}, &cobra.Command{
		Use:   "redo [flags] [SANDBOX] [N]",
		Short: "Put a sandbox forward again by N steps, after undo",
		Long: `Redo goes one step forward, or N, to what 'agentbox undo' has left: over each step that undo has
passed, to the files and processes that were there when the first undo began. A new checkpoint, and
any other restore, end that. Files changed after the undo are kept as a restore keeps what
it replaces: 'agentbox restore --undo' brings them back.`,
		Example: `  agentbox redo c
  agentbox redo c 2
  agentbox redo --list c`,
	})
}

// stepsPattern is an N where SANDBOX is left out: no prefix of an id is so short.
var stepsPattern = lazy.Regexp(`^[0-9]{1,3}$`)

func undoCommand(a *app, opts *undoOptions, cmd *cobra.Command) *cobra.Command {
	cmd.Annotations = exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied, exitUnsupported)
	cmd.Args = args(0, 2)
	cmd.ValidArgsFunction = a.completeOneSandbox(nil)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		box, steps := args, ""
		switch {
		case len(args) == 2:
			box, steps = args[:1], args[1]
		case len(args) == 1 && stepsPattern().MatchString(args[0]):
			box, steps = nil, args[0]
		}
		n := 1
		if steps != "" || len(args) == 2 {
			var err error
			if n, err = strconv.Atoi(steps); err != nil || n < 1 {
				return usageErrorf("N is %q: give it a number of steps, from 1 on", steps)
			}
		}
		if opts.Timeout < 0 {
			return usageErrorf("--timeout %v: must not be negative", opts.Timeout)
		}
		if opts.List && (opts.DryRun || opts.FilesOnly || steps != "") {
			return usageErrorf("--list shows all steps, and goes to none")
		}
		uo := runtime.UndoOptions{
			Steps: n, FilesOnly: opts.FilesOnly, NoEffects: opts.NoEffects, NoAttached: opts.NoAttach,
			Timeout: opts.Timeout, Redo: opts.redo, Paths: opts.Paths,
		}
		if !elided(box) && slices.ContainsFunc(opts.Paths, func(p string) bool { return !path.IsAbs(p) }) {
			return usageErrorf("--path: must be an absolute path inside the sandbox")
		}
		if len(opts.Paths) > 0 && (opts.List || opts.DryRun || opts.FilesOnly) {
			return usageErrorf("--path excludes --list, --dry-run and --files: see 'agentbox diff SANDBOX -- PATH'")
		}
		ctx := cmd.Context()
		return a.onSandbox(ctx, box, func(svc runtime.Service, sandbox string, _ []string) (err error) {
			if uo.Paths, err = fromHere(ctx, uo.Paths, svc); err != nil {
				return err
			}
			switch {
			case opts.List && a.picksStep(cmd):
				return a.runUndoPick(ctx, uo, sandbox, svc)
			case opts.List:
				return runUndoList(ctx, opts.Format, sandbox, svc, a.stdout, a.now())
			case opts.DryRun:
				return runPlan(opts.Format, a.stdout, func() (runtime.RestorePlan, error) {
					return svc.PlanUndo(ctx, sandbox, uo)
				})
			}
			return runUndo(ctx, uo, opts.Format, sandbox, svc, a.stdout, a.stderr)
		})
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runUndo(
	ctx context.Context, opts runtime.UndoOptions, format, sandbox string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	do, what := svc.Undo, "undo"
	if opts.Redo {
		do, what = svc.Redo, "redo"
	}
	update, end := watchSteps(stderr, what)
	defer end()
	opts.Progress = update
	r, err := do(ctx, sandbox, opts)
	end()
	summary := stepSummary
	if n := len(opts.Paths); n > 0 {
		summary = func(r runtime.Restored) string {
			return fmt.Sprintf("%s of %s as at step %s (%s)\nundo with: agentbox restore %s --undo", countText(int64(n), "path"),
				r.Sandbox.Name, shorten(r.Checkpoint.ID, 13), stepText(r.Checkpoint), r.Sandbox.Name)
		}
	}
	return showRestored(r, err, format, summary, stdout, stderr)
}

// stepSummary says where undo or redo has led.
func stepSummary(r runtime.Restored) string {
	s := fmt.Sprintf("%s is at step %s (%s)", r.Sandbox.Name, shorten(r.Checkpoint.ID, 13), stepText(r.Checkpoint))
	if r.Down > 0 {
		s += ", down " + durationText(r.Down)
	}
	if r.Redo == 0 {
		return s
	}
	return s + fmt.Sprintf(", %s back; redo with: agentbox redo %s", countText(int64(r.Redo), "step"), r.Sandbox.Name)
}

// stepText says in a few words what a checkpoint is.
func stepText(c runtime.Checkpoint) string {
	switch {
	case c.Name != "":
		return c.Name
	case c.Message != "":
		return messageText(c.Message)
	case c.Trigger == runtime.TriggerUndo:
		return "before undo"
	}
	return c.Trigger
}

func runUndoList(
	ctx context.Context, format, sandbox string, svc runtime.Service, stdout io.Writer, now time.Time,
) error {
	l, err := svc.UndoList(ctx, sandbox)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(stdout)
	if format == formatJSON {
		l.Steps = notNull(l.Steps)
		for i := range l.Steps {
			l.Steps[i].Checkpoint = documentedCheckpoint(l.Steps[i].Checkpoint)
		}
		err = printJSON(out, l)
	} else {
		err = printUndoList(out, l, now)
	}
	if err != nil {
		return err
	}
	return out.Flush()
}

// printUndoList fits a terminal of 80 columns.
func printUndoList(out io.Writer, l runtime.UndoList, now time.Time) error {
	t := newTable(out, "STEP", "CHECKPOINT", "WHAT", "CHANGES", "KIND", "AGE")
	changed := func() { t.row("now", "-", "files have changed since", "", "", "") }
	pending := l.Changed
	for _, s := range l.Steps {
		step := strconv.Itoa(s.Back)
		switch {
		case s.Back == 0:
			step = "now"
		case s.Back < 0:
			step = "redo " + strconv.Itoa(-s.Back)
		case pending:
			changed()
			pending = false
		}
		t.row(step, shortID(s.ID), clipText(stepText(s.Checkpoint), 26), changesText(s.Changes), s.Kind, shortAge(now.Sub(s.Created)))
	}
	if pending {
		changed()
	}
	return t.flush()
}

// changesText counts changes as git does in short, with ~ for what was modified.
func changesText(c *runtime.Changes) string {
	if c == nil {
		return ""
	}
	return fmt.Sprintf("+%d ~%d -%d", c.Added, c.Modified, c.Deleted)
}

// clipText is the beginning of a text that is too long for a column.
func clipText(s string, most int) string {
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}

// shortAge is an age in one unit.
func shortAge(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(0, int(d.Seconds())))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
