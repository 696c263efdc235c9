package tree

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// CloneOptions modify Clone.
type CloneOptions struct {
	// Check may refuse an entry, given its path in the tree, type and device
	// number as in stat, and attribute names.
	Check    func(path string, st *unix.Stat_t, xattrs []string) error
	MinFree  int64 // bytes of the target's file system that stay free
	Archived bool  // leave out what no archive can hold: sockets
	Progress func(Report)
}

// Clone copies everything in the open directory from into the open, empty directory to: types,
// owners, modes, times, links, attributes, devices, sockets, holes. Nothing else may touch to
// meanwhile. A mount point below from is refused, because what is mounted there is not part of
// the tree.
func Clone(ctx context.Context, from, to *os.File, opts CloneOptions) (Report, error) {
	c := &cloner{ctx: ctx, opts: opts, top: to, links: map[inode]string{}, buf: make([]byte, chunk)}
	st, err := fstat(to)
	if err != nil {
		return c.report, err
	}
	c.self = inode{st.Dev, st.Ino}
	if c.mount, err = mountID(from); err != nil {
		return c.report, err
	}
	if st, err = fstat(from); err != nil {
		return c.report, err
	}
	list, err := c.look(from, "", &st)
	if err != nil {
		return c.report, err
	}
	c.report.Entries++
	return c.report, c.dir(from, to, "", metaOf(&st, list))
}

type cloner struct {
	ctx    context.Context
	opts   CloneOptions
	top    *os.File
	self   inode
	mount  uint64
	links  map[inode]string
	buf    []byte
	space  int64
	report Report
}

// mountID identifies a mount; the device number does not, with overlayfs,
// btrfs subvolumes and bind mounts.
func mountID(f *os.File) (uint64, error) {
	var sx unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &sx)
	if err != nil || sx.Mask&unix.STATX_MNT_ID == 0 {
		st, err := fstat(f)
		return st.Dev, err
	}
	return sx.Mnt_id, nil
}

func metaOf(st *unix.Stat_t, list []xattr) meta {
	return meta{mode: st.Mode & 0o7777, uid: int(st.Uid), gid: int(st.Gid), mtime: st.Mtim, xattrs: list}
}

func (c *cloner) look(h *os.File, path string, st *unix.Stat_t) ([]xattr, error) {
	list, err := xattrs(h, func(name string) bool { return !HostXattr(name) })
	if err != nil {
		return nil, wrap("read", path, err)
	}
	if c.opts.Check != nil {
		var names []string
		for _, x := range list {
			names = append(names, x.name)
		}
		if err := c.opts.Check(path, st, names); err != nil {
			return nil, fmt.Errorf("%q: %w", path, err)
		}
	}
	return list, nil
}

func (c *cloner) dir(from, to *os.File, path string, m meta) error {
	id, err := mountID(from)
	if err != nil {
		return wrap("copy", path, err)
	}
	if id != c.mount {
		return fmt.Errorf("%w: %q is a mount point: unmount it first, or make a tar archive without it",
			fault.ErrInvalid, path)
	}
	if st, err := fstat(from); err != nil || (inode{st.Dev, st.Ino}) == c.self {
		return fmt.Errorf("%w: the directory holds the place that it would be copied to", fault.ErrInvalid)
	}
	d, err := reopen(from, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return wrap("copy", path, err)
	}
	defer d.Close()
	list, err := names(d)
	if err != nil {
		return wrap("copy", path, err)
	}
	for _, base := range list {
		p := base
		if path != "" {
			p = path + "/" + base
		}
		if err := c.entry(d, to, base, p); err != nil {
			return err
		}
	}
	// Last, since every entry changes the time and inherits a default ACL.
	return wrap("copy", path, m.apply(to, false))
}

func (c *cloner) entry(from, to *os.File, base, path string) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if len(path) >= maxPath {
		return fmt.Errorf("%w: the path %.100q... is too long", fault.ErrInvalid, path)
	}
	h, err := handle(from, base)
	if err != nil {
		return wrap("copy", path, err)
	}
	defer h.Close()
	st, err := fstat(h)
	if err != nil {
		return wrap("copy", path, err)
	}
	if c.opts.Archived && st.Mode&unix.S_IFMT == unix.S_IFSOCK {
		return nil
	}
	list, err := c.look(h, path, &st)
	if err != nil {
		return err
	}
	c.report.Entries++
	if c.opts.Progress != nil {
		c.opts.Progress(c.report)
	}
	m, kind := metaOf(&st, list), st.Mode&unix.S_IFMT
	if kind == unix.S_IFDIR {
		if err := unix.Mkdirat(int(to.Fd()), base, 0o700); err != nil {
			return wrap("copy", path, err)
		}
		d, err := openat(to, base, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return wrap("copy", path, err)
		}
		defer d.Close()
		return c.dir(h, d, path, m)
	}
	id := inode{st.Dev, st.Ino}
	if first, ok := c.links[id]; ok {
		// By path: the tree is ours alone, and its directories are no links.
		return wrap("copy", path, unix.Linkat(int(c.top.Fd()), first, int(to.Fd()), base, 0))
	}
	if st.Nlink > 1 {
		c.links[id] = path
	}
	if kind == unix.S_IFREG {
		return wrap("copy", path, c.file(h, &st, to, base, m))
	}
	if kind == unix.S_IFLNK {
		var target string
		if target, err = readlink(h); err == nil {
			err = unix.Symlinkat(target, int(to.Fd()), base)
		}
	} else {
		err = unix.Mknodat(int(to.Fd()), base, kind|0o600, int(st.Rdev))
	}
	if err != nil {
		return wrap("copy", path, err)
	}
	made, err := handle(to, base)
	if err != nil {
		return wrap("copy", path, err)
	}
	defer made.Close()
	return wrap("copy", path, m.apply(made, kind == unix.S_IFLNK))
}

func (c *cloner) file(h *os.File, st *unix.Stat_t, to *os.File, base string, m meta) (err error) {
	src, err := reopen(h, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := openat(to, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := dst.Close(); err == nil {
			err = cerr
		}
	}()
	c.report.Bytes += st.Size
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) != nil {
		if err := c.copy(src, st, dst); err != nil {
			return err
		}
	}
	return m.apply(dst, false)
}

func (c *cloner) copy(src *os.File, st *unix.Stat_t, dst *os.File) error {
	list, whole, err := extents(src, st)
	if err != nil {
		return err
	}
	if whole {
		list = []extent{{0, st.Size}}
	}
	for _, e := range list {
		for off, end := e.off, e.off+e.len; off < end; {
			if err := c.ctx.Err(); err != nil {
				return err
			}
			if c.space -= chunk; c.space < 0 && c.opts.MinFree > 0 {
				var fs unix.Statfs_t
				if err := unix.Fstatfs(int(c.top.Fd()), &fs); err != nil {
					return err
				}
				free := int64(fs.Bavail)*fs.Bsize - c.opts.MinFree
				if free < chunk {
					return fmt.Errorf("%d bytes are kept free: %w", c.opts.MinFree, unix.ENOSPC)
				}
				c.space = min(free, 64<<20)
			}
			b := c.buf[:min(int64(len(c.buf)), end-off)]
			n, err := src.ReadAt(b, off)
			if n == 0 {
				return fmt.Errorf("%w: it changed while it was copied (%v)", fault.ErrBusy, err)
			}
			if _, err := dst.WriteAt(b[:n], off); err != nil {
				return err
			}
			off += int64(n)
		}
	}
	return dst.Truncate(st.Size)
}
