package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime/audit"
)

// leastAudit keeps a typing error from taking the log of an incident away.
const leastAudit = 24 * time.Hour

func newAuditPruneCommand(a *app) *cobra.Command {
	var keep string
	cmd := &cobra.Command{
		Use:   "prune --keep-within DURATION",
		Short: "Remove old records",
		Long: `Prune removes the segments (of 1 MiB) of the log all of whose records are older than DURATION,
a day at least. That they were, and by whom, is put on record first. Nothing else ever
removes a record.`,
		Example:     `  agentbox audit prune --keep-within 2160h`,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := time.ParseDuration(keep)
			if err != nil || d < leastAudit {
				return usageErrorf("--keep-within %q: write a duration of at least %s, such as 2160h for 90 days", keep,
					leastAudit)
			}
			log, err := a.audit()
			if err != nil {
				return err
			}
			gone, err := log.Prune(audit.Self("command"), a.now().Add(-d))
			if err != nil || gone == nil {
				return err
			}
			_, err = fmt.Fprintf(a.stdout, "removed the records %d to %d\n", gone.From, gone.To)
			return err
		},
	}
	cmd.Flags().StringVar(&keep, "keep-within", "", "keep what is younger than this `DURATION`")
	return cmd
}
