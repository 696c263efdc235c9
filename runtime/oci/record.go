package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// record is container.json.
type record struct {
	Spec  runtime.Spec `json:"spec"`
	Lower []string     `json:"lower"` // top first
}

// runRecord is runs/<n>/run.json: what the later verbs need to know of a
// start. It is not synced, since it describes processes, and no process
// outlives what could lose it.
type runRecord struct {
	Number  int      `json:"number"`
	Bundle  string   `json:"bundle"`
	Env     []string `json:"env,omitempty"`
	Address string   `json:"address,omitempty"`
}

// exitRecord is runs/<n>/exit.json.
type exitRecord struct {
	Code     int       `json:"code"`
	Finished time.Time `json:"finished"`
	OOM      bool      `json:"oom,omitempty"`
}

// unknownExit is the code of a container whose end nobody saw, such as one
// that a power loss ended. Docker uses the same.
const unknownExit = 255

// recordLimit bounds what we read of our own small files.
const recordLimit = 16 << 20

// load reads container.json; a container without one does not exist.
func (b *Backend) load(id string) (record, error) {
	var rec record
	if err := checkID(id); err != nil {
		return rec, err
	}
	err := readJSON(b.dir(id, "container.json"), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	if err == nil && rec.Spec.ID != id {
		err = fmt.Errorf("container %s: its record names %q: %w", id, rec.Spec.ID, fault.ErrCorrupt)
	}
	return rec, err
}

// runs returns the numbers of a container's starts, newest first.
func (b *Backend) runs(id string) ([]int, error) {
	entries, err := os.ReadDir(b.dir(id, "runs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n > 0 {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	slices.Reverse(list)
	return list, nil
}

func (b *Backend) runPath(id string, n int, elem ...string) string {
	return b.dir(id, append([]string{"runs", strconv.Itoa(n)}, elem...)...)
}

// bundle is where run n keeps its files while it lasts. Every run has its own,
// because an old conmon removes its attach socket by name as the last thing it
// does, and would remove the next run's.
func (b *Backend) bundle(id string, n int, elem ...string) string {
	return b.runDir(id, append([]string{"bundle." + strconv.Itoa(n)}, elem...)...)
}

// exited returns how run n ended, if that is known already: from our own
// record, else from the file conmon wrote.
func (b *Backend) exited(id string, n int) (exitRecord, bool) {
	var rec exitRecord
	if readJSON(b.runPath(id, n, "exit.json"), &rec) == nil {
		return rec, true
	}
	data, at, err := readSmall(b.runPath(id, n, "exit"))
	if err != nil {
		return rec, false
	}
	code, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || code < 0 {
		code = unknownExit
	}
	_, err = os.Stat(b.runPath(id, n, "oom"))
	return exitRecord{Code: code, Finished: at, OOM: err == nil}, true
}

// started tells whether and when run n passed its start.
func (b *Backend) started(id string, n int) (time.Time, bool) {
	st, err := os.Stat(b.runPath(id, n, "started"))
	if err != nil {
		return time.Time{}, false
	}
	return st.ModTime(), true
}

func readJSON(path string, v any) error {
	data, _, err := readSmall(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%s: %w: %w", path, fault.ErrCorrupt, err)
	}
	return nil
}

func readSmall(path string) ([]byte, time.Time, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, time.Time{}, err
	}
	data, err := io.ReadAll(io.LimitReader(f, recordLimit))
	return data, st.ModTime(), err
}

func writeJSON(path string, v any, durable bool) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(data, '\n'), 0o600, durable)
}

// writeFile publishes a file whole or not at all.
func writeFile(path string, data []byte, mode os.FileMode, durable bool) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".tmp-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil && durable {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil || !durable {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// lockPoll is how often a held lock is tried again; flock tells no one when it
// becomes free without giving up cancellation.
const lockPoll = 10 * time.Millisecond

// lock serialises the verbs that change a container, across processes. The
// lock is on the container's directory itself, so it goes when that goes.
func (b *Backend) lock(ctx context.Context, id string) (unlock func(), err error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	for {
		d, err := os.Open(b.dir(id))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
		}
		if err != nil {
			return nil, err
		}
		switch err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
		case nil:
			// It may have been removed, and even made anew, while we waited.
			if same(d, b.dir(id)) {
				return func() { _ = d.Close() }, nil
			}
			_ = d.Close()
		case unix.EWOULDBLOCK, unix.EINTR:
			_ = d.Close()
			select {
			case <-ctx.Done():
				return nil, fmt.Errorf("container %s: %w: %w", id, fault.ErrBusy, ctx.Err())
			case <-time.After(lockPoll):
			}
		default:
			return nil, errors.Join(err, d.Close())
		}
	}
}

func same(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}
