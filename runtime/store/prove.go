package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Verify reads the checkpoint's lists again and proves that every chunk it needs is in a pack that
// is there in full length; with readData it reads every byte that the checkpoint needs and proves
// it. ErrCorrupt names the first damaged thing, and how many more there are.
func (r *Reader) Verify(ctx context.Context, readData bool) error {
	var first string
	n := 0
	err := r.damage(ctx, readData, func(what string) {
		if n++; n == 1 {
			first = what
		}
	})
	switch {
	case err != nil:
		return err
	case n == 1:
		return fmt.Errorf("%s: %w", first, fault.ErrCorrupt)
	case n > 1:
		return fmt.Errorf("%s (and %d more): %w", first, n-1, fault.ErrCorrupt)
	}
	return nil
}

// damage calls report for everything that is damaged. Its error is of the work, not of what was
// found.
func (r *Reader) damage(ctx context.Context, readData bool, report func(what string)) error {
	// found turns damage into a report.
	found := func(err error) error {
		if err != nil && errors.Is(err, fault.ErrCorrupt) {
			report(err.Error())
			return nil
		}
		return err
	}
	if r.surplus != "" {
		report(fmt.Sprintf("%s does not belong to the checkpoint", r.surplus))
	}
	var need idSet
	for n := range r.manifest.trees() {
		if err := found(r.needsOfTree(ctx, n, &need)); err != nil {
			return err
		}
	}
	images, err := r.needsOfImageList(ctx, &need)
	if err := found(err); err != nil {
		return err
	}
	for i := range images {
		if err := found(r.needsOfImage(ctx, &images[i], &need)); err != nil {
			return err
		}
	}
	bad, err := r.badChunks(ctx, need.list(), readData)
	if err != nil {
		return err
	}
	if len(bad) > 0 {
		return r.name(ctx, bad, report)
	}
	if !readData {
		return nil
	}
	if err := found(r.lengths(ctx)); err != nil {
		return err
	}
	// All chunks are right; only the image's digest proves that a recipe puts the right ones
	// together.
	for i := range images {
		im := &images[i]
		s, err := r.image(ctx, im)
		if err == nil {
			_, err = s.WriteTo(io.Discard)
			err = errors.Join(err, s.s.Close())
		}
		if err := found(err); err != nil {
			return err
		}
	}
	return nil
}

// badChunks returns, with the reason, the chunks that are not what they should be.
func (r *Reader) badChunks(ctx context.Context, ids []pack.ID, readData bool) (map[pack.ID]error, error) {
	bad := map[pack.ID]error{}
	var mu sync.Mutex
	for part := range slices.Chunk(ids, 1<<16) {
		var places []place
		gone, err := r.chunks.x.find(ctx, part, func(p place) error {
			if readData {
				places = append(places, p)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		for _, id := range gone {
			bad[id] = r.why(ctx, id)
		}
		if !readData {
			continue
		}
		slices.SortFunc(places, func(a, b place) int {
			return cmp.Or(cmp.Compare(a.pack, b.pack), cmp.Compare(a.blob.Off, b.blob.Off))
		})
		g, gctx := guard.WithContext(ctx)
		g.SetLimit(workers())
		for group := range slices.Chunk(places, 64) {
			g.Go(func() error {
				var room []byte
				for _, at := range group {
					if err := gctx.Err(); err != nil {
						return context.Cause(gctx)
					}
					b, err := r.chunks.loadPlace(gctx, at, room)
					if err == nil {
						room = b
						continue
					}
					if !errors.Is(err, fault.ErrCorrupt) {
						return err
					}
					mu.Lock()
					bad[at.blob.ID] = err
					mu.Unlock()
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			return nil, err
		}
	}
	return bad, nil
}

// why returns an error that says where a chunk ought to be.
func (r *Reader) why(ctx context.Context, id pack.ID) error {
	at, ok, err := r.s.locate(ctx, id)
	if err != nil || !ok {
		return fmt.Errorf("piece %s is in no pack", id)
	}
	row, _, err := r.chunks.x.pack(ctx, at.pack)
	if err != nil || row.name == "" {
		return fmt.Errorf("piece %s is in a pack that the index does not have", id)
	}
	return fmt.Errorf("piece %s: pack %s is missing or cut", id, row.name)
}

// name reports which files and images bad chunks damage.
func (r *Reader) name(ctx context.Context, bad map[pack.ID]error, report func(what string)) error {
	why := func(list []overlay.Chunk) error {
		for _, x := range list {
			if id, err := pack.ParseID(x.Digest); err == nil && bad[id] != nil {
				return bad[id]
			}
		}
		return nil
	}
	hurt := func(what string, list []overlay.Chunk) {
		if err := why(list); err != nil {
			report(fmt.Sprintf("%s: %v", what, err))
		}
	}
	for n := range r.manifest.trees() {
		list, err := r.list(ctx, n)
		if err != nil && !errors.Is(err, fault.ErrCorrupt) {
			return err
		}
		if err != nil || why(list.lines) != nil { // which was reported when it was read, as for recipes
			continue
		}
		where := r.manifest.place(n)
		err = r.entries(ctx, n, func(e overlay.Entry) error {
			if dataBytes(&e) == 0 {
				return nil
			}
			list := e.Chunks
			if list == nil {
				list = []overlay.Chunk{{Digest: e.Digest}}
			}
			hurt(where+e.Path, list)
			return nil
		})
		if err != nil && !errors.Is(err, fault.ErrCorrupt) { // which was reported
			return err
		}
	}
	images, err := r.Images(ctx)
	if err != nil && !errors.Is(err, fault.ErrCorrupt) { // which was reported
		return err
	}
	for i := range images {
		im := &images[i]
		what := "process image " + im.Name
		hurt(what, im.Chunks)
		hurt(what, im.Pages)
		if im.Recipe == nil || why(im.Recipe) != nil {
			continue
		}
		segs, err := r.recipe(ctx, im)
		if err != nil && !errors.Is(err, fault.ErrCorrupt) {
			return err
		}
		for i := range segs {
			if err := bad[segs[i].ID]; err != nil {
				report(fmt.Sprintf("%s: %v", what, err))
				break
			}
		}
	}
	return nil
}

// VerifyCheckpoint reads all of a checkpoint again; ErrCorrupt names what is damaged.
func (s *Store) VerifyCheckpoint(ctx context.Context, id string) error {
	r, err := s.OpenCheckpoint(ctx, id)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := r.Verify(ctx, true); err != nil {
		return fmt.Errorf("checkpoint %s: %w", id, err)
	}
	return nil
}
