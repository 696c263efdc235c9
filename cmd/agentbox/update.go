package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newUpdateCommand(a *app) *cobra.Command {
	var change runtime.EgressChange
	cmd := &cobra.Command{
		Use:   "update [flags] SANDBOX",
		Short: "Change what a filtered sandbox may reach",
		Long: `Update changes the egress rules of a sandbox with --network filtered, at once if it runs, and
prints those it then has. Connections that no rule allows any more end. The rules stay over
stops, restores and upgrades; a fork has those of its checkpoint. No rule can be added that
the policy of the sandbox does not cover.`,
		Example: `  agentbox update c --egress-add 'pypi.org 443' --egress-add 'files.pythonhosted.org 443'
  agentbox update c --egress-rm 'pypi.org 443'`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(change.Add)+len(change.Remove) == 0 {
				return usageErrorf("nothing to change: say --egress-add or --egress-rm")
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runUpdate(cmd.Context(), change, args[0], svc, a.stdout)
			})
		},
	}
	cmd.Flags().Var(list(&change.Add), "egress-add", "let it out to `RULE`, as 'agentbox run --egress' takes it")
	cmd.Flags().Var(list(&change.Remove), "egress-rm", "take `RULE` away")
	return cmd
}

func runUpdate(ctx context.Context, change runtime.EgressChange, sandbox string, svc runtime.Service, out io.Writer) error {
	rules, err := svc.UpdateEgress(ctx, sandbox, change)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if _, err := fmt.Fprintln(out, r); err != nil {
			return err
		}
	}
	return nil
}
