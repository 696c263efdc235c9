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

func (ms *marks) old() string            { return filepath.Join(ms.store.Root(), "watch") }
func (ms *marks) oldOf(id string) string { return filepath.Join(ms.old(), id) }

// watched reports whether a process of an older version watches a sandbox.
func (ms *marks) watched(id string) (bool, error) { return flock.Held(ms.oldOf(id), flock.Shared) }

// taken reports whether a process of an older version takes the checkpoints of a sandbox.
func (ms *marks) taken(id string) (bool, error) {
	return flock.Held(filepath.Join(ms.run, "auto", id), flock.Shared)
}

// replaceWatches writes marks in place of those that killed watches of older versions have left.
func (ms *marks) replaceWatches() error {
	entries, err := os.ReadDir(ms.old())
	if err != nil {
		return ignoreMissing(err)
	}
	var errs []error
	for _, entry := range entries {
		id := entry.Name()
		alive, err := ms.watched(id)
		if alive || err != nil {
			errs = append(errs, err)
			continue
		}
		st, err := ms.restarts.of(id)
		if _, ok, _ := ms.read(id); err == nil && !ok {
			err = ms.set(id, st.Boot)
		}
		if err == nil {
			err = ignoreMissing(os.Remove(ms.oldOf(id)))
		}
		errs = append(errs, err)
	}
	_ = os.Remove(ms.old()) // stays while there are others
	return errors.Join(errs...)
}
