package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

type eventsOptions struct {
	Follow bool
	Format string
}

func newEventsCommand(a *app) *cobra.Command {
	var opts eventsOptions
	cmd := &cobra.Command{
		Use:   "events [flags] SANDBOX",
		Short: "Show what a filtered sandbox was denied",
		Long: `Events prints what a sandbox with --network filtered tried to reach and was denied, oldest
first, a line each: when, over which protocol, to which name and address, and why not. The
newest 1 to 2 MiB are kept until the sandbox is removed; (+N) is how many more attempts there
were before this one, repeated at once or too many a second to write down.`,
		Example: `  agentbox events c
  agentbox events -f --format json c | jq -r .name`,
		Annotations:       exits(exitUsage, exitNotFound, exitState, exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runEvents(cmd.Context(), opts, args[0], svc, a.stdout)
			})
		},
	}
	cmd.Flags().BoolVarP(&opts.Follow, "follow", "f", false, "go on with what is yet to be denied")
	addFormat(cmd.Flags(), &opts.Format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func runEvents(ctx context.Context, opts eventsOptions, sandbox string, svc runtime.Service, out io.Writer) error {
	return svc.EgressEvents(ctx, sandbox, opts.Follow, func(e runtime.EgressEvent) error {
		if opts.Format == formatJSON {
			return json.NewEncoder(out).Encode(e)
		}
		more := ""
		if e.Missed > 0 {
			more = fmt.Sprintf(" (+%d)", e.Missed)
		}
		_, err := fmt.Fprintf(out, "%s %-4s %s %s: %s%s\n", e.Time.Local().Format(time.DateTime), e.Protocol, cmp.Or(e.Name, "-"), cmp.Or(e.Address, "-"), e.Reason, more)
		return err
	})
}
