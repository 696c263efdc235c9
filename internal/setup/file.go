package setup

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	udiff "github.com/aymanbagabas/go-udiff"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
)

const (
	// maxConfig bounds what is read: no engine's configuration comes near it.
	maxConfig = 4 << 20

	backupInfix = ".agentbox-backup-"
	keepBackups = 5
	// Sorts as it ages.
	backupTime = "20060102T150405.000000000Z"
)

// A file is an engine's configuration as it was when it was read.
type file struct {
	path   string // with all symlinks resolved: what is replaced is the file, not a link to it
	exists bool
	data   []byte
	mode   fs.FileMode
	uid    int
	gid    int
}

// readFile reads a configuration, which need not exist.
func readFile(path string) (file, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return file{}, err
	}
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, lerr := os.Lstat(path); lerr == nil {
			return file{}, fmt.Errorf("%s is a symlink to nothing: %w", path, fault.ErrInvalid)
		}
		// The directory may be a link all the same.
		if dir, derr := filepath.EvalSymlinks(filepath.Dir(path)); derr == nil {
			path = filepath.Join(dir, filepath.Base(path))
		}
		return file{path: path, mode: 0o644}, nil
	}
	if err != nil {
		return file{}, err
	}
	// Opening a FIFO would wait for a writer.
	f, err := os.OpenFile(real, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return file{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return file{}, err
	}
	if !st.Mode().IsRegular() {
		return file{}, fmt.Errorf("%s is no regular file: %w", real, fault.ErrInvalid)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return file{}, err
	}
	if len(data) > maxConfig {
		return file{}, fmt.Errorf("%s is larger than %d MiB: %w", real, maxConfig>>20, fault.ErrInvalid)
	}
	own := file{path: real, exists: true, data: data, mode: st.Mode().Perm(), uid: -1, gid: -1}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		own.uid, own.gid = int(sys.Uid), int(sys.Gid)
	}
	return own, nil
}

// diff is what changes from f to data; empty if nothing does.
func (f file) diff(data []byte, gone bool) string {
	from, to := f.path, f.path
	if !f.exists {
		from = "/dev/null"
	}
	if gone {
		to = "/dev/null"
	}
	return udiff.Unified(from, to, string(f.data), string(data))
}

// lock keeps other setups away from the file. It is a lock on the directory:
// the file itself is replaced.
func (f file) lock() (unlock func(), err error) {
	l, err := flock.Try(filepath.Dir(f.path), flock.Dir)
	if errors.Is(err, flock.ErrHeld) {
		return nil, fmt.Errorf("another agentbox is changing %s: %w", f.path, fault.ErrBusy)
	}
	if err != nil {
		return nil, err
	}
	return l.Unlock, nil
}

// A draft is a new version of a file, written beside it.
type draft struct {
	of   file
	temp *fsx.Temp
}

// draft writes data beside f, with f's mode, owner and attributes, for the
// engine to validate and for commit to put in its place.
func (f file) draft(data []byte) (_ *draft, err error) {
	// The name shows an administrator where the file comes from.
	name := filepath.Join(filepath.Dir(f.path), ".agentbox-"+strings.ToLower(rand.Text()))
	tmp, err := fsx.New(f.path, fsx.Options{Mode: f.mode, Temp: name})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			tmp.Discard()
		}
	}()
	if _, err := tmp.Write(data); err != nil {
		return nil, err
	}
	if f.exists {
		if err := tmp.Chown(f.uid, f.gid); err != nil {
			return nil, err
		}
		if err := copyAttributes(f.path, tmp.File); err != nil {
			return nil, err
		}
	}
	return &draft{of: f, temp: tmp}, tmp.Seal()
}

// copyAttributes keeps an SELinux label and ACLs, without which a confined
// daemon may not read its own configuration any more.
func copyAttributes(from string, to *os.File) error {
	names := make([]byte, 64<<10)
	n, err := unix.Listxattr(from, names)
	if err != nil || n == 0 {
		return nil // a filesystem without attributes
	}
	value := make([]byte, 64<<10)
	for _, name := range strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		n, err := unix.Getxattr(from, name, value)
		if err == nil {
			err = unix.Fsetxattr(int(to.Fd()), name, value[:n], 0)
		}
		if err != nil {
			return fmt.Errorf("attribute %s of %s: %w", name, from, err)
		}
	}
	return nil
}

func (d *draft) discard() { d.temp.Discard() }

// commit puts the draft in the file's place, unless the file has changed since it was read.
func (d *draft) commit() error {
	if err := d.of.unchanged(); err != nil {
		return err
	}
	return d.temp.Commit()
}

func (f file) unchanged() error {
	now, err := readFile(f.path)
	if err != nil {
		return err
	}
	if now.exists != f.exists || !bytes.Equal(now.data, f.data) {
		return &fault.Error{
			Hint: "Nothing was changed. Try again.",
			Err:  fmt.Errorf("%s changed meanwhile: %w", f.path, fault.ErrBusy),
		}
	}
	return nil
}

// replace is draft and commit in one.
func (f file) replace(data []byte) error {
	d, err := f.draft(data)
	if err != nil {
		return err
	}
	defer d.discard()
	return d.commit()
}

// remove deletes the file, unless it has changed since it was read.
func (f file) remove() error {
	if err := f.unchanged(); err != nil {
		return err
	}
	if err := os.Remove(f.path); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(f.path))
}

// backup keeps the file as it is beside itself. Configurations hold secrets
// (proxies, registries): only the owner may read it.
func (f file) backup(now time.Time) (path string, err error) {
	if !f.exists {
		return "", nil
	}
	path = f.path + backupInfix + now.UTC().Format(backupTime)
	w, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", err
	}
	defer func() {
		if cerr := w.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			_ = os.Remove(path)
			path = ""
		}
	}()
	if err := w.Chown(f.uid, f.gid); err != nil {
		return path, err
	}
	if _, err := w.Write(f.data); err != nil {
		return path, err
	}
	if err := w.Sync(); err != nil {
		return path, err
	}
	if all := f.backups(); len(all) > keepBackups {
		for _, old := range all[keepBackups:] {
			_ = os.Remove(old)
		}
	}
	return path, fsx.SyncDir(filepath.Dir(path))
}

// backups lists the backups, newest first.
func (f file) backups() (paths []string) {
	entries, err := os.ReadDir(filepath.Dir(f.path))
	if err != nil {
		return nil
	}
	prefix := filepath.Base(f.path) + backupInfix
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && e.Type().IsRegular() {
			paths = append(paths, filepath.Join(filepath.Dir(f.path), e.Name()))
		}
	}
	slices.Sort(paths)
	slices.Reverse(paths)
	return paths
}

// before finds what the file was before setup made it what it is now: the
// newest backup from which add leads to the present text. Taking out what was
// put in then gives the very bytes that there were.
func (f file) before(add func(old []byte) ([]byte, error)) ([]byte, bool) {
	for _, path := range f.backups() {
		old, err := readFile(path)
		if err != nil || bytes.Equal(old.data, f.data) {
			continue
		}
		if now, err := add(old.data); err == nil && bytes.Equal(now, f.data) {
			return old.data, true
		}
	}
	return nil, false
}
