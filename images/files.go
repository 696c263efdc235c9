package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/internal/fsx"
)

// Names in tmp begin with one of these.
const (
	tmpImport  = "import-"  // RANDOM: a tree that is being imported
	tmpLayer   = "layer-"   // HEX of a diffID: a layer that is being unpacked
	tmpPull    = "pull-"    // RANDOM: the diffIDs that a pull needs
	tmpPartial = "partial-" // HEX of a blob's digest: what an ended pull had of it
	tmpRemoved = "removed-" // to be deleted
	tmpJSON    = "json-"    // a file about to be published
)

// partialAge is how long the beginning of a blob is kept for a later pull.
const partialAge = 24 * time.Hour

func (s *Store) path(parts ...string) string {
	return filepath.Join(append([]string{s.dir}, parts...)...)
}

// locked runs fn while no other process publishes. It blocks; all holders are
// quick.
func (s *Store) locked(fn func() error) error {
	l, err := flock.Lock(context.Background(), s.path("lock"), 0)
	if err != nil {
		return fmt.Errorf("lock the image store: %w", err)
	}
	defer l.Unlock()
	return fn()
}

// temp makes a directory for an import. Its lock tells other processes that it is in use.
func (s *Store) temp() (dir string, hold *flock.Handle, err error) {
	err = s.locked(func() error {
		dir = s.path("tmp", tmpImport+random())
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
		hold, err = flock.Try(dir, flock.Dir)
		return err
	})
	return dir, hold, err
}

// claim makes the directory tmp/name, empty, for the caller alone; it waits for
// others that have it. When ready says that there is nothing left to do, dir is
// empty.
func (s *Store) claim(ctx context.Context, name string, ready func() bool) (dir string, hold *flock.Handle, err error) {
	dir = s.path("tmp", name)
	for {
		if ready() {
			return "", nil, nil
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", nil, err
		}
		hold, err := flock.Lock(ctx, dir, flock.Dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its last holder has published it
		}
		if err != nil {
			return "", nil, err
		}
		if err := clearDir(dir); err != nil { // of what one that was killed left
			hold.Unlock()
			return "", nil, err
		}
		if ready() { // while this one was waited for
			return "", nil, hold.Remove()
		}
		return dir, hold, nil
	}
}

// clearDir deletes what is in a directory.
func clearDir(dir string) error {
	list, err := os.ReadDir(dir)
	for _, e := range list {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// sweep deletes what killed imports, pulls and removals left, and the beginnings of blobs that no
// pull has continued for keep.
func (s *Store) sweep(keep time.Duration) error {
	var doomed []string
	err := s.locked(func() error { // so that no process is between mkdir and flock
		list, err := os.ReadDir(s.path("tmp"))
		if err != nil {
			return err
		}
		for _, e := range list {
			path := s.path("tmp", e.Name())
			if fi, err := e.Info(); strings.HasPrefix(e.Name(), tmpPartial) &&
				(err != nil || time.Since(fi.ModTime()) < keep) {
				continue
			}
			if gone, err := s.discard(path); err == nil && gone != "" {
				doomed = append(doomed, gone)
			}
		}
		return nil
	})
	return errors.Join(err, removeAll(doomed))
}

// discard moves a path that no process holds away from those that would claim it, and returns
// what is to be deleted.
func (s *Store) discard(path string) (string, error) {
	hold, err := flock.Try(path, flock.Existing)
	if errors.Is(err, flock.ErrHeld) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer hold.Unlock()
	if strings.HasPrefix(filepath.Base(path), tmpRemoved) {
		return path, nil
	}
	to := s.path("tmp", tmpRemoved+random())
	return to, os.Rename(path, to)
}

func removeAll(dirs []string) error {
	var errs []error
	for _, d := range dirs {
		errs = append(errs, os.RemoveAll(d))
	}
	return errors.Join(errs...)
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %s: %w", fault.ErrCorrupt, path, err)
	}
	return nil
}

// writeJSON publishes v at name, below the store.
func (s *Store) writeJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return s.writeFile(name, append(b, '\n'))
}

// writeFile publishes b at name, below the store.
func (s *Store) writeFile(name string, b []byte) error {
	return fsx.Write(s.path(name), b, fsx.Options{Temp: s.path("tmp", tmpJSON+random())})
}
