package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime/audit"
)

type auditLsOptions struct {
	Since   string
	Sandbox string
	Verb    string
	Outcome string
	Format  string
}

func (o *auditLsOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Since, "since", "",
		"only what began since `TIME`: RFC 3339, Unix seconds, or a duration such as 10m")
	fl.StringVar(&o.Sandbox, "sandbox", "",
		"only what was done to the `SANDBOX` of this name, or of an id that begins so")
	fl.StringVar(&o.Verb, "verb", "", "only this `VERB`, as its command is called: restore, \"checkpoint rm\"")
	fl.StringVar(&o.Outcome, "outcome", "",
		"only with this `OUTCOME`: ok, unfinished, or the code of an error such as denied")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newAuditLsCommand(a *app) *cobra.Command {
	var opts auditLsOptions
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"list"},
		Short:   "List what was done, by whom, with which outcome",
		Long: `Ls lists what was done, oldest first. WHO is a user id, with the one who had logged in where
that is another, and the process. OUTCOME is ok, the code of an error (as the service's API
has it), or unfinished: under way now, or killed. UNDONE BY is the number of the restore that
took the sandbox back to before; when that restore was undone itself, it counts again.`,
		Example: `  agentbox audit ls --since 1h
  agentbox audit ls --sandbox c --verb exec
  agentbox audit ls --format json | jq -r '.[] | select(.outcome != "ok") | .verb'`,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			since, err := parseSince(opts.Since, a.now())
			if err != nil {
				return err
			}
			log, err := a.audit()
			if err != nil {
				return err
			}
			f := audit.Filter{Since: since, Sandbox: opts.Sandbox, Verb: opts.Verb, Outcome: opts.Outcome}
			return runAuditLs(cmd.Context(), f, opts.Format, log, a.stdout)
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	// It fails only for a flag registered twice.
	_ = cmd.RegisterFlagCompletionFunc("sandbox", a.completeOneSandbox(nil))
	return cmd
}

func runAuditLs(ctx context.Context, f audit.Filter, format string, log *audit.Log, out io.Writer) error {
	list, err := log.List(ctx, f)
	if err != nil {
		return err
	}
	return listing[audit.Entry]{
		format: format,
		header: []string{"SEQ", "TIME", "WHO", "VERB", "SANDBOX", "OUTCOME", "UNDONE BY", "WHAT"},
		row: func(e audit.Entry) []string {
			undone := ""
			if e.UndoneBy > 0 {
				undone = strconv.FormatUint(e.UndoneBy, 10)
			}
			return []string{
				strconv.FormatUint(e.Seq, 10), e.Time.Local().Format(time.DateTime), whoText(e.Who), e.Verb,
				cmp.Or(e.Name, shortID(e.Sandbox)), e.Outcome, undone, auditText(e),
			}
		},
	}.print(out, list)
}

func whoText(w audit.Who) string {
	if w.UID == nil {
		return fmt.Sprintf("%s %s[%s]", w.Client, w.By, w.Address)
	}
	s := fmt.Sprint(*w.UID)
	if w.Login != nil && *w.Login != *w.UID {
		s += fmt.Sprintf(" (login %d)", *w.Login)
	}
	return fmt.Sprintf("%s %s[%d]", s, w.By, w.Pid)
}

// auditText is what else there is to be said of an entry.
func auditText(e audit.Entry) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if e.Program != "" {
		add("%s", e.Program)
	}
	if e.Exit != nil {
		add("exit %d", *e.Exit)
	}
	if e.Signal != "" {
		add("signal %s", e.Signal)
	}
	if e.Checkpoint != "" {
		add("checkpoint %s", shortID(e.Checkpoint))
	}
	if e.Undid != nil {
		add("undid %d-%d", e.Undid.From, e.Undid.To)
	}
	if e.Sandbox == "" && e.Ref != "" {
		add("%s", e.Ref)
	}
	if e.To != "" {
		add("to %s", e.To)
	}
	if len(e.Made) > 0 {
		ids := make([]string, len(e.Made))
		for i, id := range e.Made {
			ids[i] = shortID(id)
		}
		add("%s", strings.Join(ids, ","))
	}
	if e.Dropped != nil {
		add("records %d-%d", e.Dropped.From, e.Dropped.To)
	}
	parts = append(parts, e.Text...)
	if e.Why != "" {
		add("%s", e.Why)
	}
	return strings.Join(parts, "; ")
}
