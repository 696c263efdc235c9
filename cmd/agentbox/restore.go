package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type restoreOptions struct {
	FilesOnly bool
	Verify    bool
	Undo      bool
	NoUndo    bool
	DryRun    bool
	Salvage   bool
	Trigger   string
	Labels    []string
	NoEffects bool
	Attached  bool
	NoAttach  bool
	Strategy  string
	Timeout   time.Duration
	Alert     string
	AlertKey  string
	Format    string
	secrets   secretOptions
	grants    grantOptions
	pull      pullPolicyOptions
}

func (o *restoreOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.FilesOnly, "files-only", false,
		"leave the processes of a full checkpoint out; the command starts afresh")
	fl.BoolVar(&o.Verify, "verify", false,
		"read every file, trusting no unchanged times, and prove them against the checkpoint before anything runs")
	fl.BoolVar(&o.Undo, "undo", false, "take the last restore back: to the state that it replaced")
	fl.BoolVar(&o.NoUndo, "no-undo", false, "keep no undo checkpoint of the present state")
	fl.BoolVar(&o.DryRun, "dry-run", false, "only show what would change")
	fl.BoolVar(&o.Salvage, "salvage", false, "of a damaged checkpoint, restore what is intact and list the rest")
	fl.StringVar(&o.Trigger, "trigger", "", "without CHECKPOINT: the newest ready one that this `NAME` asked for")
	fl.VarP(list(&o.Labels), "label", "l", "without CHECKPOINT: the newest ready one with this label `KEY=VALUE`")
	fl.BoolVar(&o.NoEffects, "no-effects", false, "run no undo commands of effects; they stay on the ledger")
	fl.BoolVar(&o.NoAttach, "no-attached", false, "leave the host files alone that belong to the checkpoint")
	fl.BoolVar(&o.Attached, "attached", false,
		"put host files back, too, of a checkpoint that was imported or pulled, or whose sandbox was removed")
	fl.Var(choice(&o.Strategy, runtime.Strategies...), "strategy",
		"how to restore, and what to do when that fails: `STRATEGY` is auto, files, full or recreate (default: once, as the checkpoint is)")
	fl.DurationVar(&o.Timeout, "timeout", 0, "give up after this `DURATION`, e.g. 60s")
	fl.StringVar(&o.Alert, "alert", "",
		"when it fails for good, run `PROGRAM` (an absolute path), or post to an http or https URL")
	fl.StringVar(&o.AlertKey, "alert-secret", "", "sign what is posted with the key in `FILE`, which is root's alone")
	o.secrets.addFlags(fl)
	o.grants.addFlags(fl)
	o.pull.addMissing(fl)
	o.Format = "name"
	fl.Var(choice(&o.Format, "name", formatJSON), "format", "print as `FORMAT`: name or json")
}

func newRestoreCommand(a *app) *cobra.Command {
	var opts restoreOptions
	cmd := &cobra.Command{
		Use:   "restore [flags] [SANDBOX] [CHECKPOINT]",
		Short: "Put a sandbox back to a checkpoint",
		Long: `Restore makes a sandbox's files exactly those of a checkpoint, and lets its processes go on from
there. Without CHECKPOINT it is HEAD, the one that the sandbox was last at: taken last, or restored
last. Everything needed is checked before the sandbox is touched, and only what differs is. After a
files-only checkpoint the command starts afresh if it ran then.

A removed sandbox is at no checkpoint, and comes back at its newest one. It is made again from the
checkpoint's spec; if its image is not here any more, that is pulled by its digest, unless --pull
never is given.

A checkpoint that was imported or pulled comes from elsewhere (checkpoint ls says "foreign"): it
has to be named, or --foreign given, which chooses the newest of all. A sandbox that is made of it
gets no bind mounts, no network but an own one, no published ports, no restart policy, no labels,
no more rights and no other policy than "default", unless --mount, --publish and --policy give it
some, or --trust-spec all that it asks for, which is printed, and has to be confirmed (--yes
does). Its command is shown before it runs. A sandbox that is there keeps what it has.

Secrets have the values that they have now. Where those of a removed sandbox come from has to be
said again (--secret); for one that is there, --secret counts for this start.

Before that the present state is kept as an undo checkpoint, unless --no-undo is given;
--undo puts it back, and can itself be undone by another --undo.

What the sandbox did outside of itself since the checkpoint and has an undo command for (see
'agentbox effect') is compensated first, while it is frozen, the last one first. It is not rolled
back, and --undo does not apply it again. --no-effects leaves it alone.

Files of the host that belong to the checkpoint ('agentbox checkpoint --attach') are looked at
before anything ends: one that is neither a regular file nor absent, or cannot be written, refuses
the restore. They are put back once the sandbox is restored, all of them or none; --undo brings
back what they were. When one cannot be put after all, as somebody has changed it meanwhile, the
restore fails, and says that the sandbox is restored and its host files are as they were. Of a
checkpoint from elsewhere, and of a removed sandbox, they are left alone, with a warning, unless
--attached is given.

--strategy says how it is done. files: without processes; full: with them; recreate: the sandbox
is removed and made again from the checkpoint's spec, with its id. Each is tried up to 3 times if
its error may pass. auto goes from one to the next: full, files and recreate for a full
checkpoint, files and recreate for another. That a full checkpoint came back as files only, the
command started afresh, is a warning (degraded in the JSON), and ends with 0. When nothing has brought the
sandbox back, it is frozen or stopped and held: 'agentbox exec', start, unpause and cp into it are
refused until it is restored or released (agentbox release). Without --strategy it is tried once,
and a sandbox whose restore failed is stopped with the files it had.

--alert is told what a failed restore was about, as hooks are: a program of root's at its standard
input, a URL as the body of a POST, within 10 s and without following redirects. With --alert-secret
the header Agentbox-Signature is "t=SECONDS,v1=HEX", HMAC-SHA256 over SECONDS, a dot and the body,
by the key that is in the file, of 16 to 4096 bytes; one newline at its end is not of the key.

--dry-run changes nothing and shows what would change: the files, as 'agentbox diff --stat'
does, the processes that would end and those that would go on, and other effects. With
--format json it prints one object: sandbox, sandbox_name, checkpoint, changes (as those of
'agentbox diff'), added, deleted, modified, bytes (of file data to write), ends and begins
(pid, command), effects, recreates, compensates (as those of 'agentbox effect ls'), attached.

A damaged checkpoint is refused. --salvage restores what is intact of it, lists on stderr
what is lost, and ends with 6.

It prints the sandbox's name; with --format json one object: sandbox, checkpoint, recreated,
verified, undo (the id of the undo checkpoint), changed (how many paths), lost, down_ns
(how long it had no processes), files_ns (what the files took: undo checkpoint, comparison,
exchange, proof, sync), compensated (effects whose undo commands were run), attached (host files:
path, and action, one of put, removed, same, left and returned), strategy,
attempts (strategy, try, error, next, took_ns) and degraded with --strategy, warnings. When only
its host files could not be put back it prints that object, too, and fails.`,
		Example: `  agentbox restore c
  agentbox restore --verify c before-upgrade
  agentbox restore c 3f2a
  agentbox restore c HEAD~1
  agentbox restore c '@{5m}'
  agentbox restore HEAD~1                   # in the directory of a workspace
  agentbox restore --trigger tool:apt c
  agentbox restore --dry-run c before-upgrade
  agentbox restore --foreign --mount ./src:/src:ro --publish 127.0.0.1:8080:80 c
  agentbox restore --files-only --trust-spec c 3f2a
  agentbox restore --undo c
  agentbox restore --format json c | jq .down_ns`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported),
		Args:              args(0, 2),
		ValidArgsFunction: a.completeRestore,
		RunE: func(cmd *cobra.Command, args []string) error {
			secrets, err := opts.secrets.parse()
			if err != nil {
				return err
			}
			labels, err := parseLabels("--label", opts.Labels)
			if err != nil {
				return err
			}
			if opts.Timeout < 0 {
				return usageErrorf("--timeout %v: must not be negative", opts.Timeout)
			}
			grants, err := opts.grants.parse()
			if err != nil {
				return err
			}
			ro := runtime.RestoreOptions{
				Foreign: opts.grants.Foreign, Grants: grants, Trigger: opts.Trigger, Labels: labels, Secrets: secrets,
				FilesOnly: opts.FilesOnly, Verify: opts.Verify, Undo: opts.Undo, NoUndo: opts.NoUndo,
				Salvage: opts.Salvage, NoEffects: opts.NoEffects, Attached: opts.Attached, NoAttached: opts.NoAttach,
				Strategy: opts.Strategy, Timeout: opts.Timeout, Alert: opts.Alert, AlertSecret: opts.AlertKey,
				Pull: opts.pull.options(),
			}
			if opts.Attached && opts.NoAttach {
				return usageErrorf("--attached and --no-attached exclude each other")
			}
			return a.onSandbox(cmd.Context(), args, func(svc runtime.Service, sandbox string, rest []string) error {
				if err := opts.checkpoint(&ro, rest); err != nil {
					return err
				}
				if opts.DryRun {
					return runRestorePlan(cmd.Context(), ro, opts.Format, sandbox, svc, a.stdout)
				}
				if err := a.admitRestore(cmd.Context(), sandbox, &ro, opts.grants, svc); err != nil {
					return err
				}
				return runRestore(cmd.Context(), ro, opts.Format, sandbox, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completePolicyFlag(cmd)
	return cmd
}

// checkpoint takes the checkpoint from the arguments after SANDBOX.
func (o *restoreOptions) checkpoint(ro *runtime.RestoreOptions, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case len(args) > 1:
		return usageErrorf("unexpected argument %q", args[1])
	case args[0] == "":
		return usageErrorf("CHECKPOINT is empty; leave it out for HEAD, the one that it was last at")
	case o.Undo:
		return usageErrorf("--undo and CHECKPOINT exclude each other")
	}
	ro.Checkpoint = args[0]
	return nil
}

// admitRestore shows what a restore would make of a checkpoint from elsewhere, and has it be of that one.
func (a *app) admitRestore(
	ctx context.Context, sandbox string, ro *runtime.RestoreOptions, o grantOptions, svc runtime.Service,
) error {
	if ro.Undo {
		return nil
	}
	c, err := chosen(ctx, svc, sandbox, ro.Checkpoint, o,
		runtime.CheckpointFilter{Trigger: ro.Trigger, Labels: ro.Labels})
	if err != nil || c.ID == "" || !c.Foreign && !o.TrustSpec {
		return err
	}
	ro.Checkpoint, ro.Trigger, ro.Labels = c.ID, "", nil
	if ro.Strategy != runtime.StrategyRecreate && ro.Strategy != runtime.StrategyAuto && !o.TrustSpec {
		if _, err := svc.Sandbox(ctx, sandbox); err == nil {
			return nil // it keeps what it has
		}
	}
	return a.admitForeign(ctx, c, o)
}

func runRestore(
	ctx context.Context, opts runtime.RestoreOptions, format, sandbox string, svc runtime.Service,
	stdout, stderr io.Writer,
) error {
	update, end := watchSteps(stderr, "restore")
	defer end()
	opts.Progress = update
	r, err := svc.Restore(ctx, sandbox, opts)
	end()
	return showRestored(r, err, format, restoreSummary, stdout, stderr)
}

// showRestored prints what a restore has done, or the error of one that has done nothing.
func showRestored(
	r runtime.Restored, err error, format string, summary func(runtime.Restored) string, stdout, stderr io.Writer,
) error {
	if err != nil && r.Checkpoint.ID == "" {
		return err
	}
	if err == nil { // else the error says what was compensated
		for _, f := range r.Compensated {
			if f.Status == runtime.EffectCompensated { // the others are warnings
				fmt.Fprintln(stderr, printable(effectText(f)))
			}
		}
	}
	for _, line := range runtime.FoldAttempts(r.Attempts) {
		fmt.Fprintln(stderr, oneLine("tried "+line))
	}
	warn(stderr, r.Warnings)
	if err == nil && isTerminalWriter(stderr) {
		fmt.Fprintln(stderr, printable(summary(r)))
	}
	switch {
	case format == formatJSON:
		r.Sandbox, r.Checkpoint = documented(r.Sandbox), documentedCheckpoint(r.Checkpoint)
		err = both(err, printJSON(stdout, r)) // it is restored, but for its host files perhaps
	case err == nil:
		_, err = fmt.Fprintln(stdout, r.Sandbox.Name)
	}
	if len(r.Lost) == 0 {
		return err
	}
	for _, what := range r.Lost {
		fmt.Fprintf(stderr, "lost: %s\n", oneLine(what))
	}
	return both(&runtime.Error{Op: "restore", ID: r.Sandbox.Name,
		Err: fmt.Errorf("%s of checkpoint %s could not be restored: %w", countText(int64(len(r.Lost)), "path"),
			shortID(r.Checkpoint.ID), runtime.ErrCorrupt)}, err)
}

func restoreSummary(r runtime.Restored) string {
	c := r.Checkpoint
	s := fmt.Sprintf("%s is back at checkpoint %s", r.Sandbox.Name, shorten(c.ID, 13))
	if c.Name != "" {
		s += " (" + c.Name + ")"
	}
	s += ": " + c.Kind + ", " + countText(c.Files, "file")
	if c.Processes > 0 {
		s += ", " + countText(int64(c.Processes), "process")
	}
	if r.Down > 0 {
		s += ", down " + durationText(r.Down)
	}
	if r.Strategy != "" {
		s += ", strategy " + r.Strategy
	}
	if r.Verified {
		s += ", verified"
	}
	if n := compensatedCount(r); n > 0 {
		s += ", " + countText(n, "effect") + " compensated"
	}
	if n := len(r.Attached); n > 0 && r.Attached[0].Action != runtime.AttachedLeft {
		s += ", " + countText(int64(n), "host file")
	}
	if r.Recreated {
		s += "; the sandbox was removed and has been made again"
	}
	if r.Undo != "" {
		s += "\nundo with: agentbox restore " + r.Sandbox.Name + " --undo"
	}
	return s
}

func compensatedCount(r runtime.Restored) (n int64) {
	for _, f := range r.Compensated {
		if f.Status == runtime.EffectCompensated {
			n++
		}
	}
	return n
}
