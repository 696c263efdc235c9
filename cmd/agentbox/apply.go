package main

import (
	"bufio"
	"cmp"
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
	Yes         bool
	Format      string
	Commit      bool
	Message     string
	Branch      string
	ByHunk      bool
	Interactive bool
}

func (o *applyOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVar(&o.DryRun, "dry-run", false, "only list what would change")
	fl.BoolVar(&o.Undo, "undo", false, "take the last apply back")
	fl.BoolVar(&o.Force, "force", false, "overwrite what others changed in the directory meanwhile; with --undo, too")
	fl.BoolVar(&o.Owners, "owners", false, "take over the owners that files have in the sandbox")
	fl.StringArrayVar(&o.Allow, "allow", nil,
		"let `PATH` come although it gives rights or has git run programs (repeatable)")
	fl.StringVar(&o.Workspace, "workspace", "", "apply only the workspace at this `PATH` in the sandbox")
	fl.BoolVar(&o.Markers, "markers", false, "write both versions into files that conflict, with conflict markers")
	fl.BoolVar(&o.Ours, "ours", false, "where both sides changed something, keep what the directory has")
	fl.BoolVar(&o.Theirs, "theirs", false, "where both sides changed something, take what the sandbox has")
	fl.BoolVarP(&o.ByHunk, "patch", "p", false, "ask about each hunk, as 'git add -p' does")
	fl.BoolVarP(&o.Interactive, "interactive", "i", false, "choose from a list of the changes")
	fl.BoolVarP(&o.Yes, "yes", "y", false, "do not ask on a terminal")
	fl.BoolVar(&o.Commit, "git-commit", false, "commit what comes in the directory's git repository, as you")
	fl.StringVarP(&o.Message, "message", "m", "", "the `TEXT` of that commit's message")
	fl.StringVar(&o.Branch, "branch", "",
		"with --git-commit, commit on branch `NAME` alone, new or not checked out; the directory stays as it is")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func (o *applyOptions) check() error {
	ways := 0
	for _, set := range []bool{o.Markers, o.Ours, o.Theirs || o.Force && !o.Undo} {
		if set {
			ways++
		}
	}
	switch {
	case o.DryRun && o.Undo:
		return usageErrorf("--dry-run and --undo exclude each other")
	case o.ByHunk && o.Interactive:
		return usageErrorf("--patch and --interactive exclude each other; in the list 'p N' asks about hunks")
	case (o.ByHunk || o.Interactive) && (o.DryRun || o.Undo):
		return usageErrorf("--patch and --interactive cannot be combined with --dry-run or --undo")
	case ways > 1:
		return usageErrorf("--markers, --ours and --theirs exclude each other")
	case o.Message != "" && !o.Commit:
		return usageErrorf("--message is for --git-commit")
	case o.Branch != "" && !o.Commit:
		return usageErrorf("--branch is for --git-commit")
	case o.Commit && (o.DryRun || o.Undo || o.Markers):
		return usageErrorf("--git-commit cannot be combined with --dry-run, --undo or --markers")
	case o.Undo && (o.Workspace != "" || len(o.Paths) > 0):
		return usageErrorf("--undo takes back all that the last apply did")
	}
	return nil
}

// aim completes what is applied, and its paths, where SANDBOX is left out.
func (o *applyOptions) aim(ctx context.Context, names []string, svc runtime.Service) (string, error) {
	if !elided(names) {
		for _, p := range o.Paths {
			if !path.IsAbs(p) {
				return "", usageErrorf("the path %q is not absolute; it is one in the sandbox", p)
			}
		}
		return names[0], nil
	}
	at, err := here(ctx, svc)
	if err != nil {
		return "", err
	}
	for _, list := range [][]string{o.Paths, o.Allow} {
		for i, p := range list {
			list[i] = at.in(p)
		}
	}
	if len(names) == 0 {
		return at.sandbox.Name, nil
	}
	return at.sandbox.Name + "@" + strings.TrimPrefix(names[0], "@"), nil
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

What comes of a workspace is what CHECKPOINT has; without one, apply (also with --dry-run) takes a
checkpoint of the files. The sandbox may go on, and keeps all that it has. In the directory of a
workspace SANDBOX may be left out. With PATHs, absolute ones in the sandbox, or relative to where you
stand without SANDBOX, only what lies at and below them comes. On a terminal apply lists the changes
and asks.

The directory may be in use. What was changed only there stays as it is. Texts that both
sides have changed are merged, by git. Where that is not possible nothing is applied and the
paths are named; --markers, --ours and --theirs are the ways on. A file that another program
changes in the moment of the apply makes it fail.

What the directory has keeps its owner, and what is new gets the owner of the directory that
it comes into; --owners takes those that files have in the sandbox. Devices never come. Files
with set-id bits or capabilities, which would give their rights to every user here, and what
would have git run programs here (.git/hooks, .git/config, a .git that is a link, and the same
in a bare repository) come only with --allow PATH: apply refuses all of it otherwise. Look at
--dry-run first: it shows type, mode, owner and target of each.

The directory's .agentbox.yaml and the sandbox's policy can have rules (docs/workspace.md).
Validators judge the result first, in forks of the sandbox: if one fails, nothing is applied and
its output is shown. A person may have to approve the apply: a terminal asks; otherwise apply ends
with exit code 9 and names the 'agentbox approve ID' to run. A canary comes before the rest, and
all is taken back if its check fails.

A volume comes as a whole and has no changes afterwards; it must not be in use. A
file that was changed in the directory after the volume changed its own, as far as the times
of the files tell, makes it fail, unless --force is given.

--patch asks about each hunk of texts and about each other change, as 'git add -p' does, and
--interactive has a list to mark what comes. What is chosen comes, all or nothing, if it is still
what was shown; the rest stays in the sandbox for later. What cannot come, a conflict for one, is
named and left out.

--git-commit commits what comes, and nothing else, to the git repository that the directory is in,
as you (as the user that called sudo), without hooks. It refuses files that have staged changes in the
index already. What git ignores comes and is not committed. --undo does not take the
commit back. With --branch NAME the commit is on that branch alone, which is made of HEAD if there is
none: the directory, its index and the current branch stay as they are, and so do the changes in the
sandbox, which are still there to be applied. It is what the sandbox has changed, carried over to the
branch as by 'git cherry-pick'.

--undo takes the last apply back, and gives a volume its changes back. What the directory
had is kept until the next apply; if that is on another mount than agentbox's state, as
copies, so that one of several names of a file comes back as a file of its own.

It prints the changes as 'agentbox diff' does (A, M, D, T); with --format json one object: sandbox,
sandbox_name, original, dry_run, undone, changes, conflicts, refused, and of workspaces
checkpoint, workspaces (path, original), merged, validators (name, from, exit, timed_out, took_ns,
output), risk (score, reasons), approval, canaries.`,
		Example: `  agentbox apply                           # in the directory of a workspace
  agentbox apply @HEAD~1 -- src
  agentbox apply -p -- src
  agentbox apply --undo
  agentbox apply --git-commit -m 'Parse dates' -- src
  agentbox apply --git-commit --branch agent/dates
  agentbox apply --dry-run c
  agentbox apply c@HEAD~1 -- /work/src /work/README
  agentbox apply --markers c
  agentbox apply --allow /work/.git/hooks/pre-commit c
  agentbox apply volume://ws`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported, exitApproval),
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
			opts.Paths = paths
			if err := opts.check(); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				what, err := opts.aim(cmd.Context(), names, svc)
				if err != nil {
					return err
				}
				return a.apply(cmd.Context(), opts, what, svc)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// apply applies, after it has shown what comes and asked, or has looked for the repositories that it
// is to commit to. Then it applies the very checkpoint that it has looked at.
func (a *app) apply(ctx context.Context, opts applyOptions, what string, svc runtime.Service) error {
	ask := isTerminal(a.stdin) && isTerminal(a.stderr) && !opts.Yes && !opts.DryRun && !opts.Undo &&
		opts.Format != formatJSON && !strings.HasPrefix(what, "volume://")
	choose := opts.ByHunk || opts.Interactive
	if !ask && !opts.Commit && !choose {
		_, err := runApply(ctx, opts, what, svc, a.stdout, a.stderr, false)
		return err
	}
	look := opts.ApplyOptions
	look.DryRun, look.Patch = true, choose || opts.Branch != ""
	plan, err := svc.Apply(ctx, what, look)
	if err != nil {
		return err
	}
	sandbox, _ := splitState(what)
	if plan.Checkpoint != "" {
		what = sandbox + "@" + plan.Checkpoint
	}
	shown := false
	if choose {
		if len(plan.Changes) == 0 && len(plan.Conflicts) == 0 {
			fmt.Fprintln(a.stderr, printable("nothing to apply to "+originals(plan)))
			return nil
		}
		if opts.Picks, err = opts.pick(ctx, plan, a.stdin, a.stderr); err != nil {
			return err
		}
		plan = only(plan, opts.Picks)
	}
	var repositories []*repository
	if opts.Commit {
		if repositories, err = openRepositories(ctx, plan, opts.Branch != ""); err != nil {
			return err
		}
	}
	if ask && !choose && plan.Checkpoint != "" {
		if err := heldBack(opts, plan, a.stderr); err != nil {
			return err
		}
		if opts.Branch != "" {
			if err := unjudged(plan); err != nil {
				return err
			}
		}
		if len(plan.Changes) == 0 && len(plan.Conflicts) == 0 {
			fmt.Fprintln(a.stderr, printable("nothing to apply to "+originals(plan)))
			return nil
		}
		if err := confirmApply(ctx, opts, plan, a.stdin, a.stderr); err != nil {
			return err
		}
		if needsApproval(plan) {
			if _, err := svc.Approve(ctx, plan.Approval.ID); err != nil {
				return err
			}
		}
		shown = true
	}
	if opts.Branch != "" {
		return a.onBranch(ctx, opts, what, repositories, svc, shown)
	}
	out, err := runApply(ctx, opts, what, svc, a.stdout, a.stderr, shown)
	if err != nil {
		return err
	}
	message := opts.commitMessage(out)
	for _, r := range repositories {
		if err := r.commit(ctx, out, message, a.stderr); err != nil {
			return &runtime.Error{Err: fmt.Errorf("the changes are applied, and not committed: %w", err),
				Hint: "Commit them yourself, or take them back with: agentbox apply --undo " + sandbox}
		}
	}
	return nil
}

// commitMessage returns the message of the commit.
func (o *applyOptions) commitMessage(out runtime.Applied) string {
	return cmp.Or(o.Message, fmt.Sprintf("Apply checkpoint %.12s of sandbox %s", out.Checkpoint, out.SandboxName))
}

// heldBack shows why an apply cannot be done as asked for, and the options that would let it.
func heldBack(opts applyOptions, plan runtime.Applied, stderr io.Writer) error {
	conflicts := unsettled(opts, plan)
	if len(conflicts) == 0 && len(plan.Refused) == 0 {
		return nil
	}
	dry := opts
	dry.DryRun = true // the output says what would be needed
	warnApply(dry, plan, stderr)
	if len(plan.Refused) > 0 {
		return &runtime.Error{Err: fmt.Errorf("%w: nothing was applied to %s: %s need --allow",
			runtime.ErrDenied, originals(plan), countText(int64(len(plan.Refused)), "path")),
			Hint: "Allow each path with --allow PATH, or remove it in the sandbox."}
	}
	return &runtime.Error{Err: fmt.Errorf("%w: nothing was applied to %s: %s changed on both sides",
		runtime.ErrState, originals(plan), countText(int64(len(conflicts)), "path")),
		Hint: "Look at both sides. --markers writes both into files of text, --ours keeps what the directory has, " +
			"--theirs takes what the sandbox has."}
}

// unsettled lists the conflicts of a plan that no option settles.
func unsettled(opts applyOptions, plan runtime.Applied) []string {
	switch {
	case opts.Ours, opts.Theirs, opts.Force:
		return nil
	case opts.Markers:
		return slices.DeleteFunc(slices.Clone(plan.Conflicts), func(c string) bool {
			return slices.Contains(plan.Merged, c)
		})
	}
	return plan.Conflicts
}

// confirmApply shows what would come and asks whether it shall.
func confirmApply(
	ctx context.Context, opts applyOptions, plan runtime.Applied, stdin *os.File, stderr io.Writer,
) error {
	warnApply(opts, plan, stderr)
	if err := printApplied(plan, stderr, false); err != nil {
		return err
	}
	passes := plan
	passes.Approval = nil // it is asked for here
	printPasses(passes, stderr)
	if needsApproval(plan) {
		return confirmApproval(ctx, *plan.Approval, stdin, stderr)
	}
	question := fmt.Sprintf("Apply %s to %s? [y/N] ", countText(int64(len(plan.Changes)), "change"), originals(plan))
	if opts.Branch != "" {
		question = fmt.Sprintf("Commit %s to branch %s? [y/N] ", countText(int64(len(plan.Changes)), "change"), opts.Branch)
	}
	fmt.Fprint(stderr, printable(question))
	return confirmed(ctx, stdin, stderr, "nothing was applied")
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
) (runtime.Applied, error) {
	out, err := svc.Apply(ctx, sandbox, opts.ApplyOptions)
	if err != nil {
		return out, err
	}
	if !shown {
		warnApply(opts, out, stderr)
	}
	printPasses(out, stderr)
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
		return out, printJSON(stdout, out)
	}
	if shown {
		return out, nil
	}
	return out, printApplied(out, stdout, opts.DryRun)
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
		if at := slices.IndexFunc(out.Refs, func(r runtime.AppliedRef) bool { return r.Path == c }); at >= 0 {
			warn(stderr, []string{refText(out.Refs[at], out.SandboxName)})
		}
		text := fmt.Sprintf("%s was changed in %s since the volume changed it: ", c, out.Original)
		need := "apply needs --force to overwrite it"
		if out.Checkpoint != "" {
			text = fmt.Sprintf("%s was changed on both sides: ", c)
			need = "apply needs --markers, --ours or --theirs"
			if opts.Markers {
				need = "apply needs --ours or --theirs: it cannot have conflict markers"
			}
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

// refText describes a ref that both sides have moved, and how to keep both commits.
func refText(r runtime.AppliedRef, sandbox string) string {
	s := fmt.Sprintf("%s is %s in the directory, and %s in the sandbox", r.Ref, cmp.Or(r.Directory, "no commit"),
		cmp.Or(r.Sandbox, "no commit"))
	if r.Sandbox == "" {
		return s
	}
	return s + fmt.Sprintf("; to have both: apply --ours, then git update-ref refs/agentbox/%s/%s %s", sandbox,
		strings.TrimPrefix(r.Ref, "refs/"), r.Sandbox)
}

// printApplied lists the changes of an apply, with what each file is to be if asked to. Those of a
// single workspace are relative to it, as in a diff.
func printApplied(out runtime.Applied, to io.Writer, states bool) error {
	w := bufio.NewWriter(to)
	for _, c := range out.Changes {
		fmt.Fprintf(w, "%s %s", c.Change, quotePath(changeName(out, c)))
		if states && c.New != nil {
			w.WriteString(" " + fileStateText(*c.New))
		}
		w.WriteByte('\n')
	}
	return w.Flush()
}

// changeName is the path of a change, relative to the workspace if there is only one.
func changeName(out runtime.Applied, c runtime.Change) string {
	name := pathOf(c.Path, c.PathB64)
	if len(out.Workspaces) == 1 {
		name = cmp.Or(strings.TrimPrefix(strings.TrimPrefix(name, out.Workspaces[0].Path), "/"), ".")
	}
	return name
}

// only reduces a plan to the changes that are picked.
func only(plan runtime.Applied, picks []runtime.ApplyPick) runtime.Applied {
	of := map[string]bool{}
	for _, p := range picks {
		of[pathOf(p.Path, p.PathB64)] = true
	}
	plan.Changes = slices.DeleteFunc(slices.Clone(plan.Changes), func(c runtime.Change) bool {
		return !of[pathOf(c.Path, c.PathB64)]
	})
	return plan
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
