package worktree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// A change without a checkpoint of what it replaces still needs a way back in case it fails. If
// nothing uses the tree and little changes, it moves the files that it replaces or removes
// aside, where they stay until all is done. In the meantime these lie beside the tree:
//
//	DIR.old/before   entries that will change, as they were; written before the first change
//	DIR.old/new      the stage and, once it is applied, the displaced files
//	DIR.old/was-N    the same of earlier attempts

// displaced returns where a change keeps the displaced files.
func (t *Tree) displaced() string { return t.Dir + ".old" }

// Displaced returns the directory of the displaced files of a change, or "".
func (t *Tree) Displaced() string {
	if !t.Displacing {
		return ""
	}
	return t.displaced()
}

func (t *Tree) before() string { return filepath.Join(t.displaced(), "before") }

// keepStage keeps the files in the stage, which may be the way back.
func (t *Tree) keepStage() error {
	if err := os.Mkdir(t.displaced(), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	for i := 1; ; i++ {
		to := filepath.Join(t.displaced(), "was-"+strconv.Itoa(i))
		switch err := os.Rename(t.stage(), to); {
		case errors.Is(err, os.ErrNotExist):
			return nil
		case errors.Is(err, os.ErrExist): // a directory that is not empty
		default:
			return err
		}
	}
}

// PlanDisplacing plans and stages a change of a tree that nothing uses, whose way back is the
// displaced files. Nil: that is not possible for it, and nothing has changed.
func (t *Tree) PlanDisplacing(ctx context.Context, to Target, paranoid bool) (_ *Change, err error) {
	together, err := sameFilesystem(t.Dir, t.Home.Store.Root())
	if err != nil {
		return nil, err
	}
	// After a power cut the replaced files are the way back. They are made durable here or,
	// on the store's filesystem, by Begin before the first change.
	var durable guard.Group
	if !together {
		durable.Go(func() error { return syncfs(t.Dir) })
	}
	t.Home.Steps.Begin(runtime.PhaseLooking, 0)
	c, err := t.compare(ctx, to, paranoid)
	if err := errors.Join(err, durable.Wait()); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	ok := false
	defer func() {
		if !ok {
			err = errors.Join(err, c.Close())
			t.collection, t.Displacing = "", false
		}
	}()
	t.Displacing = true
	if err := remove(t.displaced()); err != nil {
		return nil, err
	}
	if err := os.Mkdir(t.displaced(), 0o700); err != nil {
		return nil, err
	}
	defer func() {
		if !ok {
			err = errors.Join(err, remove(t.displaced()))
		}
	}()
	if fits, err := c.update.CanDisplace(t.displaced()); err != nil || !fits {
		return nil, err
	}
	if !c.update.Empty() {
		t.Home.Steps.Begin(runtime.PhaseStaging, c.Bytes())
		if err := c.stage(ctx, c.update, runtime.PhaseStaging); err != nil {
			return nil, err
		}
	}
	if err := c.update.WriteBefore(t.before()); err != nil {
		return nil, err
	}
	if err := failpoint.Hit("restore.aside.laid"); err != nil {
		return nil, err
	}
	ok = true
	return c, nil
}

// compare collects a tree that does not change and compares it with a target.
func (t *Tree) compare(ctx context.Context, to Target, paranoid bool) (*Change, error) {
	c := t.Change(to)
	t.know(ctx, false)
	base, err := overlay.CacheBase(t.cachePath(), false)
	if t.collection != "" && err == nil && base == to.Reader.Manifest().ID && !paranoid {
		// Usually the last collection was of this very checkpoint.
		c.update, err = t.planCached(ctx, to)
		if c.known = err == nil; err == nil || ctx.Err() != nil {
			return c, err
		}
		t.Home.Log.Debug("files compared with the checkpoint's list", "sandbox", t.Home.Sandbox, "why", err)
	}
	if t.collection != "" {
		t.Know(ctx) // which proves it
	}
	if err := t.look(ctx, overlay.CollectOptions{Paranoid: paranoid}); err != nil {
		return nil, err
	}
	c.update, err = t.plan(ctx, to)
	return c, err
}

// Begin has record put it on record that the tree may be changed from here on, durably unless
// lazy. The way back is durable by then.
func (c *Change) Begin(record func(lazy bool) error) error {
	t := c.tree
	if !t.Displacing {
		return record(false)
	}
	together, err := sameFilesystem(t.Dir, t.Home.Store.Root())
	if err != nil {
		return err
	}
	if together {
		// One sync makes the old files, the stage and the record durable.
		return errors.Join(record(true), syncfs(t.Dir))
	}
	var group guard.Group
	for _, path := range []string{t.before(), t.displaced(), filepath.Dir(t.displaced())} {
		group.Go(func() error { return fsync(path) })
	}
	return errors.Join(record(false), group.Wait())
}

// Untouched reports whether a change that displaces files had not begun to before a power cut:
// its DIR.old/before did not reach the disk completely.
func (t *Tree) Untouched() (bool, error) {
	if !t.Displacing {
		return false, nil
	}
	_, err := overlay.Before(t.before(), nil)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, io.ErrUnexpectedEOF) {
		return true, nil
	}
	if errors.Is(err, runtime.ErrCorrupt) {
		err = nil // the change may still be finished
	}
	return false, err
}

// putBack makes a tree what it was before the change, with the displaced files.
func (c *Change) putBack(ctx context.Context) (err error) {
	t := c.tree
	if err := t.keepStage(); err != nil {
		return err
	}
	was, err := overlay.Before(t.before(), c.to.Entries(ctx, t.Number))
	if errors.Is(err, os.ErrNotExist) {
		return nil // a previous run has finished and removed the displaced files
	}
	if err != nil {
		return err
	}
	kept, err := overlay.OpenDisplaced(ctx, t.displaced())
	if err != nil {
		return err
	}
	t.collection = ""
	if err := t.look(ctx, overlay.CollectOptions{}); err != nil {
		return err
	}
	u, err := overlay.PlanUpdate(ctx, t.collection, was)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.Close()) }()
	if !u.Empty() {
		if err := u.Stage(ctx, t.Dir, t.stage(), displacedSource{kept, c.to.Reader.Source()}); err != nil {
			return err
		}
		if err := u.Apply(ctx, t.Dir, t.stage()); err != nil {
			return err
		}
	}
	if err := t.look(ctx, overlay.CollectOptions{}); err != nil {
		return err
	}
	diffs, err := overlay.Compare(was, t.Entries(), overlay.CompareOptions{Limit: 1})
	if err == nil && len(diffs) > 0 {
		err = fmt.Errorf("%w: the files differ from what they were: %v", runtime.ErrCorrupt, diffs[0])
	}
	if err != nil {
		return err
	}
	// No checkpoint has this collection, so it cannot become the file cache.
	if err := errors.Join(t.dropScratch(), syncfs(t.Dir)); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.aside.back"); err != nil {
		return err
	}
	if err := remove(t.displaced()); err != nil {
		return err
	}
	t.Displacing = false
	return nil
}

// displacedSource reads displaced files, and takes the data of all others from the target.
type displacedSource struct {
	kept  *overlay.Displaced
	other overlay.Source
}

func (s displacedSource) Data(ctx context.Context, entry overlay.Entry) (io.ReadCloser, error) {
	data, err := s.kept.Data(ctx, entry)
	if errors.Is(err, runtime.ErrNotFound) {
		return s.other.Data(ctx, entry)
	}
	return data, err
}

func sameFilesystem(a, b string) (bool, error) {
	var st [2]unix.Stat_t
	if err := errors.Join(unix.Stat(a, &st[0]), unix.Stat(b, &st[1])); err != nil {
		return false, fmt.Errorf("look at %s and %s: %w", a, b, err)
	}
	return st[0].Dev == st[1].Dev, nil
}

// fsync makes a file or directory durable.
func fsync(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
