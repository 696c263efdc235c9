package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newApproveCommand(a *app) *cobra.Command {
	var list, yes bool
	var format string
	cmd := &cobra.Command{
		Use:   "approve [flags] ID | approve --list",
		Short: "Approve an apply that needs a person's approval",
		Long: `Approve shows what an apply would change and why it needs an approval, asks, and approves it: once,
for these changes alone, until the approval expires. 'agentbox apply' names the ID when it needs an
approval (exit code 9), and has to be run again after it. If a change in the sandbox or in the
directory makes it another apply, that needs another approval.

Without a terminal --yes is needed. --list lists the applies that wait for an approval and those that
are approved and not applied yet. 'agentbox audit ls --verb approve' lists the approvals given.`,
		Example: `  agentbox approve --list
  agentbox approve 1f0c5a72e9d14b36
  agentbox approve --yes 1f0c5a72`,
		Annotations: exits(exitUsage, exitNotFound, exitDenied),
		Args: func(cmd *cobra.Command, got []string) error {
			if list {
				return args(0, 0)(cmd, got)
			}
			return args(1, 1)(cmd, got)
		},
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, got []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				all, err := svc.Approvals(cmd.Context())
				if err != nil {
					return err
				}
				if list {
					return printApprovals(all, format, a.now(), a.stdout)
				}
				return a.approve(cmd.Context(), all, got[0], yes, format, svc)
			})
		},
	}
	cmd.Flags().BoolVar(&list, "list", false, "list the applies that wait for an approval or are approved")
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "do not ask")
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

// approve shows one of the requests for approval, asks, and grants it.
func (a *app) approve(
	ctx context.Context, all []runtime.Approval, id string, yes bool, format string, svc runtime.Service,
) error {
	var found []runtime.Approval
	for _, one := range all {
		if strings.HasPrefix(one.ID, id) {
			found = append(found, one)
		}
	}
	if len(found) == 1 {
		id = found[0].ID // what is shown is what is approved
		printApproval(found[0], a.stderr)
		switch {
		case yes:
		case !isTerminal(a.stdin):
			return usageErrorf("approve needs --yes without a terminal")
		default:
			if err := confirmApproval(ctx, found[0], a.stdin, a.stderr); err != nil {
				return err
			}
		}
	}
	got, err := svc.Approve(ctx, id) // which has the error for an id that is unknown or ambiguous
	if err != nil {
		return err
	}
	if format == formatJSON {
		return printJSON(a.stdout, got)
	}
	fmt.Fprintln(a.stdout, got.ID)
	if isTerminalWriter(a.stderr) {
		fmt.Fprintln(a.stderr, printable(fmt.Sprintf("approved for %s; now run: agentbox apply %s",
			got.Lasts, got.SandboxName)))
	}
	return nil
}

// needsApproval reports whether a person has to approve what is planned.
func needsApproval(plan runtime.Applied) bool {
	return plan.Approval != nil && plan.Approval.Approved.IsZero()
}

// printApproval shows what a person is to approve, and why.
func printApproval(a runtime.Approval, to io.Writer) {
	say := func(format string, args ...any) { fmt.Fprintln(to, printable(fmt.Sprintf(format, args...))) }
	say("Sandbox %s to %s, checkpoint %.12s:", a.SandboxName, strings.Join(a.Originals, ", "), a.Checkpoint)
	for _, c := range a.Some {
		say("  %s", oneLine(c))
	}
	if more := a.Changes - len(a.Some); more > 0 {
		say("  and %d more", more)
	}
	say("%s", riskText(a.Risk))
	for _, why := range a.Why {
		say("%s", oneLine(why))
	}
}

// riskText is a risk with its reasons, as in "risk 3: deletes 40 files, such as /w/a (+3)".
func riskText(r runtime.Risk) string {
	var reasons []string
	for _, one := range r.Reasons {
		reasons = append(reasons, fmt.Sprintf("%s (+%d)", oneLine(one.Text), one.Points))
	}
	if len(reasons) == 0 {
		return "risk 0"
	}
	return fmt.Sprintf("risk %d: %s", r.Score, strings.Join(reasons, ", "))
}

// confirmApproval asks for an approval on the terminal: the answer has to be yes in full.
func confirmApproval(ctx context.Context, a runtime.Approval, stdin *os.File, stderr io.Writer) error {
	fmt.Fprint(stderr, printable(fmt.Sprintf("Write yes to approve %s of %s to %s: ",
		countText(int64(a.Changes), "change"), a.SandboxName, strings.Join(a.Originals, ", "))))
	return confirmedBy(ctx, stdin, stderr, "nothing was approved", "yes")
}

func printApprovals(list []runtime.Approval, format string, now time.Time, out io.Writer) error {
	return listing[runtime.Approval]{
		format: format,
		name:   func(a runtime.Approval) string { return a.ID },
		header: []string{"ID", "SANDBOX", "CHANGES", "RISK", "ASKED", "STATE", "EXPIRES"},
		row: func(a runtime.Approval) []string {
			state := "waits"
			if !a.Approved.IsZero() {
				state = "approved"
			}
			return []string{
				a.ID, a.SandboxName, fmt.Sprint(a.Changes), fmt.Sprint(a.Risk.Score), shortAge(now.Sub(a.Asked)), state,
				"in " + shortAge(a.Expires.Sub(now)),
			}
		},
	}.print(out, list)
}
