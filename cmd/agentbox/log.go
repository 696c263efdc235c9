package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
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
that the sandbox was at when it was taken, so that after a restore a new branch begins. In
brackets are HEAD, where the sandbox was last, names and tags, PINNED where prune keeps it, FOREIGN
where it comes from elsewhere, and DAMAGED where verify found damage; u marks the undo checkpoints
that restores took of what they replaced. WHAT is the beginning of what 'checkpoint --message' said,
else what triggered it; CHANGES how many paths were added (+), modified (~) and deleted (-) since its
parent, or since the image. Where the parent was deleted the line leads to the nearest one before it
that is there; of a fork, from ORIGIN@CHECKPOINT says where it began, and there a line names the fork.
A removed sandbox has a history too. With --all, x marks failed checkpoints and o pending ones. Sizes
and the like are in 'agentbox checkpoint ls'.

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
	counted := slices.ContainsFunc(shown, func(c runtime.HistoryEntry) bool { return c.Changes != nil })
	header := []string{"CHECKPOINT", "WHAT"}
	if counted {
		header = append(header, "CHANGES")
	}
	header = append(header, "KIND", "AGE")
	if opts.All {
		header = append(header, "STATUS")
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
		if marks := logMarks(ctx, c, parent, svc, id); len(marks) > 0 {
			first += " (" + strings.Join(marks, ", ") + ")"
		}
		what := c.Checkpoint
		what.Name = "" // it stands in brackets
		cells := []string{first, clipText(stepText(what), 24)}
		if counted {
			cells = append(cells, changesText(c.Changes))
		}
		cells = append(cells, c.Kind, shortAge(now.Sub(c.Created)))
		if opts.All {
			cells = append(cells, c.Status)
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

// logMarks are what stands in brackets behind a checkpoint.
func logMarks(
	ctx context.Context, c runtime.HistoryEntry, parent string, svc runtime.Service, id func(string) string,
) (marks []string) {
	mark := func(is bool, text string) {
		if is {
			marks = append(marks, text)
		}
	}
	mark(c.Head, "HEAD")
	mark(c.Name != "", c.Name)
	marks = append(marks, c.Tags...)
	mark(c.Pinned, "PINNED")
	mark(c.Foreign, "FOREIGN")
	mark(c.Damaged != "", "DAMAGED")
	if c.Parent != "" && parent == "" && !c.ParentDeleted {
		from := origin(ctx, c.Checkpoint, svc, id)
		mark(from != "", "from "+from)
		c.ParentDeleted = from == ""
	}
	mark(c.ParentDeleted, "parent deleted")
	return marks
}

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

// origin names a parent that is another sandbox's: this one is a fork of it. It is empty for a parent
// that is gone.
func origin(ctx context.Context, c runtime.Checkpoint, svc runtime.Service, id func(string) string) string {
	parent, err := svc.CheckpointInfo(ctx, c.Parent)
	if err != nil || parent.Sandbox == c.Sandbox {
		return ""
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
