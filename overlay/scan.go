package overlay

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	goruntime "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

const (
	scanItems = 64       // entries handed to a worker at once
	smallFile = 64 << 10 // bytes of data that a worker reads ahead for the consumer
)

// item is one entry on its way through the scan.
type item struct {
	dir  *dirFD // the directory that holds it; for a directory the directory itself
	name string // in dir; "" for a directory
	reg  bool   // the listing says that it is a regular file

	entry Entry
	stat  unix.Statx_t
	data  []byte // a small file's, valid until the item has been consumed
	large bool   // the consumer reads it through dir and name
	err   error
}

// scanBatch is a run of entries that one worker reads together.
type scanBatch struct {
	items []item
	buf   []byte
	done  chan struct{}
}

// dirFD is an open directory, closed with its last reference.
type dirFD struct {
	fd   int
	refs atomic.Int32
}

func (d *dirFD) hold() *dirFD { d.refs.Add(1); return d }

func (d *dirFD) release() {
	if d.refs.Add(-1) == 0 {
		_ = unix.Close(d.fd)
	}
}

// scan goes through dir in the order of ComparePaths and calls fn for every
// entry from the calling goroutine. content says what is wanted of files.
type scan struct {
	origin  origin
	content content
	skip    func(path string) bool // may be nil
	below   bool                   // CollectOptions.Below
	batches sync.Pool
	ordered chan *scanBatch // for the consumer, in order
	work    chan *scanBatch // the same batches, for the workers
}

type content int

const (
	noContent   content = iota // attributes and holes only
	withDigest                 // and the digest
	withContent                // and small files' data; larger files are the consumer's
)

func (s *scan) run(ctx context.Context, dir string, fn func(*item) error) (err error) {
	if err := checkPrivilege(); err != nil {
		return err
	}
	root, err := s.open(dir)
	if err != nil {
		return err
	}
	workers := min(max(goruntime.GOMAXPROCS(0), 2), 8)
	s.ordered = make(chan *scanBatch, 2*workers)
	s.work = make(chan *scanBatch, 2*workers)

	ctx, cancel := context.WithCancel(ctx)
	var wg guard.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		defer close(s.ordered)
		defer close(s.work)
		s.list(ctx, root)
	})
	for range workers {
		wg.Go(func() {
			buf := newScratch()
			for c := range s.work {
				if err := guard.Do(func() error { s.read(ctx, c, buf); return nil }); err != nil {
					c.items[0].err = err // there is one: nothing panics over none
				}
				close(c.done)
			}
		})
	}
	// However the loop below ends early, the lister sees the context, and the directories still
	// referred to by batches under way are closed.
	defer func() {
		cancel()
		for c := range s.ordered {
			<-c.done
			for i := range c.items {
				c.items[i].dir.release()
			}
		}
	}()
	links := make(map[uint64]*linkGroup)
	for c := range s.ordered {
		<-c.done
		for i := range c.items {
			it := &c.items[i]
			if err == nil {
				err = it.err
			}
			if err == nil {
				err = ctx.Err()
			}
			if err == nil {
				joinGroup(links, it)
				err = fn(it)
			}
			it.dir.release()
		}
		if err != nil {
			return err
		}
		s.recycle(c)
	}
	return ctx.Err()
}

// open opens the upperdir. Its own path is the caller's and may have symlinks.
func (s *scan) open(dir string) (*dirFD, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, pathError("open", dir, err)
	}
	if s.below {
		if fd, err = alone(fd); err != nil {
			return nil, pathError("open", dir, err)
		}
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, statxMask, &st); err != nil {
		_ = unix.Close(fd)
		return nil, pathError("stat", dir, err)
	}
	s.origin = origin{major: st.Dev_major, minor: st.Dev_minor, below: s.below}
	if st.Mask&unix.STATX_MNT_ID != 0 {
		s.origin.mount = st.Mnt_id
	}
	d := &dirFD{fd: fd}
	d.refs.Store(1)
	return d, nil
}

// alone returns an open directory anew, in a mount of its own that has nothing mounted in it. It
// closes the given descriptor. Where the kernel makes no such mount, it is the same directory.
func alone(dir int) (int, error) {
	mnt, err := unix.OpenTree(dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return dir, nil // one that is in no mount namespace of ours
	}
	// Private, for a clone is a peer of what it was made of: what is mounted there would appear here.
	err = unix.MountSetattr(mnt, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE})
	fd := -1
	if err == nil {
		fd, err = unix.Openat(mnt, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}
	// The mount lives on until the last file in it is closed.
	return fd, errors.Join(err, unix.Close(mnt), unix.Close(dir))
}

// linkGroup is an inode of which not all names have been seen.
type linkGroup struct {
	first string
	left  uint32
}

func joinGroup(links map[uint64]*linkGroup, it *item) {
	if it.stat.Nlink < 2 || it.entry.Type == TypeDir {
		return
	}
	g := links[it.stat.Ino]
	if g == nil {
		links[it.stat.Ino] = &linkGroup{first: it.entry.Path, left: it.stat.Nlink - 1}
		return
	}
	it.entry = Entry{Path: it.entry.Path, Type: it.entry.Type, Hardlink: g.first}
	it.data, it.large = nil, false
	if g.left--; g.left == 0 {
		delete(links, it.stat.Ino)
	}
}

func (s *scan) fresh() *scanBatch {
	c, _ := s.batches.Get().(*scanBatch)
	if c == nil {
		c = &scanBatch{items: make([]item, 0, scanItems)}
	}
	c.done = make(chan struct{})
	return c
}

func (s *scan) recycle(c *scanBatch) {
	clear(c.items)
	c.items, c.buf = c.items[:0], c.buf[:0]
	s.batches.Put(c)
}

// dirent is a name with the type that the listing gave it.
type dirent struct {
	name string
	typ  byte
}

// frame is a directory whose names are being handed out.
type frame struct {
	dir   *dirFD
	path  string
	names []dirent
}

// list walks the directories and sends batches. A failure becomes the error of
// an item, so that it reaches the consumer in its place.
func (s *scan) list(ctx context.Context, root *dirFD) {
	c := s.fresh()
	send := func() bool {
		select {
		case s.ordered <- c:
		case <-ctx.Done():
			for i := range c.items {
				c.items[i].dir.release()
			}
			c.items = c.items[:0]
			return false
		}
		s.work <- c // workers never wait for anything but work
		c = s.fresh()
		return true
	}
	add := func(it item) bool {
		c.items = append(c.items, it)
		return len(c.items) < scanItems || send()
	}
	buf := make([]byte, 64<<10)
	var stack []frame
	defer func() {
		for _, f := range stack {
			f.dir.release()
		}
	}()
	// enter takes over the reference to d.
	enter := func(d *dirFD, path string) bool {
		names, err := readNames(d.fd, path, buf)
		if err == nil {
			err = checkDepth(path, len(stack)+1)
		}
		stack = append(stack, frame{d, path, names})
		return add(item{dir: d.hold(), entry: Entry{Path: path}, err: err}) && err == nil
	}
	if !enter(root, ".") {
		send()
		return
	}
	for len(stack) > 0 {
		f := &stack[len(stack)-1]
		if len(f.names) == 0 {
			f.dir.release()
			stack = stack[:len(stack)-1]
			continue
		}
		d := f.names[0]
		f.names = f.names[1:]
		path := joinPath(f.path, d.name)
		if s.skip != nil && s.skip(path) {
			continue
		}
		if d.typ == unix.DT_UNKNOWN {
			d.typ = typeOf(f.dir.fd, d.name)
		}
		if d.typ != unix.DT_DIR {
			if !add(item{dir: f.dir.hold(), name: d.name, reg: d.typ == unix.DT_REG, entry: Entry{Path: path}}) {
				return
			}
			continue
		}
		fd, err := openAt(f.dir.fd, d.name, unix.O_DIRECTORY)
		if err != nil {
			add(item{dir: f.dir.hold(), entry: Entry{Path: path}, err: pathError("open", path, err)})
			break
		}
		sub := &dirFD{fd: fd}
		sub.refs.Store(1)
		if !enter(sub, path) {
			break
		}
	}
	if len(c.items) > 0 {
		send()
	}
}

func checkDepth(path string, depth int) error {
	if depth > maxDepth || len(path) > maxPath-maxName-1 {
		return fmt.Errorf("%q is nested too deeply: at most %d levels and %d bytes of path are handled: %w",
			clip(path), maxDepth, maxPath, fault.ErrUnsupported)
	}
	return nil
}

// typeOf asks for the type where the filesystem's listing has none. A name that
// is gone is left to the worker to report.
func typeOf(dir int, name string) byte {
	var st unix.Stat_t
	if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return unix.DT_UNKNOWN
	}
	return byte(st.Mode & unix.S_IFMT >> 12) // the DT_ numbers are the S_IF ones, shifted
}

// readNames lists a directory in order. One string holds each piece of the
// listing and the names are parts of it: a million names are a few allocations.
func readNames(fd int, path string, buf []byte) ([]dirent, error) {
	var names []dirent
	for {
		var n int
		err := retry(func() (err error) { n, err = unix.Getdents(fd, buf); return })
		if err != nil {
			return nil, pathError("list", path, err)
		}
		if n == 0 {
			break
		}
		// struct linux_dirent64: ino 8, off 8, reclen 2, type 1, name
		for text := string(buf[:n]); len(text) > 0; {
			size := int(binary.NativeEndian.Uint16([]byte{text[16], text[17]}))
			name := text[19:size]
			if i := strings.IndexByte(name, 0); i >= 0 {
				name = name[:i]
			}
			if name != "." && name != ".." {
				names = append(names, dirent{name, text[18]})
			}
			text = text[size:]
		}
	}
	slices.SortFunc(names, func(a, b dirent) int { return cmp.Compare(a.name, b.name) })
	return names, nil
}

// read is a worker's share: everything about the inodes of a batch.
func (s *scan) read(ctx context.Context, c *scanBatch, xb *scratch) {
	for i := range c.items {
		it := &c.items[i]
		if it.err == nil {
			it.err = ctx.Err()
		}
		if it.err != nil {
			return // the consumer stops here, what follows is never looked at
		}
		switch {
		case it.name == "":
			it.err = s.readDir(it, xb)
		case it.reg:
			it.err = s.readFile(ctx, it, c, xb)
		default:
			it.err = s.readSpecial(it, xb)
		}
		if it.err == nil {
			if err := it.entry.check(); err != nil {
				it.err = fmt.Errorf("%v: %w", err, fault.ErrUnsupported)
			}
		}
	}
}

func (s *scan) readDir(it *item, xb *scratch) (err error) {
	if err := s.origin.statx(it.dir.fd, "", unix.AT_EMPTY_PATH, &it.stat, &it.entry); err != nil {
		return err
	}
	it.entry.Xattrs, err = xb.readFD(it.entry.Path, it.dir.fd)
	return err
}

func (s *scan) readSpecial(it *item, xb *scratch) (err error) {
	if err := s.origin.statx(it.dir.fd, it.name, 0, &it.stat, &it.entry); err != nil {
		return err
	}
	switch it.entry.Type {
	case TypeFile, TypeDir:
		return errChanged(it.entry.Path) // the listing said otherwise
	case TypeSymlink:
		it.entry.Mode = 0o777
		if it.entry.Link, err = readlinkAt(it.dir.fd, it.name, it.entry.Path); err != nil {
			return err
		}
	}
	it.entry.Xattrs, err = xb.readAt(it.entry.Path, it.dir.fd, it.name)
	return err
}

func (s *scan) readFile(ctx context.Context, it *item, c *scanBatch, xb *scratch) error {
	e := &it.entry
	fd, err := openAt(it.dir.fd, it.name, 0)
	if err != nil {
		return pathError("open", e.Path, err)
	}
	defer unix.Close(fd)
	if err := s.origin.statx(fd, "", unix.AT_EMPTY_PATH, &it.stat, e); err != nil {
		return err
	}
	if e.Type != TypeFile {
		return errChanged(e.Path)
	}
	if e.Xattrs, err = xb.readFD(e.Path, fd); err != nil {
		return err
	}
	if e.Extents, err = extents(fd, e.Size, e.Path); err != nil {
		return err
	}
	size := e.data()
	switch {
	case s.content == noContent:
		return nil
	case size > smallFile && s.content == withContent:
		it.large = true
		return nil
	case size > smallFile:
		h := blake3.New()
		err = inBuffers(e.data(), fileReader(ctx, fd, e), func(p []byte) error { _, _ = h.Write(p); return nil })
		e.Digest = hasherDigest(h)
	default:
		// The buffer may move when it grows; what earlier items hold of the
		// old one stays as it is.
		start := len(c.buf)
		c.buf = slices.Grow(c.buf, int(size))[:start+int(size)]
		it.data = c.buf[start:]
		p := it.data
		for _, x := range e.spans() {
			if err = readFull(fd, p[:x.Len], x.Off, e.Path); err != nil {
				return err
			}
			p = p[x.Len:]
		}
		e.Digest = digestOf(it.data)
	}
	if err != nil {
		return err
	}
	return stillSame(fd, &it.stat, e.Path)
}
