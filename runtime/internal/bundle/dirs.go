package bundle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// makeVolumes makes missing directories that an image declares as volumes. Their content is
// the sandbox's, like all its files. It follows nothing in the paths or the files of the
// image out of root.
func makeVolumes(root *os.File, s runtime.Spec) error {
	for _, v := range s.Volumes {
		if err := makeDir(root, path.Clean("/"+v)); err != nil {
			return fmt.Errorf("%w: volume %.200q of the image: %w", fault.ErrInvalid, v, err)
		}
	}
	return nil
}

// makeDir makes a directory and those above it, 0755 under every umask.
func makeDir(root *os.File, dir string) error {
	for end := 1; end <= len(dir); end++ {
		if end < len(dir) && dir[end] != '/' {
			continue
		}
		handle, err := pathrs.OpenatInRoot(root, dir[:end])
		if errors.Is(err, fs.ErrNotExist) {
			handle, err = newDir(root, dir[:end])
		}
		if err != nil {
			return err
		}
		st, err := handle.Stat()
		if err := errors.Join(err, handle.Close()); err != nil {
			return err
		}
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir[:end], Err: unix.ENOTDIR}
		}
	}
	return nil
}

func newDir(root *os.File, dir string) (*os.File, error) {
	handle, err := pathrs.MkdirAllHandle(root, dir, 0o755)
	if err != nil {
		return nil, err
	}
	f, err := pathrs.Reopen(handle, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == nil {
		err = errors.Join(f.Chmod(0o755), f.Close())
	}
	if err != nil {
		return nil, errors.Join(err, handle.Close())
	}
	return handle, nil
}

// hostDir are directories that a process can have by the runtime's own
// descriptors: a working directory there is one of the host's with a runc before
// 1.1.12.
var hostDir = lazy.Regexp(`^/(?:proc/(?:self|thread-self|[0-9]+)|dev/fd)(?:/|$)`)

// checkWorkdir refuses a working directory that leads, through links of the
// image too, to a process's descriptors.
func checkWorkdir(root *os.File, dir string) error {
	if len(dir) >= unix.PathMax {
		return fmt.Errorf("%w: the working directory %.40q...: %w", fault.ErrInvalid, dir, unix.ENAMETOOLONG)
	}
	at, left := "/", path.Clean("/"+dir)
	for links := 0; left != ""; {
		var name string
		name, left, _ = strings.Cut(strings.TrimPrefix(left, "/"), "/")
		at = path.Join(at, name)
		if hostDir().MatchString(at + "/" + left) {
			return fmt.Errorf("%w: the working directory %.200q leads to the descriptors of a process (%s)",
				fault.ErrInvalid, dir, at)
		}
		to, err := readLink(root, at)
		if err != nil {
			return err
		}
		if to == "" {
			continue
		}
		if links++; links > 255 {
			return fmt.Errorf("%w: the working directory %.200q: %w", fault.ErrInvalid, dir, unix.ELOOP)
		}
		if !path.IsAbs(to) {
			to = path.Join(path.Dir(at), to)
		}
		at, left = "/", path.Join(to, left)
	}
	return nil
}

// readLink returns the target of a symlink, or "" if name is no symlink or does not exist.
func readLink(root *os.File, name string) (string, error) {
	parent, err := pathrs.OpenatInRoot(root, path.Dir(name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer parent.Close()
	buf := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(parent.Fd()), path.Base(name), buf)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return "", nil
	}
	return string(buf[:max(n, 0)]), err
}
