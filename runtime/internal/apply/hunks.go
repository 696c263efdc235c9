package apply

import (
	"fmt"
	"strings"

	udiff "github.com/aymanbagabas/go-udiff"
)

const (
	maxHunkText = 1 << 20  // bytes of a text of which parts can be applied
	maxShown    = 64 << 20 // bytes of all patches of one plan
	hunkContext = 3        // unchanged lines around each hunk
)

// lineEdits lists the runs of lines that differ between two texts.
func lineEdits(old, new string) (list []udiff.Edit) {
	for _, e := range udiff.Lines(old, new) {
		if n := len(list); n > 0 && list[n-1].End == e.Start {
			list[n-1].End, list[n-1].New = e.End, list[n-1].New+e.New
			continue
		}
		list = append(list, e)
	}
	return list
}

// splice makes edits to a text.
func splice(text string, edits []udiff.Edit) (string, error) {
	var b strings.Builder
	at := 0
	for _, e := range edits {
		if e.Start < at || e.End < e.Start || e.End > len(text) {
			return "", fmt.Errorf("edit %d-%d of a text of %d bytes", e.Start, e.End, len(text))
		}
		b.WriteString(text[at:e.Start])
		b.WriteString(e.New)
		at = e.End
	}
	b.WriteString(text[at:])
	return b.String(), nil
}

// unifiedHunks shows edits to a text as `diff -u` does, without the names before the first hunk.
func unifiedHunks(text string, edits []udiff.Edit) string {
	lines := splitLines(text)
	var out strings.Builder
	number, at, shift := 0, 0, 0 // of the line that begins at a byte of the text; how many lines more the new text has
	to := func(offset int) int {
		for at < offset {
			at += len(lines[number])
			number++
		}
		return number
	}
	type place struct{ start, end int }
	var places []place
	for _, e := range edits {
		places = append(places, place{to(e.Start), to(e.End)})
	}
	for i := 0; i < len(edits); {
		j := i + 1
		for j < len(edits) && places[j].start-places[j-1].end <= 2*hunkContext {
			j++
		}
		first, last := max(0, places[i].start-hunkContext), min(len(lines), places[j-1].end+hunkContext)
		var body strings.Builder
		next, more := first, 0
		for k := i; k < j; k++ {
			addLines(&body, ' ', lines[next:places[k].start])
			addLines(&body, '-', lines[places[k].start:places[k].end])
			is := splitLines(edits[k].New)
			addLines(&body, '+', is)
			more += len(is) - (places[k].end - places[k].start)
			next = places[k].end
		}
		addLines(&body, ' ', lines[next:last])
		fmt.Fprintf(&out, "@@ -%s +%s @@\n", span(first, last-first), span(first+shift, last-first+more))
		out.WriteString(body.String())
		shift += more
		i = j
	}
	return out.String()
}

// span is a range of lines as `diff -u` has it.
func span(first, n int) string {
	switch n {
	case 0:
		return fmt.Sprintf("%d,0", first)
	case 1:
		return fmt.Sprint(first + 1)
	}
	return fmt.Sprintf("%d,%d", first+1, n)
}

func addLines(to *strings.Builder, sign byte, lines []string) {
	for _, line := range lines {
		to.WriteByte(sign)
		to.WriteString(line)
		if !strings.HasSuffix(line, "\n") {
			to.WriteString("\n\\ No newline at end of file\n")
		}
	}
}

// splitLines returns lines with their ends.
func splitLines(text string) []string {
	lines := strings.SplitAfter(text, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

// subset returns the edits with these numbers.
func subset(edits []udiff.Edit, numbers []int) (list []udiff.Edit, err error) {
	wanted := map[int]bool{}
	for _, n := range numbers {
		wanted[n] = true
	}
	for i, e := range edits {
		if wanted[i] {
			list = append(list, e)
		}
	}
	if len(list) != len(numbers) {
		return nil, fmt.Errorf("hunks %v: some are named twice or are not among the %d", numbers, len(edits))
	}
	return list, nil
}
