package store

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// lengths proves that every chunk is as long as each reference to it says. Digests do
// not: a manifest made elsewhere may name the right chunk with a wrong length, which
// would not show until it is read.
func (r *Reader) lengths(ctx context.Context) error {
	c := lengthCheck{r: r, ctx: ctx, want: map[pack.ID]length{}}
	for n := range r.manifest.trees() {
		err := r.entries(ctx, n, func(e overlay.Entry) error {
			size := dataBytes(&e)
			if size == 0 {
				return nil
			}
			list := e.Chunks
			if list == nil {
				list = []overlay.Chunk{{Digest: e.Digest, Len: size}}
			}
			return c.chunks(fmt.Sprintf("%q", e.Path), list)
		})
		if err != nil {
			return err
		}
	}
	images, err := r.Images(ctx)
	if err != nil {
		return err
	}
	for i := range images {
		im := &images[i]
		what := "process image " + im.Name
		if err := c.chunks(what, im.Chunks); err != nil {
			return err
		}
		if err := c.chunks(what, im.Pages); err != nil {
			return err
		}
		if im.Recipe == nil {
			continue
		}
		segs, err := r.recipe(ctx, im)
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		for _, g := range segs {
			if err := c.add(what, g.ID, length{least: int64(g.Off) + int64(g.Len)}); err != nil {
				return err
			}
		}
	}
	return c.flush()
}

type length struct{ exact, least int64 } // exact 0: not said

type lengthCheck struct {
	r    *Reader
	ctx  context.Context
	want map[pack.ID]length // a bounded number
	what string             // the last one, for messages
}

func (c *lengthCheck) chunks(what string, list []overlay.Chunk) error {
	segs, err := segments(list)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	for _, g := range segs {
		if err := c.add(what, g.ID, length{exact: int64(g.Len)}); err != nil {
			return err
		}
	}
	return nil
}

func (c *lengthCheck) add(what string, id pack.ID, l length) error {
	have := c.want[id]
	if have.exact != 0 && l.exact != 0 && have.exact != l.exact {
		return fmt.Errorf("%s: piece %s has %d bytes here and %d there: %w", what, id, l.exact,
			have.exact, fault.ErrCorrupt)
	}
	c.want[id] = length{exact: max(have.exact, l.exact), least: max(have.least, l.least)}
	if c.what = what; len(c.want) >= 16*findBatch {
		return c.flush()
	}
	return nil
}

func (c *lengthCheck) flush() error {
	check := func(b pack.Blob) error {
		if l := c.want[b.ID]; l.exact != 0 && l.exact != int64(b.Raw) || l.least > int64(b.Raw) {
			return fmt.Errorf("%s, or something before it: piece %s has %d bytes, not %d: %w", c.what, b.ID, b.Raw,
				max(l.exact, l.least), fault.ErrCorrupt)
		}
		return nil
	}
	ids := slices.SortedFunc(maps.Keys(c.want), compareIDs)
	for i := range ids {
		if own, ok := c.r.chunks.own[ids[i]]; ok {
			if err := check(own.blob); err != nil {
				return err
			}
		}
	}
	// Missing chunks are reported elsewhere.
	_, err := c.r.chunks.x.find(c.ctx, ids, func(p place) error { return check(p.blob) })
	clear(c.want)
	return err
}
