package main

import (
	"fmt"
	"io"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// printPasses prints what an apply has passed or, in a dry run, has to pass: its risk, an approval,
// validators and canaries.
func printPasses(out runtime.Applied, to io.Writer) {
	say := func(format string, args ...any) { fmt.Fprintln(to, printable(fmt.Sprintf(format, args...))) }
	planned := out.DryRun
	if planned && out.Risk != nil && out.Risk.Score > 0 {
		say("%s", riskText(*out.Risk))
	}
	if planned && needsApproval(out) {
		for _, why := range out.Approval.Why {
			say("%s", oneLine(why))
		}
		say("approve it with: agentbox approve %s", out.Approval.ID)
	}
	judged := func(what string, list []runtime.Validated) {
		for _, v := range list {
			how := "has to pass"
			if v.Exit != nil {
				how = "passed in " + v.Took.Round(time.Millisecond).String()
			}
			say("%s %q of %s %s", what, v.Name, v.From, how)
		}
	}
	judged("validator", out.Validators)
	judged("canary", out.Canaries)
}
