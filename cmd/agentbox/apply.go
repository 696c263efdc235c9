package main

import (
	"bufio"
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type applyOptions struct {
	DryRun bool
	Undo   bool
	Force  bool
	Owners bool
	Allow  []string
	Format string
}

func (o *applyOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.DryRun, "dry-run", false, "only list what would change")
	fl.BoolVar(&o.Undo, "undo", false, "take the last apply back")
	fl.BoolVar(&o.Force, "force", false, "overwrite what others changed in the directory meanwhile")
	fl.BoolVar(&o.Owners, "owners", false, "take over the owners that files have in the volume")
	fl.StringArrayVar(&o.Allow, "allow", nil,
		"let the file at this `path` of the volume come with its set-id bits and capabilities (repeatable)")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newApplyCommand(a *app) *cobra.Command {
	var opts applyOptions
	cmd := &cobra.Command{
		Use:   "apply [flags] SANDBOX",
		Short: "Bring a volume's changes into the directory that it lies over",
		Long: `Apply makes the directory that a volume was made from exactly what the volume shows: changed
files are replaced, deleted ones go, modes, times, attributes, links and holes included. It does all of it or nothing: what the directory had is set aside first and comes
back when anything fails, or, if agentbox is killed, with the next agentbox command.
Afterwards the volume has no changes.

What the directory has keeps its owner, and what is new gets the owner of the directory that
it comes into; --owners takes the volume's owners instead. Devices
never come, and files with set-id bits or capabilities, which would give their rights to
every user here, only with --allow PATH for each: apply refuses all of it otherwise.
Look at --dry-run first: it shows type, mode, owner and target of each.

Nobody may use the volume meanwhile. The directory may be in use: a file that somebody else
changes during the apply, or that was changed there after the volume changed its own, as
far as the times of the files tell, makes it fail; --force overrides the latter.

--undo takes the last apply back, and gives the volume its changes back. What the directory
had is kept until the next apply; if that is on another mount than agentbox's state, as
copies, so that one of several names of a file comes back as a file of its own. It prints the changes as 'agentbox diff' does (A, M, D,
T); with --format json one object: sandbox, sandbox_name, original, dry_run, undone,
changes, conflicts, refused.`,
		Example: `  agentbox apply --dry-run volume://ws
  agentbox apply volume://ws
  agentbox apply --allow /bin/ping volume://ws
  agentbox apply --undo volume://ws`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.DryRun && opts.Undo {
				return usageErrorf("--dry-run and --undo exclude each other")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runApply(cmd.Context(), opts, args[0], svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runApply(
	ctx context.Context, opts applyOptions, sandbox string, svc runtime.Service, stdout, stderr io.Writer,
) error {
	out, err := svc.Apply(ctx, sandbox, runtime.ApplyOptions{
		DryRun: opts.DryRun, Undo: opts.Undo, Force: opts.Force, Owners: opts.Owners, Allow: opts.Allow,
	})
	if err != nil {
		return err
	}
	for _, c := range out.Conflicts {
		what := "overwritten"
		if opts.DryRun {
			what = "apply needs --force to overwrite it"
		}
		warn(stderr, []string{fmt.Sprintf("%s was changed in %s since the volume changed it: %s",
			c, out.Original, what)})
	}
	for _, r := range out.Refused {
		how := "apply refuses it; remove it in the volume"
		if r.MayAllow {
			how = "apply needs --allow " + quotePath(pathOf(r.Path, r.PathB64)) + " to let it through"
		}
		warn(stderr, []string{fmt.Sprintf("%s: %s: %s", quotePath(pathOf(r.Path, r.PathB64)), r.Reason, how)})
	}
	if isTerminalWriter(stderr) {
		s := fmt.Sprintf("%s in %s", countText(int64(len(out.Changes)), "change"), out.Original)
		switch {
		case out.Undone:
			s = "the last apply to " + out.Original + " is undone"
		case opts.DryRun:
			s += " to come"
		}
		fmt.Fprintln(stderr, printable(s))
	}
	if opts.Format == formatJSON {
		if out.Changes == nil {
			out.Changes = []runtime.Change{}
		}
		if out.Conflicts == nil {
			out.Conflicts = []string{}
		}
		if out.Refused == nil {
			out.Refused = []runtime.Refusal{}
		}
		return printJSON(stdout, out)
	}
	w := bufio.NewWriter(stdout)
	for _, c := range out.Changes {
		fmt.Fprintf(w, "%s %s", c.Change, quotePath(pathOf(c.Path, c.PathB64)))
		if opts.DryRun && c.New != nil {
			w.WriteString(" " + fileStateText(*c.New))
		}
		w.WriteByte('\n')
	}
	return w.Flush()
}

// fileStateText is what a file is to be, as in "(file 0644 1000:1000)".
func fileStateText(s runtime.FileState) string {
	switch {
	case s.Target != "":
		return fmt.Sprintf("-> %s (%s %d:%d)", quotePath(s.Target), s.Type, s.UID, s.GID)
	case s.Device != "":
		return fmt.Sprintf("(%s %s %s %d:%d)", s.Type, s.Device, s.Mode, s.UID, s.GID)
	}
	return fmt.Sprintf("(%s %s %d:%d)", s.Type, s.Mode, s.UID, s.GID)
}
