package overlay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

const (
	// inodeSize is what every file counts for, beside its blocks.
	inodeSize = 256
	// maxUsageDepth bounds how many directories are open at once.
	maxUsageDepth = 512
)

// ErrTooDeep is that of Usage for directories that lie too deep to be looked at.
var ErrTooDeep = errors.New("directories lie too deep in each other")

// Usage tells what the files of an upperdir take on their filesystem, in bytes:
// their blocks, and 256 for each. It stops looking once that is more than most.
// The upperdir may change meanwhile; what is gone by then counts for nothing. No
// link is followed.
func Usage(ctx context.Context, upper string, most int64) (int64, error) {
	u := usage{ctx: ctx, most: most, linked: map[uint64]struct{}{}}
	fd, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, &fs.PathError{Op: "open", Path: upper, Err: err}
	}
	err = u.dir(os.NewFile(uintptr(fd), upper), 0)
	if errors.Is(err, errEnough) {
		err = nil
	}
	return u.bytes, err
}

var errEnough = errors.New("enough")

type usage struct {
	ctx         context.Context
	bytes, most int64
	linked      map[uint64]struct{} // files with several names; most bounds them, too
}

// dir adds what lies in a directory, and closes it.
func (u *usage) dir(d *os.File, depth int) error {
	defer d.Close()
	if depth > maxUsageDepth {
		return ErrTooDeep
	}
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		names, err := d.Readdirnames(1024)
		for _, name := range names {
			if err := u.file(d, name, depth); err != nil {
				return err
			}
		}
		if err == io.EOF || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read directory: %w", err)
		}
	}
}

func (u *usage) file(d *os.File, name string, depth int) error {
	var st unix.Stat_t
	err := unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at a file: %w", err)
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	if !isDir && st.Nlink > 1 {
		if _, seen := u.linked[st.Ino]; seen {
			return nil
		}
		u.linked[st.Ino] = struct{}{}
	}
	if u.bytes += st.Blocks*512 + inodeSize; u.bytes > u.most {
		return errEnough
	}
	if !isDir {
		return nil
	}
	fd, err := unix.Openat(int(d.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch err {
	case nil:
		return u.dir(os.NewFile(uintptr(fd), name), depth+1)
	case unix.ENOENT, unix.ENOTDIR, unix.ELOOP: // it has just become something else
		return nil
	}
	return fmt.Errorf("open a directory: %w", err)
}
