package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// dirs says where everything is below the root.
type dirs struct {
	root string
}

// Root is the directory that all lies in.
func (d *dirs) Root() string { return d.root }

// Gone reports whether the root was removed: what is read then is in files
// that have no name any more.
func (d *dirs) Gone() bool {
	_, err := os.Lstat(d.dbPath())
	return errors.Is(err, fs.ErrNotExist)
}

func (d *dirs) dbPath() string             { return filepath.Join(d.root, "state.db") }
func (d *dirs) locksDir() string           { return filepath.Join(d.root, "locks") }
func (d *dirs) checkpointsDir() string     { return filepath.Join(d.root, "checkpoints") }
func (d *dirs) packsDir() string           { return filepath.Join(d.root, "packs") }
func (d *dirs) cacheDir() string           { return filepath.Join(d.root, "memory") }
func (d *dirs) stagedDir() string          { return filepath.Join(d.root, "staged") }
func (d *dirs) failedDir() string          { return filepath.Join(d.root, "checkpoints", "failed") }
func (d *dirs) published(id string) string { return filepath.Join(d.root, "checkpoints", id) }
func (d *dirs) draftDir(id string) string  { return filepath.Join(d.root, "checkpoints", tmpPrefix+id) }
func (d *dirs) removedDir(id string) string {
	return filepath.Join(d.root, "checkpoints", removePrefix+id)
}

const (
	tmpPrefix    = "tmp-"
	removePrefix = "tmp-rm-"
)

// makeDirs creates the directories below the root and refuses those that another user owns: their content
// is restored as root.
func (d *dirs) makeDirs() error {
	var st unix.Stat_t
	if err := unix.Stat(d.root, &st); err != nil {
		return denied(err)
	}
	if err := checkOwner(d.root, &st); err != nil {
		return err
	}
	if err := d.checkParts(); err != nil {
		return err
	}
	for _, dir := range []string{
		d.locksDir(), d.packsDir(), d.cacheDir(), d.checkpointsDir(), d.failedDir(), d.stagedDir(),
	} {
		if err := unix.Lstat(dir, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Uid == 0 {
			continue
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return denied(err)
		}
		if err := unix.Lstat(dir, &st); err != nil {
			return denied(err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR || st.Uid != 0 {
			return fmt.Errorf("%s is not a directory of root's: %w", dir, fault.ErrDenied)
		}
		if err := fsx.SyncDir(filepath.Dir(dir)); err != nil {
			return err
		}
	}
	return nil
}

// checkParts refuses what others can change, and symlinks, among all that lies in the root: a
// root that was copied or mounted from elsewhere can lead out of itself by any of its names.
func (d *dirs) checkParts() error {
	entries, err := os.ReadDir(d.root)
	if err != nil {
		return denied(err)
	}
	for _, e := range entries {
		path := filepath.Join(d.root, e.Name())
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); errors.Is(err, fs.ErrNotExist) {
			continue // a temporary file
		} else if err != nil {
			return denied(err)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return linkError(path)
		}
		if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			continue // it has no content, and its mode decides what may connect
		}
		if err := checkOwner(path, &st); err != nil {
			return err
		}
	}
	// A root other than the default one holds its own transient state.
	run := filepath.Join(d.root, "run")
	if entries, err = os.ReadDir(run); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.Type()&fs.ModeSymlink != 0 {
			return linkError(filepath.Join(run, e.Name()))
		}
	}
	return denied(err)
}

func linkError(path string) error {
	return &fault.Error{Op: "check", ID: path,
		Hint: "Put in its place what it leads to; another disk can be mounted there.",
		Err:  fmt.Errorf("a symbolic link in the state directory: %w", fault.ErrDenied)}
}

// checkOwner refuses what is not root's, or can be written by others.
func checkOwner(path string, st *unix.Stat_t) error {
	if st.Uid != 0 {
		return &fault.Error{Op: "check", ID: path,
			Hint: "Choose a directory of root's own: its owner may have put anything there. If all of it is yours: chown root " + path,
			Err:  fmt.Errorf("it belongs to user %d, not to root: %w", st.Uid, fault.ErrDenied)}
	}
	if st.Mode&0o002 != 0 || st.Mode&0o020 != 0 && st.Gid != 0 {
		return &fault.Error{Op: "check", ID: path,
			Hint: "Choose a directory of root's own, or take the right away: chmod go-w " + path,
			Err:  fmt.Errorf("others may write here: %w", fault.ErrDenied)}
	}
	return nil
}

const reserveSize = 1 << 20

func (d *dirs) reservePath() string { return filepath.Join(d.root, "reserve") }

func (d *dirs) useReserve() bool { return os.Remove(d.reservePath()) == nil }

// fillReserve puts the room aside again. A disk that has none left now gets
// another chance at the next Open.
func (d *dirs) fillReserve() {
	if info, err := os.Lstat(d.reservePath()); err == nil && info.Size() == reserveSize {
		return
	}
	f, err := os.OpenFile(d.reservePath(), os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return
	}
	// Real bytes: not every filesystem can allocate without writing.
	_, err = f.WriteAt(make([]byte, reserveSize), 0)
	if errors.Join(err, f.Close()) != nil {
		_ = os.Remove(d.reservePath())
	}
}

// denied marks the errors that mean "you may not write here".
func denied(err error) error {
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%w: %w", fault.ErrDenied, err)
	}
	return err
}
