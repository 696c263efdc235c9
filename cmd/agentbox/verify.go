package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type verifyOptions struct {
	All      bool
	ReadData bool
	Rehearse bool
	Format   string
}

func (o *verifyOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "all checkpoints, as without arguments")
	fl.BoolVar(&o.ReadData, "read-data", o.ReadData, "read every byte, not only what tells that all is there")
	fl.BoolVar(&o.Rehearse, "rehearse", false,
		"restore each of the named full checkpoints into a fork without network, compare, and remove it")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newVerifyCommand(a *app) *cobra.Command {
	return verifyCommand(a, verifyOptions{}, &cobra.Command{
		Use:   "verify [flags] [SANDBOX|CHECKPOINT...]",
		Short: "Prove that checkpoints can be restored whole",
		Example: `  agentbox verify
  agentbox verify --read-data c
  agentbox verify c@before-upgrade 3f2a
  agentbox verify --rehearse c@before-upgrade`,
	})
}

// newCheckpointVerifyCommand is the same, thorough unless told otherwise.
func newCheckpointVerifyCommand(a *app) *cobra.Command {
	return verifyCommand(a, verifyOptions{ReadData: true}, &cobra.Command{
		Use:     "verify [flags] [SANDBOX|CHECKPOINT...]",
		Short:   "Reread checkpoints and compare with their digests",
		Example: "  agentbox checkpoint verify c@before-upgrade",
	})
}

func verifyCommand(a *app, opts verifyOptions, cmd *cobra.Command) *cobra.Command {
	cmd.Long = `Verify looks whether everything is in the store that checkpoints need: those named, those of the
sandboxes named, or all. With --read-data it reads all of it and finds every flipped bit; a
disk should be read so now and then. It lists each checkpoint that is damaged with what
is hurt in it, marks it, and ends with 6; restore refuses marked ones unless told to salvage
what is intact. A mark that is no longer true is taken away.

It judges process images, too: a checkpoint that is whole, and whose processes CRIU would refuse
to restore, is listed with the reason, and verify ends with 4.

With --rehearse it restores the named checkpoints, one after the other, into throw-away forks
without network, in which nothing runs: the processes stand still. It compares the tree of
processes, the open files, the file locks and the memory with the checkpoint, prints what was
compared and what differs, and removes the fork whatever happens. Connections (TCP) are closed
there, and mounts of the host are those of the sandbox. What differs ends it with 6.

The image below a sandbox is in no checkpoint: 'agentbox image verify' proves its layers.

With --format json it prints one object: checkpoints (how many), pieces, bytes, damaged
(checkpoint, what), unrestorable (the same), notes (damage that hurts no checkpoint), and with
--rehearse rehearsed (checkpoint, took, processes, threads, descriptors, locks, pages, differs).`
	cmd.Annotations = exits(exitUsage, exitNotFound, exitState, exitCorrupt, exitDenied)
	cmd.Args = args(0, -1)
	cmd.ValidArgsFunction = a.completeVerify
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if opts.All && len(args) > 0 {
			return usageErrorf("--all and names exclude each other")
		}
		if opts.Rehearse && len(args) == 0 {
			return usageErrorf("--rehearse needs the names of checkpoints")
		}
		return a.service(cmd.Context(), func(svc runtime.Service) error {
			return runVerify(cmd.Context(), opts, args, svc, a.stdout, a.stderr)
		})
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func (a *app) completeVerify(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return append(a.sandboxNames(cmd, args, nil), a.checkpointNames(cmd, args, runtime.CheckpointFilter{})...), noFiles
}

func runVerify(
	ctx context.Context, opts verifyOptions, names []string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	update, end := watch(stderr, "verify")
	defer end()
	var ids []string
	err := each(ctx, names, func(name string) error {
		more, err := checkpointsOf(ctx, name, svc)
		for _, id := range more {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
		return err
	})
	report := runtime.VerifyReport{}
	if len(ids) > 0 || len(names) == 0 {
		// All in one: what they share is looked at once.
		var e error
		report, e = svc.Verify(ctx, runtime.VerifyOptions{
			Checkpoints: ids, ReadData: opts.ReadData, Rehearse: opts.Rehearse, Progress: update,
		})
		err = both(err, e)
	}
	end()
	if err == nil || report.Checkpoints > 0 {
		err = both(err, printVerify(opts.Format, report, stdout))
	}
	if n := len(report.Damaged); n > 0 {
		err = both(&runtime.Error{Op: "verify", Err: fmt.Errorf("%d of %s damaged: %w", n,
			countText(int64(report.Checkpoints), "checkpoint"), runtime.ErrCorrupt),
			Hint: "'agentbox restore --salvage SANDBOX CHECKPOINT' restores what is intact of one."}, err)
	}
	if n := len(report.Unrestorable); n > 0 {
		err = both(&runtime.Error{Op: "verify", Err: fmt.Errorf("the processes of %d of %s cannot be restored: %w", n,
			countText(int64(report.Checkpoints), "checkpoint"), runtime.ErrState),
			Hint: "'agentbox restore --files-only SANDBOX CHECKPOINT' restores the files of one."}, err)
	}
	differ := 0
	for _, r := range report.Rehearsed {
		if len(r.Differs) > 0 {
			differ++
		}
	}
	if differ > 0 {
		err = both(&runtime.Error{Op: "verify", Err: fmt.Errorf("%d of %s rehearsed did not come back as recorded: %w",
			differ, countText(int64(len(report.Rehearsed)), "checkpoint"), runtime.ErrCorrupt),
			Hint: "What differs stands above; 'agentbox restore --files-only SANDBOX CHECKPOINT' restores the files alone."}, err)
	}
	return err
}

// checkpointsOf are the ids of a sandbox's ready checkpoints, or of the one
// checkpoint that the name means.
func checkpointsOf(ctx context.Context, name string, svc runtime.Service) (ids []string, err error) {
	list, err := svc.Checkpoints(ctx, runtime.CheckpointFilter{Sandbox: name, All: true})
	if errors.Is(err, runtime.ErrNotFound) {
		c, err := svc.CheckpointInfo(ctx, name)
		if err == nil && c.Status != runtime.CheckpointReady {
			err = fmt.Errorf("checkpoint %s is %s: %w", name, c.Status, runtime.ErrState)
		}
		if err != nil {
			return nil, err
		}
		return []string{c.ID}, nil
	}
	for _, c := range list {
		if c.Status == runtime.CheckpointReady {
			ids = append(ids, c.ID)
		}
	}
	return ids, err
}

func printVerify(format string, report runtime.VerifyReport, out io.Writer) error {
	if format == formatJSON {
		report.Damaged, report.Unrestorable, report.Notes = notNull(report.Damaged),
			notNull(report.Unrestorable), notNull(report.Notes)
		for _, list := range [][]runtime.Damaged{report.Damaged, report.Unrestorable} {
			for i := range list {
				list[i].Checkpoint, list[i].What = documentedCheckpoint(list[i].Checkpoint), notNull(list[i].What)
			}
		}
		return printJSON(out, report)
	}
	for _, d := range report.Damaged {
		fmt.Fprintf(out, "damaged: %s\n", checkpointText(d.Checkpoint))
		for _, what := range d.What {
			fmt.Fprintf(out, "  %s\n", oneLine(what))
		}
	}
	for _, d := range report.Unrestorable {
		fmt.Fprintf(out, "cannot be restored: %s\n", checkpointText(d.Checkpoint))
		for _, what := range d.What {
			fmt.Fprintf(out, "  %s\n", oneLine(what))
		}
	}
	for _, note := range report.Notes {
		fmt.Fprintf(out, "note: %s\n", oneLine(note))
	}
	for _, r := range report.Rehearsed {
		fmt.Fprintf(out, "rehearsed: %s: %s, %s, %s, %s and %s compared, %s\n", checkpointText(r.Checkpoint),
			countText(int64(r.Processes), "process"),
			countText(int64(r.Threads), "thread"), countText(int64(r.Descriptors), "open file"),
			countText(int64(r.Locks), "lock"), countText(r.Pages, "page"), r.Took.Round(time.Millisecond))
		for _, what := range r.Differs {
			fmt.Fprintf(out, "  differs: %s\n", oneLine(what))
		}
	}
	whole := countText(int64(report.Checkpoints-len(report.Damaged)), "checkpoint") + " whole"
	if n := len(report.Damaged); n > 0 {
		whole += fmt.Sprintf(", %d damaged", n)
	}
	_, err := fmt.Fprintf(out, "%s: %s, %s\n", whole, countText(report.Pieces, "piece"), sizeText(report.Bytes))
	return err
}

// checkpointText names a checkpoint on a line of its own.
func checkpointText(c runtime.Checkpoint) string {
	s := shortID(c.ID) + " of " + c.SandboxName
	if c.Name != "" {
		s += " (" + c.Name + ")"
	}
	return printable(s)
}
