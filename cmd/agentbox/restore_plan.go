package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/agentbox/agentbox/runtime"
)

// runRestorePlan is restore --dry-run.
func runRestorePlan(
	ctx context.Context, opts runtime.RestoreOptions, format, sandbox string, svc runtime.Service, stdout io.Writer,
) error {
	return runPlan(format, stdout, func() (runtime.RestorePlan, error) { return svc.PlanRestore(ctx, sandbox, opts) })
}

// runPlan prints what a restore would change.
func runPlan(format string, stdout io.Writer, plan func() (runtime.RestorePlan, error)) error {
	p, err := plan()
	if err != nil {
		return err
	}
	out := bufio.NewWriter(stdout)
	if format == formatJSON {
		p.Checkpoint = documentedCheckpoint(p.Checkpoint)
		p.Changes, p.Ends, p.Begins, p.Effects = notNull(p.Changes), notNull(p.Ends),
			notNull(p.Begins), notNull(p.Effects)
		p.Compensates = notNull(p.Compensates)
		err = printJSON(out, p)
	} else {
		err = printRestorePlan(out, p)
	}
	if err != nil {
		return err
	}
	return out.Flush()
}

var attachedText = map[string]string{
	runtime.AttachedPut: "write", runtime.AttachedRemoved: "remove", runtime.AttachedSame: "same",
	runtime.AttachedLeft: "leave",
}

func printRestorePlan(out io.Writer, p runtime.RestorePlan) error {
	c := p.Checkpoint
	s := fmt.Sprintf("%s would go back to checkpoint %s", p.SandboxName, shortID(c.ID))
	if c.Name != "" {
		s += " (" + c.Name + ")"
	}
	s += ": " + c.Kind + ", " + countText(c.Files, "file")
	if p.Recreates {
		s += "; it was removed and would be made again"
	}
	fmt.Fprintf(out, "%s\n\n", printable(s))
	if err := printStat(out, diffOptions{}, p.Changes); err != nil {
		return err
	}
	if p.Bytes > 0 {
		fmt.Fprintf(out, "%s of file data to write\n", sizeText(p.Bytes))
	}
	for _, part := range []struct {
		title string
		list  []runtime.PlanProcess
	}{{"processes that end", p.Ends}, {"processes that go on from the checkpoint", p.Begins}} {
		if len(part.list) == 0 {
			continue
		}
		fmt.Fprintf(out, "\n%s:\n", part.title)
		for _, proc := range part.list {
			fmt.Fprintf(out, "%7d  %s\n", proc.Pid, oneLine(proc.Command))
		}
	}
	if len(p.Compensates) > 0 {
		fmt.Fprint(out, "\ncompensated first, in this order:\n")
		for _, f := range p.Compensates {
			group := ""
			if f.Group != "" {
				group = " [" + f.Group + "]"
			}
			fmt.Fprintf(out, "  %s%s: %s (on failure: %s)\n", printable(effectText(f)), printable(group),
				oneLine(strings.Join(f.Command, " ")), f.OnFailure)
		}
	}
	if len(p.Attached) > 0 {
		fmt.Fprint(out, "\nhost files, once the sandbox is restored:\n")
		for _, f := range p.Attached {
			fmt.Fprintf(out, "  %-7s  %s\n", attachedText[f.Action], oneLine(f.Path))
		}
	}
	if len(p.Effects) > 0 {
		fmt.Fprint(out, "\neffects:\n")
		for _, what := range p.Effects {
			fmt.Fprintf(out, "  %s\n", oneLine(what))
		}
	}
	return nil
}
