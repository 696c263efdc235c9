package containerd

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
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
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

// exitRecord is runs/<n>/exit.json.
type exitRecord struct {
	Code     int       `json:"code"`
	Finished time.Time `json:"finished"`
}

// unknownExit is the code of a container whose end nobody saw, such as one
// that a power loss ended. Docker uses the same.
const unknownExit = 255

// load reads container.json; a container without one does not exist.
func (b *Backend) load(id string) (container, error) {
	var c container
	if err := checkID(id); err != nil {
		return c, err
	}
	err := record.ReadJSON(b.dir(id, "container.json"), &c)
	if errors.Is(err, fs.ErrNotExist) {
		return c, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	if err == nil && c.Spec.ID != id {
		err = fmt.Errorf("container %s: its record names %q: %w", id, c.Spec.ID, fault.ErrCorrupt)
	}
	return c, err
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
// so that an old monitor and the next run's cannot meet.
func (b *Backend) bundle(id string, n int, elem ...string) string {
	return b.runDir(id, append([]string{"bundle." + strconv.Itoa(n)}, elem...)...)
}

// exited returns how run n ended, if that is known already.
func (b *Backend) exited(id string, n int) (exitRecord, bool) {
	var rec exitRecord
	return rec, record.ReadJSON(b.runPath(id, n, "exit.json"), &rec) == nil
}

// started tells whether and when run n passed its start.
func (b *Backend) started(id string, n int) (time.Time, bool) {
	st, err := os.Stat(b.runPath(id, n, "started"))
	if err != nil {
		return time.Time{}, false
	}
	return st.ModTime(), true
}

// note puts on record that run n was started, and when.
func note(runPath string, at time.Time) error {
	tmp := filepath.Join(runPath, ".started")
	f, err := os.Create(tmp)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Close(), os.Chtimes(tmp, at, at)); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(runPath, "started"))
}

// lock serialises the verbs that change a container, across processes.
func (b *Backend) lock(ctx context.Context, id string) (unlock func(), err error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	return record.Lock(ctx, b.dir(id), "container "+id)
}

// monitorLock is held by a run's monitor as long as it lives.
const monitorLock = "monitor.lock"

// takeMonitor makes this process the monitor of the run in a bundle; nil when
// there is one.
func takeMonitor(bundle string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(bundle, monitorLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	_ = f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	}
	return nil, err
}

// monitored tells whether the run in a bundle has a monitor.
func monitored(bundle string) bool {
	f, err := os.OpenFile(filepath.Join(bundle, monitorLock), os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	// Shared, so that two who ask at once do not take each other for one.
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
