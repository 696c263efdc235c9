package home

import (
	"context"
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
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Starts returns the numbers of a sandbox's starts, newest first.
func (h Home) Starts(id string) ([]int, error) {
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

// Next is the number of a sandbox's next start.
func (h Home) Next(id string) (int, error) {
	starts, err := h.Starts(id)
	if err != nil || len(starts) == 0 {
		return 1, err
	}
	return starts[0] + 1, nil
}

// Begin makes the directories of start n.
func (h Home) Begin(id string, n int) error {
	return errors.Join(os.MkdirAll(h.Start(id, n), 0o700), os.MkdirAll(h.Bundle(id, n), 0o700))
}

// Undo removes the records of starts.
func (h Home) Undo(id string, starts ...int) error {
	var errs []error
	for _, n := range starts {
		errs = append(errs, os.RemoveAll(h.Start(id, n)))
	}
	return errors.Join(errs...)
}

// Prune removes the records of all but the last few starts.
func (h Home) Prune(id string) error {
	const kept = 3
	starts, err := h.Starts(id)
	if err != nil || len(starts) <= kept {
		return err
	}
	return h.Undo(id, starts[kept:]...)
}

// Note puts on record that start n was made, and when.
func (h Home) Note(id string, n int, at time.Time) error {
	tmp := h.Start(id, n, ".started")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Close(), os.Chtimes(tmp, at, at)); err != nil {
		return err
	}
	return os.Rename(tmp, h.Start(id, n, "started"))
}

// Started reports whether and when start n was made.
func (h Home) Started(id string, n int) (time.Time, bool) {
	st, err := os.Stat(h.Start(id, n, "started"))
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

// Unknown is the exit code of a sandbox whose end was not observed, such as one that a power
// failure ended. Docker uses the same.
const Unknown = 255

// Exited returns how start n ended, if that is on record.
func (h Home) Exited(id string, n int) (exit Exit, ok bool, err error) {
	ok, err = readWhole(h.Start(id, n, "exit.json"), &exit)
	return exit, ok, err
}

// ReadRun reads what a backend has noted of start n, if it has.
func (h Home) ReadRun(id string, n int, run any) error {
	_, err := readWhole(h.Start(id, n, "run.json"), run)
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

// Settle puts on record how start n ended, if it is not. A code replaces one that is not
// known: a look at a sandbox that is being stopped may be first to find that it has ended.
func (h Home) Settle(id string, n int, exit Exit) error {
	if was, ok, err := h.Exited(id, n); err != nil {
		return err
	} else if ok && (was.Code != Unknown || exit.Code == Unknown) {
		return nil
	} else if ok {
		was.Code = exit.Code
		exit = was
	}
	return record.WriteJSON(h.Start(id, n, "exit.json"), exit, true)
}

// Unseen records the end of start n, which was not observed, so that no more than exit will
// ever be known of it. The first caller's value counts, and is returned to all others.
func (h Home) Unseen(id string, n int, exit Exit) Exit {
	// If it cannot be written, as on a full disk, the look must not fail.
	_ = h.Settle(id, n, exit)
	if first, ok, _ := h.Exited(id, n); ok {
		return first
	}
	return exit
}

// drainWait is how long a monitor usually takes, at most, from the end of a
// process to its record.
const (
	drainWait = 20 * time.Millisecond
	drainPoll = 300 * time.Microsecond
)

// Await waits for first to end, the first process of start n, which it closes and which is nil when
// it has ended, and for exited to know that end. The monitor records it, once all output is in the
// log and on the attached sockets; when orphaned returns, there is no monitor any more, and the end
// is unknown.
func (h Home) Await(ctx context.Context, id string, n int, first *kernel.Process, exited func() (Exit, bool, error), orphaned func(context.Context) error) (Exit, error) {
	if first != nil {
		err := first.Wait(ctx)
		first.Close()
		if err != nil {
			return Exit{}, err
		}
	}
	// The file is there a moment later. It is not watched for at once, because
	// the kernel takes some 10 ms to take an inotify apart.
	for end := time.Now().Add(drainWait); time.Now().Before(end); time.Sleep(drainPoll) {
		if exit, ok, err := exited(); ok || err != nil {
			return exit, err
		}
	}
	w, err := kernel.Watch(h.Start(id, n))
	if errors.Is(err, fs.ErrNotExist) {
		return h.Buried(id)
	}
	if err != nil {
		return Exit{}, err
	}
	defer w.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	orphan := guard.Start(func() error { return orphaned(ctx) })
	for over := false; ; {
		if exit, ok, err := exited(); ok || err != nil {
			return exit, err
		}
		if _, err := os.Stat(h.Start(id, n)); errors.Is(err, fs.ErrNotExist) {
			return h.Buried(id)
		}
		if over {
			return Exit{Code: Unknown, Finished: time.Now()}, nil
		}
		select {
		case <-w.Events:
		case err := <-orphan:
			if err != nil {
				return Exit{}, err
			}
			over = true // but it may have reported just before its end
		case <-ctx.Done():
			return Exit{}, ctx.Err()
		}
	}
}

// tombstone returns the file in which the exit code of a removed sandbox stays for a while: an
// automatic removal follows an exit faster than a waiter may read it.
func (h Home) tombstone(id string) string { return filepath.Join(h.Stage, "exits", id) }

// tombstoneAge is for how long a removed sandbox's exit code is kept.
const tombstoneAge = 10 * time.Minute

// Bury keeps the exit code of a sandbox that is to be removed for callers still in Wait, and
// removes old ones.
func (h Home) Bury(id string, exit Exit) error {
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

// Buried returns the exit of a sandbox that was removed not long ago.
func (h Home) Buried(id string) (Exit, error) {
	var exit Exit
	ok, err := readWhole(h.tombstone(id), &exit)
	if err == nil && !ok {
		err = fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return exit, err
}
