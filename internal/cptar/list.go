package cptar

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
)

// Listed is one path in a sandbox. The owner is as the sandbox has it.
type Listed struct {
	Path string // absolute, without symlinks before the last name
	Stat unix.Stat_t
	Link string // a symlink's target
}

// List calls fn for p, and then, if it is a directory or a symlink to one, for what is in it, by
// name: a directory before its contents, if recursive has those listed too. It follows no other
// symlink, and does not enter what the kernel makes up unless asked for that. What vanishes
// meanwhile is left out. An error of fn ends it and is returned as it is.
func List(
	ctx context.Context, root string, ids *idmap.Map, p string, recursive bool, fn func(Listed) error,
) error {
	j, err := policy.Open(root)
	if err != nil {
		return err
	}
	defer j.Close()
	l := lister{ctx: ctx, ids: ids, recursive: recursive, fn: fn}
	if fi, err := j.Stat(p); err == nil && fi.IsDir() {
		return l.top(j, p)
	}
	dir, base, err := j.Parent(p)
	if err != nil {
		return err
	}
	defer dir.Close()
	if _, err := j.Lstat(p); err != nil {
		return err
	}
	// p is not a directory, so all before its last name can be looked up by itself.
	real, _, err := j.Real(path.Dir(p))
	if err != nil {
		return err
	}
	found, err := l.describe(dir, base, path.Join(real, base))
	if err != nil {
		return &fs.PathError{Op: "stat", Path: p, Err: err}
	}
	return fn(found)
}

type lister struct {
	ctx       context.Context
	ids       *idmap.Map
	recursive bool
	fn        func(Listed) error
}

// top lists the directory that p leads to.
func (l *lister) top(j *policy.Jail, p string) error {
	real, _, err := j.Real(p)
	if err != nil {
		return err
	}
	h, err := j.Handle(p, true)
	if err != nil {
		return err
	}
	defer h.Close()
	found, err := l.describe(h, "", real)
	if err == nil {
		err = l.fn(found)
	}
	if err != nil {
		return err
	}
	d, err := policy.Reopen(h, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return &fs.PathError{Op: "open", Path: p, Err: err}
	}
	defer d.Close()
	return l.dir(d, found.Stat.Dev, real)
}

// dir lists what is in a directory.
func (l *lister) dir(d *os.File, dev uint64, at string) error {
	var names []string
	for {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		some, err := d.Readdirnames(4096)
		names = append(names, some...)
		if err == io.EOF {
			break
		}
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return &fs.PathError{Op: "list", Path: at, Err: err}
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		found, err := l.describe(d, name, path.Join(at, name))
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
			continue // deleted or replaced since
		}
		if err != nil {
			return &fs.PathError{Op: "stat", Path: path.Join(at, name), Err: err}
		}
		if err := l.fn(found); err != nil {
			return err
		}
		if !l.recursive || found.Stat.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		if err := l.enter(d, name, found, dev); err != nil {
			return err
		}
	}
	return nil
}

// enter lists what is in the directory name of d, which begins another filesystem unless that
// has the number dev.
func (l *lister) enter(d *os.File, name string, found Listed, dev uint64) error {
	fd, err := unix.Openat(int(d.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch err {
	case nil:
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP:
		return nil
	default:
		return &fs.PathError{Op: "open", Path: found.Path, Err: err}
	}
	sub := os.NewFile(uintptr(fd), found.Path)
	defer sub.Close()
	if found.Stat.Dev != dev {
		var st unix.Statfs_t
		if err := unix.Fstatfs(fd, &st); err != nil || tree.Pseudo(int64(st.Type)) {
			return nil
		}
	}
	return l.dir(sub, found.Stat.Dev, found.Path)
}

// describe looks at a name in d; "" is d itself.
func (l *lister) describe(d *os.File, name, at string) (Listed, error) {
	out := Listed{Path: at}
	err := unix.Fstatat(int(d.Fd()), name, &out.Stat, unix.AT_SYMLINK_NOFOLLOW|unix.AT_EMPTY_PATH)
	if err != nil {
		return out, err
	}
	out.Stat.Uid, out.Stat.Gid = uint32(l.ids.Tree(int(out.Stat.Uid))), uint32(l.ids.Tree(int(out.Stat.Gid)))
	if out.Stat.Mode&unix.S_IFMT == unix.S_IFLNK {
		buf := make([]byte, 4096)
		n, err := unix.Readlinkat(int(d.Fd()), name, buf)
		if err != nil {
			return out, err
		}
		out.Link = string(buf[:n])
	}
	return out, nil
}
