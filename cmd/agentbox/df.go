package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type dfOptions struct {
	Verbose bool
	NoTrunc bool
	Format  string
}

func (o *dfOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.Verbose, "verbose", "v", false, "for each checkpoint and sandbox, too")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newDfCommand(a *app) *cobra.Command {
	var opts dfOptions
	cmd := &cobra.Command{
		Use:   "df [flags]",
		Short: "Show what checkpoints and sandboxes take on the disk",
		Long: `Df shows what is on the disk, as 'du -x' of the root counts it: blocks, and directories.
Checkpoints are packs and manifests, Sandboxes their own files, logs and specs, and volumes, Other
is state.db, the audit log, events, caches and the room that is set aside for a full disk. What
an engine such as Docker keeps of its containers is in Sandboxes, though not in the root; its
images are in none. RECLAIMABLE is what nothing needs: 'agentbox prune' frees it. With --verbose
NEEDS is all that a checkpoint needs, its manifest and what it shares with others included, and
UNIQUE what would be free if only this one were removed; both are sizes before they are rounded
up to blocks.

With --format json it prints one object, sizes in bytes: root, stored (all packs), raw (what
is in them, unpacked), logical (what the checkpoints would need without the store), waste,
packs, pieces, disk (what is on it: total, packs, records, sandboxes, images, rest; elsewhere),
free (on the filesystem), checkpoints (checkpoint, needs, unique), sandboxes (id, name, upperdir).`,
		Example: `  agentbox df
  agentbox df -v
  agentbox df --format json | jq '.stored / .logical'`,
		Annotations: exits(exitUsage, exitDenied),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.service(cmd.Context(), func(svc runtime.Service) error {
				return runDf(cmd.Context(), opts, svc, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runDf(ctx context.Context, opts dfOptions, svc runtime.Service, out io.Writer, now time.Time) error {
	u, err := svc.Usage(ctx)
	if err != nil {
		return err
	}
	if opts.Format == formatJSON {
		u.Checkpoints, u.Sandboxes = notNull(u.Checkpoints), notNull(u.Sandboxes)
		for i, c := range u.Checkpoints {
			u.Checkpoints[i].Checkpoint = documentedCheckpoint(c.Checkpoint)
		}
		return printJSON(out, u)
	}
	if err := printUsage(u, out); err != nil || !opts.Verbose {
		return err
	}
	return printUsageOfEach(u, opts.NoTrunc, out, now)
}

func printUsage(u runtime.Usage, out io.Writer) error {
	d := u.Disk
	if d.Total == 0 { // told by an older service
		d.Packs = u.Stored
		for _, sb := range u.Sandboxes {
			d.Sandboxes += sb.Upperdir
		}
	}
	t := newTable(out, "TYPE", "TOTAL", "SIZE", "RECLAIMABLE")
	t.row("Checkpoints", strconv.Itoa(len(u.Checkpoints)), sizeText(d.Packs+d.Records), part(u.Waste, u.Stored))
	t.row("Sandboxes", strconv.Itoa(len(u.Sandboxes)), sizeText(d.Sandboxes+d.Elsewhere), "")
	if d.Total > 0 {
		t.row("Images", "", sizeText(d.Images), "")
		t.row("Other", "", sizeText(d.Rest), "")
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if u.Stored > 0 {
		s := fmt.Sprintf("%s in %s", countText(u.Pieces, "piece"), countText(int64(u.Packs), "pack"))
		if u.Logical > 0 {
			s += fmt.Sprintf("; without the store the checkpoints would be %s, %.1f times as much", sizeText(u.Logical),
				float64(u.Logical)/float64(u.Stored))
		}
		fmt.Fprintln(out, s)
	}
	used := ""
	if d.Total > 0 {
		used = sizeText(d.Total) + " used, "
	}
	_, err := fmt.Fprintf(out, "%s%s free at %s\n", used, sizeText(u.Free), oneLine(u.Root))
	return err
}

// part is n and how much that is of all.
func part(n, all int64) string {
	if all <= 0 {
		return sizeText(n)
	}
	return fmt.Sprintf("%s (%.0f%%)", sizeText(n), float64(n)*100/float64(all))
}

func printUsageOfEach(u runtime.Usage, whole bool, out io.Writer, now time.Time) error {
	id := idText(whole)
	fmt.Fprint(out, "\nCheckpoints:\n\n")
	t := newTable(out, "ID", "NAME", "SANDBOX", "STATUS", "CREATED", "NEEDS", "UNIQUE")
	for _, c := range u.Checkpoints {
		t.row(id(c.Checkpoint.ID), c.Checkpoint.Name, c.Checkpoint.SandboxName, checkpointStatus(c.Checkpoint),
			ago(now, c.Checkpoint.Created), sizeText(c.Needs), sizeText(c.Unique))
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprint(out, "\nSandboxes:\n\n")
	t = newTable(out, "ID", "NAME", "FILES")
	for _, sb := range u.Sandboxes {
		t.row(id(sb.ID), sb.Name, sizeText(sb.Upperdir))
	}
	return t.flush()
}
