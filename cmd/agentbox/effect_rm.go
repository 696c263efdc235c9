package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newEffectRmCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "rm SANDBOX EFFECT...",
		Aliases: []string{"remove"},
		Short:   "Take effects off the ledger, without running anything",
		Long: `Rm takes effects off the ledger that need not be compensated any more, and prints what was
taken off. Their undo commands are not run. An EFFECT is named by its id or a unique prefix of it.`,
		Example:           "  agentbox effect rm c 3f2a",
		Annotations:       exits(exitUsage, exitNotFound, exitBusy, exitDenied),
		Args:              args(2, -1),
		ValidArgsFunction: a.completeEffects,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runEffectRm(cmd.Context(), args[0], args[1:], svc, a.stdout)
			})
		},
	}
}

func runEffectRm(ctx context.Context, sandbox string, effects []string, svc runtime.Service, out io.Writer) error {
	return eachNamed(ctx, effects, out, func(id string) error { return svc.RemoveEffect(ctx, sandbox, id) })
}

// completeEffects is for a sandbox, and then for effects of it.
func (a *app) completeEffects(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 0 {
		return a.sandboxNames(cmd, nil, nil), noFiles
	}
	var ids []string
	a.ask(cmd, func(ctx context.Context, svc runtime.Service) error {
		list, err := svc.Effects(ctx, args[0], false)
		for _, f := range list {
			ids = append(ids, cobra.CompletionWithDesc(shortID(f.ID), f.Label))
		}
		return err
	})
	return ids, noFiles
}
