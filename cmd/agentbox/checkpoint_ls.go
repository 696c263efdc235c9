package main

import (
	"context"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type checkpointLsOptions struct {
	All     bool
	Labels  []string
	Trigger string
	Policy  string
	Quiet   bool
	NoTrunc bool
	Format  string
}

func (o *checkpointLsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "pending and failed ones too, and the undo checkpoints of restores")
	fl.VarP(list(&o.Labels), "label", "l", "only those with this label `KEY=VALUE`")
	fl.StringVar(&o.Trigger, "trigger", "", "only those this `NAME` asked for")
	fl.StringVar(&o.Policy, "policy", "", "only those of sandboxes made under the policy `NAME`")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "ids only")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newCheckpointLsCommand(a *app) *cobra.Command {
	var opts checkpointLsOptions
	cmd := &cobra.Command{
		Use:     "ls [flags] [SANDBOX]",
		Aliases: []string{"list"},
		Short:   "List checkpoints",
		Long: `Ls lists ready checkpoints, newest first, of one sandbox or of all, removed ones
included. ADDED is what each brought to the store, SIZE all that it needs, shared with others
or not. STATUS says foreign of one that comes from elsewhere, and CREATED when it came. With --format json it prints an array of what 'agentbox checkpoint inspect' prints.`,
		Example: `  agentbox checkpoint ls c
  agentbox checkpoint ls --all --trigger tool:apt
  agentbox checkpoint rm $(agentbox checkpoint ls -q --label turn=12)`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			labels, err := parseLabels("--label", opts.Labels)
			if err != nil {
				return err
			}
			filter := runtime.CheckpointFilter{
				All: opts.All, Labels: labels, Trigger: opts.Trigger, Policy: opts.Policy,
			}
			if len(args) > 0 {
				filter.Sandbox = args[0]
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runCheckpointLs(cmd.Context(), opts, filter, svc, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	a.completePolicyFlag(cmd)
	return cmd
}

func runCheckpointLs(
	ctx context.Context, opts checkpointLsOptions, filter runtime.CheckpointFilter, svc runtime.Service,
	out io.Writer, now time.Time,
) error {
	all, err := svc.Checkpoints(ctx, filter)
	if err != nil {
		return err
	}
	shown := []runtime.Checkpoint{}
	for _, c := range all {
		shown = append(shown, documentedCheckpoint(c))
	}

	id := idText(opts.NoTrunc)
	return listing[runtime.Checkpoint]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(c runtime.Checkpoint) string { return id(c.ID) },
		header: []string{
			"ID", "NAME", "TAGS", "SANDBOX", "KIND", "STATUS", "TRIGGER", "CREATED", "FILES",
			"PROCESSES", "SIZE", "ADDED",
		},
		row: func(c runtime.Checkpoint) []string {
			return []string{
				id(c.ID), c.Name, strings.Join(c.Tags, ","), c.SandboxName, c.Kind, checkpointStatus(c),
				c.Trigger, ago(now, c.Created),
				strconv.FormatInt(c.Files, 10), strconv.Itoa(c.Processes), sizeText(c.Bytes), sizeText(c.Added),
			}
		},
	}.print(out, shown)
}

// checkpointStatus is the status and what else decides about its future.
func checkpointStatus(c runtime.Checkpoint) string {
	s := c.Status
	if c.Damaged != "" {
		s = "damaged"
	}
	if c.Foreign {
		s += ", foreign"
	}
	if c.Pinned {
		s += ", pinned"
	}
	return s
}
