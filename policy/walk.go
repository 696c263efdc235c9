package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Limits bound a walk; each must be set.
type Limits struct {
	Entries int
	Depth   int // of directories below the first
	Time    time.Duration
}

// Entry is one thing that a walk has come to.
type Entry struct {
	Path  string // relative to where the walk began
	Mode  fs.FileMode
	Size  int64
	Mtime time.Time

	dir  *os.File
	name string
}

// errStop ends a walk early; the limit that was hit is in what Walk returns.
var errStop = errors.New("stop")

type walker struct {
	limits Limits
	left   int
	ctx    context.Context
	fn     func(Entry) error
	leave  func(magic int64) bool
	cut    string
}

// Walk calls fn for all that is below the directory name, by name, each directory before its
// contents. It follows no symlink and does not enter filesystems whose type leave reports (nil:
// none). From fn, fs.SkipDir keeps the walk out of a directory and fs.SkipAll ends it. Files that
// cannot be read are passed over. Cut names the limit that ended the walk, if one did; that is no
// error.
func (j *Jail) Walk(
	ctx context.Context, name string, limits Limits, leave func(magic int64) bool, fn func(Entry) error,
) (cut string, err error) {
	h, err := j.Handle(name, true)
	if err != nil {
		return "", err
	}
	defer h.Close()
	dir, err := Reopen(h, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return "", fail("list", name, err)
	}
	defer dir.Close()
	timed, cancel := context.WithTimeout(ctx, limits.Time)
	defer cancel()
	w := &walker{limits: limits, left: limits.Entries, ctx: timed, fn: fn, leave: leave}
	if w.foreign(dir) {
		return "", nil
	}
	err = w.walk(dir, "", 0)
	if err == errStop || err == fs.SkipAll {
		err = nil
	}
	if e := ctx.Err(); e != nil {
		return "", e
	}
	return w.cut, err
}

// foreign reports whether dir is on a filesystem to stay out of.
func (w *walker) foreign(dir *os.File) bool {
	var st unix.Statfs_t
	return w.leave != nil && (unix.Fstatfs(int(dir.Fd()), &st) != nil || w.leave(int64(st.Type)))
}

func (w *walker) stop(why string) error {
	w.cut = why
	return errStop
}

func (w *walker) walk(dir *os.File, rel string, depth int) error {
	names, more, err := w.names(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if w.ctx.Err() != nil {
			return w.stop(fmt.Sprintf("after %s", w.limits.Time))
		}
		e, dev, ok := describe(dir, rel+name, name)
		if !ok {
			continue // it is gone
		}
		switch err := w.fn(e); {
		case err == fs.SkipDir:
			continue
		case err != nil:
			return err
		case !e.Mode.IsDir():
			continue
		case depth+1 > w.limits.Depth:
			if w.cut == "" {
				w.cut = fmt.Sprintf("%d directories deep", w.limits.Depth)
			}
			continue
		}
		if err := w.enter(dir, name, rel+name+"/", dev, depth+1); err != nil {
			return err
		}
	}
	if more {
		return w.stop(fmt.Sprintf("after %d entries", w.limits.Entries))
	}
	return nil
}

// names lists a directory, as far as the bound on entries allows. They are
// plain names: what os.File would tell beyond them it looks up by path.
func (w *walker) names(dir *os.File) (names []string, more bool, err error) {
	for {
		batch, err := dir.Readdirnames(min(1000, w.left+1))
		if w.ctx.Err() != nil {
			return nil, false, w.stop(fmt.Sprintf("after %s", w.limits.Time))
		}
		names = append(names, batch...)
		if w.left -= len(batch); w.left < 0 {
			names, more = names[:len(names)-1], true
			w.left = 0
		}
		if more || errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, false, nil // it went away, or is damaged: as if it could not be read
		}
	}
	slices.Sort(names)
	return names, more, nil
}

func (w *walker) enter(dir *os.File, name, rel string, dev uint64, depth int) error {
	fd, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	sub := os.NewFile(uintptr(fd), rel)
	defer sub.Close()
	var st unix.Stat_t
	if unix.Fstat(int(dir.Fd()), &st) != nil || st.Dev != dev && w.foreign(sub) {
		return nil
	}
	return w.walk(sub, rel, depth)
}

func describe(dir *os.File, rel, name string) (e Entry, dev uint64, ok bool) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return e, 0, false
	}
	return Entry{
		Path: rel, Mode: fileMode(st.Mode), Size: st.Size, Mtime: time.Unix(st.Mtim.Unix()), dir: dir, name: name,
	}, st.Dev, true
}

func fileMode(mode uint32) fs.FileMode {
	m := fs.FileMode(mode & 0o777)
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		m |= fs.ModeDir
	case unix.S_IFLNK:
		m |= fs.ModeSymlink
	case unix.S_IFIFO:
		m |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		m |= fs.ModeSocket
	case unix.S_IFCHR:
		m |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		m |= fs.ModeDevice
	}
	for bit, flag := range map[uint32]fs.FileMode{
		unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky,
	} {
		if mode&bit != 0 {
			m |= flag
		}
	}
	return m
}

// Open opens the entry for reading, if it still is a regular file. It is good
// only within the call that the entry was handed to.
func (e Entry) Open() (*os.File, error) {
	fd, err := openat(e.dir, e.name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fail("open", e.Path, err)
	}
	h := os.NewFile(uintptr(fd), e.Path)
	defer h.Close()
	info, err := h.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = unix.EINVAL
	}
	if err != nil {
		return nil, fail("open", e.Path, err)
	}
	f, err := Reopen(h, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, fail("open", e.Path, err)
	}
	return f, nil
}

// Readlink returns the target of an entry that is a symlink.
func (e Entry) Readlink() (string, error) { return readlinkat(e.dir, e.name) }
