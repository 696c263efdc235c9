package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime/audit"
)

func newAuditCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "audit COMMAND",
		Short: "Show and prove what was done to sandboxes, and by whom",
		Long: `Every verb that may change something is put on record before it begins, and again with its
outcome before its caller is told: who (user, process, who had logged in), what, to which
sandbox, over which checkpoint. A restore's record names the ones that it has undone; nothing
is ever taken out. Arguments of commands, environments and contents are never on record.
What agentbox does by itself, such as to end a lease or to stop what has lived its time, is on
record like the verb that does the same, with the reason.

Each record has the hash of the one before it, so that verify finds what was changed, removed,
inserted or moved. The log is in audit of the root. A verb whose first record cannot be
written does not begin, unless it is one that frees space or stops something.`,
		Example: `  agentbox audit ls --sandbox c
  agentbox audit verify`,
		Annotations: exits(exitUsage, exitCorrupt, exitDenied),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newAuditLsCommand(a), newAuditVerifyCommand(a), newAuditPruneCommand(a))
	return cmd
}

// audit opens the log. The log is root's, and is read in place: no service stands between it and
// its auditor.
func (a *app) audit() (*audit.Log, error) {
	g, err := a.globals.resolve()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errNotRoot()
	}
	root, _ := g.dirs()
	return audit.Open(root), nil
}

// onRecord runs do, which is no action of a Service, between its two audit records. Nothing is
// recorded for users other than root, because they can change only what is theirs.
func (a *app) onRecord(r audit.Record, do func(*audit.Record) error) error {
	if os.Geteuid() != 0 {
		return do(&r)
	}
	log, err := a.audit()
	if err != nil {
		return err
	}
	return log.Do(audit.Self("command"), r, do)
}
