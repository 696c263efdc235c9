package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// run does a restore or a fork, or the rest of one that was killed, from the phase on record.
// All that can be proven is proven and laid out before anything is touched, and what is
// replaced is a checkpoint first. What fails before the sandbox is restored is taken back.
func (r *restoration) run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, r.closed()) }()
	if r.hasRun() {
		err = r.files.sync(ctx)
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
	before := []step{r.each(part.check), r.record, r.each(part.prepare), r.begin}
	if r.resumed { // all was proven before it was killed
		before = before[2:]
	}
	if err := take(ctx, before...); err != nil {
		return err
	}
	// The old processes end now: a caller that disconnects must not stop the restore half-way.
	return take(context.WithoutCancel(ctx), r.processes.stop, r.each(part.commit), r.proven,
		r.each(part.arrange), r.start)
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
