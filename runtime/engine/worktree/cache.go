package worktree

import (
	"context"
	"errors"
	"os"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// The file cache of a tree is its last collection: with it, the next one reads only what has
// changed. A collection is written beside the cache and renamed to it once a checkpoint has
// all of its data.
const fresh = ".new"

// memory returns the path of the file cache.
func (t *Tree) memory() string { return t.Home.Store.MemoryPath(t.Home.Sandbox, t.Number) }

// fresh makes room for a collection beside the cache and beside the last collection.
func (t *Tree) fresh() (string, error) {
	out := t.memory() + fresh
	if t.seen == out {
		out += ".2"
	}
	return out, remove(out)
}

// Know makes the file cache the last collection, if it is valid.
func (t *Tree) Know(ctx context.Context) { t.know(ctx, true) }

// know is Know; without prove the caller proves the cache. A cache is valid as long as the
// checkpoint it was built with is: all pieces that it names are then in the store.
func (t *Tree) know(ctx context.Context, prove bool) {
	t.seen = ""
	base, err := overlay.MemoryBase(t.memory(), prove)
	if err != nil {
		return
	}
	row, err := t.Home.Store.Checkpoint(ctx, base)
	if err == nil && row.Status == store.Ready && row.Damaged == "" {
		t.seen = t.memory()
	}
}

// Remember makes the last collection the file cache. Without the cache the next checkpoint
// reads more, and is still correct.
func (t *Tree) Remember() error {
	path := t.memory()
	err := os.Rename(t.seen, path)
	if errors.Is(err, os.ErrExist) { // a directory, and nothing at that path is needed
		if err = remove(path); err == nil {
			err = os.Rename(t.seen, path)
		}
	}
	if err == nil {
		t.seen = path
	}
	return err
}

// Forget deletes the file cache.
func (t *Tree) Forget() error { return remove(t.memory()) }

// proven makes the last collection, which is a checkpoint's, the file cache.
func (t *Tree) proven() error {
	if err := t.Remember(); err != nil {
		return err
	}
	t.pieces = nil
	return t.unsee()
}

// unproven deletes a collection that is no checkpoint's, and the file cache.
func (t *Tree) unproven(err error) error {
	return errors.Join(err, remove(t.seen), t.Forget())
}

// unsee deletes collections that did not become the file cache.
func (t *Tree) unsee() error {
	path := t.memory() + fresh
	return errors.Join(remove(path), remove(path+".2"))
}

// remove deletes what is at a path. It works beneath directory handles and follows no symlink.
func remove(path string) error { return os.RemoveAll(path) }
