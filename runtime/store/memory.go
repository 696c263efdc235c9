package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// freshMemory is how long a file in the cache directory that belongs to no sandbox is
// left alone: another process may be about to rename it.
const freshMemory = time.Hour

// MemoryPath is the path of the file cache of a sandbox's n-th tree (0: the upperdir, 1+i: the
// i-th volume), which overlay.Collect writes and reads. The file may be missing; then there is
// only more to read. It goes with the sandbox.
func (s *Store) MemoryPath(sandbox string, n int) string {
	return filepath.Join(s.memoryDir(), sandbox+"."+strconv.Itoa(n))
}

// StagedImages returns the directory in which a restore lays out the process images of a sandbox for
// the OCI runtime. It may not exist.
func (s *Store) StagedImages(sandbox string) string { return filepath.Join(s.stagedDir(), sandbox) }

// Scratch makes a directory for temporary files. Files that a killed process leaves there are
// swept.
func (s *Store) Scratch() (string, error) { return os.MkdirTemp(s.memoryDir(), "tmp-") }

// PullDir creates and returns the directory in which interrupted pulls leave what they
// have fetched for the next attempt. Files not reused within an hour are swept.
func (s *Store) PullDir() (string, error) {
	dir := filepath.Join(s.memoryDir(), "tmp-pull")
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

// dropMemory removes the caches of a sandbox that is gone.
func (s *Store) dropMemory(id string) {
	if !isID(id) {
		return
	}
	files, err := filepath.Glob(filepath.Join(s.memoryDir(), id+".*"))
	if err != nil {
		return
	}
	for _, f := range files {
		_ = os.Remove(f) // what stays is swept later
	}
}

// sweepMemory removes what belongs to no sandbox, and what was being written
// when its process ended.
func (s *Store) sweepMemory(ctx context.Context) error {
	// Files first: a sandbox's row is older than its memory.
	entries, err := os.ReadDir(s.memoryDir())
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
		memory := (err == nil || "."+n == ledgerSuffix) && isID(id)
		if memory && alive[id] {
			continue
		}
		if info, err := e.Info(); err != nil || !memory && time.Since(info.ModTime()) < freshMemory {
			continue
		}
		if err := os.RemoveAll(filepath.Join(s.memoryDir(), e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
