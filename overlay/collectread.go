package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"unsafe"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// reader looks at inodes; each goroutine has its own.
type reader struct {
	c       *collector
	scratch *scratch
	small   []byte
	st      unix.Statx_t
}

func newReaderOf(c *collector) *reader { return &reader{c: c} }

// batch looks at all items of b.
func (r *reader) batch(ctx context.Context, b *collectBatch) {
	for i := range b.items {
		it := &b.items[i]
		if it.err == nil && i&15 == 0 {
			it.err = ctx.Err()
		}
		if it.err == nil && it.state == stateListed {
			if it.isDir {
				it.err = r.dir(it)
			} else {
				it.err = r.look(ctx, b, it)
			}
		}
		if it.err != nil {
			b.plain = false
			return // the consumer stops here, what follows is never looked at
		}
		if it.state != stateSame {
			b.plain = false
			continue
		}
		rec := b.record(it)
		if b.plain = b.plain && (it.isDir || rec.key().links() < 2); b.plain {
			rec.count(&b.sum)
		}
	}
}

// dir completes a directory that the lister found changed.
func (r *reader) dir(it *listed) (err error) {
	it.state = stateFound
	if it.found.fixed {
		return nil
	}
	e := &it.found.entry
	for try := 0; ; try++ {
		e.Xattrs, err = r.buffers().readFD(e.Path, it.dir.fd)
		if err == nil {
			return admit(e)
		}
		if !r.c.opts.Tolerant || !passing(err) {
			return err
		}
		if try == tries {
			it.found.flags |= flagUntrusted
			return nil
		}
	}
}

func (r *reader) buffers() *scratch {
	if r.scratch == nil {
		r.scratch = newScratch()
	}
	return r.scratch
}

// admit refuses an entry that could not be carried.
func admit(e *Entry) error {
	if err := e.check(); err != nil {
		return fmt.Errorf("%v: %w", err, fault.ErrUnsupported)
	}
	return nil
}

// look decides whether an entry is as its record says, and reads it if not. An
// inode with several names is read once.
func (r *reader) look(ctx context.Context, b *collectBatch, it *listed) error {
	c, st, rec := r.c, &r.st, b.record(it)
	if it.dir.still && rec.key().links() < 2 && rec.flags()&flagUntrusted == 0 {
		it.state = stateSame
		return nil
	}
	if err := statxName(it.dir.fd, &b.buf[it.at], st); err != nil {
		path := it.path(b)
		if c.opts.Tolerant && passing(err) {
			it.state = stateHole
			return nil
		}
		return pathError("stat", path, err)
	}
	var key inodeKey
	key.set(st)
	if c.unchanged(rec, &key) && c.scan.origin.holds(st) {
		it.state = stateSame
		return nil
	}
	path, name := it.path(b), it.name(b)
	if st.Nlink < 2 || st.Mode&unix.S_IFMT == unix.S_IFDIR {
		f, err := r.patiently(ctx, it.dir.fd, name, path, rec)
		it.found, it.state = f, stateFound
		if f == nil {
			it.state = stateHole
		}
		return err
	}
	own, mine := c.claim(&key, false)
	it.found, it.state = &reading{key: key}, stateFound
	if c.isRacy(key.ctime()) {
		it.found.flags |= flagUntrusted
	}
	if mine {
		own.found, own.err = r.patiently(ctx, it.dir.fd, name, path, rec)
		close(own.done)
	}
	return nil
}

// claim returns the inode and whether the caller is to read it; other callers find the result
// once done is closed. Without must, an inode whose first name has been written is not read: all
// other names carry nothing.
func (c *collector) claim(key *inodeKey, must bool) (own *linked, mine bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	own = c.links[key.ino()]
	if own == nil || own.first != "" && own.ctime != key.ctime() {
		own = &linked{ctime: key.ctime(), mode: key.mode()}
		c.links[key.ino()] = own
	}
	if own.claimed || own.first != "" && !must {
		return own, false
	}
	own.claimed, own.done = true, make(chan struct{})
	return own, true
}

const tries = 3 // of reading what changes meanwhile, in a directory in use

// patiently reads an entry. In a directory in use it tries again when that
// changes meanwhile; it returns nothing when the entry is gone, or cannot be
// had, and a file without a digest when its data cannot.
func (r *reader) patiently(ctx context.Context, dir int, name, path string, rec cacheRecord) (*reading, error) {
	for try := 0; ; try++ {
		f, err := r.inode(ctx, dir, name, path, rec)
		if err == nil {
			return f, nil
		}
		if !r.c.opts.Tolerant || !passing(err) {
			return nil, err
		}
		if errors.Is(err, unix.ENOENT) {
			return nil, nil
		}
		if try < tries {
			continue
		}
		if f != nil && f.entry.Type == TypeFile {
			e := &f.entry
			e.Extents, e.Digest, e.Chunks = nil, "", nil
			f.flags |= flagUntrusted
			return f, admit(e)
		}
		return nil, nil
	}
}

// inode reads an entry that is no directory.
func (r *reader) inode(ctx context.Context, dir int, name, path string, rec cacheRecord) (*reading, error) {
	c := r.c
	it := item{dir: &dirFD{fd: dir}, name: name, entry: Entry{Path: path}}
	if err := c.scan.origin.statx(dir, name, 0, &it.stat, &it.entry); err != nil {
		return nil, err
	}
	var f *reading
	var err error
	switch it.entry.Type {
	case TypeDir:
		return nil, errChanged(path) // the listing said otherwise
	case TypeFile:
		f, err = r.file(ctx, dir, name, path, rec)
	default:
		err = c.scan.readSpecial(&it, r.buffers())
		f = &reading{entry: it.entry}
		f.key.set(&it.stat)
	}
	if err != nil {
		return f, err
	}
	if c.isRacy(f.key.ctime()) {
		f.flags |= flagUntrusted
	}
	return f, admit(&f.entry)
}

// file reads a regular file. A result that comes with an error has no data yet.
func (r *reader) file(ctx context.Context, dir int, name, path string, rec cacheRecord) (*reading, error) {
	c := r.c
	fd, err := openAt(dir, name, 0)
	if err != nil {
		return nil, pathError("open", path, err)
	}
	defer unix.Close(fd)
	f := &reading{entry: Entry{Path: path}}
	e := &f.entry
	var st unix.Statx_t
	if err := c.scan.origin.statx(fd, "", unix.AT_EMPTY_PATH, &st, e); err != nil {
		return nil, err
	}
	if e.Type != TypeFile {
		return nil, errChanged(path)
	}
	f.key.set(&st)
	if e.Size > 0 && !noWriter(fd) {
		f.flags |= flagUntrusted
	}
	if e.Xattrs, err = r.buffers().readFD(path, fd); err != nil {
		return f, err
	}
	if e.Extents, err = extents(fd, e.Size, path); err != nil {
		return f, err
	}
	if err := r.data(ctx, fd, e); err != nil {
		return f, err
	}
	if size := e.data(); size > 0 {
		c.read.Add(1)
		c.readBytes.Add(size)
	}
	if err := stillSame(fd, &st, path); err != nil {
		if !c.opts.Tolerant {
			return f, err
		}
		f.flags |= flagUntrusted
	}
	if c.sink == nil && rec != nil && rec.data() == e.data() {
		// The chunks were cut from the same data.
		if was, err := ParseEntry(rec.line()); err == nil && was.Digest == e.Digest {
			e.Chunks = was.Chunks
		}
	}
	return f, nil
}

// data hands a file's data to the sink and fills in what that says.
func (r *reader) data(ctx context.Context, fd int, e *Entry) (err error) {
	size := e.data()
	switch {
	case size == 0:
		e.Digest = digestOf(nil)
	case r.c.sink != nil:
		in := &dataReader{ctx: ctx, fd: fd, path: e.Path, spans: e.spans(), left: size}
		e.Digest, e.Chunks, err = r.c.sink.Data(ctx, size, in)
		switch {
		case in.err != nil:
			return in.err
		case err != nil:
			return &sinkError{e.Path, err}
		case in.left > 0 || !validDigest(e.Digest):
			return &sinkError{e.Path, fmt.Errorf("digest %q, %d bytes not taken: %w", clip(e.Digest),
				in.left, fault.ErrInvalid)}
		}
	case size <= smallFile:
		if r.small == nil {
			r.small = make([]byte, smallFile)
		}
		in := &dataReader{ctx: ctx, fd: fd, path: e.Path, spans: e.spans(), left: size}
		if _, err := io.ReadFull(in, r.small[:size]); err != nil {
			return err
		}
		e.Digest = digestOf(r.small[:size])
	default:
		h := blake3.New()
		if err := inBuffers(size, fileReader(ctx, fd, e), func(p []byte) error {
			_, _ = h.Write(p)
			return nil
		}); err != nil {
			return err
		}
		e.Digest = hasherDigest(h)
	}
	return nil
}

// sinkError keeps an error of the sink apart from those of the directory.
type sinkError struct {
	path string
	err  error
}

func (e *sinkError) Error() string { return fmt.Sprintf("store %q: %v", clip(e.path), e.err) }
func (e *sinkError) Unwrap() error { return e.err }

// dataReader reads a file's data: its extents, one after the other.
type dataReader struct {
	ctx   context.Context
	fd    int
	path  string
	spans []Extent
	at    int64 // in the first of spans
	left  int64
	err   error // stays
}

func (d *dataReader) Read(p []byte) (int, error) {
	if d.err == nil {
		d.err = d.ctx.Err()
	}
	if d.err != nil {
		return 0, d.err
	}
	if d.left == 0 {
		return 0, io.EOF
	}
	x := d.spans[0]
	p = p[:min(int64(len(p)), x.Len-d.at)]
	var n int
	err := retry(func() (err error) { n, err = unix.Pread(d.fd, p, x.Off+d.at); return })
	if err != nil {
		d.err = pathError("read", d.path, err)
		return 0, d.err
	}
	if n == 0 && len(p) > 0 {
		d.err = errChanged(d.path)
		return 0, d.err
	}
	d.left -= int64(n)
	if d.at += int64(n); d.at == x.Len {
		d.spans, d.at = d.spans[1:], 0
	}
	return n, nil
}

// noWriter reports whether no process has the file open, or mapped, for writing. The kernel sets
// times when a page is first written through a mapping, and again only after it has written the
// page back, which on a tmpfs never happens: with such a mapping, content can change under the
// same change time. Mappings made later begin with a first write.
//
// It asks for a lease, which the kernel grants only on a file without writers. A process that
// opens the file for writing at that instant waits until the lease is given back, some
// microseconds.
func noWriter(fd int) bool {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
		return false // there is one, or the filesystem cannot tell
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
	return err == nil
}

// passing reports whether err can come from a directory that changes while it is read: names
// removed or replaced, files truncated.
func passing(err error) bool {
	var own *sinkError
	if errors.As(err, &own) {
		return false
	}
	if errors.Is(err, fault.ErrBusy) {
		return true
	}
	for _, no := range []unix.Errno{
		unix.ENOENT, unix.ESTALE, unix.ELOOP, unix.ENOTDIR, unix.ENXIO, unix.ENODATA, unix.EINVAL, unix.EAGAIN,
	} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// statxName is statx of a name that lies in memory with a NUL behind it, without
// the copies that a Go string takes: it is most of what a Collect of a
// directory that has not changed does.
func statxName(dir int, name *byte, st *unix.Statx_t) error {
	const flags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	for {
		_, _, errno := unix.Syscall6(unix.SYS_STATX, uintptr(dir), uintptr(unsafe.Pointer(name)), flags, statxMask,
			uintptr(unsafe.Pointer(st)), 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// typeOfKey returns the type of the inode.
func typeOfKey(key *inodeKey) Type {
	var e Entry
	st := unix.Statx_t{Mode: uint16(key.mode())}
	st.Rdev_major, st.Rdev_minor = key.rdev()
	if err := e.fill(&st); err != nil {
		return ""
	}
	return e.Type
}
