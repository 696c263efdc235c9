package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime/audit"
)

type auditVerifyOptions struct {
	ExpectHead string
	Format     string
}

func (o *auditVerifyOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.ExpectHead, "expect-head", "",
		"a record with this `HASH` must be there: the head that an earlier verify has printed")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newAuditVerifyCommand(a *app) *cobra.Command {
	var opts auditVerifyOptions
	cmd := &cobra.Command{
		Use:   "verify [flags]",
		Short: "Prove that no record was changed, removed, inserted or moved",
		Long: `Verify reads the whole log. It ends with 6 when a record is not as it was written, is missing,
was inserted or stands elsewhere, also when the whole log is gone. Records that a crash has cut short, and verbs that were
killed, are told as notes: the log is whole.

Whoever is root can write the whole log anew. Only a head that was noted elsewhere shows that:
keep the one that verify prints, and give it to --expect-head later.`,
		Example: `  agentbox audit verify
  agentbox audit verify --expect-head "$(cat /mnt/elsewhere/head)"
  agentbox audit verify --format json | jq -r .head`,
		Annotations: exits(exitUsage, exitCorrupt, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			if h := opts.ExpectHead; h != "" && (len(h) != 64 || strings.Trim(h, "0123456789abcdef") != "") {
				return usageErrorf("--expect-head %.80q: a hash has 64 hexadecimal digits", h)
			}
			log, err := a.audit()
			if err != nil {
				return err
			}
			return runAuditVerify(cmd.Context(), opts, log, a.stdout)
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runAuditVerify(ctx context.Context, opts auditVerifyOptions, log *audit.Log, out io.Writer) error {
	r, err := log.Verify(ctx, opts.ExpectHead)
	if err != nil {
		return err
	}
	if opts.Format == formatJSON {
		if err := printJSON(out, r); err != nil {
			return err
		}
		return r.Err()
	}
	for _, f := range r.Findings {
		where := ""
		if f.Segment != "" {
			where += f.Segment
			if f.Line > 0 {
				where += fmt.Sprintf(":%d", f.Line)
			}
			where += ": "
		}
		if f.Seq > 0 {
			where += fmt.Sprintf("record %d: ", f.Seq)
		}
		fmt.Fprintf(out, "%s%s\n", where, printable(f.What))
	}
	for _, n := range r.Notes {
		fmt.Fprintf(out, "note: %s\n", printable(n))
	}
	fmt.Fprintf(out, "%s in %s\n", countText(int64(r.Records), "record"), countText(int64(r.Segments), "segment"))
	if _, err := fmt.Fprintf(out, "head %s\n", r.Head); err != nil {
		return err
	}
	return r.Err()
}
