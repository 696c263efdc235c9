package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

const maxForks = 1000 // of one command

type forkOptions struct {
	Count     int
	Names     []string
	FilesOnly bool
	NoStart   bool
	Labels    []string
	Secrets   secretOptions
	Lease     string
	Group     string
	Grants    grantOptions
	Quiet     bool
	Format    string

	countSet bool
}

func (o *forkOptions) addFlags(fl *pflag.FlagSet) {
	fl.IntVarP(&o.Count, "count", "n", 1, "make `N` forks")
	fl.Var(list(&o.Names), "name", "`NAME` of a fork, once for each; one name for several is the beginning of theirs: NAME-1, NAME-2")
	fl.BoolVar(&o.FilesOnly, "files-only", false, "leave the processes out; the command starts afresh")
	fl.BoolVar(&o.NoStart, "no-start", false, "leave the forks created")
	fl.VarP(list(&o.Labels), "label", "l", "set a label `KEY=VALUE` on each, besides those of the origin")
	o.Secrets.addFlags(fl)
	o.Grants.addFlags(fl)
	fl.StringVar(&o.Lease, "lease", "", "remove them when the `LEASE` ends; the origin's is not theirs")
	fl.StringVar(&o.Group, "group", "", "make them some of the group `NAME`")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "print ids only")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

// parse turns SANDBOX[@CHECKPOINT] and the flags into what Fork takes.
func (o *forkOptions) parse(arg string) (sandbox string, opts runtime.ForkOptions, err error) {
	opts = runtime.ForkOptions{
		FilesOnly: o.FilesOnly, NoStart: o.NoStart, Lease: o.Lease, Group: o.Group, Foreign: o.Grants.Foreign,
	}
	if o.Group != "" {
		if err := checkName("--group", o.Group); err != nil {
			return "", opts, err
		}
	}
	sandbox, opts.Checkpoint = splitState(arg)
	switch {
	case sandbox == "" && !strings.HasPrefix(arg, "@"):
		return "", opts, usageErrorf("%q names no sandbox; write SANDBOX@CHECKPOINT", arg)
	case opts.Checkpoint == "" && strings.HasSuffix(arg, "@"):
		return "", opts, usageErrorf("%q names no checkpoint after the @; leave it out to fork what is there now", arg)
	}
	opts.Count = o.Count
	if !o.countSet {
		opts.Count = max(1, len(o.Names))
	}
	if opts.Count < 1 || opts.Count > maxForks {
		return "", opts, usageErrorf("--count %d: must be from 1 to %d", opts.Count, maxForks)
	}
	switch {
	case len(o.Names) == 1 && opts.Count > 1:
		for i := range opts.Count {
			opts.Names = append(opts.Names, fmt.Sprintf("%s-%d", o.Names[0], i+1))
		}
	case len(o.Names) > 0 && len(o.Names) != opts.Count:
		return "", opts, usageErrorf("%s for %s; give one for each, or one to begin them all with",
			countText(int64(len(o.Names)), "name"), countText(int64(opts.Count), "fork"))
	default:
		opts.Names = o.Names
	}
	for i, name := range opts.Names {
		if err := checkName("--name", name); err != nil {
			return "", opts, err
		}
		if slices.Contains(opts.Names[:i], name) {
			return "", opts, usageErrorf("--name %s: given twice", name)
		}
	}
	if opts.Grants, err = o.Grants.parse(); err != nil {
		return "", opts, err
	}
	if opts.Secrets, err = o.Secrets.parse(); err != nil {
		return "", opts, err
	}
	opts.Labels, err = parseLabels("--label", o.Labels)
	return sandbox, opts, err
}

func newForkCommand(a *app) *cobra.Command {
	var opts forkOptions
	cmd := &cobra.Command{
		Use:   "fork [flags] SANDBOX[@CHECKPOINT]",
		Short: "Start new sandboxes from a checkpoint of one",
		Long: `Fork starts new sandboxes that go on from a checkpoint, or, when none is named, from one that
is taken now. The origin is left as it is. Each fork has its own id, name, host name, address
and files; what else of the origin's identity was made anew, and what the forks still share
with it, is printed below the table: secrets, keys and connections are theirs together.
After a files-only checkpoint the command starts afresh.

Forks of a checkpoint that comes from elsewhere get nothing of the host but what --mount,
--publish, --policy or --trust-spec give them, as 'agentbox restore --help' says.

With --format json it prints an array of objects: sandbox (as 'agentbox inspect' prints it),
checkpoint, reseeded, shared, took_ns, warnings.`,
		Example: `  agentbox fork c
  agentbox fork c@before-upgrade --name try
  agentbox fork c@HEAD~1
  agentbox fork c@3f2a --mount ./src:/src:ro
  agentbox fork -n 8 --name worker --label run=7 c
  agentbox rm -f $(agentbox fork -q -n 3 c)`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitBusy, exitCorrupt,
			exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeStates,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			opts.countSet = cmd.Flags().Changed("count")
			sandbox, fo, err := opts.parse(args[0])
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				if sandbox == "" {
					p, err := here(cmd.Context(), svc)
					if err != nil {
						return err
					}
					sandbox = p.sandbox.Name
				}
				c, err := chosen(cmd.Context(), svc, sandbox, fo.Checkpoint, opts.Grants, runtime.CheckpointFilter{})
				if err != nil {
					return err
				}
				if c.Foreign || opts.Grants.TrustSpec && c.ID != "" {
					fo.Checkpoint = c.ID
				}
				if err := a.admitForeign(cmd.Context(), c, opts.Grants); err != nil {
					return err
				}
				return runFork(cmd.Context(), opts, sandbox, fo, svc, a.stdout, a.stderr)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completeLeaseFlag(cmd)
	a.completePolicyFlag(cmd)
	return cmd
}

func runFork(
	ctx context.Context, opts forkOptions, sandbox string, fo runtime.ForkOptions,
	svc runtime.Service, out, stderr io.Writer,
) error {
	if opts.Quiet {
		stderr = io.Discard
	}
	update, end := watchSteps(stderr, "fork")
	defer end()
	fo.Progress = update
	forks, err := svc.Fork(ctx, sandbox, fo)
	end()
	if len(forks) > 0 {
		warn(stderr, forks[0].Warnings) // the same for all
	}
	if err != nil && len(forks) == 0 {
		return err
	}
	// Forks made before an error exist, and must be reported.
	return both(err, printForks(opts, forks, out))
}

func printForks(opts forkOptions, forks []runtime.Forked, out io.Writer) error {
	for i := range forks {
		f := &forks[i]
		f.Sandbox, f.Checkpoint = documented(f.Sandbox), documentedCheckpoint(f.Checkpoint)
		f.Reseeded, f.Shared = notNull(f.Reseeded), notNull(f.Shared)
	}

	err := listing[runtime.Forked]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(f runtime.Forked) string { return f.Sandbox.ID },
		header: []string{"NAME", "ID", "STATUS", "ADDRESS", "TOOK"},
		row: func(f runtime.Forked) []string {
			return []string{
				f.Sandbox.Name, shortID(f.Sandbox.ID), string(f.Sandbox.Status),
				f.Sandbox.Address, durationText(f.Took),
			}
		},
	}.print(out, forks)
	if err != nil || opts.Quiet || opts.Format == formatJSON {
		return err
	}
	return printReceipts(forks, out)
}

// printReceipts tells what the forks have of their own and what they share,
// once when it is the same for all.
func printReceipts(forks []runtime.Forked, out io.Writer) error {
	same := !slices.ContainsFunc(forks, func(f runtime.Forked) bool {
		return !slices.Equal(f.Reseeded, forks[0].Reseeded) || !slices.Equal(f.Shared, forks[0].Shared)
	})
	if same {
		forks = forks[:1]
	}
	for _, f := range forks {
		name := ""
		if !same {
			name = f.Sandbox.Name + ", "
		}
		for _, part := range []struct {
			title string
			what  []string
		}{{"made anew", f.Reseeded}, {"still shared with the origin", f.Shared}} {
			if len(part.what) == 0 {
				continue
			}
			if _, err := fmt.Fprintf(out, "\n%s%s:\n", name, part.title); err != nil {
				return err
			}
			for _, what := range part.what {
				if _, err := fmt.Fprintf(out, "  %s\n", oneLine(what)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
