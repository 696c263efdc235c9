package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Usage is the space that the store takes. Sizes are in bytes.
type Usage struct {
	Stored      int64 // all packs
	Raw         int64 // what the chunks in them unpack to
	Logical     int64 // every file and page of each checkpoint, as if nothing were shared or compressed
	Waste       int64 // of Stored, what no checkpoint needs
	Packs       int
	Chunks      int64
	Checkpoints []CheckpointUsage // newest first
}

// CheckpointUsage is the space of one checkpoint, its manifest included.
type CheckpointUsage struct {
	Checkpoint Checkpoint
	Needs      int64 // at rest, chunks shared with others included
	Unique     int64 // of that, what is freed if only this one is removed
	// Unread says that its lists are damaged: Needs is what its record says,
	// Unique is 0, and what it needs may count as waste.
	Unread bool
}

// Sizes knows what checkpoints need, as it was in one moment.
type Sizes struct {
	v      *survey
	list   []Checkpoint // newest first
	needs  []needed     // of each in list
	own    []int64      // manifest bytes
	data   []int64      // of files and pages
	unread []bool
	at     map[string]int
}

// Sizes reads the lists of all ready checkpoints.
func (s *Store) Sizes(ctx context.Context) (*Sizes, error) {
	l, err := s.share(ctx, "df")
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	// Checkpoints first: what they need is then in the index.
	list, err := s.Checkpoints(ctx, Filter{})
	if err != nil {
		return nil, err
	}
	cat, err := s.loadCatalog(ctx)
	if err != nil {
		return nil, err
	}
	z := &Sizes{v: newSurvey(cat), at: map[string]int{}}
	for _, c := range list {
		n, damage, r, err := z.v.open(ctx, s, c.ID)
		if errors.Is(err, fault.ErrState) || errors.Is(err, fault.ErrNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		var own, data int64
		if r != nil {
			own, data = r.size, logical(&r.manifest)
		}
		z.at[c.ID] = len(z.list)
		z.list, z.needs, z.own, z.data, z.unread = append(z.list, c), append(z.needs, n), append(z.own, own),
			append(z.data, data), append(z.unread, len(damage) > 0)
	}
	return z, nil
}

// open reads what a ready checkpoint needs. Whatever is damaged is in damage,
// and r is nil when that is the manifest; err is of the work, or says that the
// checkpoint is not, or not any more, a ready one.
func (v *survey) open(ctx context.Context, s *Store, id string) (n needed, damage []error, r *Reader, err error) {
	r, err = s.openReady(ctx, id)
	if err != nil && (errors.Is(err, fault.ErrCorrupt) || unreadable(err)) {
		// It may have been removed between the two looks.
		list, again := s.checkpoints(ctx, "WHERE id = ?", id)
		switch {
		case again != nil:
			return n, nil, nil, again
		case len(list) == 0:
			return n, nil, nil, fmt.Errorf("checkpoint %s: %w", id, fault.ErrNotFound)
		case list[0].Status != Ready:
			return n, nil, nil, fmt.Errorf("checkpoint %s is %s: %w", id, list[0].Status, fault.ErrState)
		}
		return n, []error{err}, nil, nil
	}
	if err != nil {
		return n, nil, nil, err
	}
	defer r.chunks.close()
	n, damage, err = v.checkpoint(ctx, r)
	return n, damage, r, err
}

// logical returns the size of a checkpoint before anything is shared.
func logical(m *Manifest) (n int64) {
	for _, t := range m.trees() {
		n += t.Data
	}
	return n + m.Processes.Bytes()
}

// IDs are those of the checkpoints whose sizes these are, newest first.
func (z *Sizes) IDs() []string {
	ids := make([]string, len(z.list))
	for i, c := range z.list {
		ids[i] = c.ID
	}
	return ids
}

// Of returns how many bytes a set of checkpoints needs at rest; shared bytes count once. A
// checkpoint that was not ready at that moment needs none: it has come or gone since its
// caller looked.
func (z *Sizes) Of(ids []string) int64 {
	n := z.Packed(ids)
	for _, id := range ids {
		if k, ok := z.at[id]; ok {
			n += z.own[k]
		}
	}
	return n
}

// AtMost is no less than what Sizes would say of these checkpoints, as they were
// read, and costs next to nothing: what each of them needs added up, or all that
// there is and their manifests.
func (s *Store) AtMost(ctx context.Context, rows []Checkpoint) (int64, error) {
	all, err := s.packBytes(ctx)
	if err != nil {
		return 0, err
	}
	var each int64
	for _, c := range rows {
		each += c.Bytes
		if c.Damaged != "" {
			all += c.Bytes // which counts, whatever is there
		} else if info, err := os.Lstat(filepath.Join(s.published(c.ID), ManifestName)); err == nil {
			all += info.Size()
		}
	}
	return min(each, all), nil
}

// Packed is that without the manifests, which are no part of Usage.Stored.
func (z *Sizes) Packed(ids []string) int64 {
	seen, groups := newBitset(z.v.size()), newBitset(len(z.v.groups))
	var n int64
	for _, id := range ids {
		k, ok := z.at[id]
		if !ok {
			continue
		}
		if z.unread[k] {
			n += z.list[k].Bytes
			continue
		}
		part := needed{chunks: z.needs[k].chunks}
		for _, g := range z.needs[k].groups {
			if groups.addNew(g) {
				part.groups = append(part.groups, g)
			}
		}
		z.v.each(part, seen, func(i uint32) { n += z.v.stored(i) })
	}
	return n
}

// stored returns the size of a chunk in its pack; 0, if it is in none.
func (v *survey) stored(i uint32) int64 {
	if int(i) >= len(v.cat.slots) {
		return 0
	}
	return int64(v.cat.slots[i].stored)
}

// Usage returns what space is used for. Space that only a damaged checkpoint needs counts as
// wasted when its lists cannot be read.
func (s *Store) Usage(ctx context.Context) (Usage, error) {
	z, err := s.Sizes(ctx)
	if err != nil {
		return Usage{}, err
	}
	cat := z.v.cat
	u := Usage{Packs: len(cat.packs), Chunks: int64(len(cat.ids))}
	for i := range cat.slots {
		u.Raw += int64(cat.slots[i].raw &^ packedBit)
	}
	const several = 1<<32 - 1
	owner := make([]uint32, z.v.size())
	for k := range z.list {
		x := CheckpointUsage{Checkpoint: z.list[k], Needs: z.own[k], Unread: z.unread[k]}
		z.v.each(z.needs[k], newBitset(z.v.size()), func(i uint32) {
			x.Needs += z.v.stored(i)
			if owner[i] == 0 {
				owner[i] = uint32(k) + 1
			} else {
				owner[i] = several
			}
		})
		if x.Unread {
			x.Needs = z.list[k].Bytes
		} else {
			x.Unique = z.own[k]
		}
		u.Logical += z.data[k]
		u.Checkpoints = append(u.Checkpoints, x)
	}
	live := newBitset(len(cat.ids))
	for i := range cat.slots {
		if owner[i] == 0 {
			continue
		}
		live.add(uint32(i))
		if k := owner[i]; k != several && !z.unread[k-1] {
			u.Checkpoints[k-1].Unique += z.v.stored(uint32(i))
		}
	}
	for p, needs := range cat.liveBytes(live) {
		u.Stored += cat.packs[p].bytes
		u.Waste += max(0, cat.packs[p].bytes-needs)
	}
	return u, nil
}

// liveBytes returns how long each pack would be if it held its live chunks only;
// without any, there would be none.
func (c *catalog) liveBytes(live bitset) []int64 {
	n := make([]int64, len(c.packs))
	for i := range c.slots {
		x := &c.slots[i]
		if x.pack == noPack || !live.has(uint32(i)) {
			continue
		}
		if n[x.pack] == 0 {
			n[x.pack] = pack.Overhead
		}
		n[x.pack] += int64(x.stored) + pack.ChunkOverhead
	}
	return n
}
