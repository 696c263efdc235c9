package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// openPlain opens a regular file of the open directory dir. It follows no
// symlink, does not hang on a FIFO, and takes a single name, never a path.
func openPlain(dir *os.File, name string) (*os.File, os.FileInfo, error) {
	if !isPlain(name) {
		return nil, nil, fmt.Errorf("%q is not a file name: %w", name, fault.ErrCorrupt)
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, nil, fmt.Errorf("%s is a symbolic link: %w", name, fault.ErrCorrupt)
	}
	if err != nil {
		return nil, nil, &fs.PathError{Op: "open", Path: dir.Name() + "/" + name, Err: err}
	}
	f := os.NewFile(uintptr(fd), dir.Name()+"/"+name)
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: %w", name, fault.ErrCorrupt)
	}
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// isPlain reports whether name is one path component that stays where it is.
func isPlain(name string) bool {
	if name == "" || name == "." || name == ".." || len(name) > 255 {
		return false
	}
	for i := 0; i < len(name); i++ {
		if name[i] == '/' || name[i] == 0 {
			return false
		}
	}
	return true
}

func openDir(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// readDir lists a directory's names, a bounded number of them.
func readDir(dir *os.File) ([]string, error) {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	names, err := dir.Readdirnames(maxImages)
	if errors.Is(err, io.EOF) { // an empty one
		return nil, nil
	}
	return names, err
}

// exists reports whether a directory of this name is there.
func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
