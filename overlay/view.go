package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// maxLinks is the kernel's own bound on symlinks in one resolution.
	maxLinks = 40

	// maxAsked bounds the bytes of a path that is asked for, as the kernel does, and what is left to
	// resolve of it, in names.
	maxAsked = 4096
)

// View is the files of a sandbox in a recorded state, as a process in it would find them: the
// tree of an upperdir over the layers. Nothing is laid out on disk. The tree is read as a stream,
// so that its length does not matter, and symlinks never lead out of the view. A View is not
// safe for concurrent use.
type View struct {
	d      *diff // the readers of layers
	low    *lowerDir
	opts   ViewOptions
	mounts map[string]ViewMount // by where they really are
	known  map[string]*node     // entries of the tree; nil: it has none of that path
	seen   map[string]*Entry    // what at has found
}

// ViewOptions say what a View shows.
type ViewOptions struct {
	Lower []string // the layers, top first

	// Tree opens the tree that a TreeWriter wrote of the upperdir; nil: the view is of the
	// layers alone. It is called several times, and each stream is closed.
	Tree func() (io.ReadCloser, error)
	Data Source // of the files in the tree

	// Bound are files that are bound over the root filesystem, by path.
	Bound map[string]BoundFile

	// Mounts are by path what is mounted over the root filesystem. Symlinks on the way are
	// followed. What the root filesystem has below them is not part of the view.
	Mounts map[string]ViewMount
}

// BoundFile is a small file that is bound over another.
type BoundFile struct {
	Mode     uint32
	UID, GID uint32
	Mtime    Time
	Data     []byte
}

// ViewMount is what is mounted at a path of a View.
type ViewMount struct {
	Kind  string // for messages: bind, volume, tmpfs, ...
	Files *View  // the mounted files; nil: they are not recorded
}

// ViewFile is one path of a View. Its Entry is what a user of the sandbox sees: it is never a
// whiteout, and a hard link is a file.
type ViewFile struct {
	Entry
	// Inode is equal for names of one inode; empty: no other name of it is known.
	Inode string
	// Mount is the kind of what is mounted there and not recorded; empty: nothing.
	Mount string

	v     *View
	n     *node
	bound []byte
}

// NewView opens a view. Close releases it.
func NewView(ctx context.Context, opts ViewOptions) (_ *View, err error) {
	if err := checkPrivilege(); err != nil {
		return nil, err
	}
	if opts.Tree == nil && len(opts.Lower) == 0 {
		return nil, fmt.Errorf("view: no layers and no upperdir: %w", fault.ErrInvalid)
	}
	v := &View{opts: opts, known: map[string]*node{}, seen: map[string]*Entry{}}
	v.d = &diff{
		ctx: ctx, opts: DiffOptions{Lower: opts.Lower}, prefix: "trusted.overlay.", buf: newScratch(),
		names: make([]byte, 64<<10),
	}
	if v.low, err = v.d.openLayers(); err != nil {
		return nil, fmt.Errorf("view: %w", err)
	}
	defer func() {
		if err != nil {
			v.low.close()
		}
	}()
	if err := v.Foresee(slices.Collect(maps.Keys(opts.Mounts))...); err != nil {
		return nil, err
	}
	found := map[string]ViewMount{}
	for _, p := range slices.Sorted(maps.Keys(opts.Mounts)) {
		real, _, err := v.Resolve(p, true)
		if errors.Is(err, fault.ErrNotFound) || errors.Is(err, fault.ErrInvalid) {
			continue // nothing can be mounted there
		}
		if err != nil {
			return nil, err
		}
		found[real] = opts.Mounts[p]
	}
	v.mounts = found
	if err := v.nest(); err != nil {
		return nil, err
	}
	clear(v.seen)
	return v, nil
}

// nest has the files of a mount have the mounts that lie in them.
func (v *View) nest() error {
	// The outer ones last: they are entered first.
	for _, at := range slices.Backward(slices.Sorted(maps.Keys(v.mounts))) {
		parent, _ := splitPath(at)
		outer, m, ok := v.mountOf(parent)
		if at == "." || !ok || m.Files == nil {
			continue
		}
		real, _, err := m.Files.Resolve(below(at, outer), true)
		if err == nil {
			m.Files.mount(real, v.mounts[at])
		} else if !errors.Is(err, fault.ErrNotFound) && !errors.Is(err, fault.ErrInvalid) {
			return err
		}
		delete(v.mounts, at)
		clear(m.Files.seen)
	}
	return nil
}

func (v *View) mount(at string, m ViewMount) {
	if v.mounts == nil {
		v.mounts = map[string]ViewMount{}
	}
	v.mounts[at] = m
}

// Close releases the view. Those of its mounts stay open.
func (v *View) Close() { v.low.close() }

// Mounts is what is mounted, by where it really is. What is mounted in the files of a mount is among
// theirs.
func (v *View) Mounts() map[string]ViewMount { return v.mounts }

// Foresee reads, in one go, what the tree has on the way to some paths. Resolve and Walk read it
// otherwise, path by path.
func (v *View) Foresee(paths ...string) error {
	want := map[string]bool{}
	add := func(path string) {
		if _, ok := v.known[path]; !ok {
			want[path] = true
		}
	}
	for _, p := range paths {
		at := "."
		add(at)
		for c := range strings.SplitSeq(p, "/") {
			switch c {
			case "", ".":
				continue
			case "..": // right as long as there are no symlinks
				at, _ = splitPath(at)
				continue
			}
			if at = joinPath(at, c); len(at) > maxAsked {
				break
			}
			add(at)
		}
	}
	return v.learn(want)
}

// learn reads entries of the tree.
func (v *View) learn(want map[string]bool) error {
	if len(want) == 0 {
		return nil
	}
	found := map[string]*node{}
	if err := v.scan(func(e Entry) {
		if want[e.Path] {
			found[e.Path] = &node{Entry: e, dir: -1, fd: -1}
		}
	}); err != nil {
		return err
	}
	// A further name carries nothing of its own.
	first := map[string]*Entry{}
	for _, n := range found {
		if n.Hardlink != "" && n.Type != TypeWhiteout {
			first[n.Hardlink] = nil
		}
	}
	if len(first) > 0 {
		if err := v.scan(func(e Entry) {
			if _, ok := first[e.Path]; ok {
				first[e.Path] = &e
			}
		}); err != nil {
			return err
		}
	}
	for path, n := range found {
		if n.Hardlink == "" || n.Type == TypeWhiteout {
			continue
		}
		e := first[n.Hardlink]
		if e == nil || e.Type != n.Type || e.Hardlink != "" {
			return danglingLink(&n.Entry)
		}
		n.Entry = *e
		n.Path = path
	}
	for path := range want {
		v.known[path] = found[path]
	}
	return nil
}

// scan reads the tree once. What it has read counts only when it returns nil.
func (v *View) scan(fn func(Entry)) (err error) {
	if v.opts.Tree == nil {
		return nil
	}
	r, err := v.opts.Tree()
	if err != nil {
		return err
	}
	err = ReadTree(r, func(e Entry) error {
		fn(e)
		return v.d.ctx.Err()
	})
	// An error of the stream explains what the parser stumbled over.
	if cerr := r.Close(); cerr != nil && v.d.ctx.Err() == nil {
		err = cerr
	}
	return err
}

// prefixes are the root, the directories on the way to a path, and the path.
func prefixes(path string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		if !yield(".") || path == "." {
			return
		}
		for i := range len(path) {
			if path[i] == '/' && !yield(path[:i]) {
				return
			}
		}
		yield(path)
	}
}

// mountOf returns the innermost mount that a path is in, and where in it.
func (v *View) mountOf(path string) (at string, m ViewMount, ok bool) {
	if len(v.mounts) == 0 {
		return "", m, false
	}
	for p := range prefixes(path) {
		if found, here := v.mounts[p]; here {
			at, m, ok = p, found, true
		}
	}
	return at, m, ok
}

// below is the path in a mount of a path in the view.
func below(path, mount string) string {
	if path == mount {
		return "."
	}
	if mount == "." {
		return path
	}
	return path[len(mount)+1:]
}

// chain finds what is at a path, and the directory of the layers below it, as the kernel does:
// directory by directory. done releases both. n is nil where there is nothing.
func (v *View) chain(path string) (n *node, low *lowerDir, done func(), err error) {
	if err := v.Foresee(path); err != nil {
		return nil, nil, nil, err
	}
	var open []*lowerDir
	release := func() {
		for _, l := range open {
			l.close()
		}
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	if n = v.known["."]; n == nil {
		n = v.low.node
	}
	// The kernel merges the root, whatever marks it has.
	if low = v.low; path == "." {
		return n, low, release, nil
	}
	at := "."
	for name := range strings.SplitSeq(path, "/") {
		if err := v.d.ctx.Err(); err != nil {
			return nil, nil, nil, err
		}
		if !n.isDir() || len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
			return nil, nil, release, nil
		}
		at = joinPath(at, name)
		if n, low, err = v.merge(at, name, v.known[at], low); err != nil {
			return nil, nil, nil, err
		}
		if low != nil {
			open = append(open, low)
		}
	}
	return n, low, release, nil
}

// merge returns what is to be seen at a name of a directory, where the upperdir has u and low is
// the directory of the layers; nil: there is none, or they do not show. It returns as well what
// of the layers shows in n, if n is a directory, or is n.
func (v *View) merge(path, name string, u *node, low *lowerDir) (n *node, under *lowerDir, err error) {
	if u != nil && u.Type != TypeWhiteout {
		if err := v.d.plain(path, u); err != nil {
			return nil, nil, err
		}
	}
	if low != nil && (u == nil || u.Type == TypeDir && !v.d.opaque(u)) {
		if under, err = v.d.lookup(low, name, path); err != nil {
			return nil, nil, err
		}
	}
	switch {
	case u == nil && under != nil:
		n = under.node
	case u != nil && u.Type != TypeWhiteout:
		n = u
		if under != nil && !under.node.isDir() {
			under.close()
			under = nil
		}
	}
	if b, ok := v.opts.Bound["/"+path]; ok && !n.isDir() {
		n = &node{dir: -1, fd: -1, Entry: Entry{
			Path: path, Type: TypeFile, Mode: b.Mode & 0o7777, UID: b.UID, GID: b.GID, Mtime: b.Mtime,
			Size: int64(len(b.Data)),
		}}
	}
	return n, under, nil
}

// at describes what is at a path without symlinks; nil: nothing.
func (v *View) at(path string) (*Entry, error) {
	if at, m, ok := v.mountOf(path); ok {
		switch {
		case m.Files != nil:
			return m.Files.at(below(path, at))
		case path != at:
			return nil, notRecorded(path, at, m)
		}
	}
	if e, ok := v.seen[path]; ok {
		return e, nil
	}
	n, _, done, err := v.chain(path)
	if err != nil {
		return nil, err
	}
	defer done()
	var e *Entry
	if n != nil {
		e = v.shown(path, n)
	}
	v.seen[path] = e
	return e, nil
}

// shown is what a user of the sandbox sees of n. An attribute that was set in the sandbox under a
// name that overlayfs keeps to itself is kept under an escaped one.
func (v *View) shown(path string, n *node) *Entry {
	e := v.d.shown(path, &n.Entry)
	set := map[string]string{}
	for name, value := range e.Xattrs {
		if own, ok := strings.CutPrefix(name, v.d.prefix+"overlay."); ok {
			name = v.d.prefix + own
		}
		set[name] = value
	}
	if len(set) > 0 {
		e.Xattrs = set
	}
	return e
}

func notRecorded(path, at string, m ViewMount) error {
	return fmt.Errorf("%q: %w: the sandbox has a mount (%s) at %q, which is not part of a checkpoint", rooted(path),
		fault.ErrNotFound, m.Kind, rooted(at))
}

// rooted is a path as the sandbox has it, bounded for messages.
func rooted(path string) string {
	if path == "." {
		return "/"
	}
	return clip("/" + path)
}

// Resolve finds where a path leads, as a process whose root is the view would: symlinks, also
// absolute ones and "..", stay below the root, and at most 40 are followed. A final symlink is
// followed only with follow, or if the path ends with a slash. real is relative to the root,
// and "." for the root itself; e describes what is there, and is nil if there is nothing.
// Then real is where a file of that path would be. What lies in a mount that is not recorded is
// ErrNotFound.
func (v *View) Resolve(p string, follow bool) (real string, e *Entry, err error) {
	if p == "" || len(p) > maxAsked {
		return "", nil, fmt.Errorf("path of %d bytes, 1 to %d are possible: %w", len(p), maxAsked, fault.ErrInvalid)
	}
	if err := v.Foresee(p); err != nil {
		return "", nil, err
	}
	real = "."
	if e, err = v.at(real); err != nil {
		return "", nil, err
	}
	todo := strings.Split(p, "/")
	last := todo[len(todo)-1]
	for links := 0; len(todo) > 0; {
		c := todo[0]
		todo = todo[1:]
		var next string
		switch c {
		case "", ".":
			continue
		case "..":
			next, _ = splitPath(real)
		default:
			next = joinPath(real, c)
		}
		switch {
		case len(next) > maxAsked:
			return "", nil, fmt.Errorf("%q leads to a path of more than %d bytes: %w", clip(p), maxAsked,
				fault.ErrInvalid)
		case e == nil:
			real = next // below what does not exist, a path means what it says
			continue
		case e.Type != TypeDir:
			return "", nil, notDirectory(real)
		}
		found, err := v.at(next)
		if err != nil {
			return "", nil, err
		}
		if found != nil && found.Type == TypeSymlink && (follow || len(todo) > 0) {
			todo = append(strings.Split(found.Link, "/"), todo...)
			if links++; links > maxLinks || len(todo) > maxAsked {
				return "", nil, fmt.Errorf("%q: too many symlinks: %w", clip(p), fault.ErrInvalid)
			}
			if strings.HasPrefix(found.Link, "/") {
				real = "."
				if e, err = v.at(real); err != nil {
					return "", nil, err
				}
			}
			if err := v.Foresee(real + "/" + strings.Join(todo, "/")); err != nil {
				return "", nil, err
			}
			continue
		}
		real, e = next, found
	}
	if e != nil && e.Type != TypeDir && (last == "" || last == ".") {
		return "", nil, notDirectory(real)
	}
	if e == nil {
		if at, m, ok := v.mountOf(real); ok && m.Files == nil {
			return "", nil, notRecorded(real, at, m)
		}
	}
	return real, e, nil
}

func notDirectory(path string) error {
	return fmt.Errorf("%q: %w: it is not a directory", rooted(path), fault.ErrNotFound)
}

// Walk calls fn for what is at a path that Resolve returned and, if it is a directory, for all
// below it, in the order of ComparePaths. No symlink is followed. fs.SkipDir from fn for a
// directory leaves out what is in it. Another error of fn ends the walk and is returned as it is.
// What fn is given is good until it returns. Damage of the tree is ErrCorrupt, at the latest when
// Walk returns.
func (v *View) Walk(top string, fn func(*ViewFile) error) (err error) {
	if at, m, ok := v.mountOf(top); ok && m.Files != nil {
		return m.Files.Walk(below(top, at), moved(at, fn))
	} else if ok && top != at {
		return notRecorded(top, at, m)
	}
	n, low, done, err := v.chain(top)
	if err != nil {
		return err
	}
	defer done()
	if n == nil {
		return fmt.Errorf("%q: %w", rooted(top), fault.ErrNotFound)
	}
	w := viewWalk{v: v, fn: fn}
	if !n.isDir() {
		return w.visit(top, n, "", nil)
	}
	if v.opts.Tree != nil {
		if w.tree, err = openTreeSide(v.opts.Tree); err != nil {
			return err
		}
		defer func() {
			// An error of the stream explains what the parser stumbled over.
			if cerr := w.tree.close(); cerr != nil && !w.own && v.d.ctx.Err() == nil {
				err = cerr
			}
		}()
		w.tree.pass(func(path string) bool { return ComparePaths(path, top) <= 0 })
	}
	return w.visit(top, n, "", low)
}

// moved calls fn with the files of a mount by their paths in the view.
func moved(at string, fn func(*ViewFile) error) func(*ViewFile) error {
	return func(f *ViewFile) error {
		if f.Path == "." {
			f.Path = at
		} else {
			f.Path = joinPath(at, f.Path)
		}
		if f.Inode != "" {
			f.Inode = at + "\x00" + f.Inode
		}
		return fn(f)
	}
}

// viewWalk is one Walk under way.
type viewWalk struct {
	v    *View
	tree *treeSide // nil: there is none
	fn   func(*ViewFile) error
	own  bool // the error is fn's
}

// visit hands out what is at a path, and what is in it.
func (w *viewWalk) visit(path string, n *node, inode string, low *lowerDir) error {
	f := &ViewFile{Entry: *w.v.shown(path, n), Inode: inode, v: w.v, n: n}
	if b, ok := w.v.opts.Bound["/"+path]; ok && n.Type == TypeFile {
		f.bound = b.Data
	}
	m, mounted := w.v.mounts[path]
	if mounted && m.Files == nil {
		f.Mount = m.Kind
	}
	err := w.fn(f)
	switch {
	case err == fs.SkipDir && n.isDir():
		return nil
	case err != nil:
		w.own = true
		return err
	case mounted || !n.isDir():
		return nil
	}
	return w.dir(path, low)
}

// dir goes through a directory, of which low is in the layers.
func (w *viewWalk) dir(path string, low *lowerDir) error {
	if err := checkDepth(path, strings.Count(path, "/")+1); err != nil {
		return err
	}
	var rest []string
	if low != nil {
		for _, part := range low.parts { // those of the root may have been listed before
			if _, err := unix.Seek(part.fd, 0, io.SeekStart); err != nil {
				return pathError("seek in", part.at, err)
			}
		}
		var err error
		if rest, err = w.v.d.list(low); err != nil {
			return err
		}
	}
	for p := range w.v.opts.Bound {
		if parent, name := splitPath(strings.TrimPrefix(p, "/")); parent == path {
			rest = append(rest, name)
		}
	}
	slices.Sort(rest)
	rest = slices.Compact(rest)
	for {
		if err := w.v.d.ctx.Err(); err != nil {
			return err
		}
		name, ok, err := w.next(path)
		if err != nil {
			return err
		}
		if len(rest) > 0 && (!ok || rest[0] < name) {
			name, ok = rest[0], true
		} else if !ok {
			return nil
		}
		if len(rest) > 0 && rest[0] == name {
			rest = rest[1:]
		}
		if err := w.name(path, name, low); err != nil {
			return err
		}
	}
}

// next is the next name that the tree has in a directory.
func (w *viewWalk) next(dir string) (string, bool, error) {
	if w.tree == nil {
		return "", false, nil
	}
	// What is in directories that the walk did not enter comes first.
	w.tree.pass(func(path string) bool {
		parent, _ := splitPath(path)
		return parent != dir && (dir == "." || strings.HasPrefix(path, dir+"/"))
	})
	if w.tree.err != nil || w.tree.cur == nil {
		return "", false, w.tree.err
	}
	parent, name := splitPath(w.tree.cur.Path)
	return name, parent == dir, nil
}

// name goes to one name of a directory.
func (w *viewWalk) name(dir, name string, low *lowerDir) error {
	path := joinPath(dir, name)
	if m, ok := w.v.mounts[path]; ok && m.Files != nil {
		err := m.Files.Walk(".", moved(path, func(f *ViewFile) error {
			err := w.fn(f)
			w.own = w.own || err != nil && (err != fs.SkipDir || f.Type != TypeDir)
			return err
		}))
		if err == nil && w.tree != nil {
			w.tree.pass(func(p string) bool { return ComparePaths(p, path) <= 0 })
		}
		return err
	}
	var u *node
	inode := ""
	if w.tree != nil && w.tree.cur != nil && w.tree.cur.Path == path {
		inode = w.tree.inode()
		var err error
		if u, err = w.tree.take(); err != nil {
			return err
		}
	}
	n, under, err := w.v.merge(path, name, u, low)
	if err != nil || n == nil {
		return err
	}
	defer under.close()
	if n.layer && n.nlink > 1 && n.Type != TypeDir {
		inode = fmt.Sprintf("%s\x00%d", n.at, n.ino)
	}
	return w.visit(path, n, inode, under)
}

// Open reads the data of a file: its extents, one after the other. It sets Extents, which only
// then are known of a file of the layers.
func (f *ViewFile) Open() (io.ReadCloser, error) {
	switch {
	case f.Type != TypeFile:
		return nil, fmt.Errorf("%q: %w: it is not a regular file", rooted(f.Path), fault.ErrInvalid)
	case f.bound != nil || f.Size == 0:
		f.Extents = nil
		return io.NopCloser(bytes.NewReader(f.bound)), nil
	case f.n.at == "":
		return f.v.opts.Data.Data(f.v.d.ctx, f.n.Entry)
	}
	fd, err := openFile(f.n)
	if err != nil {
		return nil, err
	}
	f.Extents = f.n.Extents
	return &layerFile{ctx: f.v.d.ctx, fd: fd, path: f.Path, rest: slices.Clone(f.n.spans())}, nil
}

// layerFile reads the extents of a file in a layer.
type layerFile struct {
	ctx  context.Context
	fd   int
	path string
	rest []Extent
}

func (l *layerFile) Read(p []byte) (int, error) {
	if err := l.ctx.Err(); err != nil {
		return 0, err
	}
	if len(l.rest) == 0 {
		return 0, io.EOF
	}
	x := &l.rest[0]
	n := int(min(int64(len(p)), x.Len))
	if err := readFull(l.fd, p[:n], x.Off, l.path); err != nil {
		return 0, err
	}
	if x.Off, x.Len = x.Off+int64(n), x.Len-int64(n); x.Len == 0 {
		l.rest = l.rest[1:]
	}
	return n, nil
}

func (l *layerFile) Close() error { return unix.Close(l.fd) }
