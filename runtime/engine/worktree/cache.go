package worktree

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// The file cache of a tree is its last collection: with it, the next one reads only what has
// changed. A collection is written beside the cache and renamed to it once a checkpoint has
// all of its data.
const fresh = ".new"

// cachePath returns the path of the file cache.
func (t *Tree) cachePath() string { return t.Home.Store.FileCachePath(t.Home.Sandbox, t.Number) }

// fresh makes room for a collection beside the cache and beside the last collection.
func (t *Tree) fresh() (string, error) {
	out := t.cachePath() + fresh
	if t.collection == out {
		out += ".2"
	}
	return out, remove(out)
}

// Know makes the file cache the last collection, if it is valid.
func (t *Tree) Know(ctx context.Context) { t.know(ctx, true) }

// know is Know; without prove the caller proves the cache. A cache is valid as long as the
// checkpoint it was built with is: all chunks that it names are then in the store.
func (t *Tree) know(ctx context.Context, prove bool) {
	t.base, t.collection = "", ""
	if base, ok := t.valid(ctx, t.cachePath(), prove); ok {
		t.base, t.collection = base, t.cachePath()
	} else if t.Below {
		// That base is another sandbox's checkpoint, in which the tree may have another number.
		if _, ok := t.valid(ctx, t.sharedPath(), true); ok {
			t.collection = t.sharedPath()
		}
	}
}

// valid reports whether a file cache is valid, and returns the checkpoint that it was built with.
func (t *Tree) valid(ctx context.Context, path string, prove bool) (base string, ok bool) {
	base, err := overlay.CacheBase(path, prove)
	if err != nil {
		return "", false
	}
	row, err := t.Home.Store.Checkpoint(ctx, base)
	return base, err == nil && row.Status == store.Ready && row.Damaged == ""
}

// sharedPath returns the path of the file cache that all sandboxes over a directory share: a new one
// reads only what has changed since another one's checkpoint.
func (t *Tree) sharedPath() string { return t.Home.Store.BelowCachePath(t.Dir) }

// share makes the file cache the shared one.
func (t *Tree) share() error {
	dir, err := t.Home.Store.Scratch()
	if err != nil {
		return err
	}
	link := filepath.Join(dir, "cache")
	err = os.Link(t.collection, link)
	if err == nil {
		err = os.Rename(link, t.sharedPath())
	}
	return errors.Join(err, remove(dir))
}

// Remember makes the last collection the file cache. Without the cache the next checkpoint
// reads more, and is still correct.
func (t *Tree) Remember() error {
	path := t.cachePath()
	err := os.Rename(t.collection, path)
	if errors.Is(err, os.ErrExist) { // a directory, and nothing at that path is needed
		if err = remove(path); err == nil {
			err = os.Rename(t.collection, path)
		}
	}
	if err != nil {
		return err
	}
	t.collection = path
	if t.Below {
		return t.share()
	}
	return nil
}

// Forget deletes the file cache, and the one that is shared.
func (t *Tree) Forget() error {
	if t.Below {
		return errors.Join(remove(t.cachePath()), remove(t.sharedPath()))
	}
	return remove(t.cachePath())
}

// proven makes the last collection, which is a checkpoint's, the file cache.
func (t *Tree) proven() error {
	if err := t.Remember(); err != nil {
		return err
	}
	t.chunks = nil
	return t.dropScratch()
}

// unproven deletes a collection that is no checkpoint's, and the file cache.
func (t *Tree) unproven(err error) error {
	return errors.Join(err, remove(t.collection), t.Forget())
}

// dropScratch deletes collections that did not become the file cache.
func (t *Tree) dropScratch() error {
	path := t.cachePath() + fresh
	return errors.Join(remove(path), remove(path+".2"))
}

// remove deletes what is at a path. It works beneath directory handles and follows no symlink.
func remove(path string) error { return os.RemoveAll(path) }
