package oci

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/home"
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

// load reads container.json; a container without one does not exist.
func (b *Backend) load(id string) (rec container, err error) {
	err = b.home.Load(id, &rec, &rec.Spec.ID)
	return rec, err
}

// exited returns how run n ended, if that is known already: from our own
// record, else from the file conmon wrote.
func (b *Backend) exited(id string, n int) (home.Exit, bool, error) {
	if exit, ok, err := b.home.Exited(id, n); ok || err != nil {
		return exit, ok, err
	}
	data, at, err := record.Read(b.home.Start(id, n, "exit"))
	if errors.Is(err, fs.ErrNotExist) {
		return home.Exit{}, false, nil
	}
	if err != nil {
		return home.Exit{}, false, err
	}
	code, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || code < 0 {
		code = home.Unknown
	}
	return home.Exit{Code: code, Finished: at, OOM: !b.oomAt(id, n).IsZero()}, true, nil
}

// oomAt returns when the kernel first killed a process for memory in run n, which conmon notes by a
// file.
func (b *Backend) oomAt(id string, n int) time.Time {
	st, err := os.Lstat(b.home.Start(id, n, "oom"))
	if err != nil {
		return time.Time{}
	}
	return st.ModTime()
}

// withHits is the end of a container's last run with how often its limits came
// into force. Until that is on record it is the cgroups that know, which stay
// as they are when the last process has ended.
func (b *Backend) withHits(id string, v view) home.Exit {
	if exit, ok, _ := b.home.Exited(id, v.run.Number); ok {
		if exit.Code == home.Unknown {
			exit.Code = v.exit.Code
		}
		return exit
	}
	exit := v.exit
	exit.Hits = b.cgroups.HitsIn(b.home.Cgroup(id))
	exit.OOM = exit.OOM || exit.Hits.OOMKills > 0
	return exit
}
