package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

type logOptions struct {
	All      bool
	MaxCount int
	NoTrunc  bool
	Format   string
}

func (o *logOptions) addFlags(fl *pflag.FlagSet) {
	fl.BoolVarP(&o.All, "all", "a", false, "pending and failed checkpoints too")
	fl.IntVarP(&o.MaxCount, "max-count", "n", -1, "only the newest `N`")
	fl.BoolVar(&o.NoTrunc, "no-trunc", false, "whole ids")
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

func newLogCommand(a *app) *cobra.Command {
	var opts logOptions
	cmd := &cobra.Command{
		Use:   "log [flags] [SANDBOX]",
		Short: "Draw the history of a sandbox's checkpoints",
		Long: `Log draws the tree of a sandbox's checkpoints, newest first: a checkpoint hangs from the one
that the sandbox was at when it was taken, so that after a restore a new branch begins. HEAD
marks the one that the sandbox was last at, PINNED those that prune keeps, DAMAGED those that
verify found damage in; u marks the undo checkpoints that restores took of what they replaced.
SIZE is all that a checkpoint needs, ADDED what it brought to the store, CHANGES how many paths
were added (+), modified (~) and deleted (-) since its parent, or since the image. PARENT is "(deleted)"
where that checkpoint is gone; the line then leads to the nearest one before it that is not;
of a fork it names the origin's checkpoint, and there a line names the fork. MESSAGE is the first
line of what 'agentbox checkpoint --message' said, where one has said it. A removed sandbox
has a history too. With --all, x marks failed checkpoints and o pending ones.

With --format json it prints an array of what 'agentbox checkpoint inspect' prints, each
with children (ids), head, parent_deleted and forks (sandbox, sandbox_name) added.`,
		Example: `  agentbox log c
  agentbox log -n 10 --no-trunc c
  agentbox log --format json c | jq -r '.[] | select(.head) | .id'`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("max-count") && opts.MaxCount < 0 {
				return usageErrorf("--max-count %d: must not be negative", opts.MaxCount)
			}
			return a.onSandbox(cmd.Context(), args, func(svc runtime.Service, sandbox string, _ []string) error {
				return runLog(cmd.Context(), opts, sandbox, svc, a.stdout, a.now())
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runLog(
	ctx context.Context, opts logOptions, sandbox string, svc runtime.Service, out io.Writer, now time.Time,
) error {
	all, err := svc.History(ctx, sandbox, runtime.HistoryOptions{All: opts.All})
	if err != nil {
		return err
	}
	shown := []runtime.HistoryEntry{}
	for _, c := range all {
		c.Checkpoint = documentedCheckpoint(c.Checkpoint)
		if c.Children == nil {
			c.Children = []string{}
		}
		c.Forks = notNull(c.Forks)
		shown = append(shown, c)
	}
	known := map[string]bool{}
	for _, c := range shown {
		known[c.ID] = true
	}
	if opts.MaxCount >= 0 && len(shown) > opts.MaxCount {
		shown = shown[:opts.MaxCount]
	}
	if opts.Format == formatJSON {
		return printJSON(out, shown)
	}
	if len(shown) == 0 {
		return nil
	}
	id := idText(opts.NoTrunc)
	header := []string{
		"CHECKPOINT", "NAME", "TAGS", "KIND", "CREATED", "SIZE", "ADDED", "TRIGGER", "FILES", "PROCESSES", "PARENT",
	}
	if opts.All {
		header = append(header, "STATUS")
	}
	counted := slices.ContainsFunc(shown, func(c runtime.HistoryEntry) bool { return c.Changes != nil })
	if counted {
		header = slices.Insert(header, changesColumn, "CHANGES")
	}
	messages := slices.ContainsFunc(shown, func(c runtime.HistoryEntry) bool { return c.Message != "" })
	if messages {
		header = append(header, "MESSAGE")
	}
	var drawn bytes.Buffer
	below := map[int]string{} // a row of the table -> the line below it
	rows := 0
	t := newTable(&drawn, header...)
	var g graph
	for _, c := range shown {
		parent := c.Parent
		if !known[parent] {
			parent = ""
		}
		join, row := g.add(c.ID, parent, logMark(c.Checkpoint))
		if join != "" {
			// With all its cells, or the columns below would not line up
			// with those above.
			t.row(append([]string{join}, make([]string, len(header)-1)...)...)
			rows++
		}
		first := row + " " + id(c.ID)
		if c.Head {
			first += " HEAD"
		}
		if c.Pinned {
			first += " PINNED"
		}
		if c.Foreign {
			first += " FOREIGN"
		}
		if c.Damaged != "" {
			first += " DAMAGED"
		}
		came := id(parent)
		switch {
		case c.ParentDeleted:
			came = "(deleted)"
		case c.Parent != "" && parent == "":
			came = origin(ctx, c.Checkpoint, svc, id)
		}
		cells := []string{first, c.Name, strings.Join(c.Tags, ","), c.Kind, ago(now, c.Created),
			sizeText(c.Bytes), sizeText(c.Added), c.Trigger, strconv.FormatInt(c.Files, 10),
			strconv.Itoa(c.Processes), came}
		if opts.All {
			cells = append(cells, c.Status)
		}
		if counted {
			cells = slices.Insert(cells, changesColumn, changesText(c.Changes))
		}
		if messages {
			cells = append(cells, messageText(c.Message))
		}
		t.row(cells...)
		rows++
		if len(c.Forks) > 0 {
			var names []string
			for _, f := range c.Forks {
				names = append(names, printable(f.SandboxName))
			}
			below[rows] = g.lines() + "  forked into " + strings.Join(names, ", ")
		}
		for _, f := range c.Effects {
			below[rows] = strings.TrimPrefix(below[rows]+"\n"+g.lines()+"  "+printable(effectText(f)), "\n")
		}
	}
	if err := t.flush(); err != nil {
		return err
	}
	n := 0
	for line := range strings.Lines(drawn.String()) {
		text := strings.TrimRight(line, " \n")
		// Not a row of the table: its length must not make a column wide.
		if more := below[n]; more != "" {
			text += "\n" + more
		}
		n++
		if _, err := fmt.Fprintln(out, text); err != nil {
			return err
		}
	}
	return nil
}

// changesColumn is where the changes stand: after what the checkpoint has added to the store.
const changesColumn = 7

// messageText is what a table shows of a message: its first line, and of that what fits.
func messageText(s string) string {
	line, _, more := strings.Cut(strings.TrimSpace(s), "\n")
	const most = 60
	if r := []rune(line); len(r) > most {
		line, more = string(r[:most]), true
	}
	if more {
		line += "…"
	}
	return oneLine(line)
}

func logMark(c runtime.Checkpoint) string {
	switch {
	case c.Status == runtime.CheckpointFailed:
		return "x"
	case c.Status == runtime.CheckpointPending:
		return "o"
	case c.Trigger == runtime.TriggerUndo:
		return "u"
	}
	return "*"
}

// origin names a parent that is another sandbox's: this one is a fork of it.
func origin(ctx context.Context, c runtime.Checkpoint, svc runtime.Service, id func(string) string) string {
	parent, err := svc.CheckpointInfo(ctx, c.Parent)
	if err != nil || parent.Sandbox == c.Sandbox {
		return "(deleted)"
	}
	return parent.SandboxName + "@" + cmp.Or(parent.Name, id(parent.ID))
}

// A graph draws a forest of which every node comes before its parent. Each lane
// leads down to the parent whose id it holds; a free one holds none.
type graph struct{ lanes []string }

// lines are the lanes as they go on from here.
func (g *graph) lines() string {
	var b strings.Builder
	for _, lane := range g.lanes {
		if lane != "" {
			b.WriteString("│ ")
		} else {
			b.WriteString("  ")
		}
	}
	return b.String()
}

// add returns the line that joins the lanes which lead to id, "" when at most
// one does, and the line with id's own mark.
func (g *graph) add(id, parent, mark string) (join, row string) {
	first, last := slices.Index(g.lanes, id), -1
	for i, lane := range g.lanes {
		if lane == id {
			last = i
		}
	}
	if first < 0 {
		if first = slices.Index(g.lanes, ""); first < 0 {
			first = len(g.lanes)
			g.lanes = append(g.lanes, "")
		}
	}
	if last > first {
		var b strings.Builder
		for i, lane := range g.lanes {
			switch {
			case i == first:
				b.WriteString("├─")
			case i == last:
				b.WriteString("╯ ")
			case i > first && i < last && lane == id:
				b.WriteString("┴─")
			case i > first && i < last && lane != "":
				b.WriteString("┼─")
			case i > first && i < last:
				b.WriteString("──")
			case lane != "":
				b.WriteString("│ ")
			default:
				b.WriteString("  ")
			}
			if i > first && lane == id {
				g.lanes[i] = ""
			}
		}
		join = strings.TrimRight(b.String(), " ")
	}
	g.lanes[first] = id
	for len(g.lanes) > 0 && g.lanes[len(g.lanes)-1] == "" {
		g.lanes = g.lanes[:len(g.lanes)-1]
	}
	var b strings.Builder
	for i, lane := range g.lanes {
		switch {
		case i == first:
			b.WriteString(mark + " ")
		case lane != "":
			b.WriteString("│ ")
		default:
			b.WriteString("  ")
		}
	}
	g.lanes[first] = parent
	for len(g.lanes) > 0 && g.lanes[len(g.lanes)-1] == "" {
		g.lanes = g.lanes[:len(g.lanes)-1]
	}
	return join, strings.TrimRight(b.String(), " ")
}
