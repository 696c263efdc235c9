package server

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

// Bounds of the records.
const (
	maxKey      = 128
	keepRecords = 4096
	keepFor     = 24 * time.Hour
	keepBytes   = 32 << 20 // of all records
	sweepEvery  = 256      // requests
	maxAnswer   = 1 << 20  // of a recorded answer
)

// requests records what was done for an idempotency key of a caller, one file per key: that
// the verb was begun, before it begins, and its answer if it succeeds. The record of a verb
// that fails is removed, unless the verb says that it has done something. So a file without
// an answer and without a live request belongs to a verb that may or may not have been
// done: the service was killed, or the verb failed halfway.
type requests struct {
	dir string
	log *slog.Logger

	mu    sync.Mutex
	live  map[string]bool
	begun int
	bytes int64 // of the records, or more
}

// record is the content of one file.
type record struct {
	Request string          `json:"request"` // digest of method, path and body
	Nonce   string          `json:"nonce"`   // of all tries of one request, and of no other
	Done    bool            `json:"done"`
	Body    json.RawMessage `json:"body,omitempty"`

	file  string
	again bool // it may have been done already
	keep  bool // though it fails: it may have been done, or a part of it
}

func openRequests(dir string, log *slog.Logger) (*requests, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return &requests{dir: dir, log: log, live: map[string]bool{}}, nil
}

// begin looks up the record of a key, and records that its request is under way.
func (s *requests) begin(caller, key, digest string) (*record, error) {
	if len(key) > maxKey || !utf8.ValidString(key) || strings.ContainsFunc(key, unicode.IsControl) {
		return nil, fmt.Errorf("%w: %s: a key has 1 to %d bytes of text", runtime.ErrInvalid, wire.HeaderKey, maxKey)
	}
	sum := sha256.Sum256([]byte(caller + " " + key))
	file := hex.EncodeToString(sum[:]) + ".json"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[file] {
		return nil, fmt.Errorf("%w: the request with the %s %q is still under way",
			runtime.ErrBusy, wire.HeaderKey, key)
	}
	if s.begun%sweepEvery == 0 || s.bytes > keepBytes {
		if err := s.sweep(); err != nil { // the next one tries again
			s.log.Error("old request records not removed", "err", err)
		}
	}
	s.begun++
	rec, err := s.read(file)
	switch {
	case err != nil:
		return nil, fmt.Errorf("what is remembered for the %s: %w", wire.HeaderKey, err)
	case rec == nil:
		rec = &record{Request: digest, Nonce: rand.Text(), file: file}
	case rec.Request != digest:
		return nil, fmt.Errorf("%w: the %s %q was used for another request", runtime.ErrInvalid, wire.HeaderKey, key)
	case rec.Done:
		return rec, nil
	default:
		rec.again = true
	}
	if err := s.write(rec); err != nil {
		return nil, err
	}
	s.live[file] = true
	return rec, nil
}

// read returns the record in a file, or nil if it does not exist or is too old.
func (s *requests) read(file string) (*record, error) {
	path := filepath.Join(s.dir, file)
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && time.Since(info.ModTime()) > keepFor {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	rec := &record{file: file}
	if err := json.Unmarshal(data, rec); err != nil || rec.Nonce == "" {
		return nil, errors.Join(runtime.ErrCorrupt, err)
	}
	return rec, nil
}

// finish records the answer, or removes the record of the request. In every case the
// request is no longer live.
func (s *requests) finish(rec *record, out any, failed error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer delete(s.live, rec.file)
	switch {
	case failed != nil && rec.keep:
		return nil
	case failed != nil:
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
	if err := fsx.Write(filepath.Join(s.dir, rec.file), data, fsx.Options{}); err != nil {
		return err
	}
	s.bytes += int64(len(data))
	return nil
}

// sweep removes old records, and the oldest if there are too many. It leaves half of the
// permitted bytes of answers, so as not to be called for each.
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
	slices.SortFunc(kept, func(a, b fs.FileInfo) int {
		return cmp.Compare(b.ModTime().UnixNano(), a.ModTime().UnixNano())
	})
	s.bytes = 0
	for i, info := range kept {
		if i < keepRecords && s.bytes+info.Size() <= keepBytes/2 && time.Since(info.ModTime()) < keepFor {
			s.bytes += info.Size()
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, info.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
