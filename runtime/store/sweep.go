package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// freshLock is how long a lock file of no known sandbox is left alone.
const freshLock = time.Minute

// RemoveCheckpoint removes a checkpoint in any state, and its tags. Its children, and
// sandboxes whose head it was, get its parent instead. The chunks stay until they are
// reclaimed, so a current reader is not disturbed. Idempotent; after a crash Sweep or
// another call finishes the removal.
func (s *Store) RemoveCheckpoint(ctx context.Context, id string) error {
	_, err := s.remove(ctx, id, "")
	return err
}

// RemoveUnpinned is RemoveCheckpoint unless the checkpoint is pinned by now, and reports
// whether it removed it: the caller may have read an old row.
func (s *Store) RemoveUnpinned(ctx context.Context, id string) (bool, error) {
	return s.remove(ctx, id, " AND (removing = 1 OR pinned = 0)")
}

func (s *Store) remove(ctx context.Context, id, and string) (removed bool, err error) {
	if err := checkID("checkpoint", id); err != nil {
		return false, err
	}
	if err := failpoint.Hit("store.remove.before-mark"); err != nil {
		return false, err
	}
	// From here on it is not ready, so that a checkpoint whose files are being removed is
	// not offered to any caller.
	stays := false
	err = s.release(ctx, "remove a checkpoint", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx,
			"UPDATE checkpoints SET status = 'failed', error = 'its removal was interrupted', removing = 1 WHERE id = ?"+and, id)
		if err != nil || and == "" {
			return err
		}
		n, err := res.RowsAffected()
		stays = n == 0
		return err
	})
	if err != nil || stays {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
	defer cancel()
	return true, s.finishRemoval(ctx, id)
}

// finishRemoval may run any number of times, in several processes at once.
func (s *Store) finishRemoval(ctx context.Context, id string) error {
	if err := checkID("checkpoint", id); err != nil {
		return err
	}
	l, err := s.flockAs(ctx, removalLock, "remove a checkpoint", storeWait, flock.Shared)
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := failpoint.Hit("store.remove.before-rename"); err != nil {
		return err
	}
	gone := s.removedDir(id)
	for _, dir := range []string{s.published(id), s.draftDir(id)} {
		there, err := exists(dir)
		if err != nil {
			return err
		}
		if !there {
			continue
		}
		if err := os.RemoveAll(gone); err != nil {
			return err
		}
		if err := os.Rename(dir, gone); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := fsx.SyncDir(s.checkpointsDir()); err != nil {
		return err
	}
	if err := failpoint.Hit("store.remove.before-row"); err != nil {
		return err
	}
	err = s.release(ctx, "remove a checkpoint", func(tx *sql.Tx) error {
		var parent string
		err := tx.QueryRowContext(ctx, "SELECT parent FROM checkpoints WHERE id = ?", id).Scan(&parent)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, q := range []string{"UPDATE removed SET bytes = bytes + (SELECT added FROM checkpoints WHERE id = ?2)",
			"UPDATE checkpoints SET parent = ?1, changes = '' WHERE parent = ?2", "UPDATE sandboxes SET head = ?1 WHERE head = ?2",
			"UPDATE effects SET head = ?1 WHERE head = ?2", "DELETE FROM tags WHERE checkpoint_id = ?2",
			"DELETE FROM checkpoints WHERE id = ?2"} {
			if _, err := tx.ExecContext(ctx, q, parent, id); err != nil {
				return err
			}
		}
		_, err = tx.ExecContext(ctx, forgetEffects)
		return err
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("store.remove.before-tree"); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(gone), os.RemoveAll(filepath.Join(s.failedDir(), id)))
}

// Sweep finishes or undoes what killed processes left behind, and returns one sentence per
// action. It touches nothing of a sandbox that is locked. One failing step does not stop
// the others.
func (s *Store) Sweep(ctx context.Context) ([]string, error) {
	var did []string
	var errs []error
	// Directories are listed before rows: a draft's row is older than its directory, so a
	// listed directory without a row belongs to no draft.
	entries, err := os.ReadDir(s.checkpointsDir())
	if err != nil {
		return nil, err
	}
	type row struct{ id, sandbox, name, status string }
	var unready []row
	known := map[string]bool{}
	foreign := false // there is a checkpoint that state.db does not know
	rows, err := s.read.QueryContext(ctx,
		"SELECT id, sandbox_id, sandbox_name, CASE WHEN removing THEN 'removing' ELSE status END FROM checkpoints")
	if err != nil {
		return nil, cancelled(ctx, dbError("sweep", err))
	}
	for rows.Next() {
		var r row
		if err := rows.Scan(&r.id, &r.sandbox, &r.name, &r.status); err != nil {
			_ = rows.Close()
			return nil, dbError("sweep", err)
		}
		if err := errors.Join(checkID("checkpoint", r.id), checkID("sandbox", r.sandbox)); err != nil {
			_ = rows.Close()
			return nil, recordError("checkpoint", err)
		}
		known[r.id] = true
		if r.status == Pending || r.status == "removing" {
			unready = append(unready, r)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, cancelled(ctx, dbError("sweep", err))
	}

	for _, r := range unready {
		if r.status == "removing" {
			said, err := s.goOnRemoving(ctx, r.id, r.sandbox)
			did, errs = append(did, said...), append(errs, err)
			continue
		}
		said, err := s.settle(ctx, r.id, r.sandbox, r.name)
		did, errs = append(did, said...), append(errs, err)
	}
	// A removed checkpoint may have no row any more, so only removalLock shows whether
	// its removal is still under way.
	removals, err := s.flockAs(ctx, removalLock, "sweep", 0, 0)
	if err != nil && !errors.Is(err, fault.ErrBusy) {
		errs = append(errs, err)
	}
	for _, e := range entries {
		id, removed := strings.CutPrefix(e.Name(), removePrefix)
		tmp := removed
		if !tmp {
			id, tmp = strings.CutPrefix(e.Name(), tmpPrefix)
		}
		switch {
		case removed && removals == nil:
		case !tmp && isID(e.Name()) && !known[e.Name()]:
			// Never left by a crash of ours: state.db was lost or replaced.
			foreign = true
			did = append(did, fmt.Sprintf("left checkpoint directory %s alone: state.db does not know it.", e.Name()))
		case tmp && !s.underWay(ctx, id):
			if there, err := exists(filepath.Join(s.checkpointsDir(), e.Name())); err != nil || !there {
				errs = append(errs, err)
				continue
			}
			err := os.RemoveAll(filepath.Join(s.checkpointsDir(), e.Name()))
			if err == nil {
				did = append(did, fmt.Sprintf("removed the leftover directory %s.", e.Name()))
			}
			errs = append(errs, err)
		}
	}
	if removals != nil {
		removals.Unlock()
	}
	said, err := s.sweepPacks(ctx, foreign)
	did, errs = append(did, said...), append(errs, err)
	errs = append(errs, s.sweepLocks(ctx), s.sweepCaches(ctx), s.sweepStaged(ctx), s.pruneLogs(), s.pruneFailures(ctx))
	return did, errors.Join(errs...)
}

// sweepPacks removes unfinished packs and those without a row. Either may belong to a
// running draft, so it needs the store exclusively. foreign says that there are
// checkpoints without a record: packs without one may be theirs, and stay, for Reindex can
// rebuild the index from them.
func (s *Store) sweepPacks(ctx context.Context, foreign bool) (did []string, err error) {
	// Usually there is nothing to sweep, and then no process should wait for the lock.
	if some, err := s.packsLeft(ctx); err != nil || !some {
		return nil, err
	}
	l, err := s.exclude(ctx, "sweep", 0)
	if errors.Is(err, fault.ErrBusy) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	// From here on there are no drafts. A pending and published checkpoint has a pack to be
	// recorded, once its sandbox's lock can be had.
	list, err := s.checkpoints(ctx, "WHERE status = 'pending'")
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		there, err := exists(s.published(c.ID))
		if err != nil {
			return nil, err
		}
		foreign = foreign || there
	}
	var errs []error
	temps, err := filepath.Glob(filepath.Join(s.packsDir(), pack.TempPrefix+"*"))
	errs = append(errs, err)
	for _, path := range temps {
		if err := os.Remove(path); err != nil {
			errs = append(errs, err)
			continue
		}
		did = append(did, fmt.Sprintf("removed the unfinished pack %s.", filepath.Base(path)))
	}
	if foreign {
		return did, errors.Join(errs...)
	}
	stray, err := s.strayPacks(ctx)
	errs = append(errs, err)
	for _, name := range stray {
		if err := failpoint.Hit("store.sweep.before-pack"); err != nil {
			return did, errors.Join(append(errs, err)...)
		}
		if err := os.Remove(pack.Path(s.packsDir(), name)); err != nil {
			errs = append(errs, err)
			continue
		}
		did = append(did, fmt.Sprintf("removed pack %s of an unfinished checkpoint.", name))
	}
	return did, errors.Join(errs...)
}

// packsLeft reports whether there are packs that are not recorded.
func (s *Store) packsLeft(ctx context.Context) (bool, error) {
	temps, err := filepath.Glob(filepath.Join(s.packsDir(), pack.TempPrefix+"*"))
	if err != nil || len(temps) > 0 {
		return true, err
	}
	stray, err := s.strayPacks(ctx)
	return len(stray) > 0, err
}

// goOnRemoving finishes a removal that was cut off.
func (s *Store) goOnRemoving(ctx context.Context, id, sandbox string) (did []string, err error) {
	l, err := s.flock(ctx, sandbox, "sweep", 0)
	if errors.Is(err, fault.ErrBusy) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	// Another process may have finished the removal since it was listed.
	if now, err := s.checkpoints(ctx, "WHERE id = ?", id); err != nil || len(now) == 0 {
		return nil, err
	}
	if err := s.finishRemoval(ctx, id); err != nil {
		return nil, err
	}
	return []string{fmt.Sprintf("finished the removal of checkpoint %s.", id)}, nil
}

// settle rolls a pending checkpoint forward if its files were published and
// are whole, else back.
func (s *Store) settle(ctx context.Context, id, sandbox, name string) (did []string, err error) {
	l, err := s.flock(ctx, sandbox, "sweep", 0)
	if errors.Is(err, fault.ErrBusy) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	// The process that made it may have ended it since it was listed.
	now, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil || len(now) == 0 || now[0].Status != Pending {
		return nil, err
	}
	ready, err := s.FinishPending(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case ready:
		return []string{fmt.Sprintf("completed checkpoint %s of sandbox %s.", id, name)}, nil
	}
	return []string{fmt.Sprintf("discarded the unfinished checkpoint %s of sandbox %s.", id, name)}, nil
}

// FinishPending completes a pending checkpoint whose process is gone: it becomes ready if its
// manifest was published and all that it needs is there, and is discarded if not. It reports
// whether the checkpoint is ready, and leaves one that is not pending as it is. The caller holds the
// sandbox's lock.
func (s *Store) FinishPending(ctx context.Context, id string) (ready bool, err error) {
	l, err := s.share(ctx, "settle")
	if err != nil {
		return false, err
	}
	defer l.Unlock()
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil || len(list) == 0 {
		return false, err
	}
	if list[0].Status != Pending {
		return list[0].Status == Ready, nil
	}
	err = s.complete(ctx, list[0])
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrExists) {
		return false, err // try again another time
	}
	reason := "it could not be completed: " + err.Error()
	if there, err := exists(s.published(id)); err != nil {
		return false, err
	} else if !there {
		reason = "the process that made it ended before it was committed"
	}
	if err := failpoint.Hit("store.sweep.before-discard"); err != nil {
		return false, err
	}
	// A pack of its own, if it has one, belongs to no checkpoint now and is swept.
	return false, errors.Join(s.discard(id), s.setFailed(ctx, id, reason))
}

// complete records a checkpoint whose manifest was published, and the packs
// that were published with it. Something missing is ErrCorrupt.
func (s *Store) complete(ctx context.Context, c Checkpoint) error {
	r, err := s.openPublished(c.ID)
	if err != nil {
		return err
	}
	defer r.Close()
	if r.manifest.SandboxID != c.SandboxID || r.manifest.Kind != c.Kind {
		return fmt.Errorf("%s is of another sandbox: %w", ManifestName, fault.ErrCorrupt)
	}
	stray, err := s.adopt(ctx, r.chunks)
	if err != nil {
		return err
	}
	need, err := r.needs(ctx)
	if err != nil {
		return err
	}
	origin, err := s.Origin(c.ID)
	if err != nil {
		return err
	}
	p := published{
		manifest: r.manifest, digest: r.digest, bytes: r.size, asIs: c.Foreign && madeElsewhere(origin, r.digest),
	}
	gone, err := r.chunks.x.find(ctx, need, func(at place) error { p.bytes += int64(at.blob.Stored); return nil })
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, id := range gone {
		at, ok := r.chunks.own[id]
		if !ok {
			return fmt.Errorf("piece %s is not there: %w", id, fault.ErrCorrupt)
		}
		// The power may have failed with the process.
		if _, err := r.chunks.read(ctx, id); err != nil {
			return err
		}
		p.bytes += int64(at.blob.Stored)
		used[at.path] = true
	}
	for path, info := range stray {
		if used[path] {
			p.packs = append(p.packs, info)
			if err := fsx.SyncDir(filepath.Dir(path)); err != nil {
				return err
			}
		}
	}
	p.lost = r.chunks.x.lost()
	if err := errors.Join(fsx.SyncDir(s.packsDir()), fsx.SyncDir(s.checkpointsDir())); err != nil {
		return err
	}
	if err := failpoint.Hit("store.sweep.before-ready"); err != nil {
		return err
	}
	_, err = s.setReady(ctx, c.ID, p)
	return err
}

// adopt lets p find chunks in packs without a row, which belong to killed drafts. It leaves out
// damaged packs.
func (s *Store) adopt(ctx context.Context, p *chunks) (map[string]pack.Info, error) {
	names, err := s.strayPacks(ctx)
	if err != nil {
		return nil, err
	}
	stray := map[string]pack.Info{}
	p.own = map[pack.ID]ownPlace{}
	for _, name := range names {
		path := pack.Path(s.packsDir(), name)
		f, err := p.open(path)
		if err != nil {
			return nil, err
		}
		info := pack.Info{Name: name}
		pr, err := pack.Open(f.f)
		if err == nil && pr.Name() != name {
			err = fmt.Errorf("pack %s is %s: %w", name, pr.Name(), fault.ErrCorrupt)
		}
		if err == nil {
			info.Bytes = pr.Bytes()
			info.Blobs, err = pr.Blobs()
		}
		p.done(f)
		if errors.Is(err, fault.ErrCorrupt) {
			continue
		}
		if err != nil {
			return nil, err
		}
		stray[path] = info
		for _, b := range info.Blobs {
			p.own[b.ID] = ownPlace{path, b}
		}
	}
	return stray, nil
}

// underWay reports whether a draft's scratch may still be in use: until its
// checkpoint is ready or, as long as the sandbox's lock is held, until Close.
func (s *Store) underWay(ctx context.Context, id string) bool {
	if !isID(id) {
		return false
	}
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil {
		return true
	}
	if len(list) == 0 || list[0].Status == Pending {
		return len(list) > 0
	}
	l, err := s.flock(ctx, list[0].SandboxID, "sweep", 0)
	if err != nil {
		return true
	}
	l.Unlock()
	return false
}

// sweepLocks removes the lock files of sandboxes that are gone. Lock checks
// that its file still has its name, so unlinking one that we hold is safe.
func (k *locks) sweepLocks(ctx context.Context) error {
	entries, err := os.ReadDir(k.locksDir())
	if err != nil {
		return err
	}
	alive, err := k.alive(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		// Even trying a lock holds it for a moment, so only locks of unknown sandboxes are
		// tried. A fresh one may belong to a sandbox that is being created.
		info, err := e.Info()
		// A lock may be of one aspect of a sandbox: ID.ASPECT.
		id, _, _ := strings.Cut(e.Name(), ".")
		if err != nil || !isID(id) || alive[id] || time.Since(info.ModTime()) < freshLock {
			continue
		}
		l, err := flock.Try(filepath.Join(k.locksDir(), e.Name()), 0)
		if err != nil {
			if !errors.Is(err, flock.ErrHeld) {
				errs = append(errs, err)
			}
			continue
		}
		if list, err := k.sandboxes(ctx, "WHERE id = ?", id); err != nil {
			errs = append(errs, err)
		} else if len(list) == 0 {
			errs = append(errs, os.Remove(l.File().Name()))
		}
		l.Unlock()
	}
	return errors.Join(errs...)
}

// alive returns the ids of all sandboxes. Callers list files first: a sandbox's row is older
// than its files.
func (r *records) alive(ctx context.Context) (map[string]bool, error) {
	list, err := r.sandboxes(ctx, "")
	alive := map[string]bool{}
	for _, b := range list {
		alive[b.ID] = true
	}
	return alive, err
}
