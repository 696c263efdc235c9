package main

import (
	"context"
	"fmt"
	"io"
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
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids and commands")
	fl.Var(list(&o.Filters), "filter", "only those with `KEY=VALUE`: group=NAME, lease=LEASE, label=KEY[=VALUE], status=STATUS; all given have to match")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newPsCommand(a *app) *cobra.Command {
	var opts psOptions
	cmd := &cobra.Command{
		Use:     "ps [flags]",
		Aliases: []string{"ls", "list"},
		Short:   "List sandboxes",
		Long: `Ps lists running and paused sandboxes, newest first, or all of them with --all.
With --format json it prints an array of what 'agentbox inspect' prints.`,
		Example: `  agentbox ps -a
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
	shown := []runtime.Sandbox{}
	for _, sb := range all {
		if !match(sb) {
			continue
		}
		if opts.All || sb.Status == runtime.Running || sb.Status == runtime.Paused {
			shown = append(shown, documented(sb))
		}
	}
	if opts.Format == formatJSON {
		return printJSON(out, shown)
	}
	id := shortID
	if opts.NoTrunc {
		id = func(id string) string { return id }
	}
	if opts.Quiet {
		for _, sb := range shown {
			if _, err := fmt.Fprintln(out, id(sb.ID)); err != nil {
				return err
			}
		}
		return nil
	}
	t := newTable(out, "ID", "NAME", "IMAGE", "COMMAND", "CREATED", "STATUS", "PORTS")
	for _, sb := range shown {
		t.row(id(sb.ID), sb.Name, sb.Image, quotedCommand(sb.Spec.Args, opts.NoTrunc),
			ago(now, sb.Created), statusText(now, sb), portsText(sb.Spec.Network.Ports))
	}
	return t.flush()
}

// psFilter reads KEY=VALUE each, all of which a sandbox has to match.
func psFilter(ctx context.Context, filters []string, svc runtime.Service) (func(runtime.Sandbox) bool, error) {
	var all []func(runtime.Sandbox) bool
	for _, f := range filters {
		key, value, _ := strings.Cut(f, "=")
		if value == "" {
			return nil, usageErrorf("--filter %q: write KEY=VALUE", f)
		}
		switch key {
		case "group":
			all = append(all, func(sb runtime.Sandbox) bool { return sb.Group == value })
		case "status":
			all = append(all, func(sb runtime.Sandbox) bool { return string(sb.Status) == value })
		case "label":
			label, want, exact := strings.Cut(value, "=")
			all = append(all, func(sb runtime.Sandbox) bool {
				have, ok := sb.Labels[label]
				return ok && (!exact || have == want)
			})
		case "lease":
			l, err := svc.Lease(ctx, value)
			if err != nil {
				return nil, err
			}
			all = append(all, func(sb runtime.Sandbox) bool { return sb.Lease == l.ID })
		default:
			return nil, usageErrorf("--filter %q: the keys are group, lease, label and status", f)
		}
	}
	return func(sb runtime.Sandbox) bool {
		for _, ok := range all {
			if !ok(sb) {
				return false
			}
		}
		return true
	}, nil
}
