package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	// reclaimLock keeps two processes from rearranging packs at once.
	reclaimLock     = ".reclaim"
	defaultMaxWaste = 0.25
	defaultWait     = 30 * time.Second
	rewriteBatch    = 256 << 20 // bytes of chunks that go into one new pack
	deadBatch       = 20000     // rows in one transaction
)

// ReclaimOptions modify Reclaim.
type ReclaimOptions struct {
	MaxWaste float64 // part of a pack that may be of no use before it is rewritten; 0: 0.25, 1: none is
	DryRun   bool
	Wait     time.Duration // at most, for drafts and readers to end; 0: 30 s
	// Progress is called now and then with bytes copied out of old packs. It may be nil.
	Progress func(done, total int64)
	// Rate bounds the bytes a second that are copied; 0: no bound.
	Rate int64
	// Yield never keeps newcomers out to have the store alone: it tries, within
	// Wait, until it happens to be.
	Yield bool
}

// Reclaimed is what a Reclaim did or, with DryRun, would do. Sizes are in bytes.
type Reclaimed struct {
	Before, After int64 // all packs
	Freed         int64
	Deleted       int   // packs without a chunk that is needed
	Rewritten     int   // packs above the waste limit
	Chunks        int64 // that left the index
	Notes         []string
}

// Reclaim deletes chunks that no checkpoint needs. Packs without needed chunks are removed;
// those with too much waste are rewritten without it.
//
// Drafts and readers go on, except for moments: Reclaim finds the needed chunks beside them;
// then, holding the store exclusively, it accounts for what they added meanwhile and removes
// the others from the index, so that no later draft counts on them; their data goes after
// that. Copies are made under the shared lock again, and the index changes over to them,
// under the exclusive one again, before the old packs go. A kill at any point costs no
// checkpoint anything; the next Sweep or Reclaim removes what it leaves.
//
// If the lists of a checkpoint cannot be read, Reclaim returns ErrCorrupt before it deletes
// anything, for the needs of that one are unknown. If drafts and readers do not leave a
// moment within Wait, it returns ErrBusy; what was done until then holds.
func (s *Store) Reclaim(ctx context.Context, o ReclaimOptions) (Reclaimed, error) {
	if o.MaxWaste == 0 {
		o.MaxWaste = defaultMaxWaste
	}
	if o.MaxWaste < 0 || o.MaxWaste > 1 {
		return Reclaimed{}, fmt.Errorf("a waste limit of %v: 0 to 1 are possible: %w", o.MaxWaste, fault.ErrInvalid)
	}
	if o.Wait <= 0 {
		o.Wait = defaultWait
	}
	one, err := s.rearrange(ctx, o.Wait)
	if err != nil {
		return Reclaimed{}, err
	}
	defer one.Unlock()
	c := &reclaim{s: s, o: o, done: map[string]bool{}}
	// Bytes removed from here on count for the next reclaim, and all of them do if this one
	// does not complete.
	removed, err := s.Removed(ctx)
	if err == nil {
		err = c.survey(ctx)
	}
	if err != nil {
		return Reclaimed{}, err
	}
	if o.DryRun {
		c.plan()
		for _, p := range c.dead {
			c.did.Freed += c.v.cat.packs[p].bytes
		}
		for _, p := range c.waste {
			c.did.Freed += c.v.cat.packs[p].bytes - c.bytes[p]
		}
		c.did.Deleted, c.did.Rewritten, c.did.Chunks = len(c.dead), len(c.waste), int64(len(c.rows()))
		c.did.After = c.did.Before - c.did.Freed
		return c.did, nil
	}
	err = c.drop(ctx)
	for err == nil && len(c.waste) > 0 {
		err = c.rewrite(ctx)
	}
	if err == nil {
		err = s.forgetRemoved(ctx, removed)
	}
	if after, sizeErr := s.packBytes(ctx); sizeErr == nil {
		c.did.After = after
		c.did.Freed = c.did.Before - after
	}
	return c.did, err
}

// Removed returns how many bytes the checkpoints had brought that were removed
// since the last Reclaim: at most so much of what the packs have can be waste.
func (r *records) Removed(ctx context.Context) (n int64, err error) {
	err = r.read.QueryRowContext(ctx, "SELECT bytes FROM removed").Scan(&n)
	return n, cancelled(ctx, dbError("read the index", err))
}

func (r *records) forgetRemoved(ctx context.Context, n int64) error {
	return r.write(ctx, "reclaim", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE removed SET bytes = max(0, bytes - ?)", n)
		return err
	})
}

// rearrange takes the right to move chunks between packs.
func (s *Store) rearrange(ctx context.Context, wait time.Duration) (*Lock, error) {
	l, err := s.flock(ctx, reclaimLock, "reclaim", wait)
	if errors.Is(err, fault.ErrBusy) {
		return nil, &fault.Error{Op: "the store is busy", Hint: "Wait for it to finish, or try again.",
			Err: fmt.Errorf("space is being reclaimed, or the index made anew, by another process: %w", fault.ErrBusy)}
	}
	return l, err
}

func (x *packs) packBytes(ctx context.Context) (n int64, err error) {
	err = x.read.QueryRowContext(ctx, "SELECT coalesce(sum(bytes), 0) FROM packs").Scan(&n)
	return n, cancelled(ctx, dbError("read the index", err))
}

// reclaim is one Reclaim under way.
type reclaim struct {
	s    *Store
	o    ReclaimOptions
	v    *survey
	did  Reclaimed
	done map[string]bool // checkpoints that were surveyed

	live  bitset   // chunks of the catalog
	bytes []int64  // pack -> its size with live chunks only
	dead  []uint32 // packs
	waste []uint32 // packs to be rewritten

	copied, total int64
	began         time.Time // the first copy
}

// survey marks the needed chunks, under the shared lock.
func (c *reclaim) survey(ctx context.Context) error {
	l, err := c.s.share(ctx, "reclaim")
	if err != nil {
		return err
	}
	defer l.Unlock()
	cat, err := c.s.loadCatalog(ctx)
	if err != nil {
		return err
	}
	c.v = newSurvey(cat)
	c.live = newBitset(len(cat.ids))
	if c.did.Before, err = c.s.packBytes(ctx); err != nil {
		return err
	}
	return c.mark(ctx)
}

// mark adds the needs of checkpoints that were not surveyed yet. A needed chunk that is not in
// the catalog was added after it, and is not touched.
func (c *reclaim) mark(ctx context.Context) error {
	list, err := c.s.checkpoints(ctx, "WHERE status IN ('ready', 'pending') ORDER BY seq")
	if err != nil {
		return err
	}
	for _, k := range list {
		if c.done[k.ID] {
			continue
		}
		n, damage, err := c.needs(ctx, k)
		switch {
		case errors.Is(err, fault.ErrState) || errors.Is(err, fault.ErrNotFound):
			continue // removed meanwhile, or not published yet: it will be examined again
		case err != nil:
			return err
		case len(damage) > 0:
			return &fault.Error{Op: "reclaim",
				Hint: fmt.Sprintf("See what is hurt with agentbox verify, and remove it with agentbox checkpoint rm %.12s; then try again.", k.ID),
				Err: fmt.Errorf("what checkpoint %s needs is not known, so nothing was deleted: %w", k.ID,
					errors.Join(damage...))}
		}
		c.v.each(n, newBitset(c.v.size()), func(i uint32) {
			if int(i) < len(c.v.cat.ids) {
				c.live.add(i)
			} else if at, ok := c.v.cat.find(c.v.absents[int(i)-len(c.v.cat.ids)]); ok {
				c.live.add(at) // it is there with another length
			}
		})
		c.done[k.ID] = true
	}
	return nil
}

func (c *reclaim) needs(ctx context.Context, k Checkpoint) (n needed, damage []error, err error) {
	if k.Status == Ready {
		n, damage, _, err = c.v.open(ctx, c.s, k.ID)
		return n, damage, err
	}
	// A checkpoint that a killed process published and did not record is going to be completed
	// if it can be.
	there, err := exists(filepath.Join(c.s.published(k.ID), ManifestName))
	if err == nil && !there {
		err = fault.ErrNotFound
	}
	if err != nil {
		return n, nil, err
	}
	r, err := c.s.openPublished(k.ID)
	if err == nil {
		defer r.chunks.close()
		if _, err = c.s.adopt(ctx, r.chunks); err == nil {
			// Damage keeps it from being completed; whatever it needs beside that stays.
			n, _, err = c.v.checkpoint(ctx, r)
		}
	}
	switch {
	case errors.Is(err, fault.ErrCorrupt):
		err = nil // it will be discarded
	case errors.Is(err, os.ErrNotExist):
		err = fmt.Errorf("%w: %w", fault.ErrNotFound, err) // it was given up just now
	}
	return n, nil, err
}

// plan decides about each pack.
func (c *reclaim) plan() {
	cat := c.v.cat
	c.bytes, c.dead, c.waste, c.total = cat.liveBytes(c.live), nil, nil, 0
	for p := range cat.packs {
		row := cat.packs[p]
		switch {
		case row.name == "":
		case c.bytes[p] == 0:
			c.dead = append(c.dead, uint32(p))
		case float64(row.bytes-c.bytes[p]) > c.o.MaxWaste*float64(row.bytes):
			c.waste = append(c.waste, uint32(p))
			c.total += c.bytes[p] - pack.Overhead
		}
	}
}

// rows lists the chunks that are not needed in packs that go or change.
func (c *reclaim) rows() (list []uint32) {
	touched := newBitset(len(c.v.cat.packs))
	for _, p := range slices.Concat(c.dead, c.waste) {
		touched.add(p)
	}
	for i := range c.v.cat.slots {
		if p := c.v.cat.slots[i].pack; p != noPack && touched.has(p) && !c.live.has(uint32(i)) {
			list = append(list, uint32(i))
		}
	}
	return list
}

// drop takes what is not needed out of the index, and the packs of which
// nothing is needed away.
func (c *reclaim) drop(ctx context.Context) error {
	if err := failpoint.Hit("store.reclaim.before-drop"); err != nil {
		return err
	}
	l, err := c.alone(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	// From here on there are no drafts, and what all earlier ones committed is ready.
	if err := c.mark(ctx); err != nil {
		return err
	}
	c.plan()
	if err := failpoint.Hit("store.reclaim.before-rows"); err != nil {
		return err
	}
	cat := c.v.cat
	for part := range slices.Chunk(c.rows(), deadBatch) {
		slices.SortFunc(part, func(a, b uint32) int {
			return cmp.Or(cmp.Compare(cat.slots[a].pack, cat.slots[b].pack), cmp.Compare(a, b))
		})
		// A draft that found its pack lost may have put the chunk into another one.
		err := c.s.release(ctx, "forget pieces", func(tx *sql.Tx) error { return deleteRows(ctx, tx, cat, part) })
		if err != nil {
			return err
		}
		c.did.Chunks += int64(len(part))
		if err := failpoint.Hit("store.reclaim.between-rows"); err != nil {
			return err
		}
	}
	var gone []packRow
	err = c.s.release(ctx, "forget packs", func(tx *sql.Tx) error {
		gone = gone[:0]
		for _, p := range c.dead {
			ok, err := forgetPack(ctx, tx, cat.packs[p].num)
			if err != nil {
				return err
			}
			if ok {
				gone = append(gone, cat.packs[p])
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("store.reclaim.after-rows"); err != nil {
		return err
	}
	// Still alone: a draft could make a pack of the very same chunks, and so of
	// the same name.
	for _, row := range gone {
		if err := c.s.removePack(row.name); err != nil {
			return err
		}
		c.did.Deleted++
	}
	return nil
}

func deleteRows(ctx context.Context, tx *sql.Tx, cat *catalog, part []uint32) error {
	for len(part) > 0 {
		p := cat.slots[part[0]].pack
		n := 0
		args := []any{cat.packs[p].num}
		for n < len(part) && n < findBatch && cat.slots[part[n]].pack == p {
			args = append(args, cat.ids[part[n]][:])
			n++
		}
		_, err := tx.ExecContext(ctx, "DELETE FROM blobs WHERE pack = ? AND id IN (?"+
			strings.Repeat(",?", n-1)+")", args...)
		if err != nil {
			return err
		}
		part = part[n:]
	}
	return nil
}

// forgetPack removes the row of a pack that no chunk is in, and reports whether it did.
func forgetPack(ctx context.Context, tx *sql.Tx, num int64) (bool, error) {
	res, err := tx.ExecContext(ctx, "DELETE FROM packs WHERE num = ?1 AND NOT EXISTS (SELECT 1 FROM blobs WHERE pack = ?1)", num)
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// removePack deletes the file of a pack that has no row any more.
func (d *dirs) removePack(name string) error {
	if err := failpoint.Hit("store.reclaim.before-remove"); err != nil {
		return err
	}
	if err := os.Remove(pack.Path(d.packsDir(), name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// rewrite puts the needed chunks of some packs into a new one.
func (c *reclaim) rewrite(ctx context.Context) error {
	n, size := 0, int64(0)
	for n < len(c.waste) && (n == 0 || size+c.bytes[c.waste[n]] <= rewriteBatch) {
		size += c.bytes[c.waste[n]]
		n++
	}
	batch := c.waste[:n]
	c.waste = c.waste[n:]
	info, num, err := c.copy(ctx, batch)
	if err != nil {
		return err
	}
	if err := failpoint.Hit("store.reclaim.before-switch"); err != nil {
		return err
	}
	l, err := c.alone(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	var gone []packRow
	err = c.s.release(ctx, "change over to a new pack", func(tx *sql.Tx) error {
		gone = gone[:0]
		if err := c.change(ctx, tx, batch, info, num); err != nil {
			return err
		}
		for _, p := range batch {
			ok, err := forgetPack(ctx, tx, c.v.cat.packs[p].num)
			if err != nil {
				return err
			}
			if ok {
				gone = append(gone, c.v.cat.packs[p])
			}
		}
		return failpoint.Hit("store.reclaim.in-switch")
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("store.reclaim.after-switch"); err != nil {
		return err
	}
	for _, row := range gone {
		if err := c.s.removePack(row.name); err != nil {
			return err
		}
		c.did.Rewritten++
	}
	return nil
}

// copy makes the new pack, durable and recorded, with nothing in it as far as
// the index knows. num is 0 when there was nothing that could be copied.
func (c *reclaim) copy(ctx context.Context, batch []uint32) (info pack.Info, num int64, err error) {
	l, err := c.s.share(ctx, "reclaim")
	if err != nil {
		return info, 0, err
	}
	defer l.Unlock()
	if err := failpoint.Hit("store.reclaim.before-copy"); err != nil {
		return info, 0, err
	}
	w, err := pack.Create(c.s.packsDir())
	if err != nil {
		return info, 0, err
	}
	defer func() { err = errors.Join(err, w.Abort()) }()
	if c.began.IsZero() {
		c.began = time.Now()
	}
	for _, p := range batch {
		err := c.copyPack(ctx, w, p)
		if errors.Is(err, fault.ErrCorrupt) || errors.Is(err, os.ErrNotExist) || unreadable(err) {
			c.did.Notes = append(c.did.Notes, fmt.Sprintf("pack %s stays: %v", c.v.cat.packs[p].name, err))
			continue
		}
		if err != nil {
			return info, 0, err
		}
	}
	if info, err = w.Finish(); err != nil || info.Name == "" {
		return info, 0, err
	}
	path := pack.Path(c.s.packsDir(), info.Name)
	if err := makeDir(filepath.Dir(path)); err != nil {
		return info, 0, err
	}
	if err := failpoint.Hit("store.reclaim.before-rename"); err != nil {
		return info, 0, err
	}
	if err := os.Rename(info.Temp, path); err != nil {
		return info, 0, err
	}
	if err := fsx.SyncDir(filepath.Dir(path)); err != nil {
		return info, 0, err
	}
	if err := failpoint.Hit("store.reclaim.before-row"); err != nil {
		return info, 0, err
	}
	// Without a row it would be swept as soon as the lock is let go.
	err = c.s.write(ctx, "record a pack", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx,
			"INSERT INTO packs (name, bytes, created) VALUES (?,?,?) ON CONFLICT (name) DO NOTHING", info.Name,
			info.Bytes, time.Now().UnixNano())
		if err != nil {
			return err
		}
		return tx.QueryRowContext(ctx, "SELECT num FROM packs WHERE name = ?", info.Name).Scan(&num)
	})
	return info, num, err
}

// copyPack copies the needed chunks of a pack as they are stored, each proven.
func (c *reclaim) copyPack(ctx context.Context, w *pack.Writer, p uint32) error {
	cat := c.v.cat
	var list []uint32
	for i := range cat.slots {
		if cat.slots[i].pack == p && c.live.has(uint32(i)) {
			list = append(list, uint32(i))
		}
	}
	slices.SortFunc(list, func(a, b uint32) int { return cmp.Compare(cat.slots[a].off, cat.slots[b].off) })
	f, err := os.Open(pack.Path(c.s.packsDir(), cat.packs[p].name))
	if err != nil {
		return err
	}
	defer f.Close()
	var bad error
	var room []byte
	for _, i := range list {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		b := cat.blob(i)
		if b.Stored > pack.MaxChunk {
			return fmt.Errorf("index: piece %s of %d bytes: %w", b.ID, b.Stored, fault.ErrCorrupt)
		}
		room = slices.Grow(room[:0], int(b.Stored))[:b.Stored]
		if _, err := f.ReadAt(room, b.Off); err != nil {
			if !unreadable(err) {
				err = fmt.Errorf("piece %s: %w: %w", b.ID, fault.ErrCorrupt, err)
			}
			bad = cmp.Or(bad, err)
			continue
		}
		err := w.AddStored(b, room)
		if errors.Is(err, fault.ErrCorrupt) {
			bad = cmp.Or(bad, err)
			continue
		}
		if err != nil {
			return err
		}
		if c.copied += int64(b.Stored) + pack.ChunkOverhead; c.o.Progress != nil {
			c.o.Progress(min(c.copied, c.total), c.total)
		}
		if err := c.pace(ctx); err != nil {
			return err
		}
	}
	return bad
}

// change lets the index find the copied chunks in the new pack.
func (c *reclaim) change(ctx context.Context, tx *sql.Tx, batch []uint32, info pack.Info, num int64) error {
	if num == 0 {
		return nil
	}
	var old []string
	for _, p := range batch {
		old = append(old, fmt.Sprint(c.v.cat.packs[p].num))
	}
	st, err := tx.PrepareContext(ctx,
		"UPDATE blobs SET pack = ?, off = ?, stored = ?, raw = ?, packed = ? WHERE id = ? AND pack IN ("+
			strings.Join(old, ",")+")")
	if err != nil {
		return err
	}
	defer st.Close()
	for i := range info.Blobs {
		b := &info.Blobs[i]
		if _, err := st.ExecContext(ctx, num, b.Off, b.Stored, b.Raw, b.Packed, b.ID[:]); err != nil {
			return err
		}
	}
	return nil
}
