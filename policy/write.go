package policy

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// WriteFile gives the file name the content data, all of it or none: what is
// there is exchanged by a rename, and keeps its mode, owner, ACL and user
// attributes. Other hard links keep the old content. A new file gets the mode
// perm, whatever the umask. Where a rename is not possible (the directory cannot
// be written, or the file is a mount point) the file is written in place.
//
// A final symlink is not followed, and only files are replaced.
func (j *Jail) WriteFile(name string, data []byte, perm fs.FileMode) error {
	dir, base, err := j.Parent(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if base == "." {
		return fail("write", name, unix.EISDIR)
	}
	old, err := writable(dir, base, name)
	if err != nil {
		return err
	}
	if old == nil {
		return fail("write", name, replace(dir, base, nil, data, perm))
	}
	defer old.Close()
	err = replace(dir, base, old, data, perm)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EBUSY),
		errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTSUP):
		err = overwrite(old, data)
	}
	return fail("write", name, err)
}

// writable opens what is to be replaced for writing, so that a file which may
// not be written is not exchanged either; nil: nothing is there.
func writable(dir *os.File, base, name string) (*os.File, error) {
	fd, err := openat(dir, base, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT {
		return nil, nil
	}
	if err != nil {
		return nil, fail("write", name, err)
	}
	h := os.NewFile(uintptr(fd), name)
	defer h.Close()
	info, err := h.Stat()
	if err != nil {
		return nil, fail("write", name, err)
	}
	switch mode := info.Mode(); {
	case mode.IsRegular():
	case mode.IsDir():
		return nil, fail("write", name, unix.EISDIR)
	case mode&fs.ModeSymlink != 0:
		return nil, fail("write", name, unix.ELOOP)
	default:
		return nil, irregular("write", name, mode)
	}
	f, err := Reopen(h, unix.O_RDWR|unix.O_NONBLOCK)
	if err == unix.EACCES { // it may be write-only
		f, err = Reopen(h, unix.O_WRONLY|unix.O_NONBLOCK)
	}
	if err != nil {
		return nil, fail("write", name, err)
	}
	return f, nil
}

// replace puts a new file in the place of old, or of nothing.
func replace(dir *os.File, base string, old *os.File, data []byte, perm fs.FileMode) (err error) {
	var random [8]byte
	_, _ = rand.Read(random[:])
	temp := ".agentbox-" + hex.EncodeToString(random[:])
	fd, err := openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), temp)
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			err = errors.Join(err, ignore(unix.Unlinkat(int(dir.Fd()), temp, 0), unix.ENOENT))
		}
	}()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if old == nil {
		err = unix.Fchmod(fd, uint32(perm.Perm()))
	} else {
		err = dress(f, old)
	}
	if err != nil {
		return err
	}
	return unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), base)
}

// dress gives f the owner, the mode and the attributes of old.
func dress(f, old *os.File) error {
	var want, got unix.Stat_t
	if err := errors.Join(unix.Fstat(int(old.Fd()), &want), unix.Fstat(int(f.Fd()), &got)); err != nil {
		return err
	}
	if want.Uid != got.Uid || want.Gid != got.Gid {
		if err := unix.Fchown(int(f.Fd()), int(want.Uid), int(want.Gid)); err != nil {
			return err
		}
	}
	names := make([]byte, 64<<10)
	n, err := unix.Flistxattr(int(old.Fd()), names)
	if err != nil && err != unix.ENOTSUP {
		return err
	}
	value := make([]byte, 64<<10)
	for name := range strings.SplitSeq(string(names[:max(n, 0)]), "\x00") {
		// Capabilities do not survive a write either.
		if !strings.HasPrefix(name, "user.") && name != "system.posix_acl_access" {
			continue
		}
		n, err := unix.Fgetxattr(int(old.Fd()), name, value)
		if err == nil {
			err = unix.Fsetxattr(int(f.Fd()), name, value[:n], 0)
		}
		if err != nil {
			return err
		}
	}
	return unix.Fchmod(int(f.Fd()), want.Mode&0o7777)
}

// overwrite writes in place, the end first cut off last, so that a full
// filesystem loses as little as may be.
func overwrite(f *os.File, data []byte) error {
	if _, err := f.WriteAt(data, 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(data)))
}

func ignore(err, harmless error) error {
	if errors.Is(err, harmless) {
		return nil
	}
	return err
}

func irregular(op, name string, mode fs.FileMode) error {
	return fmt.Errorf("%s %s: %w: it is neither a file nor a directory (%s)", op, name, fault.ErrDenied, mode.Type())
}
