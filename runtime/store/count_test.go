package store

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
)

// Each byte of process images is counted once, both ways, including pages that the parent has.
func TestCountImages(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 300<<10)
	var total int64
	for _, image := range data.images {
		total += int64(len(image))
	}
	parent := ""
	for _, name := range []string{"first", "second"} {
		c := of(b, name, KindFull)
		c.Parent = parent
		d, err := s.BeginCheckpoint(ctx, c)
		must(t, err)
		var read, written atomic.Int64
		d.CountImages(func(n int64) { read.Add(n) })
		must(t, fill(d, data))
		row, err := d.Commit(ctx, describe())
		must(t, err)
		must(t, d.Close())
		parent = row.ID
		r, err := s.OpenCheckpoint(ctx, row.ID)
		must(t, err)
		r.CountImages(func(n int64) { written.Add(n) })
		must(t, r.ExtractImages(ctx, filepath.Join(t.TempDir(), "images")))
		must(t, r.Close())
		if read.Load() != total || written.Load() != total {
			t.Errorf("%s: %d read, %d written of %d", name, read.Load(), written.Load(), total)
		}
	}
}
