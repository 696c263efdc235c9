package overlay

import (
	"context"
	"fmt"
	"os"
	"sync"
)

// checkAtMost is how many changes Check keeps in memory.
const checkAtMost = 1 << 14

// Check looks, after Apply, at what Apply touched, and reports whether dir is as wanted: compared
// with cache, from which the update was planned, the changes of the plan were made, each as
// wanted, and nothing else. It writes to out what Collect would write; sink and base are as
// there.
//
// Without all, files in directories that are as cached and have no change in them are not looked
// at again: the caller knows that since cache was written only Apply could write to dir.
//
// False means that Check cannot tell, not that dir is wrong; then there is no out.
func (u *Update) Check(ctx context.Context, dir, cache, out string, sink Sink, base string, all bool) (bool, error) {
	w, err := u.witness(all)
	if w == nil || err != nil {
		return false, err
	}
	if _, err := Collect(ctx, dir, out, sink, CollectOptions{
		Cache: cache, Trust: true, Base: base, witness: w,
	}); err != nil {
		return false, err
	}
	if w.wrong || len(w.left) > 0 {
		return false, os.Remove(out)
	}
	return true, nil
}

// witness holds what a Collect finds changed against a plan.
type witness struct {
	all  bool
	near map[string]bool   // directories in which the plan changes something, or themselves
	left map[string]string // what has not been seen yet: path -> its entry; empty: gone

	mu    sync.Mutex
	wrong bool // something else has changed
	keys  []keyChange
}

// witness returns nil for an update that is better checked as a whole.
func (u *Update) witness(all bool) (*witness, error) {
	if u.changes.file != nil || len(u.changes.index) > checkAtMost {
		return nil, nil
	}
	w := &witness{all: all, near: map[string]bool{}, left: map[string]string{}}
	for i := range u.changes.index {
		c, err := u.changes.at(i)
		if err != nil {
			return nil, err
		}
		w.near[c.Path] = true
		w.nearTo(c.Path)
		was, is := w.side(c.Old), w.side(c.New)
		if was != is {
			w.left[c.Path] = is
		}
	}
	return w, nil
}

// side returns the line of an entry that a change is about.
func (w *witness) side(e *Entry) string {
	if e == nil {
		return ""
	}
	if e.Hardlink != "" {
		w.nearTo(e.Hardlink) // the inode has other names than before
	}
	return string(e.AppendJSON(nil))
}

func (w *witness) nearTo(path string) {
	parent, _ := splitPath(path)
	w.near[parent] = true
}

// still reports whether the files in a directory, which itself has not changed, need not be
// looked at.
func (w *witness) still(dir string) bool { return w != nil && !w.all && !w.near[dir] }

// saw takes an entry that is not as the cache has it; no line: it is gone.
func (w *witness) saw(path string, line []byte) {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if is, ok := w.left[path]; !ok || is != string(line) {
		w.wrong = true
		return
	}
	delete(w.left, path)
}

// gone takes a record of something that is not there any more.
func (w *witness) gone(rec cacheRecord) error {
	if w == nil {
		return nil
	}
	e, err := rec.entry()
	if err != nil {
		return fmt.Errorf("%w: %w", errCache, err)
	}
	w.saw(e.Path, nil)
	return nil
}
