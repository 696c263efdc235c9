package oci

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// MonitorExit implements box.Hooks: conmon's exit file counts, since conmon writes it once all
// output is in the log and on the attached sockets.
func (h hooks) MonitorExit(id string, n int) (box.Exit, bool, error) {
	data, at, err := record.Read(h.box.StartDir(id, n, "exit"))
	if errors.Is(err, fs.ErrNotExist) {
		return box.Exit{}, false, nil
	}
	if err != nil {
		return box.Exit{}, false, err
	}
	code, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || code < 0 {
		code = box.UnknownExit
	}
	return box.Exit{Code: code, Finished: at, OOM: !h.oomAt(id, n).IsZero()}, true, nil
}

// oomAt returns when the kernel first killed a process for memory in run n, which conmon notes by a
// file.
func (b *Backend) oomAt(id string, n int) time.Time {
	st, err := os.Lstat(b.box.StartDir(id, n, "oom"))
	if err != nil {
		return time.Time{}
	}
	return st.ModTime()
}
