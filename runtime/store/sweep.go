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

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// freshLock is how long a lock file of no known sandbox is left alone.
const freshLock = time.Minute

// RemoveCheckpoint removes a checkpoint, whatever its state. Its children and
// the sandboxes that stood at it get its parent in its place. Idempotent, and
// after a crash Sweep, or another call, finishes it.
func (s *Store) RemoveCheckpoint(ctx context.Context, id string) error {
	if err := checkID("checkpoint", id); err != nil {
		return err
	}
	if err := failpoint.Hit("store.remove.before-mark"); err != nil {
		return err
	}
	// From here on it is not ready any more, so that nobody is offered a
	// checkpoint whose files are on their way out.
	err := s.release(ctx, "remove a checkpoint", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE checkpoints SET status = 'failed', error = 'its removal was interrupted', removing = 1 WHERE id = ?", id)
		return err
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWait)
	defer cancel()
	return s.finishRemoval(ctx, id)
}

// finishRemoval may run any number of times, in several processes at once.
func (s *Store) finishRemoval(ctx context.Context, id string) error {
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
	if err := syncDir(s.checkpointsDir()); err != nil {
		return err
	}
	if err := failpoint.Hit("store.remove.before-row"); err != nil {
		return err
	}
	err := s.release(ctx, "remove a checkpoint", func(tx *sql.Tx) error {
		var parent string
		err := tx.QueryRowContext(ctx, "SELECT parent FROM checkpoints WHERE id = ?", id).Scan(&parent)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, q := range []string{"UPDATE checkpoints SET parent = ?1 WHERE parent = ?2", "UPDATE sandboxes SET head = ?1 WHERE head = ?2", "DELETE FROM checkpoints WHERE id = ?2"} {
			if _, err := tx.ExecContext(ctx, q, parent, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := failpoint.Hit("store.remove.before-tree"); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(gone), os.RemoveAll(filepath.Join(s.failedDir(), id)))
}

// Sweep finishes or undoes what killed processes left behind, and returns one
// sentence per deed. It touches nothing of a sandbox whose lock somebody
// holds. One failing step does not stop the others.
func (s *Store) Sweep(ctx context.Context) ([]string, error) {
	var did []string
	var errs []error
	// Directories are listed before rows: a draft's row is older than its
	// directory, so one that is in the list and has no row is nobody's.
	entries, err := os.ReadDir(s.checkpointsDir())
	if err != nil {
		return nil, err
	}
	type row struct{ id, sandbox, name, status string }
	var unready []row
	known := map[string]bool{}
	rows, err := s.db.QueryContext(ctx, "SELECT id, sandbox_id, sandbox_name, CASE WHEN removing THEN 'removing' ELSE status END FROM checkpoints")
	if err != nil {
		return nil, cancelled(ctx, dbError("sweep", err))
	}
	for rows.Next() {
		var r row
		if err := rows.Scan(&r.id, &r.sandbox, &r.name, &r.status); err != nil {
			_ = rows.Close()
			return nil, dbError("sweep", err)
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
			err := s.finishRemoval(ctx, r.id)
			if err == nil {
				did = append(did, fmt.Sprintf("finished the removal of checkpoint %s.", r.id))
			}
			errs = append(errs, err)
			continue
		}
		said, err := s.settle(ctx, r.id, r.sandbox, r.name)
		did, errs = append(did, said...), append(errs, err)
	}
	for _, e := range entries {
		id, tmp := strings.CutPrefix(e.Name(), removePrefix)
		if !tmp {
			id, tmp = strings.CutPrefix(e.Name(), tmpPrefix)
		}
		switch {
		case !tmp && isID(e.Name()) && !known[e.Name()]:
			// Never left by a crash of ours: state.db was lost or replaced.
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
	errs = append(errs, s.sweepLocks(ctx), s.pruneLogs(), s.pruneFailures(ctx))
	return did, errors.Join(errs...)
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
	ready, err := s.Settle(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case ready:
		return []string{fmt.Sprintf("completed checkpoint %s of sandbox %s.", id, name)}, nil
	}
	return []string{fmt.Sprintf("discarded the unfinished checkpoint %s of sandbox %s.", id, name)}, nil
}

// Settle brings a pending checkpoint, whose process is gone, to its end: it is
// made ready if its files were published and are whole, and discarded if not.
// It tells which; one that is not pending is left as it is. The caller holds
// the sandbox's lock.
func (s *Store) Settle(ctx context.Context, id string) (ready bool, err error) {
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil || len(list) == 0 {
		return false, err
	}
	if list[0].Status != Pending {
		return list[0].Status == Ready, nil
	}
	sandbox := list[0].SandboxID
	reason := "the process that made it ended before it was committed"
	r, err := openPublished(s.published(id), id)
	if err == nil {
		defer r.Close()
		err := r.Verify(ctx)
		if err == nil && r.manifest.SandboxID != sandbox {
			err = fmt.Errorf("%s is of another sandbox: %w", ManifestName, fault.ErrCorrupt)
		}
		if err == nil {
			if err := failpoint.Hit("store.sweep.before-ready"); err != nil {
				return false, err
			}
			err = s.setReady(ctx, r.manifest, r.digest, r.size)
		}
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrExists) {
			return false, err // try again another time
		}
		reason = "it could not be completed: " + err.Error()
	} else if !errors.Is(err, fault.ErrCorrupt) { // which "not there" is, too
		return false, err
	}
	if err := failpoint.Hit("store.sweep.before-discard"); err != nil {
		return false, err
	}
	if err := errors.Join(s.discard(id), s.setFailed(ctx, id, reason)); err != nil {
		return false, err
	}
	return false, nil
}

// underWay tells whether a draft's files may still be in use.
func (s *Store) underWay(ctx context.Context, id string) bool {
	if !isID(id) {
		return false
	}
	list, err := s.checkpoints(ctx, "WHERE id = ?", id)
	if err != nil {
		return true
	}
	return len(list) > 0 && list[0].Status == Pending
}

// sweepLocks removes the lock files of sandboxes that are gone. Lock checks
// that its file still has its name, so unlinking one that we hold is safe.
func (s *Store) sweepLocks(ctx context.Context) error {
	entries, err := os.ReadDir(s.locksDir())
	if err != nil {
		return err
	}
	list, err := s.sandboxes(ctx, "")
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, b := range list {
		alive[b.ID] = true
	}
	var errs []error
	for _, e := range entries {
		// Even to try a lock is to hold it for a moment, so only those are
		// tried that nobody can want. A fresh one may be of a sandbox that is
		// being created.
		info, err := e.Info()
		// A lock may be of one aspect of a sandbox: ID.ASPECT.
		id, _, _ := strings.Cut(e.Name(), ".")
		if err != nil || !isID(id) || alive[id] || time.Since(info.ModTime()) < freshLock {
			continue
		}
		f, err := tryFlock(filepath.Join(s.locksDir(), e.Name()))
		if err != nil {
			if !errors.Is(err, unix.EWOULDBLOCK) {
				errs = append(errs, err)
			}
			continue
		}
		l := &Lock{f: f}
		if list, err := s.sandboxes(ctx, "WHERE id = ?", id); err != nil {
			errs = append(errs, err)
		} else if len(list) == 0 {
			errs = append(errs, os.Remove(f.Name()))
		}
		l.Unlock()
	}
	return errors.Join(errs...)
}

func (s *Store) pruneFailures(ctx context.Context) error {
	var n int
	err := s.db.QueryRowContext(ctx, "SELECT count(*) FROM checkpoints WHERE status = 'failed'").Scan(&n)
	if err != nil || n <= keptRows {
		return dbError("sweep", err)
	}
	return s.release(ctx, "sweep", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM checkpoints WHERE status = 'failed' AND NOT removing AND seq NOT IN
			(SELECT seq FROM checkpoints WHERE status = 'failed' ORDER BY seq DESC LIMIT ?)`, keptRows)
		return err
	})
}
