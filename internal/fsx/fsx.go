// Package fsx publishes files: under their name stands the old content or the new, never
// a part, whatever interrupts it.
//
//	temporary file -> content, owner, mode -> fsync -> rename -> fsync of the directory
//
// An error before the rename leaves the old file and nothing else. An error after it, of
// the directory's fsync, leaves the new one, which a power cut may take back.
package fsx

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2" // not crypto/rand, which is large: O_EXCL finds out a name that is taken
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Options of a file that is published. The zero value is a durable file of the caller's,
// mode 0600.
type Options struct {
	// Mode is the file's permission bits, whatever the umask; 0: 0600.
	Mode fs.FileMode
	// Like is a file whose owner and permission bits the new one gets.
	Like fs.FileInfo
	// Volatile leaves out both fsyncs: of what a power cut makes useless anyhow, or is
	// written anew if it is not whole.
	Volatile bool
	// Temp is the path of the temporary file, on the same filesystem. Only one writer may
	// use it at a time; what a killed one left there is replaced. Empty: one of a random
	// name, which begins with ".tmp-", in the file's directory.
	Temp string
	// Unnamed gives the temporary file no name while it is written, where the filesystem
	// can do so: what a killed process has written goes with it.
	Unnamed bool
}

// Write publishes data at path.
func Write(path string, data []byte, o Options) error {
	return Create(path, o, func(f *os.File) error {
		_, err := f.Write(data)
		return err
	})
}

// Create publishes what fill writes. Owner and mode of the options come after it; without
// Mode and Like they stay as fill leaves them.
func Create(path string, o Options, fill func(f *os.File) error) (err error) {
	t, err := New(path, o)
	if err != nil {
		return err
	}
	defer t.Discard()
	if err := fill(t.File); err != nil {
		return err
	}
	return t.Commit()
}

// Temp is a file that is not published yet.
type Temp struct {
	*os.File
	path  string // where it will be
	temp  string // its name until then
	named bool   // temp is there
	o     Options
}

// New makes the temporary file of a file at path. Commit, or Discard, ends it.
func New(path string, o Options) (*Temp, error) {
	t := &Temp{path: path, temp: o.Temp, o: o}
	if t.temp == "" {
		t.temp = filepath.Join(filepath.Dir(path), ".tmp-"+strconv.FormatUint(rand.Uint64(), 36))
	}
	if o.Unnamed {
		var err error
		t.File, err = os.OpenFile(filepath.Dir(t.temp), os.O_WRONLY|unix.O_TMPFILE, 0o600)
		if err == nil {
			return t, nil
		}
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EINVAL) {
			return nil, err
		}
	}

	// O_EXCL goes through no link that lies there.
	const flag = os.O_RDWR | os.O_CREATE | os.O_EXCL
	var err error
	t.File, err = os.OpenFile(t.temp, flag, 0o600)
	if o.Temp != "" && errors.Is(err, fs.ErrExist) {
		if err := os.Remove(t.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		t.File, err = os.OpenFile(t.temp, flag, 0o600)
	}
	t.named = err == nil
	return t, err
}

// Commit publishes the file. After an error other than of the directory's fsync the path
// is as it was; Discard removes the rest.
func (t *Temp) Commit() error {
	if err := t.Seal(); err != nil {
		return err
	}
	if err := os.Rename(t.temp, t.path); err != nil {
		return err
	}
	t.named = false
	if t.o.Volatile {
		return nil
	}
	return SyncDir(filepath.Dir(t.path))
}

// Seal ends the writing: a program may read the file by its Name, and only Commit and
// Discard follow. Commit seals a file that is not sealed.
func (t *Temp) Seal() error {
	if t.File == nil {
		return nil
	}
	err := t.dress()
	if err == nil && !t.o.Volatile {
		err = t.Sync()
	}
	if err == nil && !t.named {
		err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", t.Fd()), unix.AT_FDCWD, t.temp,
			unix.AT_SYMLINK_FOLLOW)
		t.named = err == nil
	}
	err = errors.Join(err, t.Close())
	t.File = nil
	return err
}

// dress gives the file its owner and mode, in this order: a change of owner clears bits.
func (t *Temp) dress() error {
	mode := t.o.Mode
	if t.o.Like != nil {
		st, ok := t.o.Like.Sys().(*syscall.Stat_t)
		if !ok {
			return fmt.Errorf("owner of %s: %w", t.path, errors.ErrUnsupported)
		}
		if err := t.Chown(int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
		mode = t.o.Like.Mode().Perm()
	}
	if mode == 0 {
		return nil
	}
	return t.Chmod(mode)
}

// Name is the path of the temporary file.
func (t *Temp) Name() string { return t.temp }

// Discard removes a file that was not published. After Commit it does nothing.
func (t *Temp) Discard() {
	if t.File != nil {
		_ = t.Close()
		t.File = nil
	}
	if t.named {
		_ = os.Remove(t.temp)
		t.named = false
	}
}

// SyncDir makes the names in a directory durable.
func SyncDir(path string) error {
	d, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// NoLinks is an error if one of the names in a directory, or with "" the directory itself, is a
// symbolic link. A missing name is not an error. It holds only where trusted users alone make
// changes.
func NoLinks(dir string, names ...string) error {
	for _, name := range names {
		path := filepath.Join(dir, name)
		info, err := os.Lstat(path)
		if err == nil && info.Mode()&fs.ModeSymlink != 0 {
			return fmt.Errorf("%s is a symbolic link", path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Within reports whether path is root or below it. It goes by the text, cleaned, and
// follows no link: callers that must know resolve both first. Nothing is within "", nor is
// "" within anything; a relative path and an absolute one are never within each other.
func Within(root, path string) bool {
	if root == "" || path == "" {
		return false
	}
	root, path = filepath.Clean(root), filepath.Clean(path)
	switch {
	case path == root:
		return true
	case root == ".":
		return filepath.IsLocal(path)
	}
	rest, below := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/")
	return below && filepath.IsLocal(rest) // ../.. is not below ..
}

// Resolved returns a path without its symbolic links, or the path itself if they lead nowhere.
func Resolved(path string) string {
	if p, err := filepath.EvalSymlinks(path); err == nil {
		return p
	}
	return path
}
