package runtime

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime/store"
)

// workDir is where in a draft CRIU keeps its log.
const workDir = "work"

// dump has CRIU write the processes' images.
func (e *Engine) dump(ctx context.Context, k *making, draft *store.Draft) (*store.Processes, error) {
	opts := e.dumpOptions(ctx, k, draft)
	opts.Ahead = k.written
	res, err := criu.Dump(ctx, k.c.Runtime, opts)
	e.noteInterrupted(k, res.Interrupted)
	if err != nil {
		return nil, err
	}
	if res.Alone != nil {
		k.without(res.Alone)
	}
	out := &store.Processes{Count: len(res.Processes)}
	for _, p := range res.Processes {
		out.List = append(out.List, store.Process{Pid: p.Pid, Parent: p.Ppid, Command: p.Comm, Stopped: p.Stopped})
	}
	return out, failpoint.Hit("checkpoint.after-dump")
}

func (e *Engine) dumpOptions(ctx context.Context, k *making, draft *store.Draft) criu.DumpOptions {
	opts := criu.DumpOptions{
		ImageDir: draft.CRIUDir(), WorkDir: filepath.Join(draft.Dir(), workDir), LeaveRunning: true,
		Options: criu.Options{TCP: k.opts.TCP, EmptyNetwork: k.c.EmptyNetwork}, Hold: k.sb.lock.File(),
	}
	if deadline, ok := ctx.Deadline(); ok {
		opts.Timeout = time.Until(deadline)
	}
	return opts
}

func (e *Engine) noteInterrupted(k *making, err error) {
	if err != nil && !errors.Is(err, ErrNotFound) {
		e.log.Warn("system calls that waited may return EINTR", "sandbox", k.sb.ID, "err", err)
	}
}
