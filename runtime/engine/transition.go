package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
)

// run does a restore or a fork, or the rest of one that was killed, from the phase on record.
// All that can be proven is proven and laid out before anything is touched, and what is
// replaced is a checkpoint first. What fails before the sandbox is restored is taken back.
func (r *restoration) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, r.closed()) }()
	if r.hasRun() {
		err = worktree.Sync(ctx, r.data.Trees)
	} else {
		err = r.change(ctx)
	}
	if err != nil {
		return err
	}
	if err := r.finish(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("the sandbox is restored, but: %w (%w)", err, errUnfinished)
	}
	return nil
}

// change is run until the sandbox is restored.
func (r *restoration) change(ctx context.Context) (err error) {
	undo := r.reverts()
	defer func() { err = r.failed(ctx, undo, err) }()
	if err := r.each(ctx, part.check); err != nil {
		return err
	}
	if err := errors.Join(r.record(ctx, true), failpoint.Hit("restore.before-layout")); err != nil {
		return err
	}
	if err := r.each(ctx, part.prepare); err != nil {
		return err
	}
	if err := r.begin(ctx); err != nil {
		return err
	}

	// The old processes end now: a caller that disconnects must not stop the restore half-way.
	ctx = context.WithoutCancel(ctx)
	if err := r.processes.stop(ctx); err != nil {
		return err
	}
	if err := r.each(ctx, part.commit); err != nil {
		return err
	}
	if err := r.proven(ctx); err != nil {
		return err
	}
	if err := r.each(ctx, part.arrange); err != nil {
		return err
	}
	durable := r.files.sync(ctx)
	return errors.Join(r.processes.start(ctx), r.files.synced(durable))
}

// finish ends a restore whose sandbox is in place. Host files come first: a failure with them
// does not change the sandbox any more.
func (r *restoration) finish(ctx context.Context) error {
	if err := r.head(ctx); err != nil {
		return err
	}
	for _, p := range slices.Backward(r.parts) {
		if err := p.settle(ctx); err != nil {
			return r.attached.last(err)
		}
	}
	return nil
}
