package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type eventsOptions struct {
	Follow bool
	Since  string
	Types  []string
	Format string
}

func (o *eventsOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Follow, "follow", "f", false, "go on with what is yet to come, until the sandbox is removed")
	fl.StringVar(&o.Since, "since", "",
		"only what came since `TIME`: RFC 3339, Unix seconds, or a duration such as 10m")
	fl.Var(list(&o.Types), "type", "only events of `TYPE`; may be given several times: "+
		strings.Join(runtime.EventTypes, ", "))
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func (o *eventsOptions) parse(now time.Time) (opts runtime.EventOptions, err error) {
	for _, t := range o.Types {
		if !slices.Contains(runtime.EventTypes, t) {
			return opts, usageErrorf("--type %q: must be one of %s", t, strings.Join(runtime.EventTypes, ", "))
		}
	}
	opts = runtime.EventOptions{Follow: o.Follow, Types: o.Types}
	opts.Since, err = parseSince(o.Since, now)
	return opts, err
}

func newEventsCommand(a *app) *cobra.Command {
	var opts eventsOptions
	cmd := &cobra.Command{
		Use:   "events [flags] SANDBOX",
		Short: "Show what a sandbox was denied, and which of its limits came into force",
		Long: `Events prints what befell a sandbox, oldest first, a line each: when, its type, and what is
to be said of that. The newest 1 to 2 MiB are kept until the sandbox is removed.

  denied         with --network filtered it tried to reach what no rule allows: over which
                 protocol, which name and address, and why not; (+N) is how many more attempts
                 there were before this one, repeated at once or too many a second to write down
  oom            the kernel killed processes of it for memory
  pids-limit     processes or threads could not be made (--pids-limit)
  storage-limit  its files take all they may (--storage-size): more is refused, or it was killed
  expired        it was stopped because its time was over (--ttl)
  idle           it was stopped because nothing went on in it (--idle)
  effect         the undo command of an effect was run (agentbox effect): its id, what came of it
  restore        a try of 'agentbox restore --strategy' failed: which one, why, and what was done then
  held           none did better: frozen or stopped, no verb may use it (agentbox release)
  lease          it is removed because its lease has ended (--lease)
  restarted      it had ended by itself and was started again (--restart)
  host-files     a restore could not put all host files of its checkpoint back, or one that was killed; or
                 restarted from a checkpoint (--restart-from head) it left them alone
  given-up       it has failed as often as --restart on-failure:N lets it, or an undo command has
  reconciled     it had ended without anybody seeing to it, and recover, or the service, did

The kernel counts oom and pids-limit. What nobody looked at when it happened is one event,
with how many there were (count, of total since the start), of the time at which it was seen.`,
		Example: `  agentbox events c
  agentbox events --type oom --since 10m c
  agentbox events -f --type denied --format json c | jq -r .name`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied, exitSignal),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			eo, err := opts.parse(a.now())
			if err != nil {
				return err
			}
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runEvents(cmd.Context(), eo, opts.Format, args[0], svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	// It fails only for a flag registered twice.
	_ = cmd.RegisterFlagCompletionFunc("type", cobra.FixedCompletions(runtime.EventTypes,
		cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func runEvents(
	ctx context.Context, opts runtime.EventOptions, format, sandbox string, svc runtime.Service, out io.Writer,
) error {
	err := svc.Events(ctx, sandbox, opts, func(e runtime.Event) error {
		if format == formatJSON {
			return json.NewEncoder(out).Encode(e)
		}
		_, err := fmt.Fprintf(out, "%s %-13s %s\n", e.Time.Local().Format(time.DateTime), e.Type, eventText(e))
		return err
	})
	var stop signalError
	if opts.Follow && errors.As(context.Cause(ctx), &stop) {
		return stop.status() // Ctrl-C is how one stops to follow: nothing to tell
	}
	return err
}

func eventText(e runtime.Event) string {
	limit := func(text string) string {
		if e.Limit == 0 {
			return "" // it has none of its own
		}
		return " (limit " + text + ")"
	}
	switch e.Type {
	case runtime.EventDenied:
		more := ""
		if e.Missed > 0 {
			more = fmt.Sprintf(" (+%d)", e.Missed)
		}
		return fmt.Sprintf("%-4s %s %s: %s%s", e.Protocol, cmp.Or(e.Name, "-"), cmp.Or(e.Address, "-"), e.Reason, more)
	case runtime.EventOOM:
		return fmt.Sprintf("%d killed for memory, %d since its start%s", e.Count, e.Total,
			limit(units.BytesSize(float64(e.Limit))))
	case runtime.EventPids:
		return fmt.Sprintf("%d not made, %d since its start%s", e.Count, e.Total, limit(fmt.Sprint(e.Limit)))
	case runtime.EventStorage:
		if e.Refused {
			return fmt.Sprintf("more is refused: its files take %s%s", units.BytesSize(float64(e.Used)),
				limit(units.BytesSize(float64(e.Limit))))
		}
		return fmt.Sprintf("killed: its files take %s%s", units.BytesSize(float64(e.Used)),
			limit(units.BytesSize(float64(e.Limit))))
	case runtime.EventExpired:
		return fmt.Sprintf("stopped: its time of %v was over", time.Duration(e.After))
	case runtime.EventRestore:
		return printable(oneLine("to checkpoint " + shortID(e.Checkpoint) + " by " + e.Strategy +
			" failed: " + e.Reason))
	case runtime.EventHeld:
		return printable(oneLine(e.Reason))
	case runtime.EventEffect:
		name := shortID(e.Effect)
		if e.Name != "" {
			name += " (" + e.Name + ")"
		}
		return printable(oneLine(name + ": " + e.Reason))
	case runtime.EventLease:
		return fmt.Sprintf("removed with lease %s: %s", e.Name, e.Reason)
	case runtime.EventRestarted, runtime.EventGivenUp:
		code := "?"
		if e.Exit != nil {
			code = fmt.Sprint(*e.Exit)
		}
		if e.Type == runtime.EventGivenUp && e.Reason != "" {
			return printable(oneLine("not restarted: " + e.Reason))
		}
		if e.Type == runtime.EventGivenUp {
			return fmt.Sprintf("exit code %s, restarted %d times: not again", code, e.Total)
		}
		return fmt.Sprintf("after exit code %s, restart %d", code, e.Count)
	case runtime.EventIdle:
		return fmt.Sprintf("stopped: nothing went on for %v", time.Duration(e.After).Round(time.Second/10))
	}
	return e.Reason
}
