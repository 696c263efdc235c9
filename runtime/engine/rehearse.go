package engine

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// errRehearsed aborts a fork that was made only for a rehearsal, so that it is rolled back.
var errRehearsed = errors.New("the rehearsal is over")

// rehearse restores a checkpoint into a fork without network, compares its frozen processes
// with their images, and removes the fork. The fork stays under way all the time: if the
// rehearsal is killed, the next command rolls it back.
func (rs *restores) rehearse(ctx context.Context, row store.Checkpoint) (out runtime.Rehearsal, err error) {
	out = runtime.Rehearsal{Checkpoint: checkpointView(row), Differs: []string{}}
	if row.Kind != runtime.KindFull {
		return out, hint(
			fmt.Errorf("%w: checkpoint %s has no processes to rehearse", runtime.ErrInvalid, short(row.ID)),
			"Rehearse a full checkpoint; verify alone proves files.")
	}
	begun := time.Now()
	var id string
	look := func(ctx context.Context, r *restoration) error {
		id = r.sb.ID
		c, err := r.sb.host.Inspect(ctx, r.sb.ID)
		if err != nil {
			return err
		}
		// As awaken does for a fork.
		r.c.Stage.TakePaused()
		got, err := criu.Compare(ctx, r.processes.images, c.Pid)
		if err != nil {
			return fmt.Errorf("compare what was restored: %w", err)
		}
		out.Processes, out.Threads, out.Descriptors, out.Locks, out.Pages = got.Processes, got.Threads,
			got.Descriptors, got.Locks, got.Pages
		out.Differs = append(out.Differs, got.Differs...)
		return errRehearsed
	}
	_, err = rs.forkOne(ctx, row, "", runtime.ForkOptions{Count: 1}, nil, &trial{look: look, offline: true})
	out.Took = time.Since(begun)
	if !errors.Is(err, errRehearsed) {
		return out, err
	}
	// The rollback may have failed, too.
	if _, gone := rs.store.Sandbox(context.WithoutCancel(ctx), id); !errors.Is(gone, runtime.ErrNotFound) {
		return out, hint(fmt.Errorf("the sandbox %s of the rehearsal is not removed: %w", short(id), err),
			"agentbox rm -f "+short(id))
	}
	return out, nil
}

// rehearseAll rehearses checkpoints one by one. It reports a checkpoint that cannot be
// restored as a difference.
func (rs *restores) rehearseAll(ctx context.Context, refs []string) ([]runtime.Rehearsal, error) {
	list := []runtime.Rehearsal{}
	for _, ref := range refs {
		row, err := rs.checkpoint(ctx, ref)
		if err != nil {
			return list, err
		}
		got, err := rs.rehearse(ctx, row)
		if err != nil && (ctx.Err() != nil || errors.Is(err, runtime.ErrInvalid)) {
			return list, err
		}
		if err != nil {
			got.Differs = append(got.Differs, fmt.Sprintf("it was not restored: %v", err))
		}
		list = append(list, got)
	}
	return list, nil
}
