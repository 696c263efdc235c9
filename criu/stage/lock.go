package stage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
)

// Lock keeps every other Lock of the container away until unlock is called, or
// this process ends: several roots of agentbox may have taken on one container,
// and each has only its own locks. It does not wait: ErrBusy.
func (at Slot) Lock() (unlock func(), err error) {
	if _, err := at.place(); err != nil {
		return nil, err
	}
	path := filepath.Join(at.Run, "lock", at.ID)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("lock %s: %w", at.ID, err)
	}
	l, err := flock.Try(path, 0)
	if errors.Is(err, flock.ErrHeld) {
		return nil, fmt.Errorf("container %s: an agentbox with another root works on it: %w", at.ID, fault.ErrBusy)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", at.ID, err)
	}
	return func() { _ = l.Remove() }, nil
}
