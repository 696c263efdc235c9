package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Remove removes a sandbox and frees all it has. Its checkpoints stay unless requested.
func (v sandboxVerbs) Remove(ctx context.Context, ref string, opts runtime.RemoveOptions) error {
	return v.e.verb(ctx, onSandbox("rm", ref), func(ctx context.Context) error {
		return v.e.sandboxes.removeAs(ctx, ref, nil, opts)
	})
}

// removeAs is Remove as the action op, for the observers; nil: they already see the verb.
func (bx *sandboxes) removeAs(ctx context.Context, ref string, op *runtime.Op, opts runtime.RemoveOptions) (err error) {
	defer func() { err = fail("rm", ref, err) }()
	sb, err := bx.acquire(ctx, ref, "rm", lockWait)
	if opts.Force && errors.Is(err, runtime.ErrBusy) {
		sb, err = bx.breakIn(ctx, ref, err)
	}
	if errors.Is(err, runtime.ErrNotFound) {
		return bx.removeUnknown(ctx, ref, opts, err)
	}
	if err != nil {
		return err
	}
	defer bx.upkeep.tidy(ctx)
	defer sb.lock.Unlock()
	if opts.AtExit && sb.Kept {
		bx.release(sb.ID)
		return nil
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil && !errors.Is(err, runtime.ErrNotFound) {
		return err
	}
	if (c.Status == runtime.Running || c.Status == runtime.Paused) && !opts.Force {
		return hint(fmt.Errorf("%w: it is %s", runtime.ErrState, c.Status), "Stop it first, or remove it with --force.")
	}
	defer bx.release(sb.ID)
	return bx.observed(ctx, op, func(ctx context.Context) error { return bx.remove(ctx, sb, opts.Checkpoints) })
}

// removal is the journal's data of a removal.
type removal struct {
	Checkpoints bool   `json:"checkpoints"`
	Backend     string `json:"backend"`
}

// remove removes a sandbox, whose lock is held. A removal that has begun is always finished,
// if need be by recovery.
func (bx *sandboxes) remove(ctx context.Context, sb *locked, checkpoints bool) error {
	// Take over an earlier removal that has failed.
	left, all, err := bx.removals(ctx, sb.ID)
	if err != nil {
		return err
	}
	checkpoints = checkpoints || all
	data, err := json.Marshal(removal{checkpoints, sb.Backend})
	if err != nil {
		return err
	}
	seq, end, err := bx.begin(ctx, store.Intent{Op: opRemove, Sandbox: sb.ID, Data: data})
	if errors.Is(err, unix.ENOSPC) {
		// The sandbox's own files may fill the disk. Removing its container first is
		// safe without an intent, because it can be repeated.
		if err = sb.host.Remove(ctx, sb.ID); err == nil {
			seq, end, err = bx.begin(ctx, store.Intent{Op: opRemove, Sandbox: sb.ID, Data: data})
		}
	}
	if err != nil {
		return err
	}
	defer end()
	for _, in := range left {
		if err := bx.store.Done(ctx, in.Seq); err != nil {
			return err
		}
	}
	err = bx.finishRemove(ctx, sb.host, sb.ID, checkpoints)
	if err == nil {
		err = bx.dropBase(ctx, sb.ID)
	}
	if err != nil {
		return err // the intent stays: recovery tries again
	}
	bx.log.Info("sandbox removed", "sandbox", sb.ID)
	return bx.store.Done(context.WithoutCancel(ctx), seq)
}

// removals returns the unfinished removals of a sandbox that are not under way in this
// process, and whether one of them includes its checkpoints.
func (bx *sandboxes) removals(ctx context.Context, id string) (left []store.Intent, checkpoints bool, err error) {
	if left, err = bx.leftIn(ctx, id); err != nil {
		return nil, false, err
	}
	left = slices.DeleteFunc(left, func(in store.Intent) bool { return in.Op != opRemove })
	for _, in := range left {
		data, err := decode[removal](in.Data)
		if err != nil {
			return nil, false, err
		}
		checkpoints = checkpoints || data.Checkpoints
	}
	return left, checkpoints, nil
}

func (bx *sandboxes) finishRemove(ctx context.Context, host Host, id string, checkpoints bool) error {
	if err := failpoint.Hit("remove.before-backend"); err != nil {
		return err
	}
	if err := host.Remove(ctx, id); err != nil {
		return err
	}

	// Remove what restores have left there for the OCI runtime.
	if err := os.RemoveAll(filepath.Join(bx.run, id)); err != nil {
		return err
	}
	if err := errors.Join(bx.events.noteHit(id, nil), bx.marks.remove(id), bx.events.drop(id),
		bx.restarts.forget(id)); err != nil {
		return err
	}
	if err := failpoint.Hit("remove.after-backend"); err != nil {
		return err
	}
	list, err := bx.store.Checkpoints(ctx, store.Filter{SandboxID: id, All: true})
	if err != nil {
		return err
	}

	for _, ck := range list {
		// Undo checkpoints are removed with the sandbox.
		if !checkpoints && (ck.Trigger != runtime.TriggerUndo || ck.Pinned || ck.Name != "" || len(ck.Tags) > 0) {
			continue
		}
		remove := func() error { return bx.store.RemoveCheckpoint(ctx, ck.ID) }
		if !checkpoints {
			remove = func() error { _, err := bx.store.RemoveUnpinned(ctx, ck.ID); return err }
		}
		if err := remove(); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("remove.after-checkpoints"); err != nil {
		return err
	}
	left, err := bx.leftIn(ctx, id) // the lock keeps new verbs from beginning
	if err != nil {
		return err
	}
	if err := bx.store.DeleteSandbox(ctx, id); err != nil {
		return err
	}
	if err := failpoint.Hit("remove.after-row"); err != nil {
		return err
	}

	// Its interrupted verbs are moot, and must not apply to a sandbox that is recreated
	// with the same id.
	for _, in := range left {
		err = errors.Join(err, bx.store.Done(ctx, in.Seq))
	}
	return err
}

// dropBase removes the base checkpoint of a removed sandbox that has left no other one, unless it is
// used: each --rm sandbox would leave one.
func (bx *sandboxes) dropBase(ctx context.Context, id string) error {
	list, err := bx.store.Checkpoints(ctx, store.Filter{SandboxID: id})
	if err != nil || len(list) != 1 || !isBase(list[0]) || list[0].Name != "" || len(list[0].Tags) > 0 {
		return err
	}
	at, err := bx.store.Positions(ctx)
	if err != nil {
		return err
	}
	for _, p := range at {
		if p.Head == list[0].ID { // a fork began there
			return nil
		}
	}
	_, err = bx.store.RemoveUnpinned(ctx, list[0].ID)
	return err
}

// Reap frees what an exited sandbox still holds, and removes the sandbox if it has
// AutoRemove. The backend's monitor calls it after every exit. Reap does nothing if the
// sandbox runs again or is gone.
func (e *Engine) Reap(ctx context.Context, id string) (err error) {
	defer func() { err = fail("reap", id, err) }()
	hold, err := e.store.Lock(ctx, holdName(id), opReap, -1)
	if err != nil {
		return err
	}
	defer hold.Unlock()
	sb, err := e.acquire(ctx, id, opReap, reapWait)
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	if busy, err := e.interruptedIn(ctx, id); err != nil || busy {
		return err // the exit may be the doing of the interrupted verb; recovery handles both
	}
	c, err := sb.host.Inspect(ctx, id)
	if err != nil || c.Status != runtime.Exited {
		return err
	}
	s, err := spec(sb.Sandbox)
	if err != nil {
		return err
	}
	if s.AutoRemove && !sb.Kept {
		op := runtime.ByItself("rm", subjectOf(sb.Sandbox),
			runtime.Own{By: runtime.ByReap, Why: "rm: it has ended, and was to go with that"})
		return e.observed(ctx, op, func(ctx context.Context) error { return e.sandboxes.remove(ctx, sb, false) })
	}
	e.events.keepHits(ctx, sb.Sandbox, c)
	return sb.host.Stop(ctx, id, runtime.StopOptions{})
}
