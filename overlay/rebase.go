package overlay

import (
	"fmt"
	"iter"
	"maps"
	"path"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// Layers are what Rebase reads, each in the order of ComparePaths and with digests. A sequence
// can be read more than once.
type Layers struct {
	Upper iter.Seq2[Entry, error] // an upperdir
	Was   iter.Seq2[Entry, error] // the directory that it lay over
	Now   iter.Seq2[Entry, error] // the one that it is to lie over
}

// Rebase returns the upperdir that over Now shows exactly what Upper shows over Was. Where Was and
// Now are equal, that is Upper. An error is the last element.
//
// What Now has not, or otherwise, is taken from Was; what only Now has is whited out. A hard link
// of Was that has to be taken becomes a file of its own, as a copy-up makes it.
func Rebase(l Layers) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		r := rebase{yield: yield}
		if err := r.run(l); err != nil && err != errStop {
			yield(Entry{}, err)
		}
	}
}

type rebase struct {
	yield func(Entry, error) bool
	above []shownDir // the directories that lead to the present path, the root first
}

// shownDir is a directory that is shown.
type shownDir struct {
	path string
	was  bool   // Was shows through
	now  bool   // Now shows through
	copy *Entry // what puts it into the upperdir; nil: it is there
}

func (r *rebase) run(l Layers) error {
	was, stopWas, err := openLower(l.Was)
	if err != nil {
		return err
	}
	defer stopWas()
	now, stopNow, err := openLower(l.Now)
	if err != nil {
		return err
	}
	defer stopNow()
	next, stop := iter.Pull2(l.Upper)
	defer stop()
	upper := &cursor{next: next}
	if err := upper.advance(); err != nil {
		return err
	}
	for {
		p, ok := first(upper, was, now)
		if !ok {
			return nil
		}
		var at [3]*Entry
		for i, c := range []*cursor{upper, was, now} {
			if at[i], err = c.take(p); err != nil {
				return err
			}
		}
		if err := r.step(p, at[0], at[1], at[2]); err != nil {
			return err
		}
	}
}

// step decides what the new upperdir has at a path.
func (r *rebase) step(p string, upper, was, now *Entry) error {
	if p == "." {
		if upper == nil {
			return fmt.Errorf("%w: an upperdir without a root", fault.ErrCorrupt)
		}
		return r.enter(p, upper, nil, isDirectory(was), isDirectory(now))
	}
	for len(r.above) > 1 && !isBelow(p, r.above[len(r.above)-1].path) {
		r.above = r.above[:len(r.above)-1]
	}
	if len(r.above) == 0 {
		return fmt.Errorf("%w: a tree without a root", fault.ErrCorrupt)
	}
	in := &r.above[len(r.above)-1]
	if in.path != path.Dir(p) {
		return nil // it is hidden
	}
	if !in.was {
		was = nil
	}
	if !in.now {
		now = nil
	}
	switch {
	case upper != nil && upper.Type == TypeDir:
		return r.enter(p, upper, nil, isDirectory(was), isDirectory(now))
	case upper != nil:
		return r.emit(*upper)
	case was == nil && now == nil:
		return nil
	case was == nil:
		return r.emit(Entry{Path: p, Type: TypeWhiteout})
	}
	same, err := sameEntry(was, now)
	switch {
	case err != nil:
		return err
	case was.Type == TypeDir && same:
		return r.enter(p, nil, was, true, true)
	case was.Type == TypeDir:
		return r.enter(p, was, nil, true, isDirectory(now))
	case same:
		return nil
	}
	return r.emit(*was)
}

// enter goes into a directory: have is put into the upperdir now, later only if something in it is.
func (r *rebase) enter(p string, have, later *Entry, was, now bool) error {
	if have != nil {
		if err := r.emit(*have); err != nil {
			return err
		}
		if have.Xattrs[markPrefix+"opaque"] == "y" {
			was, now = false, false
		}
	}
	r.above = append(r.above, shownDir{path: p, was: was, now: now, copy: later})
	return nil
}

// emit hands out an entry, after the directories that lead to it.
func (r *rebase) emit(e Entry) error {
	for i := range r.above {
		if d := &r.above[i]; d.copy != nil {
			if !r.yield(*d.copy, nil) {
				return errStop
			}
			d.copy = nil
		}
	}
	if !r.yield(e, nil) {
		return errStop
	}
	return nil
}

func isDirectory(e *Entry) bool { return e != nil && e.Type == TypeDir }

// isBelow reports whether a path lies in a directory, at any depth.
func isBelow(p, dir string) bool { return dir == "." || strings.HasPrefix(p, dir+"/") }

func sameEntry(a, b *Entry) (bool, error) {
	if a == nil || b == nil {
		return false, nil
	}
	what, err := differ(a, b, &CompareOptions{Block: 4096})
	return len(what) == 0, err
}

// cursor reads a sequence entry by entry.
type cursor struct {
	next  func() (Entry, error, bool)
	head  *Entry // nil: there are no more
	lower bool
	links map[string]*Entry // of a lower directory: the entries that others are hard links to
}

func (c *cursor) advance() error {
	for {
		e, err, ok := c.next()
		if err != nil {
			return err
		}
		if !ok {
			c.head = nil
			return nil
		}
		if c.head != nil && ComparePaths(c.head.Path, e.Path) >= 0 {
			return fmt.Errorf("%w: %q after %q", fault.ErrCorrupt, clip(e.Path), clip(c.head.Path))
		}
		c.head = &e
		if !c.lower || e.Type != TypeWhiteout { // over no other layer, that hides nothing and is not shown
			return nil
		}
	}
}

// take returns the entry at a path, if there is one, and goes on to the next.
func (c *cursor) take(p string) (*Entry, error) {
	e := c.head
	if e == nil || e.Path != p {
		return nil, nil
	}
	if c.lower {
		if _, shared := c.links[p]; shared {
			c.links[p] = e
		}
		if e.Hardlink != "" {
			of := c.links[e.Hardlink]
			if of == nil {
				return nil, fmt.Errorf("%w: %q is a hard link to %q, which is not there", fault.ErrCorrupt,
					clip(p), clip(e.Hardlink))
			}
			own := *of
			own.Path, e = p, &own
		}
		e.Xattrs = unmarked(e.Xattrs)
	}
	return e, c.advance()
}

// first returns the path that comes next; false: there is none.
func first(cursors ...*cursor) (p string, ok bool) {
	for _, c := range cursors {
		if c.head != nil && (!ok || ComparePaths(c.head.Path, p) < 0) {
			p, ok = c.head.Path, true
		}
	}
	return p, ok
}

// openLower begins to read a directory that an upperdir lies over.
func openLower(seq iter.Seq2[Entry, error]) (*cursor, func(), error) {
	links := map[string]*Entry{}
	for e, err := range seq {
		if err != nil {
			return nil, nil, err
		}
		if e.Hardlink != "" {
			links[e.Hardlink] = nil
		}
	}
	next, stop := iter.Pull2(seq)
	c := &cursor{next: next, lower: true, links: links}
	if err := c.advance(); err != nil {
		stop()
		return nil, nil, err
	}
	return c, stop, nil
}

// markPrefix begins the names of overlayfs's own attributes. With another "overlay." behind it,
// it is the name of an attribute that was set through an overlay.
const markPrefix = "trusted.overlay."

// unmarked returns attributes without those of overlayfs: a lower directory's mean nothing in an
// upperdir.
func unmarked(set map[string]string) map[string]string {
	mark := func(name string) bool {
		rest, is := strings.CutPrefix(name, markPrefix)
		return is && !strings.HasPrefix(rest, "overlay.")
	}
	for name := range set {
		if mark(name) {
			set = maps.Clone(set)
			maps.DeleteFunc(set, func(name, _ string) bool { return mark(name) })
			if len(set) == 0 {
				return nil
			}
			return set
		}
	}
	return set
}
