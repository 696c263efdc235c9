package policy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// Trusted returns the real path of a file of the host, and an error unless the file, and each
// directory and symlink on the way to it, is root's or the caller's and no other user can change
// it: such a user could have root read, or run, anything.
func Trusted(file string) (real string, err error) {
	if !filepath.IsAbs(file) {
		return "", fmt.Errorf("%s: %w: not an absolute path", file, fault.ErrInvalid)
	}
	real, rest, links := "/", split(file), 0
	if err := trusted(real); err != nil {
		return "", err
	}
	for len(rest) > 0 {
		at := filepath.Join(real, rest[0]) // of "..": real has no symlinks
		rest = rest[1:]
		if err := trusted(at); err != nil {
			return "", err
		}
		target, err := os.Readlink(at)
		if errors.Is(err, unix.EINVAL) { // it is no symlink
			real = at
			continue
		}
		if err != nil {
			return "", err
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("%s: %w", file, unix.ELOOP)
		}
		if filepath.IsAbs(target) {
			real = "/"
		}
		rest = slices.Concat(split(target), rest)
	}
	return real, nil
}

func split(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(s string) bool { return s == "" })
}

// trusted looks at one step of a path.
func trusted(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	writable := st.Mode&0o022 != 0
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		writable = false // its mode means nothing
	case unix.S_IFDIR:
		// In a sticky one others exchange what is theirs alone.
		writable = writable && st.Mode&unix.S_ISVTX == 0
	}
	if writable || !ours(st.Uid) {
		return &fault.Error{Err: fmt.Errorf("others than root can change %s: %w", path, fault.ErrDenied),
			Hint: fmt.Sprintf("Run 'chown root %s && chmod go-w %s'.", path, path)}
	}
	return nil
}

// ours reports whether a file of that owner is root's or the caller's.
func ours(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }
