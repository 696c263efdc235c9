package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type applyOptions struct {
	runtime.ApplyOptions
	Yes    bool
	Format string
}

func (o *applyOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.DryRun, "dry-run", false, "only list what would change")
	fl.BoolVar(&o.Undo, "undo", false, "take the last apply back")
	fl.BoolVar(&o.Force, "force", false, "overwrite what others changed in the directory meanwhile; with --undo, too")
	fl.BoolVar(&o.Owners, "owners", false, "take over the owners that files have in the sandbox")
	fl.StringArrayVar(&o.Allow, "allow", nil,
		"let what is at this `path` come although it gives rights or has git run programs (repeatable)")
	fl.StringVar(&o.Workspace, "workspace", "", "apply only the workspace at this `path` in the sandbox")
	fl.BoolVar(&o.Markers, "markers", false, "write both versions into files that conflict, with conflict markers")
	fl.BoolVar(&o.Ours, "ours", false, "where both sides changed something, keep what the directory has")
	fl.BoolVar(&o.Theirs, "theirs", false, "where both sides changed something, take what the sandbox has")
	fl.BoolVarP(&o.Yes, "yes", "y", false, "do not ask on a terminal")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func (o *applyOptions) check(paths int) error {
	ways := 0
	for _, set := range []bool{o.Markers, o.Ours, o.Theirs || o.Force && !o.Undo} {
		if set {
			ways++
		}
	}
	switch {
	case o.DryRun && o.Undo:
		return usageErrorf("--dry-run and --undo exclude each other")
	case ways > 1:
		return usageErrorf("--markers, --ours and --theirs exclude each other")
	case o.Undo && (o.Workspace != "" || paths > 0):
		return usageErrorf("--undo takes back all that the last apply did")
	}
	return nil
}

// place returns what is applied, and sets the paths: where SANDBOX is left out, it is the one that
// has a workspace here, and they may be relative to the current directory.
func (o *applyOptions) place(
	ctx context.Context, names, paths []string, svc runtime.Service,
) (what string, err error) {
	o.Paths = nil
	var p place
	elided := elided(names)
	if elided {
		if p, err = here(ctx, svc); err != nil {
			return "", err
		}
		what = p.sandbox.Name
		if len(names) > 0 {
			what += "@" + strings.TrimPrefix(names[0], "@")
		}
	} else {
		what = names[0]
	}
	for _, name := range paths {
		if elided {
			name = p.in(name)
		} else if !path.IsAbs(name) {
			return "", usageErrorf("the path %q is not absolute; it is one in the sandbox", name)
		}
		o.Paths = append(o.Paths, name)
	}
	return what, nil
}

func newApplyCommand(a *app) *cobra.Command {
	var opts applyOptions
	cmd := &cobra.Command{
		Use:   "apply [flags] [SANDBOX][@CHECKPOINT] [-- PATH...]",
		Short: "Bring a sandbox's changes into the directory that they were made over",
		Long: `Apply brings what a sandbox has changed in its workspaces into the directories that these lie
over, or a volume's changes into the directory that it was made from: files are replaced,
deleted ones go, modes, times, attributes, links and holes included. It does all of it or
nothing, also with several workspaces: what the directory had is set aside first and comes
back when anything fails or, if agentbox is killed, with the next agentbox command.

What comes of a workspace is what CHECKPOINT has; without one, apply takes a checkpoint of the
files. The sandbox may go on, and keeps all that it has. With PATHs, absolute ones in the
sandbox, only what lies at and below them comes. On a terminal apply lists what changes and
asks. Where SANDBOX is left out, PATHs may be relative to the current directory.

The directory may be in use. What only the directory has changed stays as it is there. Texts that both
sides have changed are merged, by git. Where that is not possible nothing is applied and the
paths are named; --markers, --ours and --theirs are the ways on. A file that another program
changes in the moment of the apply makes it fail.

What the directory has keeps its owner, and what is new gets the owner of the directory that
it comes into; --owners takes those that files have in the sandbox. Devices never come. Files
with set-id bits or capabilities, which would give their rights to every user here, and what
would have git run programs here (.git/hooks, .git/config, a .git that is a link) come only
with --allow PATH: apply refuses all of it otherwise. Look at --dry-run first: it shows type,
mode, owner and target of each.

A volume comes as a whole and has no changes afterwards; it must not be in use. A
file that was changed in the directory after the volume changed its own, as far as the times
of the files tell, makes it fail, unless --force is given.

--undo takes the last apply back, and gives a volume its changes back. What the directory
had is kept until the next apply; if that is on another mount than agentbox's state, as
copies, so that one of several names of a file comes back as a file of its own.

It prints the changes as 'agentbox diff' does (A, M, D, T); with --format json one object: sandbox,
sandbox_name, original, dry_run, undone, changes, conflicts, refused, and of workspaces
checkpoint, workspaces (path, original), merged.`,
		Example: `  agentbox apply                            # in the directory of a workspace
  agentbox apply -- src README
  agentbox apply --dry-run c
  agentbox apply c
  agentbox apply --undo c
  agentbox apply c@HEAD~1 -- /work/src /work/README
  agentbox apply --markers c
  agentbox apply --allow /work/.git/hooks/pre-commit c
  agentbox apply volume://ws`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported),
		Args: func(cmd *cobra.Command, list []string) error {
			names, _ := splitPaths(cmd, list)
			return args(0, 1)(cmd, names)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, noFiles
			}
			return a.completeStates(cmd, nil, "")
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			names, paths := splitPaths(cmd, args)
			if len(names) > 0 && names[0] == "" {
				return usageErrorf("SANDBOX is empty")
			}
			if err := opts.check(len(paths)); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				what, err := opts.place(cmd.Context(), names, paths, svc)
				if err != nil {
					return err
				}
				ask := isTerminal(a.stdin) && isTerminal(a.stderr) && !opts.Yes && !opts.DryRun && !opts.Undo &&
					opts.Format != formatJSON && !strings.HasPrefix(what, "volume://")
				shown := false
				if ask {
					if what, shown, err = confirmApply(cmd.Context(), opts, what, svc, a.stdin, a.stderr); what == "" {
						return err
					}
				}
				return runApply(cmd.Context(), opts, what, svc, a.stdout, a.stderr, shown)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// confirmApply shows what would come and asks whether it shall. It returns what is to be applied then,
// the very checkpoint that was shown; empty: nothing. Without shown, apply says what it does, or why
// it does not.
func confirmApply(
	ctx context.Context, opts applyOptions, what string, svc runtime.Service, stdin *os.File, stderr io.Writer,
) (_ string, shown bool, err error) {
	opts.DryRun = true
	out, err := svc.Apply(ctx, what, opts.ApplyOptions)
	if err != nil {
		return "", false, err
	}
	if out.Checkpoint == "" || len(out.Refused) > 0 {
		return what, false, nil // apply says why not
	}
	if len(out.Changes) == 0 && len(out.Conflicts) == 0 {
		fmt.Fprintln(stderr, printable("nothing to apply to "+originals(out)))
		return "", false, nil
	}
	sandbox, _ := splitState(what)
	what = sandbox + "@" + out.Checkpoint
	if len(out.Conflicts) > 0 && !opts.Markers && !opts.Ours && !opts.Theirs && !opts.Force {
		return what, false, nil
	}
	warnApply(opts, out, stderr)
	if err := printApplied(out, stderr, false); err != nil {
		return "", false, err
	}
	fmt.Fprint(stderr, printable(fmt.Sprintf("Apply %s to %s? [y/N] ", countText(int64(len(out.Changes)), "change"),
		originals(out))))
	if err := confirmed(ctx, stdin, stderr, "nothing was applied"); err != nil {
		return "", false, err
	}
	return what, true, nil
}

// originals names the directories of an apply.
func originals(out runtime.Applied) string {
	if len(out.Workspaces) == 0 {
		return out.Original
	}
	var list []string
	for _, w := range out.Workspaces {
		list = append(list, w.Original)
	}
	return strings.Join(list, ", ")
}

// runApply applies; shown: its changes were listed already.
func runApply(
	ctx context.Context, opts applyOptions, sandbox string, svc runtime.Service, stdout, stderr io.Writer, shown bool,
) error {
	out, err := svc.Apply(ctx, sandbox, opts.ApplyOptions)
	if err != nil {
		return err
	}
	if !shown {
		warnApply(opts, out, stderr)
	}
	if isTerminalWriter(stderr) {
		s := fmt.Sprintf("%s in %s", countText(int64(len(out.Changes)), "change"), originals(out))
		switch {
		case out.Undone:
			s = "the last apply to " + originals(out) + " is undone"
		case opts.DryRun:
			s += " to come"
		case out.Checkpoint != "" && len(out.Changes) > 0:
			name, _ := splitState(sandbox)
			s += "; take it back with: agentbox apply --undo " + name
		}
		defer fmt.Fprintln(stderr, printable(s))
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
	if shown {
		return nil
	}
	return printApplied(out, stdout, opts.DryRun)
}

// warnApply says what is particular about what comes.
func warnApply(opts applyOptions, out runtime.Applied, stderr io.Writer) {
	for _, p := range out.Merged {
		if slices.Contains(out.Conflicts, p) {
			continue
		}
		warn(stderr, []string{fmt.Sprintf("%s was changed on both sides, and is merged", p)})
	}
	for _, c := range out.Conflicts {
		text := fmt.Sprintf("%s was changed in %s since the volume changed it: ", c, out.Original)
		need := "apply needs --force to overwrite it"
		if out.Checkpoint != "" {
			text = fmt.Sprintf("%s was changed on both sides: ", c)
			need = "apply needs --markers, --ours or --theirs"
		}
		switch {
		case slices.Contains(out.Merged, c):
			text += "it has conflict markers"
		case opts.Ours:
			text += "what the directory has stays"
		case opts.DryRun && !opts.Theirs && !opts.Force:
			text += need
		default:
			text += "overwritten"
		}
		warn(stderr, []string{text})
	}
	for _, r := range out.Refused {
		how := "apply refuses it; remove it in the sandbox"
		if r.MayAllow {
			how = "apply needs --allow " + quotePath(pathOf(r.Path, r.PathB64)) + " to let it through"
		}
		warn(stderr, []string{fmt.Sprintf("%s: %s: %s", quotePath(pathOf(r.Path, r.PathB64)), r.Reason, how)})
	}
}

// printApplied lists the changes of an apply, with what each file is to be if asked to.
func printApplied(out runtime.Applied, to io.Writer, states bool) error {
	w := bufio.NewWriter(to)
	var opts diffOptions // the paths of a single workspace are relative to it
	if len(out.Workspaces) == 1 {
		opts.top = out.Workspaces[0].Path
	}
	for _, c := range out.Changes {
		fmt.Fprintf(w, "%s %s", c.Change, quotePath(opts.shown(c.Path, c.PathB64)))
		if states && c.New != nil {
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
