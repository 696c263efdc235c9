package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	maxWhat  = 100  // lines on the damage of one checkpoint
	maxNotes = 1000 // on damage that hurts none
	maxMark  = 1 << 10
)

// VerifyOptions modify VerifyAll.
type VerifyOptions struct {
	IDs []string // of ready checkpoints; none: all of them, and all packs
	// ReadData reads and proves every byte. Without it the lists of files are
	// read, and that every chunk lies in a pack with a sound footer is proven.
	ReadData bool
	// Progress is called now and then, with bytes at rest when data is read,
	// else with checkpoints. It may be nil.
	Progress func(done, total int64)
}

// VerifyReport is the result of VerifyAll.
type VerifyReport struct {
	Checkpoints int   // examined
	Chunks      int64 // proven to be there or, with ReadData, read
	Bytes       int64 // of those, at rest
	Damaged     []Damage
	Notes       []string // damage that hurts no checkpoint
}

// Damage is the damage of one checkpoint.
type Damage struct {
	Checkpoint Checkpoint
	What       []string // what is damaged and why, one sentence each; at most 100
}

// VerifyAll proves checkpoints, and marks the damaged ones in their records. It
// takes away marks that are no longer true: a mark that only reading data can
// refute is held against the data. Damage is in the report; an error means that the work could
// not be done. An id that is not of a ready checkpoint is ErrNotFound.
func (s *Store) VerifyAll(ctx context.Context, o VerifyOptions) (VerifyReport, error) {
	l, err := s.share(ctx, "verify")
	if err != nil {
		return VerifyReport{}, err
	}
	defer l.Unlock()
	list, err := s.Checkpoints(ctx, Filter{})
	if err != nil {
		return VerifyReport{}, err
	}
	if len(o.IDs) > 0 {
		all := list
		list = nil
		for _, id := range o.IDs {
			i := slices.IndexFunc(all, func(c Checkpoint) bool { return c.ID == id })
			if i < 0 {
				return VerifyReport{}, fmt.Errorf("ready checkpoint %q: %w", id, fault.ErrNotFound)
			}
			list = append(list, all[i])
		}
	}
	cat, err := s.loadCatalog(ctx)
	if err != nil {
		return VerifyReport{}, err
	}
	v := &verification{s: s, o: o, v: newSurvey(cat), p: newChunks(newIndex(s.packs)), why: map[uint32]error{}}
	defer v.p.close()
	return v.run(ctx, list)
}

type verification struct {
	s      *Store
	o      VerifyOptions
	v      *survey
	p      *chunks
	report VerifyReport

	proven []bool   // pack -> its footer says what the index says, or nothing was looked at
	packs  []string // pack -> what is wrong with it

	mu   sync.Mutex
	why  map[uint32]error // chunk -> what is wrong with it
	read bitset           // chunks that were read
	done int64
}

type subject struct {
	c      Checkpoint
	n      needed
	damage []error
}

func (v *verification) run(ctx context.Context, list []Checkpoint) (VerifyReport, error) {
	var subjects []subject
	for i, c := range list {
		n, damage, _, err := v.v.open(ctx, v.s, c.ID)
		if errors.Is(err, fault.ErrState) || errors.Is(err, fault.ErrNotFound) {
			continue // removed meanwhile
		}
		if err != nil {
			return v.report, err
		}
		subjects = append(subjects, subject{c, n, damage})
		if !v.o.ReadData {
			v.progress(int64(i+1), int64(len(list)))
		}
	}
	v.report.Checkpoints = len(subjects)
	cat := v.v.cat
	needs := newBitset(v.v.size())
	for i := range subjects {
		v.v.each(subjects[i].n, needs, func(uint32) {})
	}
	look := newBitset(len(cat.ids)) // at these chunks
	for i := range cat.ids {
		if len(v.o.IDs) == 0 || needs.has(uint32(i)) {
			look.add(uint32(i))
		}
	}
	if err := v.footers(ctx, look); err != nil {
		return v.report, err
	}
	v.read = newBitset(len(cat.ids))
	deep := newBitset(len(cat.ids))
	if v.o.ReadData {
		deep = look
	} else {
		for i := range subjects {
			if subjects[i].c.Damaged != "" {
				v.v.each(subjects[i].n, newBitset(v.v.size()), func(i uint32) {
					if int(i) < len(cat.ids) {
						deep.add(i)
					}
				})
			}
		}
	}
	if err := v.data(ctx, deep); err != nil {
		return v.report, err
	}
	for i := range cat.ids {
		if n := uint32(i); look.has(n) {
			v.report.Chunks++
			v.report.Bytes += int64(cat.slots[i].stored)
			if err := v.bad(n); err != nil && !needs.has(n) {
				v.note("%v; no checkpoint that was looked at needs it", err)
			}
		}
	}
	if err := v.shun(ctx); err != nil {
		return v.report, err
	}
	for i := range subjects {
		if err := v.judge(ctx, &subjects[i]); err != nil {
			return v.report, err
		}
	}
	return v.report, nil
}

func (v *verification) note(format string, args ...any) {
	switch n := len(v.report.Notes); {
	case n < maxNotes:
		v.report.Notes = append(v.report.Notes, fmt.Sprintf(format, args...))
	case n == maxNotes:
		v.report.Notes = append(v.report.Notes, "There is more.")
	}
}

func (v *verification) progress(done, total int64) {
	if v.o.Progress != nil {
		v.o.Progress(done, total)
	}
}

// footers holds each pack against the index.
func (v *verification) footers(ctx context.Context, look bitset) error {
	cat := v.v.cat
	v.proven, v.packs = make([]bool, len(cat.packs)), make([]string, len(cat.packs))
	counts := make([]int64, len(cat.packs))
	wanted := make([]bool, len(cat.packs))
	for i := range cat.slots {
		if p := cat.slots[i].pack; p != noPack {
			counts[p]++
			wanted[p] = wanted[p] || look.has(uint32(i))
		}
	}
	for p := range cat.packs {
		if cat.packs[p].name == "" || !wanted[p] && len(v.o.IDs) > 0 {
			continue
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		err := v.footer(ctx, uint32(p), counts[p])
		switch {
		case err == nil:
			v.proven[p] = true
		case errors.Is(err, fault.ErrCorrupt) || errors.Is(err, os.ErrNotExist) || unreadable(err):
			v.packs[p] = err.Error()
			// If data is not read, this counts against the checkpoints that need the chunks.
			if v.o.ReadData || counts[p] == 0 {
				v.note("pack %s: %v", cat.packs[p].name, err)
			}
		default:
			return err
		}
	}
	if len(v.o.IDs) > 0 {
		return nil
	}
	stray, err := v.s.strayPacks(ctx)
	for _, name := range stray {
		// It may be that of a checkpoint under way.
		if f, err := v.p.open(pack.Path(v.s.packsDir(), name)); err == nil {
			if _, err := pack.Open(f.f); err != nil {
				v.note("pack %s, which is not in the index: %v", name, err)
			}
			v.p.done(f)
		}
	}
	return err
}

// footer proves that a pack has exactly the chunks that the index has in it; it
// may have more, which the index has elsewhere or not any more.
func (v *verification) footer(ctx context.Context, p uint32, count int64) error {
	cat := v.v.cat
	row := cat.packs[p]
	f, err := v.p.open(pack.Path(v.s.packsDir(), row.name))
	if err != nil {
		return err
	}
	defer v.p.done(f)
	r, err := pack.Open(f.f)
	if err != nil {
		return err
	}
	if r.Name() != row.name || r.Bytes() != row.bytes {
		return fmt.Errorf("it is pack %s of %d bytes, the index has %d: %w", r.Name(), r.Bytes(),
			row.bytes, fault.ErrCorrupt)
	}
	var others []pack.Blob
	err = r.Each(func(b pack.Blob) error {
		if i, ok := cat.find(b.ID); ok && cat.slots[i].pack == p && cat.blob(i) == b {
			count--
		} else if v.o.ReadData && len(v.o.IDs) == 0 && len(others) < 1<<20 {
			others = append(others, b)
		}
		return nil
	})
	if err == nil && count != 0 {
		err = fmt.Errorf("%d pieces are not where the index has them: %w", count, fault.ErrCorrupt)
	}
	if err != nil {
		return err
	}
	var room []byte
	for _, b := range others {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		got, err := r.Read(b, room)
		if err != nil {
			v.note("pack %s: %v; it is not used from there", row.name, err)
			continue
		}
		room = got
	}
	return nil
}

// data reads chunks, pack by pack.
func (v *verification) data(ctx context.Context, which bitset) error {
	cat := v.v.cat
	order := make([]uint32, 0, which.count())
	var total int64
	for i := range cat.slots {
		if which.has(uint32(i)) && cat.slots[i].pack != noPack {
			order = append(order, uint32(i))
			total += int64(cat.slots[i].stored)
		}
	}
	slices.SortFunc(order, func(a, b uint32) int {
		x, y := &cat.slots[a], &cat.slots[b]
		return cmp.Or(cmp.Compare(x.pack, y.pack), cmp.Compare(x.off, y.off))
	})
	g, gctx := guard.WithContext(ctx)
	g.SetLimit(workers())
	for group := range slices.Chunk(order, 64) {
		if gctx.Err() != nil {
			break
		}
		g.Go(func() error { return v.chunks(gctx, group, total) })
	}
	return g.Wait()
}

func (v *verification) chunks(ctx context.Context, group []uint32, total int64) error {
	cat := v.v.cat
	var room []byte
	for _, i := range group {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		x := &cat.slots[i]
		got, err := v.p.loadBlob(pack.Path(v.s.packsDir(), cat.packs[x.pack].name), cat.blob(i), room)
		switch {
		case err == nil:
			room = got
		case errors.Is(err, fault.ErrCorrupt) || unreadable(err):
			err = fmt.Errorf("pack %s: %w", cat.packs[x.pack].name, err)
		default:
			return err
		}
		v.mu.Lock()
		v.read.add(i)
		if err != nil {
			v.why[i] = err
		}
		if v.done += int64(x.stored); v.o.ReadData {
			v.progress(v.done, total)
		}
		v.mu.Unlock()
	}
	return nil
}

// bad returns what is wrong with a chunk. When all data is read, a chunk is judged by its data
// alone: with it, a pack is of use whatever its footer says.
func (v *verification) bad(i uint32) error {
	cat := v.v.cat
	if int(i) >= len(cat.ids) {
		return fmt.Errorf("piece %s is in no pack, or has another length there", v.v.absents[int(i)-len(cat.ids)])
	}
	if err := v.why[i]; err != nil || v.o.ReadData && v.read.has(i) {
		return err
	}
	p := cat.slots[i].pack
	switch {
	case p == noPack:
		return fmt.Errorf("piece %s is in a pack that the index does not have", cat.ids[i])
	case !v.proven[p]:
		return fmt.Errorf("piece %s: pack %s: %s", cat.ids[i], cat.packs[p].name, v.packs[p])
	}
	return nil
}

// judge finds what is wrong with one checkpoint, and marks it or removes the mark.
func (v *verification) judge(ctx context.Context, x *subject) error {
	d := Damage{Checkpoint: x.c}
	say := func(what string) {
		switch n := len(d.What); {
		case n < maxWhat-1:
			d.What = append(d.What, what)
		case n == maxWhat-1:
			d.What = append(d.What, "There is more.")
		}
	}
	for _, err := range x.damage {
		say(err.Error())
	}
	bad := map[pack.ID]error{}
	v.v.each(x.n, newBitset(v.v.size()), func(i uint32) {
		if err := v.bad(i); err != nil && int(i) < len(v.v.cat.ids) {
			bad[v.v.cat.ids[i]] = err
		} else if err != nil {
			bad[v.v.absents[int(i)-len(v.v.cat.ids)]] = err
		}
	})
	r, err := v.s.openReady(ctx, x.c.ID)
	if err == nil {
		if r.surplus != "" {
			say(fmt.Sprintf("%s does not belong to the checkpoint", r.surplus))
		}
		if len(bad) > 0 {
			err = r.name(ctx, bad, say)
		}
		r.chunks.close()
		if len(bad) > 0 && len(d.What) == 0 {
			// A part of a list that could be read a moment ago, for instance.
			for _, err := range bad {
				say(err.Error())
				break
			}
		}
	}
	if err != nil && !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrState) &&
		!errors.Is(err, fault.ErrNotFound) && !unreadable(err) {
		return err
	}
	mark := ""
	if len(d.What) > 0 {
		mark = strings.ToValidUTF8(d.What[0][:min(len(d.What[0]), maxMark)], "?")
		d.Checkpoint.Damaged = mark
		v.report.Damaged = append(v.report.Damaged, d)
	}
	if mark == x.c.Damaged {
		return nil
	}
	return v.s.write(ctx, "mark a checkpoint", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx,
			"UPDATE checkpoints SET damaged = ? WHERE id = ? AND status = 'ready'", mark, x.c.ID)
		return err
	})
}

// shun marks the chunks that could be read and are not what they must be, so
// that no later checkpoint counts on them.
func (v *verification) shun(ctx context.Context) error {
	if len(v.why) == 0 {
		return nil
	}
	err := v.s.write(ctx, "mark pieces", func(tx *sql.Tx) error {
		for i := range v.why {
			x := &v.v.cat.slots[i]
			_, err := tx.ExecContext(ctx, "UPDATE blobs SET bad = 1 WHERE id = ? AND off = ? AND stored = ?",
				v.v.cat.ids[i][:], x.off, x.stored)
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return v.s.dropIndexCaches() // which know nothing of it
}

// unreadable knows the errors by which a disk says that it lost something.
func unreadable(err error) bool {
	return errors.Is(err, syscall.EIO) || errors.Is(err, syscall.EUCLEAN)
}
