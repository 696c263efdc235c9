package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// container is container.json.
type container struct {
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

// load reads container.json; a container without one does not exist.
func (b *Backend) load(id string) (container, error) {
	var rec container
	if err := checkID(id); err != nil {
		return rec, err
	}
	err := record.ReadJSON(b.dir(id, "container.json"), &rec)
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
	if record.ReadJSON(b.runPath(id, n, "exit.json"), &rec) == nil {
		return rec, true
	}
	data, at, err := record.Read(b.runPath(id, n, "exit"))
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

// lock serialises the verbs that change a container, across processes.
func (b *Backend) lock(ctx context.Context, id string) (unlock func(), err error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	return record.Lock(ctx, b.dir(id), "container "+id)
}
