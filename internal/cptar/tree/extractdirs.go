package tree

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// later puts off what is set on a directory until all is in it. A small
// archive can name long paths in great number.
func (x *extractor) later(path string, m meta) error {
	x.memory += int64(max(0, len(path)-usualPath))
	for _, a := range m.xattrs {
		x.memory += int64(len(a.name) + len(a.value))
	}
	if x.memory > maxMemory {
		return fmt.Errorf("%w: the archive says too much about its directories", fault.ErrInvalid)
	}
	x.dirs = append(x.dirs, pending{path, m})
	return nil
}

// openParent returns the directory parts, making what is missing, following no
// symlink. It belongs to the extractor until the next call.
func (x *extractor) openParent(parts []string) (*os.File, error) {
	path := strings.Join(parts, "/")
	if x.parent != nil && path == x.parentPath {
		return x.parent, nil
	}
	dir, same := x.top, 0
	for same < len(x.stack) && same < len(parts) && x.stack[same].name == parts[same] {
		dir = x.stack[same].dir
		same++
	}
	x.cutStack(same)
	if x.opts.Fresh && x.parent != nil && strings.HasPrefix(path, x.parentPath+"/") { // deeper than the stack
		dir, same, x.parent = x.parent, strings.Count(x.parentPath, "/")+1, nil
	}
	x.dropParent()
	for i := same; i < len(parts); i++ {
		next, err := x.step(dir, parts, i)
		if dir != x.top && i > len(x.stack) { // not held by the stack
			dir.Close()
		}
		if err != nil {
			return nil, err
		}
		dir = next
		if x.opts.Fresh && i < maxStack {
			x.stack = append(x.stack, level{parts[i], dir})
		}
	}
	if len(parts) > len(x.stack) {
		x.parent, x.parentPath = dir, path
	}
	return dir, nil
}

// step opens parts[i] in dir, and makes it if it is missing.
func (x *extractor) step(dir *os.File, parts []string, i int) (*os.File, error) {
	c := parts[i]
	next, err := openat(dir, c, unix.O_PATH|unix.O_DIRECTORY, 0)
	made := false
	if err == unix.ENOENT {
		if err = unix.Mkdirat(int(dir.Fd()), c, 0o755); err == nil || err == unix.EEXIST {
			made = err == nil
			next, err = openat(dir, c, unix.O_PATH|unix.O_DIRECTORY, 0)
		}
	} else if err == unix.ENOTDIR && x.opts.Layer {
		next, err = x.unhide(dir, c)
		made = err == nil
	}
	if err == unix.ELOOP || err == unix.ENOTDIR {
		err = fmt.Errorf("%w: the entry lies below %q, which is not a directory", fault.ErrInvalid,
			strings.Join(parts[:i+1], "/"))
	}
	if err != nil {
		return nil, err
	}
	if made {
		if err := x.implied(next, strings.Join(parts[:i+1], "/")); err != nil {
			next.Close()
			return nil, err
		}
	}
	return next, nil
}

func (x *extractor) cutStack(n int) {
	for _, l := range x.stack[n:] {
		l.dir.Close()
	}
	x.stack = x.stack[:n]
}

// implied gives a directory that the archive names only as a parent the same
// mode whatever the umask, and in a fresh tree the same time on every day.
func (x *extractor) implied(dir *os.File, path string) error {
	if x.opts.Fresh {
		if err := x.later(path, meta{mode: 0o755}); err != nil {
			return err
		}
		x.implicit[path] = true
	}
	return unix.Chmod(procPath(dir), 0o755)
}

func (x *extractor) dropParent() {
	if x.parent != nil {
		x.parent.Close()
		x.parent = nil
	}
}

func (x *extractor) closeParent() {
	x.dropParent()
	x.cutStack(0)
}

// topDir is the archive's entry for the directory that it is unpacked into.
func (x *extractor) topDir(m meta) error {
	if !x.opts.Fresh {
		return nil
	}
	h, err := reopen(x.top, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer h.Close()
	delete(x.implicit, "")
	if err := x.later("", m); err != nil {
		return err
	}
	m.xattrs = nil
	return m.apply(h, false)
}

func (x *extractor) mkdir(dir *os.File, base, path string, m meta) error {
	err := unix.Mkdirat(int(dir.Fd()), base, 0o700)
	existed := err == unix.EEXIST
	hidden := false
	if existed && x.opts.Fresh {
		// A symlink or file of the same name came earlier: the later wins.
		if h, err := handle(dir, base); err == nil {
			st, err := fstat(h)
			h.Close()
			if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
				hidden = x.opts.Layer && isWhiteout(&st)
				if err := x.clear(dir, base, path); err != nil {
					return err
				}
				if err := unix.Mkdirat(int(dir.Fd()), base, 0o700); err != nil {
					return err
				}
			}
		}
	} else if err != nil && !existed {
		return err
	}
	h, err := openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err == unix.ELOOP || err == unix.ENOTDIR {
		return fmt.Errorf("%w: a directory cannot replace what is no directory", fault.ErrExists)
	}
	if err != nil {
		return err
	}
	defer h.Close()
	if existed && !x.opts.Fresh && !x.opts.Dirs {
		return nil
	}
	if x.opts.Fresh {
		delete(x.implicit, path)
	}
	if err := x.later(path, m); err != nil {
		return err
	}
	if hidden {
		if err := setOpaque(h); err != nil {
			return err
		}
	}
	// A default ACL set now would be inherited by all that comes into it.
	m.xattrs = nil
	return m.applyOpen(h)
}

// finishDirs sets the times and attributes of directories.
func (x *extractor) finishDirs() error {
	x.closeParent()
	for _, p := range x.dirs {
		h, err := x.openDir(p.path)
		if err != nil {
			if !x.opts.Fresh { // a process in the sandbox moved it away
				x.report.skip(p.path, "it was removed while it was filled")
				continue
			}
			return wrap("unpack", p.path, err)
		}
		err = p.meta.applyXattrs(h)
		if err == nil {
			err = p.meta.applyTime(h)
		}
		h.Close()
		if err != nil {
			return wrap("unpack", p.path, err)
		}
	}
	return nil
}

func (x *extractor) openDir(path string) (*os.File, error) {
	if path == "" {
		return reopen(x.top, unix.O_RDONLY|unix.O_DIRECTORY)
	}
	dir, base := x.top, path
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		var err error
		if dir, err = x.openParent(strings.Split(path[:i], "/")); err != nil {
			return nil, err
		}
		base = path[i+1:]
	}
	return openat(dir, base, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}
