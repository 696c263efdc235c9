package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type psOptions struct {
	All     bool
	Quiet   bool
	NoTrunc bool
	Format  string
}

func (o *psOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "created and exited ones too")
	fl.BoolVarP(&o.Quiet, "quiet", "q", false, "ids only")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids and commands")
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
	shown := []runtime.Sandbox{}
	for _, sb := range all {
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
