package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// errPipe is the error of a capture that is no longer read.
var errPipe = unix.EPIPE

// do carries out one op. A file taken out of the original is checked once no other process
// can reach it by name: if it is not what the plan saw, the rollback puts it back.
func (t *txn) do(o op) error {
	at, p := string(o.At), string(o.Path)
	var err error
	switch o.Kind {
	case opPut:
		err = move(t.scratch, at, t.from, p, unix.RENAME_NOREPLACE)
	case opSwap:
		err = move(t.scratch, at, t.from, p, unix.RENAME_EXCHANGE)
	case opRemove:
		err = move(t.from, p, t.scratch, at, unix.RENAME_NOREPLACE)
	default:
		return fmt.Errorf("%w: an apply with the step %q", fault.ErrCorrupt, o.Kind)
	}
	switch {
	case errors.Is(err, unix.EEXIST), gone(err):
		return conflict(o.Path, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%w: the filesystem of %s cannot exchange two files: %w",
			fault.ErrUnsupported, t.rec.From, err)
	case err != nil:
		return err
	case o.Kind == opPut:
		return nil
	}
	now, err := t.scratch.fingerprint(at)
	if err != nil {
		return err
	}
	if now != o.Old {
		return conflict(o.Path, nil) // the rollback puts it back
	}
	return nil
}

// done reports whether an op has been carried out and not been taken back.
func (t *txn) done(o op) (bool, error) {
	st, err := t.scratch.stat(string(o.At))
	if err != nil {
		return false, err
	}
	switch o.Kind {
	case opPut:
		return st == nil, nil
	case opSwap:
		return st != nil && st.Ino != o.NewIno, nil
	}
	return st != nil, nil
}

// back takes one op back. It never removes what another process has put in the place
// meanwhile.
func (t *txn) back(o op) error {
	done, err := t.done(o)
	if err != nil || !done {
		return err
	}
	at, p := string(o.At), string(o.Path)
	now, err := t.from.stat(p)
	if err != nil {
		return err
	}
	ours := now != nil && now.Ino == o.NewIno
	switch {
	case o.Kind == opPut && now == nil:
		return nil // removed by another process: it is as it was
	case o.Kind == opPut && ours:
		return move(t.from, p, t.scratch, at, unix.RENAME_NOREPLACE)
	case o.Kind == opSwap && ours:
		return move(t.scratch, at, t.from, p, unix.RENAME_EXCHANGE)
	case o.Kind != opPut && now == nil:
		return move(t.scratch, at, t.from, p, unix.RENAME_NOREPLACE)
	}
	return &fault.Error{Err: fmt.Errorf("%w: %q was made in %s by another program and is in the way of what was there",
		fault.ErrState, path.Join("/", p), t.rec.From),
		Hint: "Move it elsewhere, then run: agentbox recover"}
}

// rollback takes back what was written, whatever that is, and records when all of it is.
func (t *txn) rollback() error {
	if t.scratch == nil {
		if err := t.openScratch(false); err != nil {
			return err
		}
	}
	var errs []error
	for i := len(t.plan.Ops) - 1; i >= 0; i-- {
		errs = append(errs, t.back(t.plan.Ops[i]))
		if t.head.Undoing && i == len(t.plan.Ops)/2 {
			errs = append(errs, failpoint.Hit("volume.undo.mid-write"))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := t.upperBack(); err != nil {
		return err
	}
	if err := syncfs(t.from.File); err != nil {
		return err
	}
	if err := t.put(phaseRolled); err != nil {
		return err
	}
	return failpoint.Hit("volume.apply.after-rollback")
}

// upperBack gives the volume the upperdir that was applied, if it lost it.
func (t *txn) upperBack() error {
	upper, old := t.v.path(t.rec.Name, "upper"), t.path(dirOld)
	var st unix.Stat_t
	if err := unix.Lstat(old, &st); err != nil || st.Ino != t.head.Upper {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	return exchange(upper, old)
}

// exchange swaps two directories and makes it last.
func exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("exchange %s and %s: %w", a, b, err)
	}
	return errors.Join(fsx.SyncDir(path.Dir(a)), fsx.SyncDir(path.Dir(b)))
}

// clear ends an apply that is taken back, or was never begun.
func (t *txn) clear() error {
	for _, name := range []string{t.head.Scratch, t.head.Stray} {
		if err := t.drop(name); err != nil {
			return err
		}
	}
	if t.plan != nil && t.head.Phase == phaseRolled {
		for i := len(t.plan.Dirs) - 1; i >= 0; i-- {
			if err := t.setDir(t.plan.Dirs[i], true); err != nil {
				return err
			}
		}
	} else if t.head.Scratch != "" {
		// The scratch directory came and went.
		if err := setTime(int(t.from.Fd()), ".", t.head.Root.Sec, t.head.Root.Nsec); err != nil {
			return err
		}
	}
	// The header goes last: without it the directory belongs to no apply.
	return discardApply(t.path())
}

// discardApply deletes the directory of an apply, so that a part of it is never
// taken for one.
func discardApply(dir string) error {
	if err := os.Remove(dir + "/" + fileHeader); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(dir)
}

// drop deletes a scratch directory in the original.
func (t *txn) drop(name string) error {
	if name == "" {
		return nil
	}
	return os.RemoveAll(t.from.at(name))
}

// finish ends an apply whose changes are all in the original: the volume gets an
// empty upperdir, and what is needed to undo it is kept. Every step finds out
// whether it was done before.
func (t *txn) finish() error {
	upper := t.v.path(t.rec.Name, "upper")
	var st unix.Stat_t
	if err := unix.Lstat(upper, &st); err != nil {
		return err
	}
	if st.Ino == t.head.Upper {
		if err := os.RemoveAll(t.path(dirOld)); err != nil {
			return err
		}
		if err := makeUpper(t.path(dirOld), t.rec.From); err != nil {
			return err
		}
		if err := exchange(upper, t.path(dirOld)); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("volume.apply.after-upper"); err != nil {
		return err
	}
	if t.head.Stray != "" {
		if err := t.drop(t.head.Stray); err != nil {
			return err
		}
		for _, d := range t.plan.Dirs {
			if string(d.Path) != "." {
				continue
			}
			if err := setTime(int(t.from.Fd()), ".", d.New.Sec, d.New.Nsec); err != nil {
				return err
			}
		}
		t.head.Stray = ""
		if err := t.put(phaseDone); err != nil {
			return err
		}
	}
	old := t.v.path(t.rec.Name, dirUndo)
	if err := discardApply(old); err != nil {
		return err
	}
	if err := failpoint.Hit("volume.apply.before-end"); err != nil {
		return err
	}
	if err := os.Rename(t.path(), old); err != nil {
		return err
	}
	return fsx.SyncDir(t.v.path(t.rec.Name))
}

// keep copies what came out of the original from the scratch directory there
// to the volume. With the commit, that in the original is not needed any more.
func (t *txn) keep(ctx context.Context) error {
	if err := os.Mkdir(t.path(dirScratch), 0o700); err != nil {
		return err
	}
	if err := copyTree(ctx, t.scratch.at("."), t.path(dirScratch)); err != nil {
		return err
	}
	own, err := os.Open(t.path())
	if err != nil {
		return err
	}
	if err := errors.Join(syncfs(own), own.Close()); err != nil {
		return err
	}
	t.head.Stray, t.head.Scratch = t.head.Scratch, ""
	return nil
}

func syncfs(f *os.File) error {
	if err := unix.Syncfs(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", f.Name(), err)
	}
	return nil
}

// undo takes the last apply back, and gives the volume its changes back.
func (t *txn) undo(ctx context.Context, force bool) (err error) {
	kept := t.v.path(t.rec.Name, dirUndo)
	if err := t.load(kept); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("volume %s: %w: nothing was applied that could be undone", t.rec.Name, fault.ErrState)
	} else if err != nil {
		return err
	}
	if err := t.samePlace(); err != nil {
		return err
	}
	if err := t.unchanged(ctx, force); err != nil {
		return err
	}
	if err := os.Rename(kept, t.path()); err != nil {
		return err
	}
	defer func() {
		if err != nil && t.head.Phase == phaseDone {
			_, e := t.v.settle(t.rec.Name) // back to where it was kept
			err = errors.Join(err, e)
		}
	}()
	near, err := t.near()
	if err != nil {
		return err
	}
	if !near {
		if err := t.restage(ctx); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("volume.undo.before-write"); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	t.head.Undoing = true
	if err := t.put(phaseWrite); err != nil {
		return err
	}
	if err := t.rollback(); err != nil {
		return err
	}
	return t.clear()
}

// restage copies what an apply took out of the original back beside it. A copy
// shares no inode with names that the apply left where they were.
func (t *txn) restage(ctx context.Context) error {
	t.head.Stray = scratchPrefix + newID()[:16]
	if err := t.put(phaseDone); err != nil {
		return err
	}
	if err := os.Mkdir(t.from.at(t.head.Stray), 0o700); err != nil {
		return err
	}
	if err := copyTree(ctx, t.path(dirScratch), t.from.at(t.head.Stray)); err != nil {
		return err
	}
	t.head.Scratch, t.head.Stray = t.head.Stray, ""
	if err := syncfs(t.from.File); err != nil {
		return err
	}
	return t.openScratch(false)
}

// unchanged proves that an undo takes away nothing but what the apply brought.
func (t *txn) unchanged(ctx context.Context, force bool) error {
	n := 0
	err := overlay.Walk(ctx, t.v.path(t.rec.Name, "upper"), overlay.WalkOptions{}, func(overlay.Entry) error {
		n++
		return nil
	})
	if err != nil {
		return err
	}
	if n > 1 {
		return &fault.Error{Err: fmt.Errorf("volume %s: %w: it was changed since it was applied",
			t.rec.Name, fault.ErrState),
			Hint: "Checkpoint it, then restore or apply it; an undo needs a volume without changes."}
	}
	for _, o := range t.plan.Ops {
		now, err := t.from.fingerprint(string(o.Path))
		if err != nil {
			return err
		}
		if o.Kind == opRemove && now == "" || o.Kind != opRemove && now == o.New {
			continue
		}
		if force && o.Kind != opRemove {
			if st, err := t.from.stat(string(o.Path)); err == nil && (st == nil || st.Ino == o.NewIno) {
				continue // still the file, or directory, that the apply brought
			}
		}
		e := &fault.Error{Err: fmt.Errorf("%w: %q was changed in %s since the apply", fault.ErrState,
			path.Join("/", string(o.Path)), t.rec.From),
			Hint: "Look at it; to lose that change too, add --force."}
		if force {
			e.Hint = "It has been replaced: move it elsewhere first."
		}
		return e
	}
	return nil
}

// load reads an apply from the disk.
func (t *txn) load(dir string) error {
	if err := record.ReadJSON(dir+"/"+fileHeader, &t.head); err != nil {
		return err
	}
	if t.head.Version > version {
		return fmt.Errorf("volume %s: %w: a newer agentbox applied it", t.rec.Name, fault.ErrUnsupported)
	}
	for _, name := range []string{t.head.Scratch, t.head.Stray} {
		if name != "" && !scratchPattern().MatchString(name) { // it is removed in the original
			return fmt.Errorf("volume %s: %w: an apply by way of %.80q", t.rec.Name, fault.ErrCorrupt, name)
		}
	}
	t.plan = &plan{}
	err := readPlan(dir+"/"+filePlan, t.plan)
	if errors.Is(err, fs.ErrNotExist) && t.head.Phase == phaseStage {
		t.plan, err = nil, nil
	}
	return err
}

// samePlace proves that the original is the directory that the apply was about.
func (t *txn) samePlace() error {
	if t.from.ino == t.head.Ino && t.rec.From == t.head.Original {
		return nil
	}
	return &fault.Error{Err: fmt.Errorf("%w: %s is not the directory that volume %s was applied to", fault.ErrState,
		t.rec.From, t.rec.Name),
		Hint: "Put that directory back in its place, then run: agentbox recover"}
}

// Settle implements runtime.Original.
func (b Backend) Settle(ctx context.Context, id string) (string, error) {
	rec, err := b.find(id)
	if err != nil {
		return "", err
	}
	unlock, err := record.Lock(ctx, b.path(rec.Name), "volume "+rec.Name)
	if err != nil {
		return "", err
	}
	defer unlock()
	return b.settle(rec.Name)
}

// settle brings an apply that was killed to its end. The lock is held.
func (v *Volumes) settle(name string) (did string, err error) {
	dir := v.path(name, dirApply)
	if _, err := os.Lstat(dir); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	rec, err := v.load(name)
	if err != nil {
		return "", err
	}
	t := &txn{v: v, rec: rec}
	defer t.close()
	err = t.load(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", os.RemoveAll(dir) // it had not begun, or was at its end
	}
	if err != nil {
		return "", fmt.Errorf("the apply of volume %s: %w", name, err)
	}
	if t.from, err = openRoot(rec.From); err == nil {
		err = t.samePlace()
	}
	if err != nil {
		return "", fmt.Errorf("an apply of volume %s is unfinished: %w", name, err)
	}
	did = fmt.Sprintf("took back the half-done apply of volume %s: %s is as it was", name, rec.From)
	if t.head.Undoing {
		did = fmt.Sprintf("finished the undo of the apply of volume %s to %s", name, rec.From)
	}
	switch t.head.Phase {
	case phaseWrite:
		if err = t.rollback(); err == nil {
			err = t.clear()
		}
	case phaseStage, phaseRolled:
		err = t.clear()
	case phaseDone:
		did = fmt.Sprintf("finished the apply of volume %s to %s", name, rec.From)
		err = t.finish()
	default:
		err = fmt.Errorf("%w: phase %q", fault.ErrCorrupt, t.head.Phase)
	}
	if err != nil {
		return "", fmt.Errorf("an apply of volume %s is unfinished: %w", name, err)
	}
	v.log.Warn("interrupted apply settled", "volume", name, "action", did)
	return did, nil
}
