package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type restoreOptions struct {
	FilesOnly bool
	Verify    bool
	Format    string
}

func (o *restoreOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.FilesOnly, "files-only", false, "leave the processes of a full checkpoint out; the command starts afresh")
	fl.BoolVar(&o.Verify, "verify", false, "prove the restored files against the checkpoint before anything runs")
	o.Format = "name"
	fl.Var(choice(&o.Format, "name", formatJSON), "format", "print as `FORMAT`: name or json")
}

func newRestoreCommand(a *app) *cobra.Command {
	var opts restoreOptions
	cmd := &cobra.Command{
		Use:   "restore [flags] SANDBOX [CHECKPOINT]",
		Short: "Put a sandbox back to a checkpoint",
		Long: `Restore makes a sandbox's files exactly those of a checkpoint, the newest ready one unless
another is named, and lets its processes go on from there. Everything needed is checked
before the sandbox is touched. After a files-only checkpoint the command starts afresh if
it ran then. A removed sandbox is made again from the checkpoint's spec.

It prints the sandbox's name.`,
		Example: `  agentbox restore c
  agentbox restore --verify c before-upgrade
  agentbox restore c 3f2a
  agentbox restore --format json c | jq .down_ns`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied, exitUnsupported),
		Args:              args(1, 2),
		ValidArgsFunction: a.completeRestore,
		RunE: func(cmd *cobra.Command, args []string) error {
			ro := runtime.RestoreOptions{FilesOnly: opts.FilesOnly, Verify: opts.Verify}
			if len(args) > 1 {
				if args[1] == "" {
					return usageErrorf("CHECKPOINT is empty; leave it out for the newest one")
				}
				ro.Checkpoint = args[1]
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runRestore(cmd.Context(), ro, opts.Format, args[0], svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runRestore(ctx context.Context, opts runtime.RestoreOptions, format, sandbox string, svc runtime.Service, stdout, stderr io.Writer) error {
	r, err := svc.Restore(ctx, sandbox, opts)
	if err != nil {
		return err
	}
	warn(stderr, r.Warnings)
	if isTerminalWriter(stderr) {
		fmt.Fprintln(stderr, printable(restoreSummary(r)))
	}
	if format == formatJSON {
		r.Sandbox, r.Checkpoint = documented(r.Sandbox), documentedCheckpoint(r.Checkpoint)
		return printJSON(stdout, r)
	}
	_, err = fmt.Fprintln(stdout, r.Sandbox.Name)
	return err
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
	if r.Verified {
		s += ", verified"
	}
	if r.Recreated {
		s += "; the sandbox was removed and has been made again"
	}
	return s
}
