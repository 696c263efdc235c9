package overlay

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// PlanUpdate compares the entries that a directory has, from a Collect of it
// (the file have), with those it is to have, in the order of ComparePaths and
// with digests. What want says is believed: the caller proves the tree before it
// applies the update, and an error of want ends the plan and is in its error.
//
// A file counts as unchanged when its data lies at the same offsets and has the
// same digest. A tree from a filesystem with smaller blocks can therefore name
// files that Compare would take for equal; replacing them is never wrong.
func PlanUpdate(ctx context.Context, have string, want iter.Seq2[Entry, error]) (*Update, error) {
	return planBy(ctx, have, func(p *planner) error {
		return p.merge(pull(func(fn func(Entry) error) error { return Collection(have, fn) }), want)
	})
}

// planBy keeps what does not fit into memory beside the file have.
func planBy(ctx context.Context, have string, merge func(p *planner) error) (*Update, error) {
	p := planner{ctx: ctx, u: &Update{
		changes: changeList{beside: have}, from: map[int]string{}, times: map[string]Time{},
	}}
	err := merge(&p)
	switch {
	case err != nil:
	case !p.haveOrder.any:
		err = fmt.Errorf("the directory has no entries, not even \".\": %w", fault.ErrInvalid)
	case !p.wantOrder.any:
		err = fmt.Errorf("nothing is wanted, not even \".\": %w", fault.ErrInvalid)
	default:
		if err = p.u.changes.end(); err == nil {
			err = p.resolve()
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("plan update: %w", err), p.u.Close())
	}
	return p.u, nil
}

// planner merges two trees. It remembers nothing of entries that are the same
// on both sides: what is not among the changes is as wanted.
type planner struct {
	ctx  context.Context
	u    *Update
	dirs []timedDir // the wanted directories above the current path
	tied []int      // the changes in which an inode has a further name
	n    int

	haveOrder, wantOrder orderCheck
}

type timedDir struct {
	path    string
	mtime   Time
	changes bool // it is among the changes
}

func (p *planner) merge(have, want iter.Seq2[Entry, error]) error {
	next, stop := iter.Pull2(want)
	defer stop()
	var w Entry
	more := false
	advance := func() (err error) {
		if w, err, more = next(); more && err == nil {
			err = p.wantOrder.next(&w)
		}
		return err
	}
	if err := advance(); err != nil {
		return err
	}
	for h, err := range have {
		if err == nil {
			err = p.haveOrder.next(&h)
		}
		for err == nil && more && ComparePaths(w.Path, h.Path) < 0 {
			if err = p.pair(nil, &w); err == nil {
				err = advance()
			}
		}
		if err == nil {
			if !more || w.Path != h.Path {
				err = p.pair(&h, nil)
			} else if err = p.pair(&h, &w); err == nil {
				err = advance()
			}
		}
		if err != nil {
			return err
		}
	}
	for more {
		if err := p.pair(nil, &w); err != nil {
			return err
		}
		if err := advance(); err != nil {
			return err
		}
	}
	return p.ctx.Err()
}

// pair takes what one path is and what it is to be; one of them may be nil.
func (p *planner) pair(h, w *Entry) error {
	if p.n++; p.n%1024 == 0 && p.ctx.Err() != nil {
		return p.ctx.Err()
	}
	if h == nil || w == nil || !same(h, w) {
		return p.record(h, w)
	}
	ok, err := p.settled(w)
	if err != nil {
		return err
	}
	if !ok {
		return p.record(h, w)
	}
	p.enter(w, false)
	return nil
}

// settled reports whether a path that is equal on both sides needs no second look.
// A further name of an inode does when that inode is among the changes.
func (p *planner) settled(w *Entry) (bool, error) {
	if w.Hardlink == "" {
		return true, nil
	}
	i, err := p.u.changes.find(w.Hardlink)
	return i < 0, err
}

// enter keeps the directories above the current path.
func (p *planner) enter(w *Entry, changes bool) {
	if w.Type != TypeDir {
		return
	}
	p.leave(w.Path)
	p.dirs = append(p.dirs, timedDir{w.Path, w.Mtime, changes})
}

func (p *planner) leave(path string) {
	for n := len(p.dirs); n > 0 && !isAbove(p.dirs[n-1].path, path); n-- {
		p.dirs = p.dirs[:n-1]
	}
}

// isAbove reports whether path lies below dir, at any depth.
func isAbove(dir, path string) bool {
	if dir == "." {
		return path != "."
	}
	return len(path) > len(dir) && path[len(dir)] == '/' && strings.HasPrefix(path, dir)
}

// record notes a path that differs, or may yet turn out to.
func (p *planner) record(h, w *Entry) error {
	if w != nil {
		if err := w.check(); err != nil {
			return fmt.Errorf("%w: %w", fault.ErrInvalid, err)
		}
		if w.Type == TypeFile && w.Hardlink == "" && !validDigest(w.Digest) {
			return fmt.Errorf("%q is wanted without a digest: %w", clip(w.Path), fault.ErrInvalid)
		}
	}
	c := newChange(h, w)
	c.do = c.alone()
	if h != nil && h.Hardlink != "" || w != nil && w.Hardlink != "" {
		p.tied = append(p.tied, len(p.u.changes.index))
	}
	if err := p.u.changes.add(h, w, c.do); err != nil {
		return err
	}
	p.u.count(c, 1)
	p.leave(c.Path)
	if n := len(p.dirs); n > 0 && !p.dirs[n-1].changes {
		if parent, _ := splitPath(c.Path); parent == p.dirs[n-1].path {
			p.u.times[parent] = p.dirs[n-1].mtime
		}
	}
	if w != nil {
		p.enter(w, true)
	}
	return nil
}

func newChange(h, w *Entry) *updateChange {
	c := &updateChange{Kind: Modified, Old: h, New: w, inode: w}
	if h != nil {
		c.Path = h.Path
	} else {
		c.Path = w.Path
	}
	switch {
	case h == nil:
		c.Kind = Added
	case w == nil:
		c.Kind = Deleted
	case h.Type != w.Type:
		c.Kind = TypeChanged
	}
	return c
}

// alone is what there is to do where no inode has several names.
func (c *updateChange) alone() action {
	h, w := c.Old, c.New
	switch {
	case w == nil:
		return doRemove
	case w.Type == TypeDir:
		return doDir
	case w.Hardlink != "":
		return doLink
	case w.Type != TypeFile:
		return doNode
	case h != nil && h.Type == TypeFile && h.Hardlink == "" && sameContent(h, w):
		return doAttrs
	}
	return doFile
}

// same reports whether nothing needs to be done to make h what w is.
func same(h, w *Entry) bool {
	return h.Type == w.Type && h.Hardlink == w.Hardlink && sameAttrs(h, w) && sameContent(h, w)
}

func sameAttrs(h, w *Entry) bool {
	return h.Mode == w.Mode && h.UID == w.UID && h.GID == w.GID && h.Mtime == w.Mtime && maps.Equal(h.Xattrs, w.Xattrs)
}

func sameContent(h, w *Entry) bool {
	if h.Hardlink == "" && w.Hardlink == "" && w.Type == TypeFile && w.Digest == "" {
		return false // which proves nothing
	}
	return h.Link == w.Link && h.Major == w.Major && h.Minor == w.Minor && h.Size == w.Size && h.Digest == w.Digest &&
		(h.Extents == nil && w.Extents == nil || slices.Equal(h.spans(), w.spans()))
}

// group is the first path of the inode that e is a name of.
func (e *Entry) group() string {
	if e.Hardlink != "" {
		return e.Hardlink
	}
	return e.Path
}

// claim is an inode that is there and becomes a wanted one.
type claim struct {
	have  string // its group in the directory
	path  string // the name by which it is taken; it stays where it is
	exact bool   // nothing about the inode itself changes
}

// tie is a change of an inode that has several names, here or there.
type tie struct {
	i          int
	have, want int // the changes of the first names; -1: that one is as wanted
}

// ties returns these changes, in order.
func (p *planner) ties() ([]tie, error) {
	l := &p.u.changes
	list := make([]tie, 0, len(p.tied))
	var firsts []int
	for _, i := range p.tied {
		c, err := l.at(i)
		if err != nil {
			return nil, err
		}
		t := tie{i, i, i}
		for _, side := range []struct {
			e     *Entry
			first *int
		}{{c.Old, &t.have}, {c.New, &t.want}} {
			if side.e == nil || side.e.Hardlink == "" {
				continue
			}
			if *side.first, err = l.find(side.e.Hardlink); err != nil {
				return nil, err
			}
			if *side.first >= 0 {
				firsts = append(firsts, *side.first)
			}
		}
		list = append(list, t)
	}
	slices.Sort(firsts)
	for _, i := range slices.Compact(firsts) {
		if _, ok := slices.BinarySearch(p.tied, i); !ok {
			list = append(list, tie{i, i, i})
		}
	}
	slices.SortFunc(list, func(a, b tie) int { return a.i - b.i })
	return list, nil
}

// resolve decides which of the present inodes become wanted ones, and with that
// what there is to do for the paths of inodes with several names.
//
// A present inode becomes at most one wanted inode, and only by a path that has
// the one and is to have the other. That path keeps its name throughout, so it
// is good to link from whenever the others' turn comes. All other paths of the
// present inode are removed or get another, and so its attributes may change.
func (p *planner) resolve() error {
	ties, err := p.ties()
	if err != nil {
		return err
	}
	claims, err := p.claim(ties)
	if err != nil {
		return err
	}
	for _, t := range ties {
		c, err := p.u.changes.at(t.i)
		if err != nil {
			return err
		}
		if c.New == nil || c.New.Type == TypeDir {
			continue
		}
		p.u.count(c, -1)
		c.do = doLink
		cl, ok := claims[c.New.group()]
		switch {
		case t.want < 0: // the inode is there as wanted, under the group's own name
		case ok && (c.Old == nil || c.Old.Type != c.New.Type || c.Old.group() != cl.have):
			p.u.from[t.i] = cl.path
		case ok && c.Path == cl.path && !cl.exact:
			c.do = doAttrs
		case ok:
			c.do = doNothing
		case t.want != t.i:
		case c.New.Type == TypeFile:
			c.do = doFile
		default:
			c.do = doNode
		}
		p.u.count(c, 1)
		p.u.changes.index[t.i].do = c.do
	}
	return nil
}

func (p *planner) claim(ties []tie) (map[string]claim, error) {
	l := &p.u.changes
	claims := map[string]claim{}   // by wanted group
	taken := map[string]struct{}{} // groups of the directory
	for _, exact := range []bool{true, false} {
		for _, t := range ties {
			c, err := l.at(t.i)
			if err != nil {
				return nil, err
			}
			if c.New == nil || c.New.Type == TypeDir {
				continue
			}
			w := c.New
			if t.want >= 0 && t.want != t.i {
				leader, err := l.at(t.want)
				if err != nil {
					return nil, err
				}
				if w = leader.New; w == nil || w.Hardlink != "" || w.Type != c.New.Type {
					return nil, fmt.Errorf("%q is wanted as a hard link to %q, which is to be no %s of its own: %w",
						clip(c.Path), clip(c.New.Hardlink), c.New.Type, fault.ErrInvalid)
				}
			}
			if c.Old == nil || c.Old.Type != c.New.Type || t.have < 0 || t.want < 0 {
				continue // or an inode that a path which is as wanted has already
			}
			h := c.Old
			if t.have != t.i {
				leader, err := l.at(t.have)
				if err != nil {
					return nil, err
				}
				h = leader.Old
			}
			if h == nil || h.Hardlink != "" {
				return nil, fmt.Errorf("%q is recorded as a hard link to %q, which is none of its own: %w",
					clip(c.Path), clip(c.Old.Hardlink), fault.ErrCorrupt)
			}
			// Nodes are made anew rather than changed: it costs nothing, and
			// the kernel's whiteouts share an inode with its work directory.
			if !sameContent(h, w) || exact && !sameAttrs(h, w) || !exact && w.Type != TypeFile {
				continue
			}
			if _, ok := taken[h.Path]; ok {
				continue
			}
			if _, ok := claims[w.Path]; ok {
				continue
			}
			taken[h.Path] = struct{}{}
			claims[w.Path] = claim{h.Path, c.Path, exact}
		}
	}
	return claims, nil
}
