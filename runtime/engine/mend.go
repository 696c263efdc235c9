package engine

import (
	"context"
	"errors"

	"github.com/agentbox/agentbox/internal/failpoint"
)

// proveTree proves that a tree is as the checkpoint has it, and repairs what the death of
// the old processes has changed.
//
// All files were read while the processes were frozen, but their death still writes: the
// kernel marks each robust mutex that a dying process holds (FUTEX_OWNER_DIED) and clears
// the words that wait for the end of its threads (clear_child_tid), even in a shared mapping
// of a file. That does not change the file's times if its page is already dirty. The file
// cache, however, trusts no file that has a writer, so the proof reads such files and finds
// the difference.
func (e *Engine) proveTree(ctx context.Context, r *restoration, i int) error {
	t := &r.data.Trees[i]
	lost := r.lostOf(t)
	if i < len(r.updates) && !r.again && len(lost) == 0 && !r.verify {
		ok, err := e.proveUpdate(ctx, r.sb.ID, t, r.updates[i], r.row.ID, !r.idle || t.Number > 0)
		if err != nil || ok {
			return err
		}
	}
	if r.idle || t.Aside { // no process has ended
		return e.prove(ctx, r.sb.ID, t, r.reader, lost, r.verify)
	}
	err := e.differs(ctx, r.sb.ID, t, r.reader, lost, r.verify)
	if errors.Is(err, errDiffers) {
		e.log.Debug("files changed by the stop mended", "sandbox", r.sb.ID, "tree", t.Number, "err", err)
		if err := errors.Join(failpoint.Hit("restore.before-mend"), t.change(ctx, r.reader, lost)); err != nil {
			return err
		}
		err = e.differs(ctx, r.sb.ID, t, r.reader, lost, r.verify)
	}
	if errors.Is(err, errDiffers) {
		return e.equalize(ctx, r.sb.ID, t, r.reader, lost)
	}
	if err != nil || len(lost) > 0 {
		return errors.Join(err, remove(t.seen), remove(e.store.MemoryPath(r.sb.ID, t.Number)))
	}
	return e.proven(r.sb.ID, t)
}
