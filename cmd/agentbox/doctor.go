package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime/doctor"
)

type doctorOptions struct{ Format string }

func (o *doctorOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newDoctorCommand(a *app) *cobra.Command {
	var opts doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor [flags]",
		Short: "Check whether this host can checkpoint and restore",
		Long: `Doctor checks everything agentbox needs of this host, one line each, with the remedy for
what is missing; where the service runs, it is the service that checks. It ends with 1 if
sandboxes cannot be run, checkpointed and restored here.`,
		Example: `  agentbox doctor
  agentbox doctor --format json | jq -r '.checks[] | select(.status != "ok") | .remedy'`,
		Annotations: exits(exitUsage),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			report, err := a.doctor(cmd.Context(), g)
			if err != nil {
				return err
			}
			return runDoctor(opts, report, a.stdout)
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

// doctor has the service examine the host when there is one: what this process may
// and finds does not matter then.
func (a *app) doctor(ctx context.Context, g globals) (doctor.Report, error) {
	if a.connect == nil {
		return a.examine(ctx, g), nil
	}
	svc, _, err := a.connect(ctx, g)
	if err != nil {
		return doctor.Report{}, err
	}
	if svc == nil {
		return a.examine(ctx, g), nil
	}
	report, err := svc.Ready(ctx)
	if cerr := svc.Close(); err == nil {
		err = cerr
	}
	return report, err
}

func runDoctor(opts doctorOptions, report doctor.Report, out io.Writer) error {
	if opts.Format == formatJSON {
		if report.Checks == nil {
			report.Checks = []doctor.Check{}
		}
		if err := printJSON(out, report); err != nil {
			return err
		}
	} else if err := printReport(out, report); err != nil {
		return err
	}
	if !report.OK {
		return exitStatus(exitFailure)
	}
	return nil
}

func printReport(out io.Writer, report doctor.Report) error {
	wide := 0
	for _, c := range report.Checks {
		wide = max(wide, len(c.Name))
	}
	for _, c := range report.Checks {
		fmt.Fprintf(out, "%-4s  %-*s  %s\n", c.Status, wide, c.Name, printable(c.Detail))
		if c.Remedy != "" {
			fmt.Fprintf(out, "%s  remedy: %s\n", strings.Repeat(" ", 4+2+wide), printable(c.Remedy))
		}
	}
	last := "agentbox can run, checkpoint and restore sandboxes here"
	if !report.OK {
		last = "agentbox cannot do its job here: see the lines that say fail"
	}
	_, err := fmt.Fprintln(out, last)
	return err
}
