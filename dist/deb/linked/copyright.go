package main

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
)

// common are the licences whose text every Debian system has.
var common = map[string]string{
	"Apache-2.0": "Apache-2.0",
	"MPL-2.0":    "MPL-2.0",
}

const project = "https://github.com/agentbox/agentbox"

// writeCopyright writes Debian's copyright file, version 1.0: a paragraph per module
// with the terms in full, or by reference where every Debian system has them.
func writeCopyright(to io.Writer, modules []*module) error {
	w := bufio.NewWriter(to)
	fmt.Fprintf(w, "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: agentbox\nSource: %s\n"+
		"Comment: The programs are linked statically, of agentbox and of the Go modules below;\n"+
		" these are named in the versions that are linked. agentbox.cdx.json beside this\n file has the same for machines.\n\n", project)
	fmt.Fprint(w, "Files: *\nCopyright: the agentbox authors\nLicense: Apache-2.0\n")
	standalone := map[string]bool{"Apache-2.0": true}
	for _, m := range modules {
		ids := m.ids()
		var lines []string
		for _, l := range m.licences {
			for _, h := range l.holder {
				if !slices.Contains(lines, h) {
					lines = append(lines, h)
				}
			}
		}
		if len(lines) == 0 {
			lines = []string{"the authors of " + m.path}
		}
		fmt.Fprintf(w, "\nFiles: %s/*\nCopyright: %s\n", m.path, strings.Join(lines, "\n "))
		fmt.Fprintf(w, "License: %s\n", strings.ReplaceAll(strings.Join(ids, " and "), " OR ", " or "))
		if slices.ContainsFunc(ids, func(id string) bool { return common[id] == "" }) || len(ids) > 1 {
			for _, l := range m.licences {
				if len(l.ids) == 1 && common[l.ids[0]] != "" {
					indent(w, fmt.Sprintf("%s: %s", l.file, refer(l.ids[0])))
				} else if len(l.ids) > 0 {
					indent(w, l.file+":\n\n"+l.text)
				}
			}
		} else {
			standalone[ids[0]] = true
		}
		fmt.Fprintf(w, "Comment: version %s\n", m.version)
		for _, l := range m.licences {
			if len(l.ids) == 0 {
				indent(w, ".\n"+l.file+":\n\n"+l.text)
			}
		}
	}
	for _, id := range []string{"Apache-2.0", "MPL-2.0"} {
		if standalone[id] {
			fmt.Fprintf(w, "\nLicense: %s\n", id)
			indent(w, refer(id))
		}
	}
	return w.Flush()
}

func refer(id string) string {
	return "on Debian systems the text of " + id + " is\n/usr/share/common-licenses/" + common[id]
}

// ids are the licences of a module, sorted.
func (m *module) ids() []string {
	var ids []string
	for _, l := range m.licences {
		for _, id := range l.ids {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return ids
}

// indent writes a text as the lines of a field.
func indent(w io.Writer, text string) {
	for line := range strings.Lines(strings.TrimSpace(text) + "\n") {
		line = strings.TrimRight(strings.ReplaceAll(line, "\f", ""), " \t\r\n")
		if strings.TrimSpace(line) == "" {
			line = "."
		}
		fmt.Fprintf(w, " %s\n", line)
	}
}
