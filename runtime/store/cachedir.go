package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// freshCache is how long a file in the cache directory that belongs to no sandbox is
// left alone: another process may be about to rename it.
const freshCache = time.Hour

// FileCachePath returns the path of the file cache of a sandbox's n-th tree (0: the upperdir, 1+i: the
// i-th volume), which overlay.Collect writes and reads. The file may be missing; then there is
// only more to read. It goes with the sandbox.
func (d *dirs) FileCachePath(sandbox string, n int) string {
	return filepath.Join(d.cacheDir(), sandbox+"."+strconv.Itoa(n))
}

// belowCache begins the names of the file caches of directories below workspaces.
const belowCache = "below-"

// belowCacheKept is how long the file cache of a directory below workspaces is kept without use.
const belowCacheKept = 30 * 24 * time.Hour

// BelowCachePath returns the path of the file cache that the sandboxes with a workspace over a
// directory share. The file may be missing.
func (d *dirs) BelowCachePath(dir string) string {
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(d.cacheDir(), belowCache+hex.EncodeToString(sum[:]))
}

// StagedImages returns the directory in which a restore lays out the process images of a sandbox for
// the OCI runtime. It may not exist.
func (d *dirs) StagedImages(sandbox string) string { return filepath.Join(d.stagedDir(), sandbox) }

// Scratch makes a directory for temporary files. Files that a killed process leaves there are
// swept.
func (d *dirs) Scratch() (string, error) { return os.MkdirTemp(d.cacheDir(), "tmp-") }

// PullDir creates and returns the directory in which interrupted pulls leave what they
// have fetched for the next attempt. Files not reused within an hour are swept.
func (d *dirs) PullDir() (string, error) {
	dir := filepath.Join(d.cacheDir(), "tmp-pull")
	return dir, makeDir(dir)
}

// sweepStaged removes process images that no restore is about to use. The
// restore of a sandbox holds its lock.
func (s *Store) sweepStaged(ctx context.Context) error {
	entries, err := os.ReadDir(s.stagedDir())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if !isID(e.Name()) {
			continue
		}
		l, err := s.Lock(ctx, e.Name(), "sweep", 0)
		if err != nil {
			continue
		}
		errs = append(errs, os.RemoveAll(s.StagedImages(e.Name())))
		l.Unlock()
	}
	return errors.Join(errs...)
}

// dropCaches removes the caches of a sandbox that is gone.
func (d *dirs) dropCaches(id string) {
	if !isID(id) {
		return
	}
	files, err := filepath.Glob(filepath.Join(d.cacheDir(), id+".*"))
	if err != nil {
		return
	}
	for _, f := range files {
		_ = os.Remove(f) // what stays is swept later
	}
}

// sweepCaches removes what belongs to no sandbox, and what was being written
// when its process ended.
func (s *Store) sweepCaches(ctx context.Context) error {
	// Files first: a sandbox's row is older than its caches.
	entries, err := os.ReadDir(s.cacheDir())
	if err != nil {
		return err
	}
	alive, err := s.alive(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		id, n, _ := strings.Cut(e.Name(), ".")
		_, err := strconv.ParseUint(n, 10, 16)
		cache := (err == nil || "."+n == indexCacheSuffix) && isID(id)
		if cache && alive[id] {
			continue
		}
		kept := freshCache
		if strings.HasPrefix(e.Name(), belowCache) {
			kept = belowCacheKept
		}
		if info, err := e.Info(); err != nil || !cache && time.Since(info.ModTime()) < kept {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.cacheDir(), e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
