package overlay

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// upperdir hands out the entries of one side, directory by directory, in order.
type upperdir interface {
	root() (*node, error)        // nil: there is no upperdir
	enter(n *node) error         // the directory that root or take gave last
	peek() (string, bool, error) // the next name in the directory entered last
	take() (*node, error)        // what is there; nil: it vanished
	leave()
	close() error
}

func (d *diff) openSide(s Side) (upperdir, error) {
	switch {
	case s.Dir != "":
		return &dirSide{d: d, top: s.Dir}, nil
	case s.Tree != nil:
		return openTreeSide(s.Tree)
	}
	return noSide{}, nil
}

// noSide is no upperdir.
type noSide struct{}

func (noSide) root() (*node, error)        { return nil, nil }
func (noSide) enter(*node) error           { return nil }
func (noSide) peek() (string, bool, error) { return "", false, nil }
func (noSide) take() (*node, error)        { return nil, nil }
func (noSide) leave()                      {}
func (noSide) close() error                { return nil }

// vanished reports whether a name does not exist any more, or not as it was listed.
func vanished(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) || errors.Is(err, unix.ENOTDIR) ||
		errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO)
}

// dirSide is an upperdir on the disk, which may change while it is read.
type dirSide struct {
	d     *diff
	top   string
	stack []level
}

type level struct {
	fd    int // the node's
	path  string
	names []dirent
}

func (u *dirSide) root() (*node, error) {
	fd, err := unix.Open(u.top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", u.top, err)
	}
	n := &node{Entry: Entry{Path: "."}, at: u.top, dir: -1, fd: fd}
	if err := u.d.readFD(n); err != nil {
		n.close()
		return nil, err
	}
	return n, nil
}

func (u *dirSide) enter(n *node) error {
	names, err := readNames(n.fd, n.Path, u.d.names)
	if err != nil && !vanished(err) {
		return err
	}
	u.stack = append(u.stack, level{n.fd, n.Path, names})
	return nil
}

func (u *dirSide) peek() (string, bool, error) {
	f := &u.stack[len(u.stack)-1]
	if len(f.names) == 0 {
		return "", false, nil
	}
	return f.names[0].name, true, nil
}

func (u *dirSide) take() (*node, error) {
	f := &u.stack[len(u.stack)-1]
	name := f.names[0].name
	f.names = f.names[1:]
	n, err := u.d.readAt(f.fd, name, joinPath(f.path, name))
	if n != nil {
		n.at = u.top
	}
	return n, err
}

func (u *dirSide) leave()       { u.stack = u.stack[:len(u.stack)-1] }
func (u *dirSide) close() error { return nil }

// readAt reads what name in dir is; nil when it is not there. Names are
// exchanged for others while a sandbox runs, so it tries again.
func (d *diff) readAt(dir int, name, path string) (n *node, err error) {
	for range 100 {
		n = &node{Entry: Entry{Path: path}, dir: dir, name: name, fd: -1}
		if err = d.readOnce(n); err == nil {
			return n, nil
		}
		n.close()
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) {
			return nil, nil
		}
		if !vanished(err) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fault.ErrBusy) {
			return nil, err
		}
	}
	return nil, err
}

func (d *diff) readOnce(n *node) (err error) {
	var st unix.Statx_t
	err = retry(func() error {
		return unix.Statx(n.dir, n.name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, statxMask, &st)
	})
	if err != nil {
		return pathError("stat", n.Path, err)
	}
	if err := n.fillNode(&st); err != nil {
		return err
	}
	switch n.Type {
	case TypeDir:
		if n.fd, err = openAt(n.dir, n.name, unix.O_DIRECTORY); err != nil {
			n.fd = -1
			return pathError("open", n.Path, err)
		}
		return d.readFD(n)
	case TypeSymlink:
		n.Mode = 0o777
		if n.Link, err = readlinkAt(n.dir, n.name, n.Path); err != nil {
			return err
		}
	}
	n.Xattrs, err = d.buf.readAt(n.Path, n.dir, n.name)
	return unsteady(err, n.Path)
}

// unsteady turns the errors of attributes, or of an inode, that changed since they were listed
// into errChanged.
func unsteady(err error, path string) error {
	for _, sign := range []error{unix.ENODATA, unix.EOPNOTSUPP, unix.ERANGE} {
		if errors.Is(err, sign) {
			return errChanged(path)
		}
	}
	return err
}

// readFD reads an open directory.
func (d *diff) readFD(n *node) (err error) {
	var st unix.Statx_t
	if err := unix.Statx(n.fd, "", unix.AT_EMPTY_PATH, statxMask, &st); err != nil {
		return pathError("stat", n.Path, err)
	}
	if err := n.fillNode(&st); err != nil {
		return err
	}
	for range 100 {
		n.Xattrs, err = d.buf.readFD(n.Path, n.fd)
		if err = unsteady(err, n.Path); !errors.Is(err, fault.ErrBusy) {
			break
		}
	}
	return err
}

func (n *node) fillNode(st *unix.Statx_t) error {
	n.ctime = time.Unix(st.Ctime.Sec, int64(st.Ctime.Nsec))
	n.ino, n.nlink = st.Ino, st.Nlink
	n.Entry = Entry{Path: n.Path}
	return n.fill(st)
}

// treeSide is an upperdir as a tree has it.
type treeSide struct {
	r     io.ReadCloser
	next  func() (Entry, error, bool)
	stop  func()
	cur   *Entry // not taken yet; nil: the end
	err   error
	links map[string]*Entry // what further names lead to
	stack []string
}

func openTreeSide(open func() (io.ReadCloser, error)) (_ *treeSide, err error) {
	u := &treeSide{}
	if u.links, err = linkTargets(open); err != nil {
		return nil, err
	}
	if u.r, err = open(); err != nil {
		return nil, err
	}
	u.next, u.stop = iter.Pull2(TreeEntries(u.r))
	u.advance()
	return u, nil
}

// linkTargets returns the entries that have further names. The tree does not
// mark them, so that it has to be read once for this alone.
func linkTargets(open func() (io.ReadCloser, error)) (links map[string]*Entry, err error) {
	r, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	links = map[string]*Entry{}
	br := bufio.NewReaderSize(r, 64<<10)
	for {
		line, err := readLine(br)
		if err == io.EOF {
			return links, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read tree: %w", err)
		}
		if !bytes.Contains(line, []byte(`"hardlink`)) {
			continue
		}
		e, err := ParseEntry(line)
		if err != nil {
			return nil, fmt.Errorf("read tree: %w", err)
		}
		if e.Hardlink != "" && e.Type != TypeWhiteout { // of which the kernel makes very many names
			links[e.Hardlink] = nil
		}
	}
}

func (u *treeSide) advance() {
	e, err, ok := u.next()
	u.cur, u.err = nil, err
	if ok && err == nil {
		u.cur = &e
	}
}

func (u *treeSide) root() (*node, error) {
	if u.err != nil || u.cur == nil {
		return nil, cmp.Or(u.err, fmt.Errorf("read tree: %w: it is empty", fault.ErrCorrupt))
	}
	return u.take()
}

func (u *treeSide) enter(n *node) error {
	u.stack = append(u.stack, n.Path)
	return nil
}

func (u *treeSide) peek() (string, bool, error) {
	if u.err != nil || u.cur == nil {
		return "", false, u.err
	}
	parent, name := splitPath(u.cur.Path)
	return name, parent == u.stack[len(u.stack)-1], nil
}

func (u *treeSide) take() (*node, error) {
	e := *u.cur
	u.keepTarget()
	if e.Hardlink != "" && e.Type != TypeWhiteout {
		first := u.links[e.Hardlink]
		if first == nil || first.Type != e.Type || first.Hardlink != "" {
			return nil, danglingLink(&e)
		}
		path := e.Path
		e = *first
		e.Path = path
	}
	u.advance()
	return &node{Entry: e, dir: -1, fd: -1}, nil
}

// keepTarget keeps the present entry if further names lead to it.
func (u *treeSide) keepTarget() {
	if _, ok := u.links[u.cur.Path]; ok {
		u.links[u.cur.Path] = u.cur
	}
}

func danglingLink(e *Entry) error {
	return fmt.Errorf("read tree: %w: %q is a hard link to %q, which is not there", fault.ErrCorrupt,
		clip(e.Path), clip(e.Hardlink))
}

// pass goes past entries for as long as skip says so.
func (u *treeSide) pass(skip func(path string) bool) {
	for u.err == nil && u.cur != nil && skip(u.cur.Path) {
		u.keepTarget()
		u.advance()
	}
}

// inode is the first name of what the present entry is a name of, if there are several.
func (u *treeSide) inode() string {
	if _, ok := u.links[u.cur.Path]; ok {
		return u.cur.Path
	}
	return u.cur.Hardlink
}

func (u *treeSide) leave() { u.stack = u.stack[:len(u.stack)-1] }

func (u *treeSide) close() error {
	u.stop()
	return u.r.Close()
}

// lowerDir is one directory of the layers, merged.
type lowerDir struct {
	node  *node   // what is to be seen of it, or of what is no directory; nil: no layers
	parts []*node // the directories that make it up, top first, open
}

func (l *lowerDir) close() {
	if l != nil {
		for _, p := range l.parts {
			p.close()
		}
	}
}

func (d *diff) openLayers() (*lowerDir, error) {
	l := &lowerDir{}
	for _, dir := range d.opts.Lower {
		fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			l.close()
			return nil, pathError("open", dir, err)
		}
		n := &node{Entry: Entry{Path: "."}, at: dir, dir: -1, fd: fd, layer: true}
		l.parts = append(l.parts, n)
		if err := d.readFD(n); err != nil {
			l.close()
			return nil, fmt.Errorf("layer %s: %w", dir, err)
		}
	}
	if len(l.parts) > 0 {
		l.node = l.parts[0]
	}
	return l, nil
}

// lookup finds name in a merged directory as the kernel does: from the top,
// down to the first layer that hides the others. Nil: it is not there.
func (d *diff) lookup(l *lowerDir, name, path string) (found *lowerDir, err error) {
	defer func() {
		if err != nil {
			found.close()
			found = nil
		}
	}()
	for _, part := range l.parts {
		n, err := d.readAt(part.fd, name, path)
		if err != nil {
			return found, fmt.Errorf("layer %s: %w", part.at, err)
		}
		if n == nil {
			continue
		}
		n.at, n.layer = part.at, true
		if n.Type == TypeWhiteout || d.attributeWhiteout(part, n) {
			break
		}
		if n.Type != TypeDir {
			if found == nil {
				found = &lowerDir{node: n}
			}
			break
		}
		if found == nil {
			found = &lowerDir{node: n}
		}
		found.parts = append(found.parts, n)
		if d.opaque(n) {
			break
		}
	}
	return found, nil
}

// attributeWhiteout reports whether a layer has the other kind of whiteout: an
// empty file with an attribute, in a directory that is marked for having such.
func (d *diff) attributeWhiteout(dir, n *node) bool {
	if n.Type != TypeFile || n.Size != 0 || dir.Xattrs[d.prefix+"opaque"] != "x" {
		return false
	}
	_, ok := n.Xattrs[d.prefix+"whiteout"]
	return ok
}

// list returns all names in a merged directory, those that are whiteouts too.
func (d *diff) list(l *lowerDir) (names []string, err error) {
	for _, part := range l.parts {
		list, err := readNames(part.fd, part.Path, d.names)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", part.at, err)
		}
		for _, e := range list {
			names = append(names, e.name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
