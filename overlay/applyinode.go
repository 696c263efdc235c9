package overlay

import (
	"fmt"
	goruntime "runtime"
	"sync/atomic"
	"unsafe"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// finish gives an open file or directory all but its content. The order is the
// kernel's: a change of owner drops set-id bits and capabilities, attributes
// bring the ACL, the mode then repeats what the ACL implies and adds set-id bits,
// and times come after everything that touches them.
func finish(fd int, e *Entry) error {
	if err := unix.Fchown(fd, int(e.UID), int(e.GID)); err != nil {
		return pathError("chown", e.Path, err)
	}
	for name, value := range e.Xattrs {
		if err := unix.Fsetxattr(fd, name, []byte(value), 0); err != nil {
			return xattrError(name, e.Path, err)
		}
	}
	if err := unix.Fchmod(fd, e.Mode); err != nil {
		return pathError("chmod", e.Path, err)
	}
	if err := checkACL(e, func(name string, p []byte) (int, error) { return unix.Fgetxattr(fd, name, p) }); err != nil {
		return err
	}
	if err := setTimes(fd, "", e.Mtime, unix.AT_EMPTY_PATH); err != nil {
		return pathError("set times of", e.Path, err)
	}
	return nil
}

// makeSpecial makes everything that has no content, by name.
func makeSpecial(dir int, name string, e *Entry) error {
	var err error
	switch e.Type {
	case TypeSymlink:
		err = unix.Symlinkat(e.Link, dir, name)
	case TypeFifo:
		err = unix.Mknodat(dir, name, unix.S_IFIFO|0o600, 0)
	case TypeSocket:
		err = unix.Mknodat(dir, name, unix.S_IFSOCK|0o600, 0)
	case TypeChar, TypeWhiteout:
		err = unix.Mknodat(dir, name, unix.S_IFCHR|0o600, int(unix.Mkdev(e.Major, e.Minor)))
	case TypeBlock:
		err = unix.Mknodat(dir, name, unix.S_IFBLK|0o600, int(unix.Mkdev(e.Major, e.Minor)))
	}
	if err != nil {
		return createError("create "+string(e.Type), e.Path, err)
	}
	if err := unix.Fchownat(dir, name, int(e.UID), int(e.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return pathError("chown", e.Path, err)
	}
	if len(e.Xattrs) > 0 {
		p := procFD(dir) + "/" + name
		for attr, value := range e.Xattrs {
			if err := unix.Lsetxattr(p, attr, []byte(value), 0); err != nil {
				return xattrError(attr, e.Path, err)
			}
		}
	}
	if e.Type != TypeSymlink {
		err := unix.Fchmodat(dir, name, e.Mode, unix.AT_SYMLINK_NOFOLLOW)
		if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
			// Before Linux 6.6. The name was made a moment ago, in a
			// directory that only we can write to: it is no symlink.
			err = unix.Fchmodat(dir, name, e.Mode, 0)
		}
		if err != nil {
			return pathError("chmod", e.Path, err)
		}
		p := procFD(dir) + "/" + name
		if err := checkACL(e, func(attr string, buf []byte) (int, error) {
			return unix.Lgetxattr(p, attr, buf)
		}); err != nil {
			return err
		}
	}
	if err := setTimes(dir, name, e.Mtime, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return pathError("set times of", e.Path, err)
	}
	return nil
}

func setTimes(fd int, name string, t Time, flags int) error {
	ts := [2]unix.Timespec{
		{Nsec: unix.UTIME_OMIT},
		{Sec: t.Sec, Nsec: t.Nsec},
	}
	if flags == unix.AT_EMPTY_PATH {
		return futimens(fd, &ts)
	}
	return unix.UtimesNanoAt(fd, name, ts[:], flags)
}

// checkACL reads an access or default ACL back: the kernel changes an ACL with
// the mode, and drops one that says no more than the mode does. No capture has
// such a pair, but an archive of another origin may.
func checkACL(e *Entry, read func(string, []byte) (int, error)) error {
	for name, want := range e.Xattrs {
		if name != "system.posix_acl_access" && name != "system.posix_acl_default" {
			continue
		}
		buf := make([]byte, maxXattr)
		n, err := read(name, buf)
		if err == unix.ENODATA {
			n, err = 0, nil
		}
		if err != nil {
			return pathError("read attribute "+name+" of", e.Path, err)
		}
		if string(buf[:n]) != want {
			return corrupt("%q: its ACL %s contradicts its mode", clip(e.Path), name)
		}
	}
	return nil
}

// xattrError tells an attribute that does not exist in this kernel or
// filesystem from other trouble.
func xattrError(name, path string, err error) error {
	op := fmt.Sprintf("set attribute %q of", clip(name))
	switch err {
	case unix.EOPNOTSUPP, unix.EPERM, unix.EINVAL, unix.ERANGE, unix.E2BIG:
		return fmt.Errorf("%w: %w", fault.ErrUnsupported, pathError(op, path, err))
	}
	return pathError(op, path, err)
}

// fileWriter puts the data of one file where it belongs.
type fileWriter struct {
	fd    int
	e     *Entry
	spans []Extent
	at    int64 // in the first of spans
	hash  *blake3.Hasher
}

func newFileWriter(fd int, e *Entry) *fileWriter {
	return &fileWriter{fd: fd, e: e, spans: e.spans(), hash: blake3.New()}
}

func (w *fileWriter) write(p []byte) error {
	_, _ = w.hash.Write(p)
	return w.place(p)
}

func (w *fileWriter) place(p []byte) error {
	for len(p) > 0 {
		x := w.spans[0]
		n := min(int64(len(p)), x.Len-w.at)
		if err := writeFull(w.fd, p[:n], x.Off+w.at, w.e.Path); err != nil {
			return err
		}
		p = p[n:]
		if w.at += n; w.at == x.Len {
			w.spans, w.at = w.spans[1:], 0
		}
	}
	return nil
}

// end sets the size where a hole ends the file, the digest, and the rest.
func (w *fileWriter) end() error {
	w.e.Digest = hasherDigest(w.hash)
	return w.seal()
}

func (w *fileWriter) seal() error {
	e := w.e
	if e.Extents != nil {
		if n := len(e.Extents); n == 0 || e.Extents[n-1].Off+e.Extents[n-1].Len < e.Size {
			err := retry(func() error { return unix.Ftruncate(w.fd, e.Size) })
			if err == unix.EFBIG || err == unix.EINVAL {
				return fmt.Errorf("%w: %q has %d bytes, more than this filesystem's files can: %w",
					fault.ErrUnsupported, clip(e.Path), e.Size, err)
			}
			if err != nil {
				return pathError("truncate", e.Path, err)
			}
		}
	}
	return finish(w.fd, e)
}

func writeFull(fd int, p []byte, off int64, path string) error {
	for len(p) > 0 {
		var n int
		err := retry(func() (err error) { n, err = unix.Pwrite(fd, p, off); return })
		if err == unix.EFBIG {
			return fmt.Errorf("%w: %w", fault.ErrUnsupported, pathError("write", path, err))
		}
		if err != nil {
			return pathError("write", path, err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// writers fill and finish small files while the archive is read on. Entries
// pass through them in batches and come out in order; entries of other kinds
// ride along done.
type writers struct {
	work   chan *batch
	queue  []*batch // sent, in order, not reported yet
	cur    *batch
	wg     guard.WaitGroup
	failed atomic.Bool // what comes after a failure is only closed
}

const (
	batchEntries = 64
	batchBytes   = 1 << 20
	batchQueue   = 8
)

type batch struct {
	jobs []job
	buf  []byte
	done chan struct{}
	err  error
}

// job is one entry; fd is -1 when nothing is left to do for it.
type job struct {
	fd    int
	entry Entry
	data  []byte
}

func newBatch() *batch {
	return &batch{jobs: make([]job, 0, batchEntries), done: make(chan struct{})}
}

func (w *writers) start() {
	w.cur = newBatch()
	w.work = make(chan *batch, batchQueue)
	for range min(max(goruntime.GOMAXPROCS(0)-1, 1), 8) {
		w.wg.Go(func() {
			for b := range w.work {
				if b.err = guard.Do(func() error { return w.write(b) }); b.err != nil {
					w.failed.Store(true)
				}
				close(b.done)
			}
		})
	}
}

func (w *writers) write(b *batch) (err error) {
	for i := range b.jobs {
		j := &b.jobs[i]
		if j.fd < 0 {
			continue
		}
		if err == nil && !w.failed.Load() {
			j.entry.Digest = digestOf(j.data)
			f := fileWriter{fd: j.fd, e: &j.entry, spans: j.entry.spans()}
			if err = f.place(j.data); err == nil {
				err = f.seal()
			}
		}
		if cerr := unix.Close(j.fd); err == nil && cerr != nil {
			err = pathError("close", j.entry.Path, cerr)
		}
	}
	return err
}

// room returns memory for a small file's data, in the batch that add goes to.
func (w *writers) room(size int, report func(*Entry) error) ([]byte, error) {
	if len(w.cur.jobs) >= batchEntries || len(w.cur.buf)+size > batchBytes {
		if err := w.send(report); err != nil {
			return nil, err
		}
	}
	if w.cur.buf == nil && size > 0 {
		w.cur.buf = buffers.Get().(*[copyBuf]byte)[:0]
	}
	at := len(w.cur.buf)
	w.cur.buf = w.cur.buf[:at+size]
	return w.cur.buf[at:], nil
}

func (w *writers) add(fd int, e Entry, data []byte) {
	w.cur.jobs = append(w.cur.jobs, job{fd, e, data})
}

// done lets an entry that is already made ride along.
func (w *writers) done(e Entry, report func(*Entry) error) error {
	if len(w.cur.jobs) >= batchEntries {
		if err := w.send(report); err != nil {
			return err
		}
	}
	w.cur.jobs = append(w.cur.jobs, job{fd: -1, entry: e})
	return nil
}

// send passes the current batch on, and reports the oldest when there are many.
func (w *writers) send(report func(*Entry) error) error {
	w.queue = append(w.queue, w.cur)
	w.work <- w.cur
	w.cur = newBatch()
	if len(w.queue) < batchQueue {
		return nil
	}
	return w.collect(report)
}

// collect waits for the oldest batch and reports its entries.
func (w *writers) collect(report func(*Entry) error) error {
	b := w.queue[0]
	w.queue = w.queue[1:]
	<-b.done
	if b.err != nil {
		return b.err
	}
	for i := range b.jobs {
		if err := report(&b.jobs[i].entry); err != nil {
			return err
		}
	}
	if b.buf != nil {
		buffers.Put((*[copyBuf]byte)(b.buf[:copyBuf]))
	}
	return nil
}

// drain waits for everything and reports it.
func (w *writers) drain(report func(*Entry) error) error {
	if err := w.send(report); err != nil {
		return err
	}
	for len(w.queue) > 0 {
		if err := w.collect(report); err != nil {
			return err
		}
	}
	return nil
}

// stop ends the writers and returns the first error of what was not collected.
func (w *writers) stop() (err error) {
	w.failed.Store(true) // the remaining results are not needed
	for i := range w.cur.jobs {
		if fd := w.cur.jobs[i].fd; fd >= 0 {
			_ = unix.Close(fd)
		}
	}
	close(w.work)
	w.wg.Wait()
	for _, b := range w.queue {
		if err == nil {
			err = b.err
		}
	}
	return err
}

// futimens is utimensat without a path, for which x/sys has no name that takes
// UTIME_OMIT on a descriptor.
func futimens(fd int, ts *[2]unix.Timespec) error {
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(ts)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
