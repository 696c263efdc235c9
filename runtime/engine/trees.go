package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// tree is one directory in a checkpoint: the upperdir, or the data of a volume.
type tree struct {
	Dir    string `json:"dir"`
	Number int    `json:"number"` // in a checkpoint; 0: the upperdir, 1+i: Manifest.Volumes[i]
	Aside  bool   `json:"aside"`  // a restore moves what it replaces aside, as the way back (aside.go)

	seen   string          // path of its last collection
	pieces []overlay.Piece // of the list in that collection; nil: not known
	steps  *steps
	known  bool            // the last plan is of PlanUpdateKnown, with seen
	learnt *overlay.Learnt // what must still be written to seen
}

// stage returns where a restore stages what Dir lacks: beside it, so that a rename moves
// it in.
func (t tree) stage() string {
	if t.Aside {
		return filepath.Join(t.aside(), "new")
	}
	return t.Dir + ".new"
}

// unstage makes room for the next stage.
func (t tree) unstage() error {
	if t.Aside {
		return t.keepStage()
	}
	return discard(t.stage())
}

// apply moves in what was staged.
func (t tree) apply(ctx context.Context, u *overlay.Update) error {
	if t.Aside {
		return u.ApplyAside(ctx, t.Dir, t.stage())
	}
	return u.Apply(ctx, t.Dir, t.stage())
}

// each calls do for every tree, concurrently.
func each(ctx context.Context, trees []tree, do func(context.Context, *tree) error) error {
	group, ctx := guard.WithContext(ctx)
	group.SetLimit(2)
	for i := range trees {
		group.Go(func() error { return do(ctx, &trees[i]) })
	}
	return group.Wait()
}

// memory returns where a new collection of a tree is written before it becomes the tree's
// file cache.
func (e *Engine) memory(sandbox string, t tree) string {
	return e.store.MemoryPath(sandbox, t.Number) + ".new"
}

// known returns the path of the tree's file cache, or "". A cache is valid as long as the
// checkpoint it was built with is: all pieces that it names are then in the store.
func (e *Engine) known(ctx context.Context, sandbox string, t tree) string {
	return e.knownIf(ctx, sandbox, t, true)
}

// knownIf is known; without prove the caller proves it.
func (e *Engine) knownIf(ctx context.Context, sandbox string, t tree, prove bool) string {
	path := e.store.MemoryPath(sandbox, t.Number)
	base, err := overlay.MemoryBase(path, prove)
	if err != nil {
		return ""
	}
	row, err := e.store.Checkpoint(ctx, base)
	if err != nil || row.Status != store.Ready || row.Damaged != "" {
		return ""
	}
	return path
}

// approach reads what has changed since the last checkpoint while the sandbox still runs,
// as a pre-copy, so that little is left to read once it is frozen.
func (e *Engine) approach(ctx context.Context, k *making, draft *store.Draft) error {
	return each(ctx, k.trees, func(ctx context.Context, t *tree) error {
		t.seen = e.known(ctx, k.sb.ID, *t)
		if k.c.Status != runtime.Running {
			return nil // it does not change anyway
		}
		out := filepath.Join(draft.Dir(), "early-"+strconv.Itoa(t.Number))
		_, err := overlay.Collect(ctx, t.Dir, out, k.sb.steps.sink(runtime.PhaseFiles, draft.Sink()), overlay.CollectOptions{
			Known: t.seen, Trust: true, Tolerant: true, Paranoid: k.opts.Paranoid,
		})
		if err != nil {
			return fmt.Errorf("read files ahead: %w", err)
		}
		t.seen = out
		return nil
	})
}

// collect captures the trees of a stopped or frozen sandbox.
func (e *Engine) collect(ctx context.Context, k *making, draft *store.Draft, opts overlay.CollectOptions) error {
	for i := range k.trees {
		t := &k.trees[i]
		out := e.memory(k.sb.ID, *t)
		if err := remove(out); err != nil {
			return err
		}
		now := overlay.CollectOptions{}
		if t.Number == 0 {
			now = opts
		}
		now.Known, now.Trust, now.Base = t.seen, true, k.row.ID
		now.Paranoid = k.opts.Paranoid && k.c.Status != runtime.Running
		if _, err := overlay.Collect(ctx, t.Dir, out, k.sb.steps.sink(runtime.PhaseFiles, draft.Sink()), now); err != nil {
			if t.Number > 0 {
				return fmt.Errorf("volume %s: %w", k.parts.Volumes[t.Number-1].Name, err)
			}
			return fmt.Errorf("capture files: %w", err)
		}
		t.seen = out
	}
	return failpoint.Hit("checkpoint.after-capture")
}

// file stores what was captured. The sandbox may run again by then.
func (e *Engine) file(ctx context.Context, k *making, draft *store.Draft) error {
	if k.row.Kind == runtime.KindFull {
		k.sb.steps.begin(runtime.PhaseStoring, k.sb.steps.sizes(draft.CRIUDir()))
		draft.CountImages(k.sb.steps.adder(runtime.PhaseStoring))
	} else {
		k.sb.steps.begin(runtime.PhaseStoring, 0)
	}
	for i := range k.trees {
		t, like := &k.trees[i], k.like
		if t.Number > 0 {
			like = nil
		}
		var err error
		if t.pieces, err = draft.PutCollection(ctx, t.Number, t.seen, like); err != nil {
			return err
		}
	}
	if k.row.Kind != runtime.KindFull {
		return nil
	}
	return draft.PutImages(ctx)
}

// remember makes the collections of a checkpoint the file caches. Without them the next
// checkpoint reads more, and is still correct.
func (e *Engine) remember(k *making) {
	if k.aside {
		return // the caches stay those of the earlier checkpoint
	}
	for i := range k.trees {
		t := &k.trees[i]
		path := e.store.MemoryPath(k.sb.ID, t.Number)
		if err := learn(t.seen, path); err != nil {
			e.log.Warn("file cache not kept; files will be read again", "sandbox", k.sb.ID, "err", err)
			continue
		}
		t.seen = path
	}
}

// unlearn deletes a sandbox's file caches.
func (e *Engine) unlearn(k *making) error {
	var errs []error
	for _, t := range k.trees {
		errs = append(errs, remove(e.store.MemoryPath(k.sb.ID, t.Number)))
	}
	return errors.Join(errs...)
}

// learn renames a collection to the path of the file cache. It replaces even a directory
// there: nothing at that path is needed.
func learn(seen, path string) error {
	err := os.Rename(seen, path)
	if !errors.Is(err, os.ErrExist) { // a directory
		return err
	}
	if err := remove(path); err != nil {
		return err
	}
	return os.Rename(seen, path)
}

// remove deletes a file cache, or anything else at its path.
func remove(path string) error { return os.RemoveAll(path) }

// entries reads a collection as a sequence; an error is its last element.
func entries(path string) iter.Seq2[overlay.Entry, error] {
	stop := errors.New("stop")
	return func(yield func(overlay.Entry, error) bool) {
		err := overlay.Collection(path, func(e overlay.Entry) error {
			if !yield(e, nil) {
				return stop
			}
			return nil
		})
		if err != nil && err != stop {
			yield(overlay.Entry{}, err)
		}
	}
}

// wanted reads a tree of a checkpoint as a sequence, without the paths that
// are lost.
func wanted(ctx context.Context, r *store.Reader, t tree, lost map[string]bool) iter.Seq2[overlay.Entry, error] {
	return func(yield func(overlay.Entry, error) bool) {
		list, err := r.Tree(ctx, t.Number)
		if err != nil {
			yield(overlay.Entry{}, err)
			return
		}
		for entry, err := range overlay.TreeEntries(list) {
			if lost[entry.Path] || lost[entry.Hardlink] && entry.Hardlink != "" {
				continue
			}
			if !yield(entry, err) {
				_ = list.Close() // a consumer that stops early has an error of its own
				return
			}
			if err != nil {
				break
			}
		}
		if err := list.Close(); err != nil {
			yield(overlay.Entry{}, err)
		}
	}
}

// plan compares the last collection of a tree with a checkpoint.
func (t *tree) plan(ctx context.Context, r *store.Reader, lost map[string]bool) (*overlay.Update, error) {
	if len(lost) > 0 {
		u, err := overlay.PlanUpdate(ctx, t.seen, wanted(ctx, r, *t, lost))
		if err != nil {
			err = fmt.Errorf("compare the files: %w", err)
		}
		return u, err
	}
	if t.pieces != nil {
		list, err := r.TreePieces(ctx, t.Number)
		if err != nil {
			return nil, err
		}
		u, err := overlay.PlanUpdatePieces(ctx, t.seen, t.pieces, list, func(from, to int) (io.ReadCloser, error) {
			return r.TreePart(ctx, t.Number, from, to)
		})
		if err == nil {
			return u, nil
		}
	}
	list, err := r.Tree(ctx, t.Number)
	if err != nil {
		return nil, err
	}
	u, err := overlay.PlanUpdateTree(ctx, t.seen, list)
	if err = errors.Join(err, list.Close()); err != nil {
		return nil, fmt.Errorf("compare the files: %w", errors.Join(err, u.Close()))
	}
	return u, nil
}

// look collects a tree that does not change, without storing its data.
func (e *Engine) look(ctx context.Context, sandbox string, t *tree, opts overlay.CollectOptions) error {
	out := e.memory(sandbox, *t)
	if t.seen == out {
		out += ".2"
	}
	if err := remove(out); err != nil {
		return err
	}
	opts.Known, opts.Trust = t.seen, true
	if _, err := overlay.Collect(ctx, t.Dir, out, t.steps.reading(), opts); err != nil {
		return err
	}
	t.seen, t.pieces = out, nil
	return nil
}

// errDiffers: a tree differs from the checkpoint.
var errDiffers = fmt.Errorf("%w: the files differ from the manifest", runtime.ErrCorrupt)

// prove collects a tree again, fails if it differs from the checkpoint, and makes the
// collection the file cache. Files that have not changed since the last collection are
// read only when paranoid.
func (e *Engine) prove(ctx context.Context, sandbox string, t *tree, r *store.Reader, lost map[string]bool, paranoid bool) error {
	err := e.differs(ctx, sandbox, t, r, lost, paranoid)
	if err != nil || len(lost) > 0 {
		return errors.Join(err, remove(t.seen), remove(e.store.MemoryPath(sandbox, t.Number)))
	}
	return e.proven(sandbox, t)
}

// differs collects a tree again and compares it with a checkpoint; errDiffers: they
// differ. It keeps the collection.
func (e *Engine) differs(ctx context.Context, sandbox string, t *tree, r *store.Reader, lost map[string]bool, paranoid bool) error {
	id := r.Manifest().ID
	if err := e.look(ctx, sandbox, t, overlay.CollectOptions{Base: id, Paranoid: paranoid}); err != nil {
		return err
	}
	// Equal lines need no parsing; a close comparison is worth the time only if some
	// differ.
	u, err := t.plan(ctx, r, lost)
	var diffs []overlay.Difference
	if err == nil {
		err = u.Close()
	}
	if err == nil && !u.Empty() {
		diffs, err = overlay.Compare(wanted(ctx, r, *t, lost), entries(t.seen), overlay.CompareOptions{Limit: 1})
	}
	if err == nil && len(diffs) > 0 && len(lost) == 0 {
		// Holes may be finer or coarser than they were; the contents decide.
		var list io.ReadCloser
		if list, err = r.Tree(ctx, t.Number); err != nil {
			return err
		}
		diffs, err = overlay.Verify(ctx, t.Dir, list, overlay.CompareOptions{Limit: 1})
		err = errors.Join(err, list.Close())
	}
	if err == nil && len(diffs) > 0 {
		err = fmt.Errorf("%w: %v", errDiffers, diffs[0])
	}
	return err
}

// proveUpdate is prove for a tree that was known when u was planned and that only u has
// changed since; with all, it does not assume this of any file. It reports whether that
// was enough.
func (e *Engine) proveUpdate(ctx context.Context, sandbox string, t *tree, u *overlay.Update, base string, all bool) (bool, error) {
	if t.known {
		got, err := u.CheckKnown(ctx, t.Dir, t.seen, t.steps.reading())
		t.learnt = got
		return got != nil, err
	}
	out := e.memory(sandbox, *t)
	if t.seen == out {
		out += ".2"
	}
	if err := remove(out); err != nil {
		return false, err
	}
	ok, err := u.Check(ctx, t.Dir, t.seen, out, t.steps.reading(), base, all)
	if err != nil || !ok {
		return false, err
	}
	t.seen = out
	return true, e.proven(sandbox, t)
}

// proven makes the last collection of a tree its file cache.
func (e *Engine) proven(sandbox string, t *tree) error {
	path := e.store.MemoryPath(sandbox, t.Number)
	if err := learn(t.seen, path); err != nil {
		return err
	}
	if err := e.unsee(sandbox, *t); err != nil {
		return err
	}
	t.seen, t.pieces = path, nil
	return nil
}

// learn writes the changed inodes of trees with a file cache to the caches.
func (e *Engine) learn(r *restoration) {
	for i := range r.data.Trees {
		t := &r.data.Trees[i]
		if t.learnt == nil {
			continue
		}
		if err := t.learnt.Write(r.row.ID); err != nil {
			// A half-written cache must not be used.
			e.log.Warn("file cache not kept; files will be read again", "sandbox", r.sb.ID, "err", errors.Join(err, remove(t.seen)))
		}
		t.learnt = nil
	}
}

// unsee deletes collections of a tree that did not become its file cache.
func (e *Engine) unsee(sandbox string, t tree) error {
	path := e.memory(sandbox, t)
	return errors.Join(remove(path), remove(path+".2"))
}

// equalize makes a tree equal to a checkpoint, durably. The tree is not in use, and its
// contents are not assumed to be known.
func (e *Engine) equalize(ctx context.Context, sandbox string, t *tree, r *store.Reader, lost map[string]bool) error {
	t.seen = e.known(ctx, sandbox, *t)
	if err := e.look(ctx, sandbox, t, overlay.CollectOptions{Paranoid: true}); err != nil {
		return err
	}
	if err := t.change(ctx, r, lost); err != nil {
		return err
	}
	return errors.Join(e.prove(ctx, sandbox, t, r, lost, false), syncfs(t.Dir))
}

// change turns a tree, as last collected, into the checkpoint's.
func (t *tree) change(ctx context.Context, r *store.Reader, lost map[string]bool) error {
	u, err := t.plan(ctx, r, lost)
	if err != nil {
		return err
	}
	if err = t.unstage(); err == nil && !u.Empty() {
		if err = u.Stage(ctx, t.Dir, t.stage(), t.steps.source(runtime.PhasePutting, r.Source())); err == nil {
			err = t.apply(ctx, u)
		}
		err = errors.Join(err, t.unstage())
	}
	return errors.Join(err, u.Close())
}

// discard deletes what a restore has staged. RemoveAll works beneath directory handles and
// follows no symlink.
func discard(dir string) error { return os.RemoveAll(dir) }

// plan lists the trees that the restore replaces.
func (r *restoration) plan(ctx context.Context) error {
	r.data.Trees = []tree{{Dir: r.c.Upper, steps: r.sb.steps}}
	for i, v := range r.reader.Manifest().Volumes {
		at := slices.IndexFunc(r.c.Volumes, func(have runtime.Volume) bool { return have.Name == v.Name })
		if at < 0 {
			return hint(fmt.Errorf("%w: volume %s of the checkpoint is not the sandbox's any more", runtime.ErrState, v.Name), "Make it and the container again as they were.")
		}
		r.data.Trees = append(r.data.Trees, tree{Dir: r.c.Volumes[at].Path, Number: i + 1, steps: r.sb.steps})
	}
	return r.checkAlone(ctx)
}
