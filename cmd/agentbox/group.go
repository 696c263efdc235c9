package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/group"
)

// newGroupCommand holds the verbs on groups.
func newGroupCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "group COMMAND",
		Short: "Run the same in many sandboxes, and leave none behind",
		Long: `A group is some sandboxes with the same --group NAME. 'agentbox group run' makes one, has
each member do its work, and removes them all, whatever fails.`,
		Example: `  agentbox group run -n 32 --from c@ready -- pytest -q
  agentbox group ls`,
		Annotations: exits(exitUsage),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newGroupRunCommand(a), newGroupLsCommand(a), newGroupRmCommand(a))
	return cmd
}

type groupRunOptions struct {
	Count     int
	Parallel  int
	From      string
	Image     string
	Name      string
	FailFast  bool
	Score     string
	KeepFor   string
	FilesOnly bool
	Mounts    createOptions // of which a flag sets the workspaces
	Secrets   secretOptions
	OutputDir string
	Format    string
}

func (o *groupRunOptions) addFlags(fl *pflag.FlagSet) {
	fl.IntVarP(&o.Count, "count", "n", 1, "make `N` members")
	fl.IntVar(&o.Parallel, "parallel", 8, "have `P` of them at work at a time")
	fl.StringVar(&o.From, "from", "",
		"make them forks of the `CHECKPOINT`, SANDBOX@NAME or an id; of a SANDBOX alone one is taken first")
	fl.StringVar(&o.Image, "image", "", "make them of the `IMAGE`, which has to have a sleep command")
	fl.StringVar(&o.Name, "name", "", "`NAME` of the group; members are NAME-1, NAME-2; default: one is made up")
	fl.BoolVar(&o.FailFast, "fail-fast", true, "the first failure cancels all others")
	fl.StringVar(&o.Score, "score", "",
		"then run `COMMAND` with sh -c in each whose command ended with 0; what it prints is the score")
	fl.StringVar(&o.KeepFor, "keep-for", "", "keep those that passed for `DURATION`, e.g. 30m")
	fl.BoolVar(&o.FilesOnly, "files-only", false,
		"with --from: leave the processes out; the sandbox's command starts afresh")
	fl.Var(list(&o.Mounts.Workspaces), "workspace",
		"with --image: show each the host directory `DIR[:PATH][:ro]`, which it changes for itself alone")
	o.Mounts.addMaxFiles(fl)
	o.Secrets.addFlags(fl)
	fl.StringVar(&o.OutputDir, "output-dir", "", "write what members print to `DIR`/MEMBER.out and MEMBER.err instead")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newGroupRunCommand(a *app) *cobra.Command {
	var opts groupRunOptions
	cmd := &cobra.Command{
		Use:   "run [flags] COMMAND [ARG...]",
		Short: "Run a command in many sandboxes, and remove them",
		Long: `Run makes N sandboxes, forks of a checkpoint or new ones of an image, runs COMMAND in each,
P at a time, prints a line for each line of theirs, behind the member's name, and at last a
table with what became of them. Every member is removed when it is through.

With the first failure, unless --fail-fast=false, and with Ctrl-C, those that have not
begun are cancelled and all that are there are removed. What fails while they are removed keeps
no other from being removed. The first error of the work is what run ends with, or else the
first of removing; all are on stderr, and in the JSON. The members belong to a lease of this
process: they are removed even when it is killed.

With --score a second command runs in each member whose first ended with 0. With --keep-for the
members that passed stay for that long, or until 'agentbox group rm' or 'agentbox lease
release', if none failed or --fail-fast=false.

Besides the variables of every sandbox, AGENTBOX_ATTEMPT among them, COMMAND has
AGENTBOX_GROUP, AGENTBOX_MEMBER (from 1) and AGENTBOX_MEMBERS (how many there are).

With --format json it prints one object: group, lease, expires, errors, members; of each member,
name, id, phase (make, run, score, done), outcome (passed, failed, cancelled), exit, score, kept,
took_ns, error. What members print goes to stderr then.

It ends with 0 when all members passed, with 128+n when it was interrupted by signal n, and else
with the code of the first error, which is 1 when a command did not end with 0.`,
		Example: `  agentbox group run -n 8 --from c@ready -- sh -c 'make test'
  agentbox group run -n 32 --parallel 4 --fail-fast=false --output-dir out --from c@ready -- ./rollout
  agentbox group run -n 4 --image busybox --score 'cat /reward' --keep-for 30m --name try7 -- sh -c 'echo $AGENTBOX_MEMBER > /reward'`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt, exitDenied,
			exitUnsupported, exitSignal),
		Args: args(1, -1),
		RunE: func(cmd *cobra.Command, args []string) error {
			keep, err := opts.check()
			if err != nil {
				return err
			}
			secrets, err := opts.Secrets.parse()
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runGroup(cmd.Context(), opts, keep, secrets, args, svc, a)
			})
		},
	}
	cmd.Flags().SetInterspersed(false)
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	// They fail only for a flag registered twice.
	_ = cmd.RegisterFlagCompletionFunc("from", func(cmd *cobra.Command, _ []string, s string) ([]string,
		cobra.ShellCompDirective) {
		return a.completeStates(cmd, nil, s)
	})
	_ = cmd.RegisterFlagCompletionFunc("image", func(cmd *cobra.Command, _ []string, s string) ([]string,
		cobra.ShellCompDirective) {
		return a.completeImage(cmd, nil, s)
	})
	return cmd
}

func (o *groupRunOptions) check() (keep time.Duration, err error) {
	switch {
	case (o.From == "") == (o.Image == ""):
		return 0, usageErrorf("say what members are made of: --from CHECKPOINT or --image IMAGE")
	case o.Image != "" && o.FilesOnly:
		return 0, usageErrorf("--files-only needs --from: what is made of an image has no processes")
	case o.From != "" && len(o.Mounts.Workspaces) > 0:
		return 0, usageErrorf("--workspace needs --image: a fork has the workspaces of its checkpoint")
	case o.Count < 1 || o.Count > group.MaxMembers:
		return 0, usageErrorf("--count %d: must be from 1 to %d", o.Count, group.MaxMembers)
	case o.Parallel < 1:
		return 0, usageErrorf("--parallel %d: must be 1 or more", o.Parallel)
	}
	if o.Name != "" {
		// With a member's number it has to be a name, too.
		if err := checkName("--name", fmt.Sprintf("%s-%d", o.Name, o.Count)); err != nil {
			return 0, err
		}
	}
	if o.KeepFor != "" {
		keep, err = parseLifetime("--keep-for", o.KeepFor)
	}
	return keep, err
}

// source finds what members are made of.
func (o *groupRunOptions) source(
	ctx context.Context, secrets []runtime.Secret, svc runtime.Service, to *group.Options,
) error {
	if o.Image != "" {
		mounts, err := o.Mounts.mounts()
		if err != nil {
			return err
		}
		to.Create = &runtime.CreateRequest{
			Entrypoint: []string{}, WorkspaceFiles: o.Mounts.MaxFiles, Spec: runtime.Spec{
				Image: o.Image, Args: []string{"sleep", "2147483647"}, Init: true, Secrets: secrets, Mounts: mounts,
			},
		}
		return nil
	}
	to.Fork = runtime.ForkOptions{FilesOnly: o.FilesOnly, Secrets: secrets}
	c, err := svc.CheckpointInfo(ctx, o.From)
	if errors.Is(err, runtime.ErrNotFound) && !strings.Contains(o.From, "@") {
		to.Sandbox = o.From // perhaps a sandbox; the fork reports it if not
		return nil
	}
	to.Sandbox, to.Fork.Checkpoint = c.Sandbox, c.ID
	return err
}

func runGroup(
	ctx context.Context, opts groupRunOptions, keep time.Duration, secrets []runtime.Secret, command []string,
	svc runtime.Service, a *app,
) (err error) {
	g := group.Options{
		Name: opts.Name, Count: opts.Count, Parallel: opts.Parallel, NoStop: !opts.FailFast, KeepFor: keep,
	}
	if err := opts.source(ctx, secrets, svc, &g); err != nil {
		return err
	}
	out := &memberOutput{dir: opts.OutputDir, stdout: a.stdout, stderr: a.stderr}
	if opts.Format == formatJSON {
		out.stdout = a.stderr
	}
	if out.dir != "" {
		if err := os.MkdirAll(out.dir, 0o777); err != nil {
			return err
		}
	}
	g.Work = func(ctx context.Context, m group.Member) error { return out.exec(ctx, svc, m, command) }
	if opts.Score != "" {
		g.Score = func(ctx context.Context, m group.Member) (string, error) {
			return scoreOf(ctx, svc, m, opts.Score, out)
		}
	}
	rep, err := group.Run(ctx, svc, g)
	if rep.Group == "" {
		return err
	}
	if opts.Format == formatJSON {
		return both(err, printJSON(a.stdout, rep))
	}
	if perr := printGroup(rep, opts.Score != "", a.stdout); perr != nil {
		return both(err, perr)
	}
	if !rep.Expires.IsZero() {
		fmt.Fprintf(a.stderr, "kept until %s; sooner: agentbox group rm %s\n",
			rep.Expires.Local().Format(time.DateTime), rep.Group)
	}
	return err
}

func printGroup(rep group.Report, scored bool, out io.Writer) error {
	header := []string{"MEMBER", "OUTCOME", "PHASE", "EXIT", "TOOK"}
	if scored {
		header = append(header, "SCORE")
	}
	t := newTable(out, append(header, "ERROR")...)
	for _, m := range rep.Members {
		exit, took := "-", "-"
		if m.Exit != nil {
			exit = fmt.Sprint(*m.Exit)
		}
		if m.Took > 0 {
			took = durationText(m.Took)
		}
		row := []string{m.Name, m.Outcome, m.Phase, exit, took}
		if scored {
			row = append(row, shorten(m.Score, 40))
		}
		t.row(append(row, shorten(m.Error, 100))...)
	}
	if err := t.flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\n%d passed, %d failed, %d cancelled\n", rep.Count(group.Passed),
		rep.Count(group.Failed), rep.Count(group.Cancelled))
	return err
}

func newGroupLsCommand(a *app) *cobra.Command {
	var quiet bool
	var format string
	cmd := &cobra.Command{
		Use:         "ls [flags]",
		Short:       "List groups that have members",
		Example:     "  agentbox group ls --format json",
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := oneForm(quiet, format); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				list, err := group.List(cmd.Context(), svc)
				if err != nil {
					return err
				}
				return listing[group.Group]{
					format: format,
					quiet:  quiet,
					name:   func(g group.Group) string { return g.Name },
					header: []string{"NAME", "MEMBERS", "RUNNING", "LEASE", "CREATED"},
					row: func(g group.Group) []string {
						return []string{
							g.Name, fmt.Sprint(len(g.Members)), fmt.Sprint(g.Running), shortID(g.Lease),
							ago(a.now(), g.Created),
						}
					},
				}.print(a.stdout, list)
			})
		},
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "names only")
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func newGroupRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "rm GROUP...",
		Short: "Remove all members of groups",
		Long: `Rm removes every sandbox of each group, running ones too, ends the lease of a group that
'agentbox group run' has made, and prints the groups' names. An error with one sandbox does not
keep it from the others.`,
		Example:     "  agentbox group rm try7",
		Annotations: exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:        args(1, -1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) (names []string,
			_ cobra.ShellCompDirective) {
			a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
				list, err := group.List(ctx, svc)
				for _, g := range list {
					if !slices.Contains(args, g.Name) {
						names = append(names, cobra.CompletionWithDesc(g.Name,
							countText(int64(len(g.Members)), "member")))
					}
				}
				return err
			})
			return names, noFiles
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return eachNamed(cmd.Context(), args, a.stdout, func(name string) error {
					return group.Remove(cmd.Context(), svc, name)
				})
			})
		},
	}
}
