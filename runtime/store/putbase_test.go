package store

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A list is cut in the same places, whatever its base is.
func TestBaseTree(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
	must(t, err)
	n := 0
	write := func(lines []string, base Tree) Tree {
		n++
		must(t, d.putTree(ctx, n, func(w *treeWriter) (err error) {
			if w.base, err = newBaseTree(base.Chunks); err != nil {
				return err
			}
			for _, l := range lines {
				if err := w.add([]byte(l), 1); err != nil {
					return err
				}
			}
			return nil
		}))
		tree := d.trees[n]
		delete(d.trees, n)
		n--
		return tree
	}
	check := func(t *rapid.T, before, after []string) {
		was := write(before, Tree{})
		plain, alike := write(after, Tree{}), write(after, was)
		if plain.Digest != alike.Digest || !slices.Equal(plain.Chunks, alike.Chunks) ||
			plain.Entries != alike.Entries || plain.Bytes != alike.Bytes {
			t.Fatalf("%d lines are %d chunks, or %d with a base", len(after), len(plain.Chunks), len(alike.Chunks))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		line := func() string { return fmt.Sprintf("%d%s", r.Uint64(), strings.Repeat("x", r.IntN(400))) }
		var before []string
		for range rapid.IntRange(1, 3000).Draw(t, "lines") {
			before = append(before, line())
		}
		after := slices.Clone(before)
		for range rapid.IntRange(0, 12).Draw(t, "changes") {
			at, some := r.IntN(len(after)+1), rapid.SampledFrom([]int{1, 1, 2, 500}).Draw(t, "some")
			switch rapid.IntRange(0, 3).Draw(t, "change") {
			case 0:
				after = slices.Delete(after, at, min(at+some, len(after)))
			case 1:
				more := make([]string, some)
				for i := range more {
					more[i] = line()
				}
				after = slices.Insert(after, at, more...)
			case 2:
				if at < len(after) {
					after[at] = line()
				}
			case 3:
				after = slices.Insert(after, at, strings.Repeat("y",
					rapid.SampledFrom([]int{100 << 10, 300 << 10, 1 << 20, 3 << 20}).Draw(t, "long")))
			}
		}
		if len(after) == 0 {
			after = append(after, line())
		}
		check(t, before, after)
	})
	must(t, d.Abort(ctx, nil))
}
