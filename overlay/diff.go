package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// ChangeKind is a letter as git has it.
type ChangeKind string

// The kinds of changes.
const (
	Added       ChangeKind = "A"
	Modified    ChangeKind = "M" // the same type of thing; Change.What tells in which respects
	Deleted     ChangeKind = "D"
	TypeChanged ChangeKind = "T" // e.g. a file has become a symlink
	Renamed     ChangeKind = "R" // only from FindRenames
)

// The respects in which two entries of one type differ, in this order.
const (
	WhatContent = "content"
	WhatTarget  = "target" // of a symlink
	WhatDevice  = "device" // the numbers of a device node
	WhatMode    = "mode"
	WhatOwner   = "owner"
	WhatXattrs  = "xattrs"
	WhatMtime   = "mtime" // never of a directory
	WhatType    = "type"
)

// Change is one path at which two states of a sandbox's files differ.
type Change struct {
	Path string // relative to the root; "." is the root itself
	Kind ChangeKind
	From string // of a rename: the path it had
	What []string

	// Old and New are what a user of the sandbox sees at the path: no
	// whiteouts, none of overlayfs's own attributes, no hard links. Nil where
	// there is nothing. Digest and Extents are there if they were known.
	Old, New *Entry

	oldAt, newAt string // the directory of the host below which the file lies; empty: only a record of it is there
}

// Side is one state of the files: an upperdir over layers. The zero value is
// the layers alone.
type Side struct {
	// Dir is an upperdir as it lies there. It may be in use: what vanishes
	// while it is read is not there, what changes is changed.
	Dir string

	// Tree opens the tree that a TreeWriter wrote of an upperdir, digests
	// included. It is called twice and read to the end.
	Tree func() (io.ReadCloser, error)

	// Taken is when the capture behind Tree began; zero: unknown.
	Taken time.Time
}

// DiffOptions modify Diff.
type DiffOptions struct {
	Lower []string // the layers that both sides lie on, top first

	// Paranoid reads every file again. Otherwise a file of an upperdir on disk is taken for the
	// one in a Tree, unread, if size and modification time are equal and neither it nor a
	// directory above it changed in any way since the tree was taken (ctime, which no process can
	// set).
	Paranoid bool

	// UserXattr: the overlay is mounted with userxattr, that is rootless, and
	// its marks are user.overlay.* rather than trusted.overlay.*.
	UserXattr bool
}

// racy is how much older than a capture a change must be for the capture to have surely seen it:
// inodes take their times from a clock that ticks every 1 to 10 ms.
var racy = 100 * time.Millisecond

// Diff calls fn for every path at which a user of the merged filesystem finds
// something else on side b than on side a, in the order of ComparePaths. It
// only reads, follows no symlink and takes nothing in an upperdir for granted.
//
// All below a directory that came or went is listed too. A directory counts as
// modified when its own mode, owner or attributes are others, not because of
// what came into it or left it. How names share inodes is not compared. An
// upperdir that points into the layers (trusted.overlay.redirect or .metacopy,
// which Mount never makes) is ErrUnsupported. An error of fn ends it and is
// returned as it is.
func Diff(ctx context.Context, a, b Side, opts DiffOptions, fn func(Change) error) (err error) {
	d := &diff{ctx: ctx, opts: opts, fn: fn, prefix: "trusted.overlay.", buf: newScratch(), names: make([]byte, 64<<10)}
	if opts.UserXattr {
		d.prefix = "user.overlay."
	}
	if err := checkPrivilege(); err != nil {
		return err
	}
	defer func() {
		if err != nil && d.own == nil {
			err = fmt.Errorf("diff: %w", err)
		}
	}()
	low, err := d.openLayers()
	if err != nil {
		return err
	}
	defer low.close()
	for i, s := range []Side{a, b} {
		if d.upper[i], err = d.openSide(s); err != nil {
			return err
		}
		defer func() {
			if cerr := d.upper[i].close(); cerr != nil && d.own == nil {
				err = errors.Join(err, cerr)
			}
		}()
		if !s.Taken.IsZero() {
			d.taken = s.Taken.Add(-racy)
		}
	}
	return d.root(low)
}

// diff is one Diff under way.
type diff struct {
	ctx    context.Context
	opts   DiffOptions
	fn     func(Change) error
	own    error // fn's
	prefix string
	upper  [2]upperdir
	taken  time.Time // what changed before is in the tree
	buf    *scratch
	names  []byte
}

// node is what lies at one path of one side, or in the layers.
type node struct {
	Entry
	at    string // the directory of the host below which it lies; "" when it is only recorded
	dir   int    // that holds it, open
	name  string
	fd    int // itself, of a directory on the disk; else -1
	ctime time.Time
	ino   uint64 // of what lies on the disk, and how many names it has
	nlink uint32
	layer bool // it lies in a layer
}

func (n *node) isDir() bool { return n != nil && n.Type == TypeDir }

func (n *node) close() {
	if n != nil && n.fd >= 0 {
		_ = unix.Close(n.fd)
		n.fd = -1
	}
}

// state is what one side has at a path that is a directory on one of them.
type state struct {
	dir    bool // it is one here
	up     bool // the upperdir has it
	low    bool // the layers show through
	stable bool // up to here no directory changed since the tree was taken
}

func (d *diff) root(low *lowerDir) error {
	var n [2]*node
	var s [2]state
	for i, u := range d.upper {
		var err error
		if n[i], err = u.root(); err != nil {
			return err
		}
		defer n[i].close()
		// The kernel merges the root, whatever marks it has.
		s[i] = state{dir: true, up: n[i] != nil, low: true, stable: d.settled(n[i])}
		if n[i] == nil {
			n[i] = low.node
		}
	}
	if n[0] == nil || n[1] == nil {
		return fmt.Errorf("no layers and no upperdir: %w", fault.ErrInvalid)
	}
	if err := d.compare(".", n[0], n[1], false); err != nil {
		return err
	}
	return d.enter(".", n, s, low)
}

// settled reports whether a directory did not change since the tree was taken.
func (d *diff) settled(n *node) bool {
	return n == nil || n.at == "" || !d.taken.IsZero() && n.ctime.Before(d.taken)
}

// enter compares what is in a directory.
func (d *diff) enter(path string, n [2]*node, s [2]state, low *lowerDir) error {
	if err := checkDepth(path, strings.Count(path, "/")+1); err != nil {
		return err
	}
	for i := range d.upper {
		if s[i].up {
			if err := d.upper[i].enter(n[i]); err != nil {
				return err
			}
			defer d.upper[i].leave()
		}
	}
	// Names that neither upperdir has are only of interest where the layers
	// show through on one side alone.
	var rest []string
	if s[0].low != s[1].low {
		var err error
		if rest, err = d.list(low); err != nil {
			return err
		}
	}
	for {
		more, err := d.next(path, s, low, &rest)
		if err != nil || !more {
			return err
		}
	}
}

// next takes the next name of a directory, in order, from wherever it is.
func (d *diff) next(path string, s [2]state, low *lowerDir, rest *[]string) (more bool, err error) {
	if err := d.ctx.Err(); err != nil {
		return false, err
	}
	name := ""
	if len(*rest) > 0 {
		name, more = (*rest)[0], true
	}
	var first [2]string
	for i, u := range d.upper {
		if !s[i].up {
			continue
		}
		var ok bool
		if first[i], ok, err = u.peek(); err != nil {
			return false, err
		}
		if !ok {
			first[i] = ""
		} else if !more || first[i] < name {
			name, more = first[i], true
		}
	}
	if !more {
		return false, nil
	}
	var up [2]*node
	for i, u := range d.upper {
		if first[i] != name {
			continue
		}
		if up[i], err = u.take(); err != nil {
			return false, err
		}
		defer up[i].close()
	}
	if len(*rest) > 0 && (*rest)[0] == name {
		*rest = (*rest)[1:]
	}
	return true, d.name(joinPath(path, name), name, up, s, low)
}

// name compares one name of a directory; up is what the upperdirs have there.
func (d *diff) name(path, name string, up [2]*node, s [2]state, low *lowerDir) error {
	var below *lowerDir // what the layers have there
	for i, u := range up {
		if u != nil && u.Type != TypeWhiteout {
			if err := d.plain(path, u); err != nil {
				return err
			}
		}
		if below == nil && s[i].low && (u == nil || u.Type == TypeDir && !d.opaque(u)) {
			var err error
			if below, err = d.lookup(low, name, path); err != nil {
				return err
			}
			defer below.close()
		}
	}
	var n [2]*node
	var in [2]state
	for i, u := range up {
		switch {
		case u == nil && s[i].low && below != nil:
			n[i] = below.node
			in[i] = state{dir: n[i].isDir(), low: n[i].isDir(), stable: s[i].stable}
		case u == nil || u.Type == TypeWhiteout:
		default:
			n[i] = u
			in[i].dir, in[i].up = u.Type == TypeDir, u.Type == TypeDir
			in[i].low = in[i].dir && s[i].low && below != nil && below.node.isDir() && !d.opaque(u)
			in[i].stable = s[i].stable && d.settled(u)
		}
	}
	if n[0] != n[1] {
		if err := d.compare(path, n[0], n[1], s[0].stable && s[1].stable); err != nil {
			return err
		}
	}
	if in[0].up || in[1].up || in[0].low != in[1].low {
		return d.enter(path, n, in, below)
	}
	return nil
}

// plain refuses what does not mean what it looks like.
func (d *diff) plain(path string, u *node) error {
	for _, mark := range []string{"metacopy", "redirect"} {
		if _, ok := u.Xattrs[d.prefix+mark]; ok {
			return fmt.Errorf("%q has its content elsewhere in the layers (%s%s): %w", clip(path), d.prefix,
				mark, fault.ErrUnsupported)
		}
	}
	return nil
}

func (d *diff) opaque(n *node) bool { return n.Xattrs[d.prefix+"opaque"] == "y" }

// compare reports the difference between two nodes at one path, if there is one.
func (d *diff) compare(path string, old, now *node, stable bool) error {
	c := Change{Path: path}
	switch {
	case old == nil && now == nil:
		return nil
	case old == nil:
		c.Kind = Added
	case now == nil:
		c.Kind = Deleted
	case old.Type != now.Type:
		c.Kind, c.What = TypeChanged, []string{WhatType}
	default:
		same, err := true, error(nil)
		if old.Type == TypeFile {
			if same, err = d.sameContent(old, now, stable); err != nil {
				return err
			}
		}
		if !same {
			c.What = append(c.What, WhatContent)
		}
		if c.What = append(c.What, metadata(&old.Entry, &now.Entry,
			maps.Equal(d.visible(old.Xattrs), d.visible(now.Xattrs)))...); len(c.What) == 0 {
			return nil
		}
		c.Kind = Modified
	}
	if old != nil {
		c.Old, c.oldAt = d.shown(path, &old.Entry), old.at
	}
	if now != nil {
		c.New, c.newAt = d.shown(path, &now.Entry), now.at
	}
	d.own = d.fn(c)
	return d.own
}

// metadata returns how entries of one type differ apart from their content.
func metadata(old, now *Entry, sameXattrs bool) (what []string) {
	if old.Link != now.Link {
		what = append(what, WhatTarget)
	}
	if old.Major != now.Major || old.Minor != now.Minor {
		what = append(what, WhatDevice)
	}
	if old.Mode != now.Mode {
		what = append(what, WhatMode)
	}
	if old.UID != now.UID || old.GID != now.GID {
		what = append(what, WhatOwner)
	}
	if !sameXattrs {
		what = append(what, WhatXattrs)
	}
	if old.Mtime != now.Mtime && old.Type != TypeDir {
		what = append(what, WhatMtime)
	}
	return what
}

// shown is an entry as a user of the sandbox sees it.
func (d *diff) shown(path string, e *Entry) *Entry {
	out := *e
	out.Path, out.Hardlink, out.Xattrs = path, "", d.visible(e.Xattrs)
	return &out
}

// visible leaves out the attributes that overlayfs keeps to itself. One that
// was set in the sandbox under such a name is kept under an escaped one, which
// is what both sides have then.
func (d *diff) visible(set map[string]string) map[string]string {
	own := func(name string) bool {
		return strings.HasPrefix(name, d.prefix) && !strings.HasPrefix(name[len(d.prefix):], "overlay.")
	}
	for name := range set {
		if own(name) {
			set = maps.Clone(set)
			maps.DeleteFunc(set, func(name, _ string) bool { return own(name) })
			break
		}
	}
	if len(set) == 0 {
		return nil
	}
	return set
}

// sameContent compares two files. stable says that the directories above did
// not change since the tree was taken, so that one name is one file.
func (d *diff) sameContent(old, now *node, stable bool) (same bool, err error) {
	if old.Size != now.Size || old.Size == 0 {
		return old.Size == now.Size, nil
	}
	switch {
	case old.at == "" && now.at == "":
		// With other holes the digests are over other bytes. The two have
		// never been found equal then.
		return old.Digest != "" && old.Digest == now.Digest && slices.Equal(old.spans(), now.spans()), nil
	case old.at != "" && now.at != "":
		same, err = d.equalFiles(old, now)
	default:
		record, file := old, now
		if record.at != "" {
			record, file = now, old
		}
		if !d.opts.Paranoid && stable && !file.layer && old.Mtime == now.Mtime && d.settled(file) {
			return true, nil
		}
		same, err = d.holds(record, file)
	}
	if errors.Is(err, fault.ErrBusy) || vanished(err) {
		return false, nil // it changes under our eyes
	}
	return same, err
}

// openFile opens a file to be read, holes known.
func openFile(n *node) (fd int, err error) {
	if fd, err = openAt(n.dir, n.name, 0); err != nil {
		return -1, pathError("open", n.Path, err)
	}
	var st unix.Statx_t
	if err = unix.Statx(fd, "", unix.AT_EMPTY_PATH, statxMask, &st); err == nil {
		if st.Mode&unix.S_IFMT != unix.S_IFREG || int64(st.Size) != n.Size {
			err = errChanged(n.Path)
		}
	}
	if err == nil {
		n.Extents, err = extents(fd, n.Size, n.Path)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// holds reports whether a file has the content of a record.
func (d *diff) holds(record, file *node) (bool, error) {
	fd, err := openFile(file)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	if record.Digest == "" {
		return false, nil
	}
	return fdHoldsContent(d.ctx, fd, &record.Entry, &file.Entry)
}

// equalFiles compares two files on the disk, where either has data.
func (d *diff) equalFiles(a, b *node) (bool, error) {
	fa, err := openFile(a)
	if err != nil {
		return false, err
	}
	defer unix.Close(fa)
	fb, err := openFile(b)
	if err != nil {
		return false, err
	}
	defer unix.Close(fb)
	pa, pb := buffers.Get().(*[copyBuf]byte), buffers.Get().(*[copyBuf]byte)
	defer buffers.Put(pa)
	defer buffers.Put(pb)
	for _, x := range append(slices.Clone(a.spans()), subtract(b.spans(), a.spans())...) {
		for at := int64(0); at < x.Len; at += copyBuf {
			if err := d.ctx.Err(); err != nil {
				return false, err
			}
			n := min(x.Len-at, copyBuf)
			if err := errors.Join(readFull(fa, pa[:n], x.Off+at, a.Path),
				readFull(fb, pb[:n], x.Off+at, b.Path)); err != nil {
				return false, err
			}
			if !bytes.Equal(pa[:n], pb[:n]) {
				return false, nil
			}
		}
	}
	return true, nil
}
