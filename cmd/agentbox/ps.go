package main

import (
	"context"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type psOptions struct {
	All     bool
	Quiet   bool
	NoTrunc bool
	Filters []string
	Format  string
}

func (o *psOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "created and exited ones too")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "ids only")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids, images and commands")
	fl.Var(list(&o.Filters), "filter",
		"only those with `KEY=VALUE`: name=PART, id=PREFIX, group=NAME, lease=LEASE, label=KEY[=VALUE], status=STATUS; of one key but label any, of several keys all have to match")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newPsCommand(a *app) *cobra.Command {
	var opts psOptions
	cmd := &cobra.Command{
		Use:     "ps [flags]",
		Aliases: []string{"list"},
		Short:   "List sandboxes",
		Long: `Ps lists running and paused sandboxes and those being checkpointed or restored,
newest first, or all of them with --all.
A --filter by status shows those of that status, exited ones too.
With --format json it prints an array of what 'agentbox inspect' prints.`,
		Example: `  agentbox ps -a
  agentbox ps --filter status=exited --filter name=try7-
  agentbox rm -f $(agentbox ps -aq)
  agentbox ps -a --filter group=try7
  agentbox ps --format json | jq -r '.[].name'`,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := oneForm(opts.Quiet, opts.Format); err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runPs(cmd.Context(), opts, svc, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runPs(ctx context.Context, opts psOptions, svc runtime.Service, out io.Writer, now time.Time) error {
	all, err := svc.Sandboxes(ctx)
	if err != nil {
		return err
	}
	match, err := psFilter(ctx, opts.Filters, svc)
	if err != nil {
		return err
	}
	opts.All = opts.All || slices.ContainsFunc(opts.Filters, func(f string) bool {
		return strings.HasPrefix(f, "status=")
	})
	shown := []runtime.Sandbox{}
	for _, sb := range all {
		if !match(sb) {
			continue
		}
		if opts.All || sb.Status == runtime.Running || sb.Status == runtime.Paused || sb.Work != nil {
			shown = append(shown, documented(sb))
		}
	}

	id := idText(opts.NoTrunc)
	return listing[runtime.Sandbox]{
		format: opts.Format,
		quiet:  opts.Quiet,
		name:   func(sb runtime.Sandbox) string { return id(sb.ID) },
		header: []string{"ID", "NAME", "IMAGE", "COMMAND", "CREATED", "STATUS", "PORTS"},
		row: func(sb runtime.Sandbox) []string {
			return []string{
				id(sb.ID), sb.Name, imageText(sb.Image, opts.NoTrunc), quotedCommand(sb.Spec.Args, opts.NoTrunc),
				ago(now, sb.Created), statusText(now, sb), portsText(sb.Spec.Network.Ports),
			}
		},
	}.print(out, shown)
}

// psFilter reads KEY=VALUE each. As with Docker, a sandbox has to match one of
// those of each key, and every label.
func psFilter(ctx context.Context, filters []string, svc runtime.Service) (func(runtime.Sandbox) bool, error) {
	type test = func(runtime.Sandbox) bool
	all := map[string][]test{} // any of each
	for _, f := range filters {
		key, value, _ := strings.Cut(f, "=")
		if value == "" {
			return nil, usageErrorf("--filter %q: write KEY=VALUE", f)
		}
		var ok test
		switch key {
		case "name":
			ok = func(sb runtime.Sandbox) bool { return strings.Contains(sb.Name, value) }
		case "id":
			ok = func(sb runtime.Sandbox) bool { return strings.HasPrefix(sb.ID, value) }
		case "group":
			ok = func(sb runtime.Sandbox) bool { return sb.Group == value }
		case "status":
			ok = func(sb runtime.Sandbox) bool { return string(sb.Status) == value }
		case "label":
			label, want, exact := strings.Cut(value, "=")
			key = f
			ok = func(sb runtime.Sandbox) bool {
				have, ok := sb.Labels[label]
				return ok && (!exact || have == want)
			}
		case "lease":
			l, err := svc.Lease(ctx, value)
			if err != nil {
				return nil, err
			}
			ok = func(sb runtime.Sandbox) bool { return sb.Lease == l.ID }
		default:
			return nil, usageErrorf("--filter %q: the keys are name, id, group, lease, label and status", f)
		}
		all[key] = append(all[key], ok)
	}
	return func(sb runtime.Sandbox) bool {
		for _, some := range all {
			if !slices.ContainsFunc(some, func(ok test) bool { return ok(sb) }) {
				return false
			}
		}
		return true
	}, nil
}

// imageText is a reference to an image without what it is made of.
func imageText(ref string, full bool) string {
	if name, _, found := strings.Cut(ref, "?"); found && !full {
		return name + "?…"
	}
	return ref
}
