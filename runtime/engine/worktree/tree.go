// Package worktree is the door to package overlay for all that changes a sandbox's files. It
// captures the directories of a checkpoint, and makes a directory what a checkpoint has,
// provably:
//
//	ReadAhead -> Capture -> Put -> Remember                        a checkpoint
//	Plan -> Stage -> Begin -> Apply -> Verify -> Learn -> Close    a change
//	Plan -> ... -> Apply -> Revert -> Close                        a change that failed
//	Change -> Force -> Verify -> Close                             from an unknown state
//
// It chooses among overlay's ways to plan and to prove, by what is known of the files, and
// owns what they need: the file cache of each tree (cache.go), the stage beside it, and the
// files that a change displaces (displace.go).
package worktree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/store"
)

// Home is what all trees of a sandbox share.
type Home struct {
	Store   *store.Store
	Sandbox string
	Steps   *progress.Meter // nil: nothing is counted
	Log     *slog.Logger
}

// Tree is one directory in a checkpoint: the upperdir, or the data of a volume. In JSON it is
// a part of the journal.
type Tree struct {
	Dir        string `json:"dir"`
	Number     int    `json:"number"` // in a checkpoint; 0: the upperdir, 1+i: Manifest.Volumes[i]
	Displacing bool   `json:"aside"`  // a change displaces what it replaces, as the way back
	Below      bool   `json:"-"`      // it is what an overlay is laid over, and only read
	Home       Home   `json:"-"`

	base       string          // id of the checkpoint that the file cache is of; empty: none is known
	collection string          // path of its last collection; empty: none yet
	chunks     []overlay.Chunk // of the list in that collection; nil: not known
	same       bool            // that collection is what base has
}

// Each calls do for every tree, concurrently.
func Each(ctx context.Context, trees []Tree, do func(context.Context, *Tree) error) error {
	group, ctx := guard.WithContext(ctx)
	group.SetLimit(2)
	for i := range trees {
		group.Go(func() error { return do(ctx, &trees[i]) })
	}
	return group.Wait()
}

// Sync makes all data written to the filesystems of trees durable.
func Sync(ctx context.Context, trees []Tree) error {
	return Each(ctx, trees, func(_ context.Context, t *Tree) error { return syncfs(t.Dir) })
}

// ReadAhead reads what has changed since the last checkpoint while the directory is in use, as
// a pre-copy, so that little is left for Capture. It writes its findings to the new file out.
func (t *Tree) ReadAhead(ctx context.Context, out string, sink overlay.Sink, paranoid bool) error {
	t.Know(ctx)
	_, err := overlay.Collect(ctx, t.Dir, out, t.Home.Steps.Sink(runtime.PhaseFiles, sink), overlay.CollectOptions{
		Cache: t.collection, Trust: true, Tolerant: true, Paranoid: paranoid, Below: t.Below,
	})
	if err != nil {
		return fmt.Errorf("read files ahead: %w", err)
	}
	t.collection = out
	return nil
}

// Capture collects the tree, which does not change now, and has sink store the data that is
// not cached. Cache and Trust of opts are its own.
func (t *Tree) Capture(ctx context.Context, sink overlay.Sink, opts overlay.CollectOptions) error {
	out := t.cachePath() + fresh
	if err := remove(out); err != nil {
		return err
	}
	opts.Cache, opts.Trust, opts.Below = t.collection, true, t.Below
	got, err := overlay.Collect(ctx, t.Dir, out, t.Home.Steps.Sink(runtime.PhaseFiles, sink), opts)
	if err != nil {
		return err
	}
	t.same = got.Same && t.base != "" && opts.Cache == t.cachePath()
	t.collection = out
	return nil
}

// Put puts the list of what was captured into a draft. The directory may be in use again. like
// are the chunks of a list that is likely similar.
func (t *Tree) Put(ctx context.Context, draft *store.Draft, like []overlay.Chunk) (err error) {
	t.chunks, err = draft.PutCollection(ctx, t.Number, t.collection, like)
	return err
}

// Adopt takes over what a checkpoint of the same directory has just collected.
func (t *Tree) Adopt(from Tree) { t.collection, t.chunks = from.collection, from.chunks }

// look collects a tree that nothing writes to, without storing its data.
func (t *Tree) look(ctx context.Context, opts overlay.CollectOptions) error {
	out, err := t.fresh()
	if err != nil {
		return err
	}
	opts.Cache, opts.Trust = t.collection, true
	if _, err := overlay.Collect(ctx, t.Dir, out, t.Home.Steps.Reading(), opts); err != nil {
		return err
	}
	t.collection, t.chunks = out, nil
	return nil
}

// Differs collects a directory that may be in use, and reports whether it is not what a tree of
// a checkpoint has. The collection is the new file out.
func (t *Tree) Differs(ctx context.Context, out string, to Target) (bool, error) {
	if untouched, err := t.IsUntouched(ctx, out, to); untouched || err != nil {
		return false, err
	}
	return t.isNot(ctx, t.Number, to)
}

// isNot reports whether the last collection is not what a tree of a checkpoint has.
func (t *Tree) isNot(ctx context.Context, tree int, to Target) (bool, error) {
	diffs, err := overlay.Compare(to.Entries(ctx, tree), t.Entries(), overlay.CompareOptions{Limit: 1})
	return len(diffs) > 0, err
}

// Differed returns the tree as it was captured, and reports whether that is not a tree of a checkpoint. What
// is returned reads the collection by the new name link, since that of the file cache changes.
func (t *Tree) Differed(ctx context.Context, link string, tree int, to Target) (Tree, bool, error) {
	then := *t
	if t.same && tree == t.Number && to.whole(tree) {
		if has, err := t.baseHas(ctx, to.Reader); has || err != nil {
			return then, false, err
		}
	}
	if err := os.Link(t.collection, link); err != nil {
		return then, false, err
	}
	then.collection = link
	differs, err := then.isNot(ctx, tree, to)
	return then, differs, err
}

// IsUntouched collects a directory that may be in use, and reports whether the file cache alone shows
// that it is what a tree of a checkpoint has; false: it is not known. The collection is the new file out.
func (t *Tree) IsUntouched(ctx context.Context, out string, to Target) (bool, error) {
	t.Know(ctx)
	opts := overlay.CollectOptions{Cache: t.collection, Trust: true, Tolerant: true, Below: t.Below}
	got, err := overlay.Collect(ctx, t.Dir, out, t.Home.Steps.Reading(), opts)
	if err != nil {
		return false, err
	}
	if t.collection = out; !got.Same || !to.whole(t.Number) {
		return false, nil
	}
	return t.baseHas(ctx, to.Reader)
}

// baseHas reports whether the checkpoint that the file cache is of has the same list for the tree
// as another one; false: it is not known to.
func (t *Tree) baseHas(ctx context.Context, other *store.Reader) (bool, error) {
	m := other.Manifest()
	if t.base == m.ID {
		return true, nil
	}
	r, err := t.Home.Store.OpenCheckpoint(ctx, t.base)
	if err != nil {
		return false, ctx.Err() // it was removed meanwhile, or is damaged
	}
	base := r.Manifest()
	return base.SameTree(&m, t.Number), r.Close()
}

// Entries reads the last collection as a sequence; an error is its last element.
func (t *Tree) Entries() iter.Seq2[overlay.Entry, error] {
	stop := errors.New("stop")
	return func(yield func(overlay.Entry, error) bool) {
		err := overlay.Collection(t.collection, func(e overlay.Entry) error {
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

// Target is what trees are to become: those of a checkpoint, or what is left of them.
type Target struct {
	Reader *store.Reader
	Lost   map[string]bool // paths of the upperdir that are left out
	Moved  map[int]Moved   // by the number of the tree
}

// Moved is a workspace whose directory below is not what it was. Its tree is not to become the
// checkpoint's, but what shows the same over the directory as it is now.
type Moved struct {
	Below int                             // the tree of the directory as it was
	Now   iter.Seq2[overlay.Entry, error] // as it is
}

// whole reports whether a tree is to become the checkpoint's, as that is listed.
func (g Target) whole(tree int) bool {
	_, moved := g.Moved[tree]
	return !moved && len(g.lost(tree)) == 0
}

// lost returns the paths of a tree that are left out.
func (g Target) lost(tree int) map[string]bool {
	if tree > 0 {
		return nil
	}
	return g.Lost
}

// Entries reads a tree of a checkpoint as a sequence; an error is its last element.
func Entries(ctx context.Context, r *store.Reader, tree int) iter.Seq2[overlay.Entry, error] {
	return Target{Reader: r}.Entries(ctx, tree)
}

// Tree reads what a tree is to become, as a TreeWriter writes it.
func (g Target) Tree(ctx context.Context, tree int) (io.ReadCloser, error) {
	if g.whole(tree) {
		return g.Reader.Tree(ctx, tree)
	}
	r, w := io.Pipe()
	guard.Go(func() {
		// A reader waits for it, also after a panic.
		_ = w.CloseWithError(guard.Do(func() error { return g.write(ctx, tree, w) }))
	})
	return r, nil
}

func (g Target) write(ctx context.Context, tree int, to io.Writer) error {
	w := overlay.NewTreeWriter(to)
	for e, err := range g.Entries(ctx, tree) {
		if err != nil {
			return err
		}
		if err := w.Write(e); err != nil {
			return err
		}
	}
	return w.Close()
}

// Entries reads what a tree is to become.
func (g Target) Entries(ctx context.Context, tree int) iter.Seq2[overlay.Entry, error] {
	if m, ok := g.Moved[tree]; ok {
		return overlay.Rebase(overlay.Layers{Upper: g.listed(ctx, tree), Was: g.listed(ctx, m.Below), Now: m.Now})
	}
	return g.listed(ctx, tree)
}

// listed reads a tree of the checkpoint, without what is left out.
func (g Target) listed(ctx context.Context, tree int) iter.Seq2[overlay.Entry, error] {
	lost := g.lost(tree)
	return func(yield func(overlay.Entry, error) bool) {
		list, err := g.Reader.Tree(ctx, tree)
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

// syncfs makes all data written to the filesystem of dir durable.
func syncfs(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}
