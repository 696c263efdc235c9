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

func newEffectCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "effect COMMAND",
		Aliases: []string{"effects"},
		Short:   "Keep undo commands for what a sandbox does outside of itself",
		Long: `What a sandbox has done outside of itself (a ticket, a virtual machine, a row in somebody's
database) cannot be rolled back, only compensated. Its ledger keeps an undo command for each
such effect; a restore to a checkpoint from before it runs that command on this host.`,
		Example: `  agentbox effect add c --label "vm test-7" -- /usr/local/bin/cloud vm delete test-7
  agentbox restore --dry-run c before
  agentbox restore c before`,
		Annotations: exits(exitUsage, exitNotFound, exitState, exitDenied),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newEffectAddCommand(a), newEffectLsCommand(a), newEffectRmCommand(a))
	return cmd
}

type effectAddOptions struct {
	Group     string
	Label     string
	OnFailure string
	Timeout   time.Duration
	Format    string
}

func (o *effectAddOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Group, "group", "", "compensate it together with the others of `GROUP`")
	fl.StringVar(&o.Label, "label", "", "say with `TEXT` what it is")
	o.OnFailure = runtime.OnFailureAbort
	fl.Var(choice(&o.OnFailure, runtime.OnFailureAbort, runtime.OnFailureContinue, runtime.OnFailureRetry),
		"on-failure", "what follows when the undo command fails: `WHAT` is abort, continue or retry")
	fl.DurationVar(&o.Timeout, "timeout", 0, "kill the undo command after `DURATION`, 10m at most (default 30s)")
	addIDFormat(fl, &o.Format)
}

func newEffectAddCommand(a *app) *cobra.Command {
	var opts effectAddOptions
	cmd := &cobra.Command{
		Use:   "add [flags] SANDBOX UNDO-COMMAND [ARG...]",
		Short: "Record that a sandbox has done something outside of itself",
		Long: `Add records, at the present place in the history of a sandbox, that something was done
outside of it, with the command that compensates it. A restore to a checkpoint that was taken
before runs the command; one to a later checkpoint does not. It prints the effect's id.

The command is a program of this host and its arguments; there is no shell. Root runs it, in /,
with nothing in its environment but PATH, AGENTBOX_SANDBOX, AGENTBOX_CHECKPOINT (which is being
restored), AGENTBOX_EFFECT and, with a root of its own, AGENTBOX_ROOT. Nobody but root may be
able to change the program. The sandbox is frozen meanwhile, and its other verbs are busy.

Of several effects the last comes first, and those of a group come together, where the newest
of them stands. When a command fails:
  abort     the restore is called off, and the sandbox goes on as it was (the default)
  continue  it is told, stays outstanding, and the restore goes on
  retry     it is run again, 3 times in all, and then as with abort; the command must be one
            that can be run twice
A command that was killed, by its timeout or with agentbox, may have had its way. Only with
retry is it run again by itself; with abort the next restore stops and says so.

Forks do not inherit the ledger. What was compensated is not applied again by restore --undo.`,
		Example: `  agentbox effect add c -- /usr/local/bin/cloud vm delete test-7
  agentbox effect add c --group release --on-failure retry --timeout 2m -- /usr/bin/git -C /srv/repo push origin :release-7`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitBusy, exitDenied),
		Args:              args(2, -1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := runtime.EffectRequest{
				Command: args[1:], Group: opts.Group, Label: opts.Label,
				OnFailure: opts.OnFailure, Timeout: opts.Timeout,
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runEffectAdd(cmd.Context(), args[0], req, opts.Format, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runEffectAdd(
	ctx context.Context, sandbox string, req runtime.EffectRequest, format string, svc runtime.Service, out io.Writer,
) error {
	f, err := svc.AddEffect(ctx, sandbox, req)
	if err != nil {
		return err
	}
	if format == formatJSON {
		return printJSON(out, f)
	}
	_, err = fmt.Fprintln(out, f.ID)
	return err
}
