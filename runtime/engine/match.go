package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/runtime"
)

// RemoveCheckpoints deletes the checkpoints that match a filter; see Service.
func (v checkpointVerbs) RemoveCheckpoints(
	ctx context.Context, filter runtime.CheckpointFilter,
) (runtime.RemovedCheckpoints, error) {
	return verb(ctx, v.e, onSandbox("checkpoint rm", filter.Sandbox),
		func(ctx context.Context) (runtime.RemovedCheckpoints, error) {
			return v.e.checkpoints.removeCheckpoints(ctx, filter)
		})
}

func (cs *checkpoints) removeCheckpoints(
	ctx context.Context, filter runtime.CheckpointFilter,
) (out runtime.RemovedCheckpoints, err error) {
	out = runtime.RemovedCheckpoints{Removed: []string{}, Pinned: []string{}}
	switch {
	case filter.Policy != "" || filter.Sandbox != "":
	case filter.Trigger != "" || len(filter.Labels) > 0:
		return out, hint(fmt.Errorf("%w: a trigger or label filter needs a sandbox or a policy", runtime.ErrInvalid),
			"Name the policy, or the sandbox, whose checkpoints are to go.")
	default:
		return out, fmt.Errorf("%w: the filter names no checkpoints to remove", runtime.ErrInvalid)
	}
	filter.All = true
	list, err := cs.listCheckpoints(ctx, filter)
	if err != nil {
		return out, err
	}
	var failed []error
	for _, c := range list {
		if c.Pinned {
			out.Pinned = append(out.Pinned, c.ID)
			continue
		}
		removed, err := cs.removeUnpinned(ctx, c)
		if ctx.Err() != nil {
			return out, errors.Join(append(failed, err)...)
		}
		switch {
		case err == nil && !removed:
			out.Pinned = append(out.Pinned, c.ID)
		case err == nil:
			out.Removed = append(out.Removed, c.ID)
		case !errors.Is(err, runtime.ErrNotFound): // it is gone already
			failed = append(failed, err)
		}
	}
	return out, errors.Join(failed...)
}

func (cs *checkpoints) removeUnpinned(ctx context.Context, c runtime.Checkpoint) (bool, error) {
	lock, err := cs.lock(ctx, c.Sandbox, "checkpoint rm", lockWait)
	if err != nil {
		return false, err
	}
	defer cs.upkeep.tidy(ctx)
	defer lock.Unlock()
	removed, err := cs.store.RemoveUnpinned(ctx, c.ID)
	if err == nil && !removed {
		_, err = cs.store.Checkpoint(ctx, c.ID) // or it is gone
	}
	return removed, err
}

// match resolves the trigger and labels in RestoreOptions to the newest ready checkpoint
// that has them.
func (cs *checkpoints) match(ctx context.Context, sandbox string, opts *runtime.RestoreOptions) error {
	if opts.Trigger == "" && len(opts.Labels) == 0 {
		return nil
	}
	if opts.Checkpoint != "" || opts.Undo {
		return fmt.Errorf("%w: a trigger or label filter cannot be combined with a checkpoint or --undo",
			runtime.ErrInvalid)
	}
	list, err := cs.listCheckpoints(ctx, runtime.CheckpointFilter{
		Sandbox: sandbox, Trigger: opts.Trigger, Labels: opts.Labels,
	})
	if err != nil {
		return err
	}
	for _, c := range list {
		if opts.Foreign || !c.Foreign {
			opts.Checkpoint = c.ID
			return nil
		}
	}
	err = fmt.Errorf("no ready checkpoint has this trigger and these labels: %w", runtime.ErrNotFound)
	if len(list) > 0 {
		err = hint(err, foreignHint(sandbox))
	}
	return err
}
