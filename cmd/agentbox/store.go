package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

func newStoreCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:         "store COMMAND",
		Short:       "Work with the store that checkpoints are in",
		Long:        "The store holds the data of all checkpoints, each piece of it once. See also df, verify and prune.",
		Example:     "  agentbox store reindex",
		Annotations: exits(exitUsage, exitBusy, exitCorrupt, exitDenied),
		Args:        args(0, -1),
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newStoreReindexCommand(a))
	return cmd
}

func newStoreReindexCommand(a *app) *cobra.Command {
	format := formatTable
	cmd := &cobra.Command{
		Use:   "reindex [flags]",
		Short: "Rebuild the index of the store from its files",
		Long: `Reindex rebuilds what the state database knows of packs, pieces and checkpoints from the
packs and manifests alone, for example after the database was lost. Pins and tags are only in
the database. With --format json it prints one object: packs, pieces, checkpoints (whose
records were made again), notes (what could not be used, and why).`,
		Example:     "  agentbox store reindex",
		Annotations: exits(exitUsage, exitBusy, exitCorrupt, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runStoreReindex(cmd.Context(), format, svc, a.stdout, a.stderr)
			})
		},
	}
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func runStoreReindex(ctx context.Context, format string, svc runtime.Service, stdout, stderr io.Writer) error {
	r, err := svc.Reindex(ctx)
	if err != nil {
		return err
	}
	if format == formatJSON {
		r.Notes = notNull(r.Notes)
		return printJSON(stdout, r)
	}
	warn(stderr, r.Notes)
	_, err = fmt.Fprintf(stdout, "%s with %s; the records of %s made again\n",
		countText(int64(r.Packs), "pack"), countText(r.Pieces, "piece"), countText(int64(r.Checkpoints), "checkpoint"))
	return err
}
