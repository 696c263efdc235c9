package worktree

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// VerifyOptions modify Verify.
type VerifyOptions struct {
	Still    bool // no process has used the upperdir since it was planned
	Paranoid bool // read every file again
}

// Verify proves that the tree is as the target has it, and repairs what the death of
// processes has changed.
//
// All files were read while the processes were frozen, but their death still writes: the
// kernel marks each robust mutex that a dying process holds (FUTEX_OWNER_DIED) and clears
// the words that wait for the end of its threads (clear_child_tid), even in a shared mapping
// of a file. That does not change the file's times if its page is already dirty. The file
// cache, however, trusts no file that has a writer, so the proof reads such files and finds
// the difference.
func (c *Change) Verify(ctx context.Context, opts VerifyOptions) error {
	t := c.tree
	whole := c.to.whole(t.Number)
	if c.update != nil && !c.forced && whole && !opts.Paranoid {
		if ok, err := c.witnessed(ctx, !opts.Still || t.Number > 0); err != nil || ok {
			return err
		}
	}
	if opts.Still || t.Displacing { // no process has ended
		return c.prove(ctx, opts.Paranoid)
	}
	err := c.differs(ctx, opts.Paranoid)
	if errors.Is(err, errDiffers) {
		t.Home.Log.Debug("files changed by the stop mended", "sandbox", t.Home.Sandbox, "tree", t.Number, "err", err)
		if err := errors.Join(failpoint.Hit("restore.before-mend"), c.change(ctx)); err != nil {
			return err
		}
		err = c.differs(ctx, opts.Paranoid)
	}
	if errors.Is(err, errDiffers) {
		return c.Force(ctx)
	}
	if err != nil || !whole {
		return t.unproven(err)
	}
	return t.proven()
}

// errDiffers: a tree differs from its target.
var errDiffers = fmt.Errorf("%w: the files differ from the manifest", runtime.ErrCorrupt)

// prove collects a tree again, fails if it differs from the target, and makes the collection
// the file cache. Files that have not changed since the last collection are read only when
// paranoid.
func (c *Change) prove(ctx context.Context, paranoid bool) error {
	err := c.differs(ctx, paranoid)
	if err != nil || !c.to.whole(c.tree.Number) {
		return c.tree.unproven(err)
	}
	return c.tree.proven()
}

// differs collects a tree again and compares it with the target; errDiffers: they differ. It
// keeps the collection.
func (c *Change) differs(ctx context.Context, paranoid bool) error {
	t := c.tree
	if err := t.look(ctx, overlay.CollectOptions{Base: c.to.Reader.Manifest().ID, Paranoid: paranoid}); err != nil {
		return err
	}
	// Equal lines need no parsing; a close comparison is worth the time only if some
	// differ.
	u, err := t.plan(ctx, c.to)
	var diffs []overlay.Difference
	if err == nil {
		err = u.Close()
	}
	if err == nil && !u.Empty() {
		diffs, err = overlay.Compare(c.to.Entries(ctx, t.Number), t.Entries(), overlay.CompareOptions{Limit: 1})
	}
	if err == nil && len(diffs) > 0 && len(c.to.lost(t.Number)) == 0 {
		// Holes may be finer or coarser than they were; the contents decide.
		diffs, err = overlay.VerifyEntries(ctx, t.Dir, c.to.Entries(ctx, t.Number), overlay.CompareOptions{Limit: 1})
	}
	if err == nil && len(diffs) > 0 {
		err = fmt.Errorf("%w: %v", errDiffers, diffs[0])
	}
	return err
}

// witnessed is prove for a tree that only the planned update has changed since; with all, it
// does not assume this of any file. It reports whether that was enough.
func (c *Change) witnessed(ctx context.Context, all bool) (bool, error) {
	t := c.tree
	if c.known {
		got, err := c.update.CheckCached(ctx, t.Dir, t.collection, t.Home.Steps.Reading())
		c.patch = got
		return got != nil, err
	}
	out, err := t.fresh()
	if err != nil {
		return false, err
	}
	ok, err := c.update.Check(ctx, t.Dir, t.collection, out, t.Home.Steps.Reading(), c.to.Reader.Manifest().ID, all)
	if err != nil || !ok {
		return false, err
	}
	t.collection = out
	return true, t.proven()
}

// Learn writes the changed inodes to a file cache that is otherwise still true. The tree may
// be in use again.
func (c *Change) Learn() {
	if c.patch == nil {
		return
	}
	t := c.tree
	if err := c.patch.Write(c.to.Reader.Manifest().ID); err != nil {
		// A half-written cache must not be used.
		err = errors.Join(err, remove(t.collection))
		t.Home.Log.Warn("file cache not kept; files will be read again", "sandbox", t.Home.Sandbox, "err", err)
	}
	c.patch = nil
}
