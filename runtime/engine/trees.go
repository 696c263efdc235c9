package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// home returns what the trees of a sandbox share.
func (e *Engine) home(sb *locked) worktree.Home {
	return worktree.Home{Store: e.store, Sandbox: sb.ID, Steps: sb.steps, Log: e.log}
}

// approach reads what has changed since the last checkpoint while the sandbox still runs.
func (e *Engine) approach(ctx context.Context, k *making, draft *store.Draft) error {
	return worktree.Each(ctx, k.trees, func(ctx context.Context, t *worktree.Tree) error {
		if k.c.Status != runtime.Running { // it does not change anyway
			t.Know(ctx)
			return nil
		}
		return t.ReadAhead(ctx, filepath.Join(draft.Dir(), "early-"+strconv.Itoa(t.Number)), draft.Sink(), k.opts.Paranoid)
	})
}

// collect captures the trees of a stopped or frozen sandbox.
func (e *Engine) collect(ctx context.Context, k *making, draft *store.Draft, opts overlay.CollectOptions) error {
	for i := range k.trees {
		t := &k.trees[i]
		now := overlay.CollectOptions{}
		if t.Number == 0 {
			now = opts
		}
		now.Base, now.Paranoid = k.row.ID, k.opts.Paranoid && k.c.Status != runtime.Running
		if err := t.Capture(ctx, draft.Sink(), now); err != nil {
			if t.Number > 0 {
				return fmt.Errorf("volume %s: %w", k.parts.Volumes[t.Number-1].Name, err)
			}
			return fmt.Errorf("capture files: %w", err)
		}
	}
	return failpoint.Hit("checkpoint.after-capture")
}

// file stores what was captured. The sandbox may run again by then.
func (e *Engine) file(ctx context.Context, k *making, draft *store.Draft) error {
	if k.row.Kind == runtime.KindFull {
		k.sb.steps.Begin(runtime.PhaseStoring, k.sb.steps.Sizes(draft.CRIUDir()))
		draft.CountImages(k.sb.steps.Adder(runtime.PhaseStoring))
	} else {
		k.sb.steps.Begin(runtime.PhaseStoring, 0)
	}
	for i := range k.trees {
		t, like := &k.trees[i], k.like
		if t.Number > 0 {
			like = nil
		}
		if err := t.Put(ctx, draft, like); err != nil {
			return err
		}
	}
	if k.row.Kind != runtime.KindFull {
		return nil
	}
	return draft.PutImages(ctx)
}

// remember makes the collections of a checkpoint the file caches.
func (e *Engine) remember(k *making) {
	if k.aside {
		return // the caches stay those of the earlier checkpoint
	}
	for i := range k.trees {
		if err := k.trees[i].Remember(); err != nil {
			e.log.Warn("file cache not kept; files will be read again", "sandbox", k.sb.ID, "err", err)
		}
	}
}

// unlearn deletes a sandbox's file caches.
func (e *Engine) unlearn(k *making) error {
	var errs []error
	for i := range k.trees {
		errs = append(errs, k.trees[i].Forget())
	}
	return errors.Join(errs...)
}

// plan lists the trees that the restore replaces.
func (e *Engine) plan(ctx context.Context, r *restoration) error {
	home := e.home(r.sb)
	r.data.Trees = []worktree.Tree{{Dir: r.c.Upper, Home: home}}
	for i, v := range r.reader.Manifest().Volumes {
		at := slices.IndexFunc(r.c.Volumes, func(have runtime.Volume) bool { return have.Name == v.Name })
		if at < 0 {
			return hint(fmt.Errorf("%w: volume %s of the checkpoint is not the sandbox's any more", runtime.ErrState, v.Name),
				"Make it and the container again as they were.")
		}
		r.data.Trees = append(r.data.Trees, worktree.Tree{Dir: r.c.Volumes[at].Path, Number: i + 1, Home: home})
	}
	return r.checkAlone(ctx)
}

// target returns what the trees of a restore are to become.
func (r *restoration) target() worktree.Target {
	return worktree.Target{Reader: r.reader, Lost: r.lost}
}

// layAside stages a restore whose way back is the files that it displaces, if that is
// possible for it; otherwise nothing has changed.
func (r *restoration) layAside(ctx context.Context) (ok bool, err error) {
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

// untouched reports whether a restore that displaces files had not begun to before a power
// cut.
func (r *restoring) untouched() (bool, error) {
	if r.Phase != phaseSwap || len(r.Trees) == 0 {
		return false, nil
	}
	return r.Trees[0].Untouched()
}

// beginSwap records that the files may be changed from here on.
func (e *Engine) beginSwap(ctx context.Context, seq int64, r *restoration) (err error) {
	defer func() { r.past = err != nil }() // nothing has changed
	r.data.Phase = phaseSwap
	return r.changes[0].Begin(func(lazy bool) error { return e.advance(ctx, seq, r.data, lazy) })
}

// layOutFiles compares the trees with the checkpoint and stages what they lack.
func (r *restoration) layOutFiles(ctx context.Context) error {
	if err := r.closeChanges(); err != nil { // of an earlier attempt
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

func (r *restoration) closeChanges() error {
	var errs []error
	for _, c := range r.changes {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// discard deletes all that was staged.
func (r *restoration) discard() error {
	var errs []error
	for i := range r.data.Trees {
		errs = append(errs, r.data.Trees[i].Clear(r.past || r.data.Phase == phasePrepare))
	}
	errs = append(errs, r.closeChanges())
	if r.images != "" {
		errs = append(errs, os.RemoveAll(r.images))
	}
	return errors.Join(errs...)
}

// putBack puts the files back as they were before the restore.
func (e *Engine) putBack(ctx context.Context, r *restoration) (err error) {
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
		if was.Reader, err = e.store.OpenCheckpoint(ctx, r.undone); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, was.Reader.Close()) }()
	}
	var errs []error
	for _, c := range r.changes {
		errs = append(errs, c.Revert(ctx, was))
	}
	return errors.Join(errs...)
}
