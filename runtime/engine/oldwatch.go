package engine

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/flock"
)

// Older versions had a process for each sandbox: `watch`, which held the lock ROOT/watch/ID,
// for its limits and restarts, and `auto`, with RUN/auto/ID, for its checkpoints. One that still
// runs attends to its sandbox until it ends.

func (e *Engine) oldMarks() string         { return filepath.Join(e.store.Root(), "watch") }
func (e *Engine) oldMark(id string) string { return filepath.Join(e.oldMarks(), id) }

// watched reports whether a process of an older version watches a sandbox.
func (e *Engine) watched(id string) (bool, error) { return flock.Held(e.oldMark(id), flock.Shared) }

// taken reports whether a process of an older version takes the checkpoints of a sandbox.
func (e *Engine) taken(id string) (bool, error) {
	return flock.Held(filepath.Join(e.run, "auto", id), flock.Shared)
}

// replaceWatches writes marks in place of those that killed watches of older versions have left.
func (e *Engine) replaceWatches() error {
	entries, err := os.ReadDir(e.oldMarks())
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, entry := range entries {
		id := entry.Name()
		alive, err := e.watched(id)
		if alive || err != nil {
			errs = append(errs, err)
			continue
		}
		st, err := e.restartsOf(id)
		if _, ok, _ := e.readMark(id); err == nil && !ok {
			err = e.setMark(id, st.Boot)
		}
		if err == nil {
			err = ignoreMissing(os.Remove(e.oldMark(id)))
		}
		errs = append(errs, err)
	}
	_ = os.Remove(e.oldMarks()) // stays while there are others
	return errors.Join(errs...)
}
