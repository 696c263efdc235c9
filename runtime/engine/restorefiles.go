package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// filesPart is the files of a restore, and the way back: a checkpoint of the present state, or
// the files that are displaced.
type filesPart struct {
	noWork
	*restoration
	present  *making                // the undo checkpoint
	undone   string                 // its id, once it is ready
	changes  []*worktree.Change     // of the trees
	changed  int                    // how many paths
	lost     map[string]bool        // paths of the upperdir that cannot be restored
	replaced bool                   // the files may be changed
	scratch  string                 // a directory for what is read of directories below workspaces; may be empty
	moved    map[int]worktree.Moved // the workspaces whose directories below have changed since the checkpoint
	below    []worktree.Tree        // those directories, as the undo checkpoint has just read them
	began    time.Time              // start of the work on the files
	took     time.Duration          // duration of that work
}

// target returns what the trees are to become.
func (r *filesPart) target() worktree.Target {
	return worktree.Target{Reader: r.reader, Lost: r.lost, Moved: r.moved}
}

// findMoved finds the workspaces whose directories below are not what they were at a checkpoint.
func (r *filesPart) findMoved(ctx context.Context, from *store.Reader) (map[int]worktree.Moved, error) {
	var moved map[int]worktree.Moved
	m := from.Manifest()
	for i, v := range m.Volumes {
		below := m.Below(i + 1)
		at := slices.IndexFunc(r.c.Volumes, func(have runtime.Volume) bool { return have.Name == v.Name })
		if below == 0 || at < 0 {
			continue
		}
		if r.scratch == "" {
			dir, err := r.e.store.Scratch()
			if err != nil {
				return nil, err
			}
			r.scratch = dir
			r.sb.steps.Begin(runtime.PhaseLooking, 0)
		}
		t := worktree.Tree{Dir: r.c.Volumes[at].Lower, Number: below, Below: true, Home: r.e.checkpoints.home(r.sb)}
		out := filepath.Join(r.scratch, fmt.Sprintf("%s-%d", m.ID, below))
		if err := os.RemoveAll(out); err != nil {
			return nil, err
		}
		changed, err := r.differs(ctx, &t, out, worktree.Target{Reader: from})
		if err != nil {
			return nil, fmt.Errorf("read %s, below workspace %s: %w", t.Dir, v.Name, err)
		}
		if changed {
			if moved == nil {
				moved = map[int]worktree.Moved{}
			}
			moved[i+1] = worktree.Moved{Below: below, Now: t.Entries()}
			r.e.log.Info("workspace rebased", "sandbox", r.sb.ID, "workspace", v.Name, "directory", t.Dir)
		}
	}
	return moved, nil
}

// differs reports whether a directory is not what it was at a checkpoint. It is read unless the undo
// checkpoint has done so.
func (r *filesPart) differs(ctx context.Context, t *worktree.Tree, out string, to worktree.Target) (bool, error) {
	at := slices.IndexFunc(r.below, func(have worktree.Tree) bool { return have.Dir == t.Dir })
	if at < 0 {
		return t.Differs(ctx, out, to)
	}
	then, differs, err := r.below[at].Differed(ctx, out, t.Number, to)
	*t = then
	return differs, err
}

// check lists the trees that the restore replaces.
func (r *filesPart) check(ctx context.Context) error {
	home := r.e.checkpoints.home(r.sb)
	r.data.Trees = []worktree.Tree{{Dir: r.c.Upper, Home: home}}
	for i, v := range r.reader.Manifest().Volumes {
		if v.Below {
			continue // it is the host's, and left as it is
		}
		at := slices.IndexFunc(r.c.Volumes, func(have runtime.Volume) bool { return have.Name == v.Name })
		if at < 0 && v.Workspace() {
			return hint(fmt.Errorf("%w: the checkpoint has a workspace at %s, and the sandbox has none there",
				runtime.ErrState, v.Name),
				"Give it one, over any directory: --workspace DIR:"+v.Name)
		}
		if at < 0 {
			return hint(fmt.Errorf("%w: volume %s of the checkpoint is not the sandbox's any more",
				runtime.ErrState, v.Name),
				"Make it and the container again as they were.")
		}
		r.data.Trees = append(r.data.Trees, worktree.Tree{Dir: r.c.Volumes[at].Path, Number: i + 1, Home: home})
	}
	return r.checkAlone(ctx)
}

// prepare stages what the trees lack, and keeps the present state. It leaves the sandbox
// frozen, so that the comparison stays true. A restore that is resumed stages nothing: its
// files are of no known state.
func (r *filesPart) prepare(ctx context.Context) error {
	if !r.resumed && r.c.Status != runtime.Running { // otherwise once it is frozen
		r.e.limits.liftFiles(r.spec, r.c)
	}
	if err := r.findLost(ctx); err != nil {
		return err
	}
	if r.resumed {
		var err error
		if r.moved, err = r.findMoved(ctx, r.reader); err != nil {
			return err
		}
		for i := range r.data.Trees {
			r.data.Trees[i].Home = r.e.checkpoints.home(r.sb)
			r.changes = append(r.changes, r.data.Trees[i].Change(r.target()))
		}
		return nil
	}
	r.began = time.Now()
	displaces, err := r.displace(ctx)
	if err == nil && !displaces {
		err = r.keepPresent(ctx)
	}
	if err := errors.Join(err, failpoint.Hit("restore.after-undo")); err != nil {
		return err
	}
	if r.changes == nil {
		r.sb.steps.Begin(runtime.PhaseLooking, 0)
		if err := r.layOut(ctx); err != nil {
			return err
		}
	}
	return failpoint.Hit("restore.after-layout")
}

// displace stages a restore whose way back is the files that it displaces, if that is
// possible for it; otherwise nothing has changed.
func (r *filesPart) displace(ctx context.Context) (ok bool, err error) {
	if !r.data.NoUndo || r.data.Undo == "" || r.data.Salvage || len(r.data.Trees) != 1 || len(r.data.HostFiles) > 0 ||
		r.c.Status != runtime.Created && r.c.Status != runtime.Exited || r.sb.host.Properties().FilesOnly {
		return false, nil
	}
	c, err := r.data.Trees[0].PlanDisplacing(ctx, r.target(), r.verify)
	if c == nil || err != nil {
		return false, err
	}
	r.changes, r.changed, r.data.Undo = []*worktree.Change{c}, c.Len(), ""
	return true, nil
}

// layOut compares the trees with the checkpoint and stages what they lack.
func (r *filesPart) layOut(ctx context.Context) error {
	err := r.closeChanges() // of an earlier attempt
	if err != nil {
		return err
	}
	if r.moved, err = r.findMoved(ctx, r.reader); err != nil {
		return err
	}
	r.changes, r.changed = make([]*worktree.Change, len(r.data.Trees)), 0
	// The dump for a full undo checkpoint has left files that the checkpoint lacks.
	opts := worktree.PlanOptions{Paranoid: r.verify, Stale: r.present != nil && r.present.row.Kind == runtime.KindFull}
	bytes := int64(0)
	for i := range r.data.Trees {
		c, err := r.data.Trees[i].Plan(ctx, r.target(), opts)
		if err != nil {
			return err
		}
		r.changes[i] = c
		r.changed += c.Len()
		bytes += c.Bytes()
	}
	r.sb.steps.Begin(runtime.PhaseStaging, bytes)
	for _, c := range r.changes {
		if err := c.Stage(ctx); err != nil {
			return err
		}
	}
	return nil
}

// stopped ends what keeps the old processes as they were.
func (r *filesPart) stopped() error {
	if r.present == nil {
		return nil
	}
	r.present.thawn = true // its processes are gone
	cut := r.present.cut
	r.present.cut = nil
	return cut.End()
}

// commit makes the files the checkpoint's, and proves them.
func (r *filesPart) commit(ctx context.Context) error {
	r.replaced = true
	r.sb.steps.Begin(runtime.PhasePutting, 0)
	for _, c := range r.changes {
		apply := c.Apply
		if r.processes.again {
			apply = c.Force
		}
		if err := apply(ctx); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("restore.after-apply"); err != nil {
		return err
	}
	r.sb.steps.Begin(runtime.PhaseProving, 0)
	for _, c := range r.changes {
		if err := c.Verify(ctx, worktree.VerifyOptions{Still: r.processes.idle, Paranoid: r.verify}); err != nil {
			return err
		}
	}
	r.took += time.Since(r.began)
	return nil
}

// sync makes the files durable.
func (r *filesPart) sync(ctx context.Context) error {
	syncing := time.Now()
	err := worktree.Sync(ctx, r.data.Trees)
	r.took += time.Since(syncing)
	return err
}

// learn makes the file caches true again.
func (r *filesPart) learn() {
	for _, c := range r.changes {
		c.Learn()
	}
}

func (r *filesPart) settle(ctx context.Context) error {
	return errors.Join(r.data.discard(true), r.forgetUndos(ctx))
}

// revert makes the files what they were, and lets the sandbox go on if it has not ended.
func (r *filesPart) revert(ctx context.Context) (err error) {
	if r.replaced || r.resumed && r.processes.stopped {
		err = r.putBack(ctx)
	}
	if r.resumed { // what it has laid out stays until it is given up
		return err
	}
	left := err != nil
	if r.present != nil { // before what may take long
		err = errors.Join(err, r.present.cut.End(), r.e.checkpoints.thaw(ctx, r.present))
	}
	err = errors.Join(err, r.data.discard(!r.replaced))
	// The checkpoint is the way back until the files are back, and has the processes.
	if r.present != nil && (!r.processes.touched || r.data.NoUndo && !left) {
		err = errors.Join(err, r.e.store.RemoveCheckpoint(ctx, r.undone))
	}
	return err
}

// putBack makes the files what they were before the restore.
func (r *filesPart) putBack(ctx context.Context) (err error) {
	r.sb.steps.Begin(runtime.PhasePutting, 0)
	defer func() {
		if err != nil {
			err = fmt.Errorf("put the files back: %w (%w)", err, errUnfinished)
		}
	}()
	var was worktree.Target
	if r.data.Trees[0].Displaced() == "" {
		if r.undone == "" {
			return nil
		}
		if was.Reader, err = r.e.store.OpenCheckpoint(ctx, r.undone); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, was.Reader.Close()) }()
		r.below = nil // they may have changed since
		if was.Moved, err = r.findMoved(ctx, was.Reader); err != nil {
			return err
		}
	}
	var errs []error
	for _, c := range r.changes {
		errs = append(errs, c.Revert(ctx, was))
	}
	return errors.Join(errs...)
}

func (r *filesPart) close() error {
	err := r.closeChanges()
	if r.scratch != "" {
		err = errors.Join(err, os.RemoveAll(r.scratch))
		r.scratch = ""
	}
	return err
}

func (r *filesPart) closeChanges() error {
	var errs []error
	for _, c := range r.changes {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// keepPresent makes a checkpoint of what the restore replaces, and leaves the sandbox
// frozen. The checkpoint is also the way back if the restore fails, so it has the files
// even if no undo checkpoint is wanted.
func (r *filesPart) keepPresent(ctx context.Context) error {
	if r.data.Undo == "" {
		return nil
	}

	// The restore ends all processes, even one of files only, so the undo checkpoint
	// includes them.
	opts := runtime.CheckpointOptions{
		Trigger: runtime.TriggerUndo, TCP: runtime.TCPEstablished, FilesOnly: r.data.NoUndo,
		WithVolumes: len(r.data.Trees) > 1, Paranoid: r.verify, Attach: r.attached.hostPaths(),
	}
	unlearnt := false
	for {
		k, err := r.e.checkpoints.prepare(ctx, r.sb, r.c, opts)
		if err != nil && !opts.FilesOnly {
			if !errors.Is(err, runtime.ErrNotFound) { // otherwise it has no process that could be lost
				r.undoIsFiles(err)
			}
			opts.FilesOnly = true
			continue
		}
		if err != nil {
			return err
		}
		k.row.ID, k.hold = r.data.Undo, true
		if r.row.Damaged == "" && !unlearnt {
			if k.like, err = r.reader.TreeChunks(ctx, 0); err != nil {
				return err
			}
		}
		var laid error
		if k.row.Kind == runtime.KindFiles && len(k.trees) >= len(r.data.Trees) {
			// Staging does not touch the sandbox.
			k.beside = func(ctx context.Context) {
				r.take(k)
				laid = r.layOut(ctx)
			}
		}
		row, err := r.e.checkpoints.record(ctx, k)
		if err != nil && !opts.FilesOnly && ctx.Err() == nil && !errors.Is(err, unix.ENOSPC) && !isCalledOff(err) {
			// A sandbox that cannot be dumped can still be undone as files.
			r.e.log.Info("undo checkpoint limited to files", "sandbox", r.sb.ID, "err", err)
			r.undoIsFiles(err)
			opts.FilesOnly, r.data.Undo = true, newID()
			// Recovery looks for the undo checkpoint that the journal names.
			if err := r.note(ctx, true); err != nil {
				return err
			}
			continue
		}
		if err != nil && k.stale && !unlearnt {
			// Try once more without the file cache.
			unlearnt, r.data.Undo = true, newID()
			if err := r.note(ctx, true); err != nil {
				return err
			}
			continue
		}
		if isCalledOff(err) {
			return r.attached.hostTrouble(fmt.Errorf("keep the present state: %w", err))
		}
		if err != nil {
			return fmt.Errorf("keep the present state: %w", err)
		}
		r.present, r.undone = k, row.ID
		r.take(k)
		return laid
	}
}

// undoIsFiles warns that the processes that the restore ends are lost.
func (r *filesPart) undoIsFiles(why error) {
	r.warnings = append(slices.Clone(r.warnings),
		fmt.Sprintf("the undo checkpoint has files only: %v; the processes that this restore has ended cannot be brought back", why))
}

// take takes over the collections of the undo checkpoint.
func (r *filesPart) take(k *making) {
	r.below = slices.Clone(k.below)
	for i := range r.data.Trees {
		for _, t := range k.trees {
			if t.Dir == r.data.Trees[i].Dir {
				r.data.Trees[i].Adopt(t)
			}
		}
	}
}

// findLost reads all files of a damaged checkpoint to find those that cannot be restored.
func (r *filesPart) findLost(ctx context.Context) error {
	if !r.data.Salvage {
		return nil
	}
	r.lost = map[string]bool{}
	r.sb.steps.Begin(runtime.PhaseLooking, 0)
	source := r.sb.steps.Source(runtime.PhaseLooking, r.reader.Source())
	for entry, err := range worktree.Entries(ctx, r.reader, 0) {
		if err != nil {
			return err
		}
		if entry.Type != overlay.TypeFile || entry.Size == 0 {
			continue
		}
		if entry.Hardlink != "" {
			if r.lost[entry.Hardlink] {
				r.lost[entry.Path] = true
			}
			continue
		}
		data, err := source.Data(ctx, entry)
		if err == nil {
			_, err = io.Copy(io.Discard, data)
			err = errors.Join(err, data.Close())
		}
		if errors.Is(err, runtime.ErrCorrupt) {
			r.lost[entry.Path] = true
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// forgetUndos removes the undo checkpoints that a newer one has replaced. It keeps those
// that are pinned, named or tagged, the one that the sandbox is at and those before it from which it
// went on, those that redo leads to, and those that alone have previous host files: the caller of
// this restore may have no say over these.
func (r *filesPart) forgetUndos(ctx context.Context) error {
	rows, err := r.e.store.Checkpoints(ctx, store.Filter{SandboxID: r.sb.ID, Trigger: runtime.TriggerUndo})
	if err != nil {
		return err
	}
	steps, err := r.stepsOf(ctx, rows)
	if err != nil {
		return err
	}
	var kept *store.Attached
	for _, row := range rows {
		if row.ID == r.data.Undo {
			kept = row.Attached
		}
	}
	for _, row := range rows {
		newest := row.ID == r.data.Undo && !r.data.NoUndo
		if newest || steps[row.ID] || row.Pinned || row.Name != "" || len(row.Tags) > 0 {
			continue
		}
		if r.data.NoUndo && row.ID != r.data.Undo {
			continue // no newer one has replaced it
		}
		if row.ID != r.data.Undo && !kept.Covers(row.Attached) {
			continue
		}
		_, failed := r.e.store.RemoveUnpinned(ctx, row.ID)
		err = errors.Join(err, failed)
	}
	if r.data.NoUndo {
		r.undone = ""
	}
	return err
}
