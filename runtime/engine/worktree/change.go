package worktree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Change makes a tree what a target has.
type Change struct {
	tree   *Tree
	to     Target
	update *overlay.Update // nil: not planned
	known  bool            // it is planned with the file cache alone, which has the target's files
	forced bool
	patch  *overlay.CachePatch // what must still be written to the file cache
}

// PlanOptions modify Plan.
type PlanOptions struct {
	Stale    bool   // the tree has changed since it was last collected
	Paranoid bool   // read every file of a tree that was not collected yet
	Scratch  string // a directory for files of a plan that is only looked at; the tree may be in use
}

// Change returns a change that is not planned: Force makes it.
func (t *Tree) Change(to Target) *Change { return &Change{tree: t, to: to} }

// Plan compares the tree with a target. Unless the tree is in use, nothing may write to it
// from its last collection on.
func (t *Tree) Plan(ctx context.Context, to Target, opts PlanOptions) (*Change, error) {
	switch {
	case opts.Scratch != "":
		t.Know(ctx)
		out := filepath.Join(opts.Scratch, strconv.Itoa(t.Number))
		known := overlay.CollectOptions{Cache: t.collection, Trust: true, Tolerant: true}
		if _, err := overlay.Collect(ctx, t.Dir, out, store.Cutter{}, known); err != nil {
			return nil, err
		}
		t.collection, t.chunks = out, nil
	case t.collection == "":
		t.Know(ctx)
		if err := t.look(ctx, overlay.CollectOptions{Paranoid: opts.Paranoid}); err != nil {
			return nil, err
		}
	case opts.Stale:
		if err := t.look(ctx, overlay.CollectOptions{}); err != nil {
			return nil, err
		}
	}
	u, err := t.plan(ctx, to)
	return &Change{tree: t, to: to, update: u}, err
}

// plan compares the last collection with a target.
func (t *Tree) plan(ctx context.Context, to Target) (*overlay.Update, error) {
	if !to.whole(t.Number) {
		u, err := overlay.PlanUpdate(ctx, t.collection, to.Entries(ctx, t.Number))
		if err != nil {
			err = fmt.Errorf("compare the files: %w", err)
		}
		return u, err
	}
	if t.chunks != nil {
		list, err := to.Reader.TreeChunks(ctx, t.Number)
		if err != nil {
			return nil, err
		}
		u, err := overlay.PlanUpdateChunks(ctx, t.collection, t.chunks, list,
			func(from, until int) (io.ReadCloser, error) {
				return to.Reader.TreePart(ctx, t.Number, from, until)
			})
		if err == nil {
			return u, nil
		}
	}
	list, err := to.Reader.Tree(ctx, t.Number)
	if err != nil {
		return nil, err
	}
	u, err := overlay.PlanUpdateTree(ctx, t.collection, list)
	if err = errors.Join(err, list.Close()); err != nil {
		return nil, fmt.Errorf("compare the files: %w", errors.Join(err, u.Close()))
	}
	return u, nil
}

// planKnown is plan for a tree whose file cache has exactly the target's files, as most often
// the last collection was of this very checkpoint.
func (t *Tree) planCached(ctx context.Context, to Target) (*overlay.Update, error) {
	proof := guard.Start(func() error {
		list, err := to.Reader.TreeChunks(ctx, t.Number)
		if err != nil {
			return err
		}
		same, err := overlay.ProveCache(t.collection, list)
		if err == nil && !same {
			err = fmt.Errorf("the checkpoint has another list than what is known: %w", runtime.ErrState)
		}
		return err
	})
	u, err := overlay.PlanUpdateCached(ctx, t.Dir, t.collection, t.Home.Steps.Reading())
	if err := errors.Join(<-proof, err); err != nil {
		return nil, errors.Join(err, u.Close())
	}
	return u, nil
}

// Len returns how many paths change.
func (c *Change) Len() int {
	if c == nil || c.update == nil {
		return 0
	}
	return c.update.Len()
}

// Bytes returns how much data Stage writes.
func (c *Change) Bytes() int64 {
	if c == nil || c.update == nil {
		return 0
	}
	return c.update.Bytes()
}

// Stage reads and proves what the tree lacks, and lays it out beside the tree, so that a
// rename moves it in. It does not touch the tree.
func (c *Change) Stage(ctx context.Context) error {
	if c.update.Empty() {
		return nil
	}
	if err := remove(c.tree.stage()); err != nil {
		return err
	}
	return c.stage(ctx, c.update, runtime.PhaseStaging)
}

func (c *Change) stage(ctx context.Context, u *overlay.Update, phase runtime.Phase) error {
	return u.Stage(ctx, c.tree.Dir, c.tree.stage(), c.tree.Home.Steps.Source(phase, c.to.Reader.Source()))
}

// Apply moves in what was staged. Nothing else may use the tree, and nothing may have written
// to it since it was planned.
func (c *Change) Apply(ctx context.Context) error {
	if c.update.Empty() {
		return nil
	}
	if err := c.apply(ctx, c.update); err != nil {
		return err
	}
	return failpoint.Hit("restore.between-trees")
}

func (c *Change) apply(ctx context.Context, u *overlay.Update) error {
	if c.tree.Displacing {
		return u.ApplyDisplacing(ctx, c.tree.Dir, c.tree.stage())
	}
	return u.Apply(ctx, c.tree.Dir, c.tree.stage())
}

// Force makes the change, proven and durable, whatever the tree is now and whatever was
// planned.
func (c *Change) Force(ctx context.Context) error {
	t := c.tree
	c.forced = true
	t.Know(ctx)
	if err := t.look(ctx, overlay.CollectOptions{Paranoid: true}); err != nil {
		return err
	}
	if err := c.change(ctx); err != nil {
		return err
	}
	return errors.Join(c.prove(ctx, false), syncfs(t.Dir))
}

// change plans anew from the last collection, stages and applies.
func (c *Change) change(ctx context.Context) error {
	u, err := c.tree.plan(ctx, c.to)
	if err != nil {
		return err
	}
	if err = c.tree.unstage(); err == nil && !u.Empty() {
		if err = c.stage(ctx, u, runtime.PhasePutting); err == nil {
			err = c.apply(ctx, u)
		}
		err = errors.Join(err, c.tree.unstage())
	}
	return errors.Join(err, u.Close())
}

// Revert makes a tree what it was before the change: from the displaced files or, if there are
// none, from a checkpoint of that state.
func (c *Change) Revert(ctx context.Context, was Target) error {
	if c.tree.Displacing {
		return c.putBack(ctx)
	}
	return c.tree.Change(was).Force(ctx)
}

// Close gives back what the change holds open. It may be called again, and of nil.
func (c *Change) Close() error {
	if c == nil {
		return nil
	}
	return c.update.Close()
}

// stage returns where a change stages what the tree lacks.
func (t *Tree) stage() string {
	if t.Displacing {
		return filepath.Join(t.displaced(), "new")
	}
	return t.Dir + ".new"
}

// unstage makes room for the next stage.
func (t *Tree) unstage() error {
	if t.Displacing {
		return t.keepStage()
	}
	return remove(t.stage())
}

// Clear deletes what changes have left beside the tree. Without all it keeps displaced files,
// which are the way back.
func (t *Tree) Clear(all bool) error {
	if t.Displacing && !all {
		return nil
	}
	err := remove(t.stage())
	if t.Number == 0 {
		err = errors.Join(err, remove(t.displaced()))
	}
	return err
}
