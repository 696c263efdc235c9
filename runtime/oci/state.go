package oci

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Look implements box.Hooks.
func (h hooks) Look(ctx context.Context, id string) (box.View, error) { return h.box.Look(ctx, id) }

// Attend implements box.Hooks: a conmon that was killed cannot be replaced.
func (h hooks) Attend(context.Context, string, box.Run) error { return nil }

// Monitored implements box.Hooks.
func (h hooks) Monitored(dir string) (bool, error) {
	p, err := monitor(dir)
	if p != nil {
		p.Close()
	}
	return p != nil, err
}

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

// AwaitMonitor implements box.Hooks.
func (h hooks) AwaitMonitor(ctx context.Context, _ string, run box.Run) error {
	p, err := monitor(run.Bundle)
	if p == nil || err != nil {
		return err
	}
	defer p.Close()
	return p.Wait(ctx)
}

// Inspect describes the current state.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	v, ok := b.cachedView(id)
	if !ok {
		var err error
		began := time.Now()
		if v, err = b.box.Open(ctx, id); err != nil {
			v.Close()
			return runtime.Container{}, err
		}
		if !b.cacheView(id, v, began) {
			v.Close()
		}
	}
	c := b.box.Describe(v)
	c.EmptyNetwork = v.Spec.IDs != nil
	if v.Status != runtime.Created {
		c.OOMAt = b.oomAt(id, v.Run.Number)
	}
	return c, nil
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
