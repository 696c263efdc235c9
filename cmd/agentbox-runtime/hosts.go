package main

import (
	"slices"
	"strings"
)

// withOwn returns a hosts file with the lines that another one has for a name.
// Since version 28 Docker takes a container's own lines out when it ends, and has
// them in a new file by the next `start`. They stand where they did: after the
// last line that both have.
func withOwn(data, engines []byte, name string) []byte {
	kept, theirs := lines(data), lines(engines)
	at := slices.IndexFunc(kept, func(line string) bool { return !slices.Contains(theirs, line) })
	if at < 0 {
		at = len(kept)
	}
	for _, line := range theirs {
		if f := strings.Fields(line); len(f) > 1 && slices.Contains(f[1:], name) && !slices.Contains(kept, line) {
			kept = slices.Insert(kept, at, line)
			at++
		}
	}
	return []byte(strings.Join(kept, ""))
}

// lines are those of a file, each with its end.
func lines(data []byte) []string { return slices.Collect(strings.Lines(string(data))) }
