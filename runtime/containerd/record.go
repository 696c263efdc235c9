package containerd

import (
	"errors"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime"
)

// container is container.json.
type container struct {
	Spec  runtime.Spec `json:"spec"`
	Lower []string     `json:"lower"` // the snapshot's directories, top first
	Upper string       `json:"upper"`
	Work  string       `json:"work"`
	// Theirs is set of an adopted container.
	Theirs *theirs `json:"theirs,omitempty"`
}

// runRecord is runs/<n>/run.json: what the later verbs need to know of a
// start. It is not synced, since it describes processes, and no process
// outlives what could lose it.
type runRecord struct {
	Number  int         `json:"number"`
	Bundle  string      `json:"bundle"`
	Env     []string    `json:"env,omitempty"`
	Address string      `json:"address,omitempty"`
	Pid     int         `json:"pid,omitempty"` // of the first process; known once the task exists
	Shim    shimAddress `json:"shim"`
}

// load reads container.json; a container without one does not exist.
func (b *Backend) load(id string) (c container, err error) {
	err = b.home.Load(id, &c, &c.Spec.ID)
	return c, err
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
