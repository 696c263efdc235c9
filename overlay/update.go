package overlay

import (
	"context"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// Source has the data of the files of a tree.
type Source interface {
	// Data opens the data of a file (its extents, one after the other), of
	// exactly as many bytes as the entry has. What is read is proven against
	// the digests of the pieces; damage is ErrCorrupt. Called from several
	// goroutines at a time.
	Data(ctx context.Context, e Entry) (io.ReadCloser, error)
}

// Update is the way from what a directory holds to what it is to hold. It
// lists the differences only; its memory is theirs.
//
//	Collect -> PlanUpdate -> Stage (while the directory is still in use) -> Apply (while nobody uses it)
type Update struct {
	// Changes are all paths that are touched, in the order of ComparePaths. A
	// directory that goes is followed by everything in it.
	Changes []UpdateChange

	// times has the wanted times of the directories in which names change:
	// such a directory need not be different itself.
	times map[string]Time
}

// UpdateChange is one path of an upperdir that an Update touches.
type UpdateChange struct {
	Path string
	Kind ChangeKind // Added, Deleted, Modified or TypeChanged
	Old  *Entry     // nil: Added
	New  *Entry     // nil: Deleted
	Data bool       // the file's data is staged

	do    action
	inode *Entry // what the inode behind the path is to be: New, or what New is a hard link to
	from  string // doLink: a path that has the inode by then
}

// action is what Apply does about a path.
type action int

const (
	doNothing action = iota
	doRemove         // it and, of a directory, all below
	doDir            // make it unless it is one; give it its attributes when all in it is done
	doAttrs          // of a file, in place
	doFile           // move the staged file here
	doNode           // make a symlink, device, FIFO, socket or whiteout
	doLink           // make it a name of the inode that from has
)

// Empty tells that nothing needs to be done.
func (u *Update) Empty() bool { return len(u.Changes) == 0 }

// Bytes returns how many bytes of file data Stage reads and writes.
func (u *Update) Bytes() int64 {
	var n int64
	for i := range u.Changes {
		if c := &u.Changes[i]; c.Data {
			n += c.New.data()
		}
	}
	return n
}

// PlanUpdate compares the entries that a directory has, from a Collect of it
// (the file have), with those it is to have, in the order of ComparePaths and
// with digests. What want says is believed: the caller proves the tree before it
// applies the update, and an error of want ends the plan and is in its error.
//
// A file counts as unchanged when its data lies at the same offsets and has the
// same digest. A tree from a filesystem with smaller blocks can therefore name
// files that Compare would take for equal; replacing them is never wrong.
func PlanUpdate(ctx context.Context, have string, want iter.Seq2[Entry, error]) (*Update, error) {
	return plan(ctx, pull(func(fn func(Entry) error) error { return Collection(have, fn) }), want)
}

func plan(ctx context.Context, have, want iter.Seq2[Entry, error]) (*Update, error) {
	return planBy(ctx, func(p *planner) error { return p.merge(have, want) })
}

func planBy(ctx context.Context, merge func(p *planner) error) (*Update, error) {
	p := planner{ctx: ctx, u: &Update{times: map[string]Time{}}}
	err := merge(&p)
	switch {
	case err != nil:
	case !p.haveOrder.any:
		err = fmt.Errorf("the directory has no entries, not even \".\": %w", fault.ErrInvalid)
	case !p.wantOrder.any:
		err = fmt.Errorf("nothing is wanted, not even \".\": %w", fault.ErrInvalid)
	default:
		err = p.resolve()
	}
	if err != nil {
		return nil, fmt.Errorf("plan update: %w", err)
	}
	return p.u, nil
}

// planner merges two trees. It remembers nothing of entries that are the same
// on both sides: what is not among the changes is as wanted.
type planner struct {
	ctx  context.Context
	u    *Update
	dirs []timedDir // the wanted directories above the current path
	n    int

	haveOrder, wantOrder orderCheck
}

type timedDir struct {
	path  string
	mtime Time
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
	if h == nil || w == nil || !same(h, w) || !p.settled(w) {
		return p.record(h, w)
	}
	p.enter(w)
	return nil
}

// settled tells whether a path that is equal on both sides needs no second look.
// A further name of an inode does when that inode is among the changes.
func (p *planner) settled(w *Entry) bool { return w.Hardlink == "" || p.u.find(w.Hardlink) < 0 }

// enter keeps the directories above the current path.
func (p *planner) enter(w *Entry) {
	if w.Type != TypeDir {
		return
	}
	p.leave(w.Path)
	p.dirs = append(p.dirs, timedDir{w.Path, w.Mtime})
}

func (p *planner) leave(path string) {
	for n := len(p.dirs); n > 0 && !isAbove(p.dirs[n-1].path, path); n-- {
		p.dirs = p.dirs[:n-1]
	}
}

// isAbove tells whether path lies below dir, at any depth.
func isAbove(dir, path string) bool {
	if dir == "." {
		return path != "."
	}
	return len(path) > len(dir) && path[len(dir)] == '/' && strings.HasPrefix(path, dir)
}

// record notes a path that differs, or may yet turn out to.
func (p *planner) record(h, w *Entry) error {
	c := UpdateChange{Kind: Modified}
	if h != nil {
		e := *h
		c.Path, c.Old = e.Path, &e
	}
	if w != nil {
		e := *w
		if err := e.check(); err != nil {
			return fmt.Errorf("%w: %w", fault.ErrInvalid, err)
		}
		if e.Type == TypeFile && e.Hardlink == "" && !validDigest(e.Digest) {
			return fmt.Errorf("%q is wanted without a digest: %w", clip(e.Path), fault.ErrInvalid)
		}
		c.Path, c.New = e.Path, &e
	}
	switch {
	case h == nil:
		c.Kind = Added
	case w == nil:
		c.Kind = Deleted
	case h.Type != w.Type:
		c.Kind = TypeChanged
	}
	p.u.Changes = append(p.u.Changes, c)
	p.leave(c.Path)
	if n := len(p.dirs); n > 0 {
		if parent, _ := splitPath(c.Path); parent == p.dirs[n-1].path {
			p.u.times[parent] = p.dirs[n-1].mtime
		}
	}
	if w != nil {
		p.enter(w)
	}
	return nil
}

// find returns the index of a path's change, or -1: it is as wanted.
func (u *Update) find(path string) int {
	i, ok := slices.BinarySearchFunc(u.Changes, path, func(c UpdateChange, path string) int { return ComparePaths(c.Path, path) })
	if !ok {
		return -1
	}
	return i
}

// same tells whether nothing needs to be done to make h what w is.
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

// resolve decides which of the present inodes become wanted ones, and with that
// what there is to do for each path.
//
// A present inode becomes at most one wanted inode, and only by a path that has
// the one and is to have the other. That path keeps its name throughout, so it
// is good to link from whenever the others' turn comes. All other paths of the
// present inode are removed or get another, and so its attributes may change.
func (p *planner) resolve() error {
	claims, err := p.claim()
	if err != nil {
		return err
	}
	for i := range p.u.Changes {
		c := &p.u.Changes[i]
		if c.New == nil {
			c.do = doRemove
			continue
		}
		c.inode = c.New
		if c.New.Type == TypeDir {
			c.do = doDir
			continue
		}
		group := c.New.group()
		leader := i
		if c.New.Hardlink != "" {
			leader = p.u.find(group)
		}
		if leader < 0 { // the inode is there as wanted, under the group's own name
			c.do, c.from = doLink, group
			continue
		}
		c.inode = p.u.Changes[leader].New
		if cl, ok := claims[group]; ok {
			if c.Old == nil || c.Old.Type != c.New.Type || c.Old.group() != cl.have {
				c.do, c.from = doLink, cl.path
			} else if c.Path == cl.path && !cl.exact {
				c.do = doAttrs
			}
			continue
		}
		switch {
		case leader != i:
			c.do, c.from = doLink, group
		case c.New.Type == TypeFile:
			c.do, c.Data = doFile, true
		default:
			c.do = doNode
		}
	}
	p.u.Changes = slices.DeleteFunc(p.u.Changes, func(c UpdateChange) bool { return c.do == doNothing })
	return nil
}

func (p *planner) claim() (map[string]claim, error) {
	claims := map[string]claim{}   // by wanted group
	taken := map[string]struct{}{} // groups of the directory
	for _, exact := range []bool{true, false} {
		for i := range p.u.Changes {
			c := &p.u.Changes[i]
			if c.New == nil || c.New.Type == TypeDir {
				continue
			}
			wi := i
			if c.New.Hardlink != "" {
				if wi = p.u.find(c.New.Hardlink); wi >= 0 {
					if l := p.u.Changes[wi].New; l == nil || l.Hardlink != "" || l.Type != c.New.Type {
						return nil, fmt.Errorf("%q is wanted as a hard link to %q, which is to be no %s of its own: %w",
							clip(c.Path), clip(c.New.Hardlink), c.New.Type, fault.ErrInvalid)
					}
				}
			}
			if c.Old == nil || c.Old.Type != c.New.Type {
				continue
			}
			hi := i
			if c.Old.Hardlink != "" {
				hi = p.u.find(c.Old.Hardlink)
			}
			if hi < 0 || wi < 0 {
				continue // an inode that a path which is as wanted has already
			}
			h, w := p.u.Changes[hi].Old, p.u.Changes[wi].New
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
