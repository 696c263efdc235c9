package box

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Starts returns the numbers of a sandbox's starts, newest first.
func (h home) Starts(id string) ([]int, error) {
	entries, err := os.ReadDir(h.Dir(id, "runs"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []int
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n > 0 && e.IsDir() {
			list = append(list, n)
		}
	}
	slices.Sort(list)
	slices.Reverse(list)
	return list, nil
}

// nextStart is the number of a sandbox's next start.
func (h home) nextStart(id string) (int, error) {
	starts, err := h.Starts(id)
	if err != nil || len(starts) == 0 {
		return 1, err
	}
	return starts[0] + 1, nil
}

// makeStart makes the directories of start n.
func (h home) makeStart(id string, n int) error {
	return errors.Join(os.MkdirAll(h.StartDir(id, n), 0o700), os.MkdirAll(h.Bundle(id, n), 0o700))
}

// removeStarts removes the records of starts.
func (h home) removeStarts(id string, starts ...int) error {
	var errs []error
	for _, n := range starts {
		errs = append(errs, os.RemoveAll(h.StartDir(id, n)))
	}
	return errors.Join(errs...)
}

// pruneStarts removes the records of all but the last few starts.
func (h home) pruneStarts(id string) error {
	const kept = 3
	starts, err := h.Starts(id)
	if err != nil || len(starts) <= kept {
		return err
	}
	return h.removeStarts(id, starts[kept:]...)
}

// NoteStart puts on record that start n was made, and when.
func (h home) NoteStart(id string, n int, at time.Time) error {
	tmp := h.StartDir(id, n, ".started")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Close(), os.Chtimes(tmp, at, at)); err != nil {
		return err
	}
	return os.Rename(tmp, h.StartDir(id, n, "started"))
}

// started reports whether and when start n was made.
func (h home) started(id string, n int) (time.Time, bool) {
	st, err := os.Stat(h.StartDir(id, n, "started"))
	if err != nil {
		return time.Time{}, false
	}
	return st.ModTime(), true
}

// Exit is the end of a start.
type Exit struct {
	Code     int         `json:"code"`
	Finished time.Time   `json:"finished"`
	OOM      bool        `json:"oom,omitempty"`
	Hits     kernel.Hits `json:"hits,omitzero"` // of the limits, in that start
}

// Told is the exit as a backend tells it.
func (e Exit) Told() runtime.Exit { return runtime.Exit{Code: e.Code, OOMKilled: e.OOM} }

// UnknownExit is the exit code of a sandbox whose end was not observed, such as one that a power
// failure ended. Docker uses the same.
const UnknownExit = 255

// RecordedExit returns how start n ended, if that is on record.
func (h home) RecordedExit(id string, n int) (exit Exit, ok bool, err error) {
	ok, err = readWhole(h.StartDir(id, n, "exit.json"), &exit)
	return exit, ok, err
}

// ReadRun reads what a backend has noted of start n, if it has.
func (h home) ReadRun(id string, n int, run *Run) error {
	_, err := readWhole(h.StartDir(id, n, "run.json"), run)
	return err
}

// readWhole reads a record, if it exists. A record that a power failure cut short does not.
func readWhole(path string, v any) (ok bool, err error) {
	err = record.ReadJSON(path, v)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fault.ErrCorrupt) {
		return false, nil
	}
	return err == nil, err
}

// recordExit puts on record how start n ended, if it is not. A code replaces one that is not
// known: a look at a sandbox that is being stopped may be first to find that it has ended.
func (h home) recordExit(id string, n int, exit Exit) error {
	if was, ok, err := h.RecordedExit(id, n); err != nil {
		return err
	} else if ok && (was.Code != UnknownExit || exit.Code == UnknownExit) {
		return nil
	} else if ok {
		was.Code = exit.Code
		exit = was
	}
	return record.WriteJSON(h.StartDir(id, n, "exit.json"), exit, true)
}

// recordLateExit records the end of start n, which was not observed, so that no more than exit will
// ever be known of it. The first caller's value counts, and is returned to all others.
func (h home) recordLateExit(id string, n int, exit Exit) Exit {
	// If it cannot be written, as on a full disk, the look must not fail.
	_ = h.recordExit(id, n, exit)
	if first, ok, _ := h.RecordedExit(id, n); ok {
		return first
	}
	return exit
}

// tombstone returns the file in which the exit code of a removed sandbox stays for a while: an
// automatic removal follows an exit faster than a waiter may read it.
func (h home) tombstone(id string) string { return filepath.Join(h.Stage, "exits", id) }

// tombstoneAge is for how long a removed sandbox's exit code is kept.
const tombstoneAge = 10 * time.Minute

// keepExit keeps the exit code of a sandbox that is to be removed for callers still in Wait, and
// removes old ones.
func (h home) keepExit(id string, exit Exit) error {
	entries, err := os.ReadDir(filepath.Join(h.Stage, "exits"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if st, err := e.Info(); err == nil && time.Since(st.ModTime()) > tombstoneAge {
			_ = os.Remove(h.tombstone(e.Name()))
		}
	}
	return record.WriteJSON(h.tombstone(id), exit, false)
}

// keptExit returns the exit of a sandbox that was removed not long ago.
func (h home) keptExit(id string) (Exit, error) {
	var exit Exit
	ok, err := readWhole(h.tombstone(id), &exit)
	if err == nil && !ok {
		err = fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return exit, err
}
