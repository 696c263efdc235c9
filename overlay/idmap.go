package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/idmap"
)

// mapped mounts m with the ids of its layers mapped, so that no file on disk changes its owner.
// An overlay cannot be mapped itself, but its layers can, each in a clone of its mount. Until the
// overlay has clones of its own, they are mounted on its target, which is not in use yet.
func (m Mount) mapped() (err error) {
	ns, err := m.IDs.Namespace()
	if err != nil {
		return err
	}
	defer ns.Close()
	var fds []int
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		if err != nil {
			err = errors.Join(err, Unmount(m.Target, UnmountOptions{Lazy: true}))
		}
	}()
	clone := func(dir string) (string, error) {
		fd, err := mapTree(dir, int(ns.Fd()), m.Target, 0)
		if err != nil {
			return "", err
		}
		fds = append(fds, fd)
		return procFD(fd), nil
	}
	own := m
	own.IDs, own.Lower = nil, make([]string, len(m.Lower))
	for i, dir := range m.Lower {
		if own.Lower[i], err = clone(dir); err != nil {
			return err
		}
	}
	if m.Upper != "" {
		// The two have to be on one mount.
		if filepath.Dir(m.Upper) != filepath.Dir(m.Work) {
			return fmt.Errorf("the upper directory %s and the work directory %s are not in one directory: %w", m.Upper,
				m.Work, fault.ErrUnsupported)
		}
		top, err := clone(filepath.Dir(m.Upper))
		if err != nil {
			return err
		}
		own.Upper, own.Work = filepath.Join(top, filepath.Base(m.Upper)), filepath.Join(top, filepath.Base(m.Work))
	}
	// Files that the overlay creates on disk belong to the mounting user, whose id must exist in
	// the map.
	if err := m.IDs.AsRoot(own.mount); err != nil {
		return err
	}
	mnt, err := unix.OpenTree(unix.AT_FDCWD, m.Target,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("clone the overlay: %w", err)
	}
	defer unix.Close(mnt)
	if err := Unmount(m.Target, UnmountOptions{Lazy: true}); err != nil {
		return err
	}
	if err := unix.MoveMount(mnt, "", unix.AT_FDCWD, m.Target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("attach the overlay again: %w", err)
	}
	return nil
}

// Bind mounts a directory or file, with what is mounted below it, on target,
// which is one, too: seen there, its ids are mapped.
func Bind(source, target string, ids idmap.Map) error {
	ns, err := ids.Namespace()
	if err != nil {
		return err
	}
	defer ns.Close()
	fd, err := mapTree(source, int(ns.Fd()), target, unix.AT_RECURSIVE)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// MayBind is ErrUnsupported for what Bind could not map to ns, a user namespace.
func MayBind(source string, ns *os.File) error {
	fd, err := mapped(source, int(ns.Fd()), unix.AT_RECURSIVE)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// mapTree mounts a clone of dir's mount, with mapped ids, on target.
func mapTree(dir string, ns int, target string, flags uint) (int, error) {
	fd, err := mapped(dir, ns, flags)
	if err != nil {
		return -1, err
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		_ = unix.Close(fd)
		return -1, pathError("mount on", target, err)
	}
	return fd, nil
}

// mapped makes a clone of dir's mount, with mapped ids, that is nowhere yet.
func mapped(dir string, ns int, flags uint) (fd int, err error) {
	fd, err = unix.OpenTree(unix.AT_FDCWD, dir,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW|flags)
	if err != nil {
		return -1, pathError("clone the mount of", dir, err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	// Private, for under systemd all mounts are shared, and a clone is a peer of
	// what it was made of: what is mounted on it would appear there, too.
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|flags,
		&unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns), Propagation: unix.MS_PRIVATE})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		err = fmt.Errorf("%w: this kernel cannot map the ids of its filesystem", fault.ErrUnsupported)
	}
	if err != nil {
		return -1, fmt.Errorf("map the ids of %s: %w", dir, err)
	}
	return fd, nil
}
