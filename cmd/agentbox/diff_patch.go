package main

import (
	"bufio"
	"strings"

	"github.com/agentbox/agentbox/runtime"
)

// git's own colours.
const (
	colorHeader = "\x1b[1m"
	colorHunk   = "\x1b[36m"
	colorOld    = "\x1b[31m"
	colorNew    = "\x1b[32m"
	colorNote   = "\x1b[2m"
	colorOff    = "\x1b[m"
)

// printPatches writes the patches one after the other. For people's eyes, what
// is in the files must not drive the terminal; for programs it is as it is.
func printPatches(out *bufio.Writer, opts diffOptions, changes []runtime.Change, color, eyes bool) {
	line := func(paint, s string) {
		if eyes {
			s = printable(s)
		}
		if color && paint != "" && s != "" {
			s = paint + s + colorOff
		}
		out.WriteString(s + "\n")
	}
	for _, c := range changes {
		if c.Patch == "" {
			line(colorNote, "# "+patchNote(opts, c))
			continue
		}
		inHunk := false
		for s := range strings.Lines(c.Patch) {
			s = strings.TrimSuffix(s, "\n")
			paint := colorHeader
			switch {
			case strings.HasPrefix(s, "diff --git "):
				// A line of a file begins with a sign of the hunk.
				inHunk = false
			case strings.HasPrefix(s, "@@"):
				inHunk, paint = true, colorHunk
			case inHunk:
				paint = map[byte]string{'-': colorOld, '+': colorNew}[(s + " ")[0]]
			}
			line(paint, s)
		}
	}
}

// patchNote describes a change that a patch has no form for.
func patchNote(opts diffOptions, c runtime.Change) string {
	s := c.Change + " " + quotePath(opts.shown(c.Path, c.PathB64))
	if c.Change == "R" {
		s = c.Change + " " + quotePath(opts.shown(c.From, c.FromB64)) + " -> " +
			quotePath(opts.shown(c.Path, c.PathB64))
	}
	what := statWhat(c)
	if c.Old != nil && c.New != nil && c.Old.Mode != c.New.Mode {
		what = strings.Replace(what, "mode", "mode "+c.Old.Mode+" -> "+c.New.Mode, 1)
	}
	if what != "" {
		s += ": " + what
	}
	return s
}
