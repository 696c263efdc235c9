package main

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// A table aligns columns as Docker does: three spaces between them.
type table struct{ tw *tabwriter.Writer }

func newTable(w io.Writer, header ...string) *table {
	t := &table{tabwriter.NewWriter(w, 0, 1, 3, ' ', 0)}
	t.row(header...)
	return t
}

// row prints one line; what came out of a sandbox cannot break it.
func (t *table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = oneLine(c)
	}
	fmt.Fprintln(t.tw, strings.Join(cells, "\t"))
}

func (t *table) flush() error { return t.tw.Flush() }

// A listing is how a verb prints what it lists: as a table, as a JSON array, or
// with --quiet one name or id a line.
type listing[T any] struct {
	format string
	quiet  bool
	name   func(T) string // for --quiet

	header []string
	row    func(T) []string
}

func (l listing[T]) print(out io.Writer, list []T) error {
	if l.format == formatJSON {
		return printJSON(out, notNull(list))
	}
	if l.quiet {
		for _, v := range list {
			if _, err := fmt.Fprintln(out, l.name(v)); err != nil {
				return err
			}
		}
		return nil
	}

	t := newTable(out, l.header...)
	for _, v := range list {
		t.row(l.row(v)...)
	}
	return t.flush()
}
