package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type recoverOptions struct{ Format string }

func (o *recoverOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newRecoverCommand(a *app) *cobra.Command {
	var opts recoverOptions
	cmd := &cobra.Command{
		Use:   "recover [flags]",
		Short: "Finish or undo what an interrupted command left",
		Long: `Recover rolls verbs that were cut off (kill -9, a crash, no more space) forward or back,
frees what belongs to no sandbox any more, and says what it did. Every command does the
first part by itself when it finds the need.

A sandbox that is whole and that state.db does not know is named, and left alone.`,
		Example:     "  agentbox recover",
		Annotations: exits(exitUsage, exitBusy, exitCorrupt, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runRecover(cmd.Context(), opts, svc, a.stdout)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runRecover(ctx context.Context, opts recoverOptions, svc runtime.Service, out io.Writer) error {
	// What was done before an error is worth knowing, too.
	rec, err := svc.Recover(ctx)
	if rec.Actions == nil {
		rec.Actions = []string{}
	}
	if opts.Format == formatJSON {
		return both(err, printJSON(out, rec))
	}
	for _, action := range rec.Actions {
		fmt.Fprintln(out, printable(action))
	}
	if err == nil && len(rec.Actions) == 0 {
		_, err = fmt.Fprintln(out, "nothing to recover")
	}
	return err
}
