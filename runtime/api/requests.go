package api

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agentbox/agentbox/runtime"
)

// Bounds of what is remembered.
const (
	maxKey      = 128
	keepRecords = 4096
	keepFor     = 24 * time.Hour
	sweepEvery  = 256     // requests
	maxAnswer   = 1 << 20 // of an answer that is remembered
)

// requests remembers, a file for each key, what was done for whom: that it was
// begun before the verb begins, its answer when it succeeds. A verb that fails
// has done nothing, and is forgotten. So a file without an answer that nobody is
// at was left by a service that was killed: the verb may or may not have been done.
type requests struct {
	dir string

	mu    sync.Mutex
	live  map[string]bool
	begun int
}

// record is what one file holds.
type record struct {
	Request string          `json:"request"` // digest of method, path and body
	Done    bool            `json:"done"`
	Body    json.RawMessage `json:"body,omitempty"`

	file  string
	again bool
}

func openRequests(dir string) (*requests, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &requests{dir: dir, live: map[string]bool{}}, nil
}

// begin finds what is known of a key, and puts on record that it is being worked on.
func (s *requests) begin(caller, key, digest string) (*record, error) {
	if len(key) > maxKey || !utf8.ValidString(key) || strings.ContainsFunc(key, unicode.IsControl) {
		return nil, fmt.Errorf("%w: %s: a key has 1 to %d bytes of text", runtime.ErrInvalid, headerKey, maxKey)
	}
	sum := sha256.Sum256([]byte(caller + " " + key))
	file := hex.EncodeToString(sum[:]) + ".json"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[file] {
		return nil, fmt.Errorf("%w: the request with the %s %q is still under way", runtime.ErrBusy, headerKey, key)
	}
	if s.begun%sweepEvery == 0 {
		if err := s.sweep(); err != nil {
			return nil, err
		}
	}
	s.begun++
	rec := &record{Request: digest, file: file}
	data, err := os.ReadFile(filepath.Join(s.dir, file))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	default:
		if err := json.Unmarshal(data, rec); err != nil {
			return nil, fmt.Errorf("what is remembered for the %s: %w: %w", headerKey, runtime.ErrCorrupt, err)
		}
		if rec.Request != digest {
			return nil, fmt.Errorf("%w: the %s %q was used for another request", runtime.ErrInvalid, headerKey, key)
		}
		if rec.Done {
			return rec, nil
		}
		rec.again = true
	}
	if err := s.write(rec); err != nil {
		return nil, err
	}
	s.live[file] = true
	return rec, nil
}

// finish remembers the answer, or forgets that there was a request.
func (s *requests) finish(rec *record, out any, failed error) error {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.live, rec.file)
	}()
	if failed != nil {
		return os.Remove(filepath.Join(s.dir, rec.file))
	}
	var err error
	if rec.Body, err = json.Marshal(out); err != nil {
		return err
	}
	if len(rec.Body) > maxAnswer {
		rec.Body = nil
	}
	rec.Done = true
	return s.write(rec)
}

// write puts a record on the disk: whole, or as it was before.
func (s *requests) write(rec *record) error {
	data, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(s.dir, ".tmp-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), filepath.Join(s.dir, rec.file))
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// sweep forgets what is old, and the oldest of what is too much.
func (s *requests) sweep() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	var kept []fs.FileInfo
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) || s.live[e.Name()] {
			continue
		}
		if err != nil {
			return err
		}
		kept = append(kept, info)
	}
	slices.SortFunc(kept, func(a, b fs.FileInfo) int { return cmp.Compare(b.ModTime().UnixNano(), a.ModTime().UnixNano()) })
	for i, info := range kept {
		if i < keepRecords && time.Since(info.ModTime()) < keepFor {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, info.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
