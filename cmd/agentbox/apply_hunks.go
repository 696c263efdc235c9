package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
)

// An applyItem is what can be chosen of an apply: a change, with those that come with it.
type applyItem struct {
	runtime.Change
	with  []runtime.Change // below a directory that comes in the place of a file
	hunks []shownHunk      // of a text that can come in parts
}

// applyItems lists what can be chosen of a plan. Directories come and go with what is in them.
func applyItems(plan runtime.Applied) (list []applyItem) {
	raw := func(c runtime.Change) string { return pathOf(c.Path, c.PathB64) }
	below := func(c, of runtime.Change) bool {
		return strings.HasPrefix(raw(c), strings.TrimSuffix(raw(of), "/")+"/")
	}
	changes := plan.Changes
	for i := 0; i < len(changes); i++ {
		it := applyItem{Change: changes[i]}
		end := i + 1
		for end < len(changes) && below(changes[end], it.Change) {
			end++
		}
		dir := it.Type == "dir" && (it.Change.Change == "A" || it.Change.Change == "D")
		switch {
		case it.Change.Change == "T":
			if it.Type == "dir" {
				it.with = changes[i+1 : end]
			}
			i = end - 1 // what goes with a directory is no choice of its own
		case dir && end > i+1:
			continue
		case it.Hunks > 0:
			it.hunks = parseHunks(it.Patch)
		}
		list = append(list, it)
	}
	return list
}

// picks picks an item as a whole.
func (it applyItem) picks() (list []runtime.ApplyPick) {
	for _, c := range append([]runtime.Change{it.Change}, it.with...) {
		list = append(list, runtime.ApplyPick{Path: c.Path, PathB64: c.PathB64, Seen: c.Seen})
	}
	return list
}

// modeChange reports whether an item has another mode, beside other changes.
func (it applyItem) modeChange() bool {
	return it.Change.Change == "M" && it.Old != nil && it.New != nil && it.Old.Mode != it.New.Mode
}

// A shownHunk is a part of a patch: some runs of added and removed lines, with what is around them.
type shownHunk struct {
	old, new int      // line numbers of the first line, counted from 1
	lines    []string // with their sign, and the note on a missing end of line as a part of its line
	first    int      // the number of its first run in the file
	runs     int
}

// parseHunks reads a patch, from the first @@ on.
func parseHunks(patch string) (list []shownHunk) {
	run := 0
	for line := range strings.Lines(patch) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "@@") {
			h := shownHunk{first: run}
			_, _ = fmt.Sscanf(strings.ReplaceAll(line, ",", " , "), "@@ -%d", &h.old)
			if _, to, ok := strings.Cut(line, " +"); ok {
				_, _ = fmt.Sscanf(to, "%d", &h.new)
			}
			list = append(list, h)
			continue
		}
		if len(list) == 0 || line == "" {
			continue
		}
		h := &list[len(list)-1]
		switch n := len(h.lines); {
		case line[0] == '\\' && n > 0:
			h.lines[n-1] += "\n" + line
			continue
		case line[0] != ' ' && (n == 0 || h.lines[n-1][0] == ' '):
			run++
			h.runs++
		}
		h.lines = append(h.lines, line)
	}
	return list
}

// split makes a hunk of each run of lines.
func (h shownHunk) split() (list []shownHunk) {
	var starts, ends []int
	for i, line := range h.lines {
		if line[0] == ' ' {
			continue
		}
		if n := len(ends); n > 0 && ends[n-1] == i {
			ends[n-1]++
		} else {
			starts, ends = append(starts, i), append(ends, i+1)
		}
	}
	for k := range starts {
		from, to := 0, len(h.lines)
		if k > 0 {
			from = ends[k-1]
		}
		if k+1 < len(starts) {
			to = starts[k+1]
		}
		one := shownHunk{old: h.old, new: h.new, lines: h.lines[from:to], first: h.first + k, runs: 1}
		for _, line := range h.lines[:from] {
			if line[0] != '+' {
				one.old++
			}
			if line[0] != '-' {
				one.new++
			}
		}
		list = append(list, one)
	}
	return list
}

// text shows a hunk as `diff -u` does.
func (h shownHunk) text() string {
	old, new := 0, 0
	for _, line := range h.lines {
		if line[0] != '+' {
			old++
		}
		if line[0] != '-' {
			new++
		}
	}
	return fmt.Sprintf("@@ -%d,%d +%d,%d @@\n%s\n", h.old, old, h.new, new, strings.Join(h.lines, "\n"))
}

// numbers are those of the runs of a hunk.
func (h shownHunk) numbers() (list []int) {
	for n := range h.runs {
		list = append(list, h.first+n)
	}
	return list
}

// picked is what comes of an item of which some hunks, and perhaps the mode, are chosen.
func (it applyItem) picked(hunks []int, mode bool) []runtime.ApplyPick {
	modeLeft := it.modeChange() && !mode
	if len(hunks) == 0 && !(it.modeChange() && mode) {
		return nil
	}
	list := it.picks()
	if len(hunks) < it.Hunks || modeLeft {
		slices.Sort(hunks)
		list[0].Hunks, list[0].Mode = append([]int{}, hunks...), mode && it.modeChange()
	}
	return list
}

// applyHunks makes a patch's changes to the very text that it is of.
func applyHunks(text, patch string) (string, error) {
	lines := strings.SplitAfter(text, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	var out strings.Builder
	at := 0
	for _, h := range parseHunks(patch) {
		from := h.old - 1
		if !slices.ContainsFunc(h.lines, func(s string) bool { return s[0] != '+' }) {
			from = h.old // the line after which it comes
		}
		if from < at || from > len(lines) {
			return "", fmt.Errorf("a hunk at line %d of %d", h.old, len(lines))
		}
		out.WriteString(strings.Join(lines[at:from], ""))
		at = from
		for _, s := range h.lines {
			line, open := strings.CutSuffix(s[1:], "\n\\ No newline at end of file")
			if !open {
				line += "\n"
			}
			if s[0] != '+' {
				if at >= len(lines) || lines[at] != line {
					return "", fmt.Errorf("line %d is not the one that was shown", at+1)
				}
				at++
			}
			if s[0] != '-' {
				out.WriteString(line)
			}
		}
	}
	out.WriteString(strings.Join(lines[at:], ""))
	return out.String(), nil
}
