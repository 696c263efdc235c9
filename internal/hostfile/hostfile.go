// Package hostfile copies single regular files of the host with all that they
// are, and puts them back so. It knows paths and descriptors only.
//
// Take reads one file, of one instant, into a sink of the caller's, from
// where it goes into a checkpoint. Dir.Put makes a file what a State says: what is
// new is written beside it, made durable, and renamed over it. Put finds its work
// done when it is called again, and refuses to replace what is neither as it was
// recorded (the caller's way back) nor as it is to be. No symlink is followed.
package hostfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// leaseWait is how long somebody who has a lease on a file is waited for.
const leaseWait = time.Second

// ErrChanged is in the error of a Put that would replace what nobody has a copy of.
var ErrChanged = fmt.Errorf("%w: another program has changed it meanwhile", fault.ErrState)

// State is how a file is, or is to be.
type State struct {
	Entry *overlay.Entry // nil: it is not there
	Data  func(context.Context) (io.ReadCloser, error)
}

// Resolve returns the path by which a file, which need not be there, is reached
// without a symlink. Its own name is not followed.
func Resolve(path string) (string, error) {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// Dir is an open directory.
type Dir struct {
	path string
	f    *os.File
}

// Open opens a directory, on the way to which there is no symlink.
func Open(path string) (*Dir, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if errors.Is(err, unix.ELOOP) {
		return nil, fmt.Errorf("%w: there is a symlink in the way to %s", fault.ErrState, path)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return &Dir{path, os.NewFile(uintptr(fd), path)}, nil
}

// Close closes it.
func (d *Dir) Close() error { return d.f.Close() }

func (d *Dir) fd() int { return int(d.f.Fd()) }

// ID tells a directory from all others of the host, whatever paths lead to it.
func (d *Dir) ID() (string, error) {
	var st unix.Stat_t
	err := unix.Fstat(d.fd(), &st)
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), err
}

// Free tells which filesystem the directory is on, and how much that has room for.
func (d *Dir) Free() (dev uint64, bytes int64, err error) {
	var st unix.Stat_t
	var room unix.Statfs_t
	if err := errors.Join(unix.Fstat(d.fd(), &st), unix.Fstatfs(d.fd(), &room)); err != nil {
		return 0, 0, err
	}
	if room.Blocks == 0 { // a filesystem that does not tell
		return st.Dev, math.MaxInt64, nil
	}
	return st.Dev, int64(room.Bfree) * room.Bsize, nil
}

// file is what is there under a name.
type file struct {
	*os.File
	st unix.Stat_t
}

// look opens a file for reading; nil: it is not there. What is not a regular file,
// or has other names too, is refused, without being opened.
func (d *Dir) look(ctx context.Context, name string) (*file, error) {
	fd, st, err := d.find(name)
	if err != nil || fd < 0 {
		return nil, err
	}
	defer unix.Close(fd)
	// Whoever has a lease on it is asked by this to let go, which takes a program
	// that means well milliseconds. Others lose it much later; nobody waits for them.
	for until := time.Now().Add(leaseWait); ; {
		f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err == nil {
			return &file{f, st}, nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		if time.Now().After(until) {
			return nil, fmt.Errorf("%w: another process holds a lease on it", fault.ErrBusy)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// find finds a file without opening it; -1: it is not there.
func (d *Dir) find(name string) (fd int, st unix.Stat_t, err error) {
	fd, err = unix.Openat(d.fd(), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return -1, st, nil
	}
	if err != nil {
		return -1, st, err
	}
	err = unix.Fstat(fd, &st)
	if kind := kinds[st.Mode&unix.S_IFMT]; err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = fmt.Errorf("%w: it is %s, and not a regular file", fault.ErrState, kind)
	} else if err == nil && st.Nlink > 1 {
		err = fmt.Errorf("%w: it has %d hard links, and what is put back would be linked to none of them",
			fault.ErrState, st.Nlink)
	}
	if err != nil {
		return -1, st, errors.Join(err, unix.Close(fd))
	}
	return fd, st, nil
}

var kinds = map[uint32]string{
	unix.S_IFDIR: "a directory", unix.S_IFLNK: "a symlink", unix.S_IFIFO: "a fifo", unix.S_IFSOCK: "a socket",
	unix.S_IFCHR: "a device", unix.S_IFBLK: "a device", 0: "of a kind of its own",
}

func (f *file) close() {
	if f != nil {
		_ = f.Close() // it was only read
	}
}

// flush has the kernel write out what programs have stored through a mapping: their
// next store then is a change that the file's times tell. Where there is no disk
// beneath (tmpfs) none is told; so nobody depends on it.
func (f *file) flush() {
	_ = unix.SyncFileRange(int(f.Fd()), 0, 0,
		unix.SYNC_FILE_RANGE_WAIT_BEFORE|unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
}

// entry describes a file as it is now.
func (f *file) entry() (*overlay.Entry, error) {
	if err := unix.Fstat(int(f.Fd()), &f.st); err != nil {
		return nil, err
	}
	e := &overlay.Entry{Type: overlay.TypeFile, Mode: f.st.Mode & 0o7777, UID: f.st.Uid, GID: f.st.Gid,
		Mtime: overlay.Time{Sec: f.st.Mtim.Sec, Nsec: f.st.Mtim.Nsec}, Size: f.st.Size}
	var err error
	e.Xattrs, err = xattrs(int(f.Fd()))
	return e, err
}

// settled is entry, after the last change has been so long ago that another one would
// have another time: the kernel's clock for that may tick but a hundred times a second.
func (f *file) settled(ctx context.Context) (e *overlay.Entry, err error) {
	for range 50 {
		if e, err = f.entry(); err != nil {
			return nil, err
		}
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now); err != nil {
			return nil, err
		}
		if age := now.Nano() - f.st.Ctim.Nano(); age > 0 || age < -int64(time.Second) { // later ones are of a clock that was set
			return e, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(time.Millisecond):
		}
	}
	return nil, ErrChanged
}

// same reports whether nothing of a file has changed since it was looked at.
func same(a, b *unix.Stat_t) bool {
	return sameFile(a, b) && a.Size == b.Size && a.Mtim == b.Mtim && a.Ctim == b.Ctim
}

// sameFile reports whether it is the same file, whatever was done with it.
func sameFile(a, b *unix.Stat_t) bool { return a.Dev == b.Dev && a.Ino == b.Ino }

// fill makes a new, empty file what an entry says.
func fill(f *os.File, e *overlay.Entry, data io.Reader) error {
	parts := e.Extents
	if parts == nil {
		parts = []overlay.Extent{{Len: e.Size}}
	}
	for _, x := range parts {
		n, err := io.Copy(io.NewOffsetWriter(f, x.Off), io.LimitReader(data, x.Len))
		if err == nil && n < x.Len {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
	fd := int(f.Fd())
	if err := errors.Join(unix.Ftruncate(fd, e.Size), unix.Fchown(fd, int(e.UID), int(e.GID))); err != nil {
		return err
	}
	have, err := xattrs(fd) // a directory may have given it some
	if err != nil {
		return err
	}
	for name := range have {
		if _, wanted := e.Xattrs[name]; !wanted {
			if err := unix.Fremovexattr(fd, name); err != nil {
				return fmt.Errorf("remove attribute %s: %w", name, err)
			}
		}
	}
	for name, value := range e.Xattrs {
		if have[name] == value && value != "" {
			continue
		}
		if err := unix.Fsetxattr(fd, name, []byte(value), 0); err != nil {
			return fmt.Errorf("set attribute %s: %w", name, err)
		}
	}
	// After the owner, a change of which clears bits, and the ACL, which sets some.
	if err := unix.Fchmod(fd, e.Mode); err != nil {
		return err
	}
	at := unix.Timespec{Sec: e.Mtime.Sec, Nsec: e.Mtime.Nsec}
	return unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd),
		[]unix.Timespec{{Nsec: unix.UTIME_NOW}, at}, 0)
}

// xattrs reads all attributes that belong to a file: those of users, of security
// modules and of trusted programs, and its ACL.
func xattrs(fd int) (map[string]string, error) {
	list, err := attribute(func(b []byte) (int, error) { return unix.Flistxattr(fd, b) })
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && list == "" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	set := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(list, "\x00"), "\x00") {
		switch space, _, _ := strings.Cut(name, "."); {
		case space == "system" && name != "system.posix_acl_access":
			continue // what a filesystem shows of itself
		case name == "security.evm", strings.HasPrefix(name, "trusted.overlay."):
			continue // what a kernel notes of this inode
		}
		value, err := attribute(func(b []byte) (int, error) { return unix.Fgetxattr(fd, name, b) })
		if errors.Is(err, unix.ENODATA) {
			continue // removed meanwhile, which the change time tells
		}
		if err != nil {
			return nil, fmt.Errorf("read attribute %s: %w", name, err)
		}
		set[name] = value
	}
	return set, nil
}

func attribute(read func([]byte) (int, error)) (string, error) {
	for {
		n, err := read(nil)
		if err != nil || n == 0 {
			return "", err
		}
		b := make([]byte, n)
		n, err = read(b)
		if errors.Is(err, unix.ERANGE) {
			continue // it has grown
		}
		return string(b[:max(n, 0)]), err
	}
}

// is reports whether a file, nil for none, is as s says.
func (s State) is(ctx context.Context, f *file) (bool, error) {
	if s.Entry == nil || f == nil {
		return s.Entry == nil && f == nil, nil
	}
	e, err := f.entry()
	if err != nil {
		return false, err
	}
	w := s.Entry
	if e.Mode != w.Mode || e.UID != w.UID || e.GID != w.GID || e.Mtime != w.Mtime || e.Size != w.Size ||
		!maps.Equal(e.Xattrs, w.Xattrs) {
		return false, nil
	}
	d, err := s.Data(ctx)
	if err != nil {
		return false, err
	}
	equal, err := equal(reader{ctx, io.NewSectionReader(f.File, 0, e.Size)}, whole(w, d), w.Size)
	return equal, errors.Join(err, d.Close())
}

// prove reads all that a state has to give.
func (s State) prove(ctx context.Context) error {
	if s.Entry == nil {
		return nil
	}
	d, err := s.Data(ctx)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, reader{ctx, d})
	return errors.Join(err, d.Close())
}

// whole reads a file of which data has the extents, with its holes.
func whole(e *overlay.Entry, data io.Reader) io.Reader {
	if e.Extents == nil {
		return data
	}
	var parts []io.Reader
	at := int64(0)
	for _, x := range append(e.Extents[:len(e.Extents):len(e.Extents)], overlay.Extent{Off: e.Size}) {
		parts = append(parts, io.LimitReader(zeros{}, x.Off-at), io.LimitReader(data, x.Len))
		at = x.Off + x.Len
	}
	return io.MultiReader(parts...)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// equal compares a file with what it should have, all size bytes of it.
func equal(have, want io.Reader, size int64) (bool, error) {
	x, y := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(want, y)
		if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return false, err
		}
		m, broken := io.ReadFull(have, x[:n])
		if m == n {
			broken = nil
		}
		if size -= int64(n); broken != nil || !bytes.Equal(x[:m], y[:n]) || err != nil {
			if errors.Is(broken, io.EOF) || errors.Is(broken, io.ErrUnexpectedEOF) {
				broken = nil // it is shorter now
			}
			return broken == nil && size == 0 && bytes.Equal(x[:m], y[:n]), broken
		}
	}
}
