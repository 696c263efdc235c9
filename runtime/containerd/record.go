package containerd

import (
	"errors"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// adoptedRecord is the container.json of an adopted container; of any other Theirs is nil.
type adoptedRecord struct {
	box.Container
	Theirs *theirs `json:"theirs,omitempty"`
}

// readRecord reads a container.json of either kind.
func (b *Backend) readRecord(id string) (rec adoptedRecord, err error) {
	err = b.box.ReadRecord(id, &rec, &rec.Spec.ID)
	return rec, err
}

// runRecord is run.json, with the shim of the run.
type runRecord struct {
	box.Run
	Shim shimAddress `json:"shim"`
}

// readRun reads run.json from a run's directory.
func readRun(dir string) (run runRecord, err error) {
	err = record.ReadJSON(filepath.Join(dir, "run.json"), &run)
	return run, err
}

// monitorLock is held by a run's monitor as long as it lives.
const monitorLock = "monitor.lock"

// takeMonitor makes this process the monitor of the run in a bundle; nil when
// there is one.
func takeMonitor(bundle string) (*flock.Handle, error) {
	l, err := flock.Try(filepath.Join(bundle, monitorLock), 0)
	if errors.Is(err, flock.ErrHeld) {
		return nil, nil
	}
	return l, err
}

// monitored reports whether the run in a bundle has a monitor.
func monitored(bundle string) (bool, error) {
	return flock.Held(filepath.Join(bundle, monitorLock), flock.Shared)
}
