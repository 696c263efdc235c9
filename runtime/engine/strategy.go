package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// strategyTries bounds the attempts with one strategy while its errors may be temporary.
const strategyTries = 3

// strategyPause is the pause before the second attempt; later ones are longer.
const strategyPause = 200 * time.Millisecond

// checkRestore refuses options that exclude each other.
func checkRestore(o runtime.RestoreOptions) error {
	if o.Undo && o.Checkpoint != "" {
		return fmt.Errorf("%w: --undo cannot be combined with a checkpoint", runtime.ErrInvalid)
	}
	if o.Strategy != "" && !slices.Contains(runtime.Strategies, o.Strategy) {
		return fmt.Errorf("%w: strategy %q: choose %s", runtime.ErrInvalid, o.Strategy,
			strings.Join(runtime.Strategies, ", "))
	}
	if o.FilesOnly && o.Strategy == runtime.StrategyFull {
		return fmt.Errorf("%w: --files-only cannot be combined with --strategy full", runtime.ErrInvalid)
	}
	if o.Attached && o.NoAttached {
		return fmt.Errorf("%w: --attached and --no-attached exclude each other", runtime.ErrInvalid)
	}
	return checkAlert(o)
}

// way is one strategy for one checkpoint.
type way struct {
	strategy  string
	filesOnly bool
}

// recreateFiles names, in attempts, the last strategy of auto for a checkpoint with
// processes: StrategyRecreate without the processes.
const recreateFiles = "recreate-files"

// name distinguishes the ways for a checkpoint; full says that its processes are wanted.
func (w way) name(full bool) string {
	if full && w.filesOnly && w.strategy == runtime.StrategyRecreate {
		return recreateFiles
	}
	return w.strategy
}

// waysOf returns the ways to try for a checkpoint, in order.
func waysOf(o runtime.RestoreOptions, kind string) ([]way, error) {
	full := kind == runtime.KindFull && !o.FilesOnly
	switch {
	case o.Strategy == runtime.StrategyFull && !full:
		return nil, hint(fmt.Errorf("%w: the checkpoint has no processes", runtime.ErrState),
			"Restore its files with --strategy files.")
	case o.Strategy != runtime.StrategyAuto:
		return []way{{o.Strategy, !full || o.Strategy == runtime.StrategyFiles}}, nil
	case full:
		return []way{
			{runtime.StrategyFull, false}, {runtime.StrategyFiles, true}, {runtime.StrategyRecreate, false},
			{runtime.StrategyRecreate, true},
		}, nil
	}
	return []way{{runtime.StrategyFiles, true}, {runtime.StrategyRecreate, true}}, nil
}

// escalate restores by a strategy: each way up to three times, then the next.
func (rs *restores) escalate(ctx context.Context, ref string, t *trying) (runtime.Restored, error) {
	opts := t.opts
	r, err := rs.target(ctx, ref, t.sb, opts, nil)
	if err != nil {
		return runtime.Restored{}, err
	}
	row, id := r.row, r.sb.ID
	r.sb.lock.Unlock()
	ways, err := waysOf(opts, row.Kind)
	if err != nil {
		return runtime.Restored{}, err
	}

	// Stay with this checkpoint, even if an attempt makes a newer one.
	t.opts.Checkpoint, t.opts.Undo = row.ID, false
	full := row.Kind == runtime.KindFull && !opts.FilesOnly
	for i, w := range ways {
		t.way, t.opts.FilesOnly = w.strategy, w.filesOnly && row.Kind == runtime.KindFull
		for try := 1; ; try++ {
			began := time.Now()
			out, err := rs.try(ctx, ref, t)
			if err == nil || out.Checkpoint.ID != "" { // it is restored, except perhaps its host files
				out.Strategy, out.Attempts = t.way, t.attempts
				if out.Degraded = full && w.filesOnly && opts.Strategy == runtime.StrategyAuto; out.Degraded {
					out.Warnings = append(slices.Clone(out.Warnings),
						"the processes of the checkpoint could not be restored: its files are back, and the command was started afresh")
				}
			}
			if err == nil {
				return out, nil
			}
			if isCalledOff(err) && t.begun {
				return out, rs.explainTries(ctx, err, t)
			}
			if !t.begun || ctx.Err() != nil {
				return runtime.Restored{}, err
			}
			ref = id // a name or prefix may not match any more
			if err := rs.afterTry(ctx, t); err != nil {
				rs.log.Warn("restore attempt not cleaned up", "sandbox", id, "err", err)
			}
			again := try < strategyTries && mayPass(err)
			a := runtime.RestoreAttempt{
				Time: began.UTC(), Strategy: w.name(full), Try: try, Error: err.Error(), Took: time.Since(began),
			}
			if again {
				a.Next = a.Strategy
			} else if i+1 < len(ways) {
				a.Next = ways[i+1].name(full)
			}
			t.attempts = append(t.attempts, a)
			rs.log.Info("restore attempt failed", "sandbox", id, "checkpoint", row.ID, "strategy", a.Strategy, "try",
				a.Try, "next", a.Next, "err", a.Error)
			rs.noteAttempt(id, row.ID, a)
			if !again {
				if i+1 == len(ways) && opts.Strategy != runtime.StrategyAuto {
					return runtime.Restored{}, rs.explainTries(ctx, err, t)
				}
				break
			}
			select {
			case <-time.After(strategyPause << (2 * (try - 1))):
			case <-ctx.Done():
				return runtime.Restored{}, errors.Join(err, ctx.Err())
			}
		}
	}
	return runtime.Restored{}, rs.safeStop(context.WithoutCancel(ctx), id, t)
}

// explainTries adds to an error what became of the sandbox and its former state.
func (rs *restores) explainTries(ctx context.Context, err error, t *trying) error {
	if _, gone := rs.store.Sandbox(context.WithoutCancel(ctx), t.r.sb.ID); errors.Is(gone, runtime.ErrNotFound) {
		err = hint(err, fmt.Sprintf("The sandbox was removed to be made again, and was not; try again with: agentbox restore %s %s", t.r.sb.Name, short(t.r.row.ID)))
	}
	if t.kept != "" {
		err = hint(err, fmt.Sprintf("What it had before is checkpoint %s.", short(t.kept)))
	}
	return err
}

// mayPass reports whether an error may be temporary.
func mayPass(err error) bool {
	for _, lasting := range []error{
		runtime.ErrNotFound, runtime.ErrExists, runtime.ErrState, runtime.ErrDenied, runtime.ErrUnsupported,
		runtime.ErrCorrupt, runtime.ErrInvalid, unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO,
	} {
		if errors.Is(err, lasting) {
			return false
		}
	}
	return true
}

// afterTry cleans up after a failed attempt: it recovers what the attempt left in the
// journal, and keeps the undo checkpoint of the first attempt for the whole restore.
func (rs *restores) afterTry(ctx context.Context, t *trying) error {
	ctx = context.WithoutCancel(ctx)
	_, err := rs.recovery.recoverFor(ctx, runtime.Own{})
	if t.r == nil || t.kept != "" || t.r.files.undone == "" {
		return err
	}
	row, e2 := rs.store.Checkpoint(ctx, t.r.files.undone)
	if e2 == nil && row.Status == store.Ready {
		// Later attempts find only what this one has put back.
		t.kept, t.opts.NoUndo = row.ID, true
	}
	return err
}

func (rs *restores) noteAttempt(id, checkpoint string, a runtime.RestoreAttempt) {
	then := "no other strategy is left"
	switch a.Next {
	case "":
	case a.Strategy:
		then = "once more"
	default:
		then = "next: " + a.Next
	}
	ev := runtime.Event{
		Time: a.Time, Type: runtime.EventRestore, Checkpoint: checkpoint, Strategy: a.Strategy,
		Reason: a.Error + "; " + then,
	}
	if err := rs.events.note(id, ev); err != nil {
		rs.log.Warn("event not recorded", "sandbox", id, "err", err)
	}
}

// clearAway removes a sandbox, whose lock is held, so that it can be recreated. Before
// that it proves all that is needed and makes a checkpoint of the present state, which
// stays until the restore is done.
func (rs *restores) clearAway(ctx context.Context, r *restoration, t *trying) (err error) {
	if r.spec.Adopted {
		return fmt.Errorf("%w: agentbox did not make it and cannot make it again", runtime.ErrUnsupported)
	}
	old := *r.sb
	if err := failpoint.Hit("restore.recreate.before-proof"); err != nil {
		return err
	}
	if err := rs.store.VerifyCheckpoint(ctx, r.row.ID); err != nil {
		return err
	}
	attach, err := r.attached.proveHosts(ctx)
	if err != nil {
		return err
	}
	r.orphan = true // so that secrets come from their present sources
	if err := rs.again(ctx, r, runtime.ErrNotFound); err != nil {
		return err
	}
	if err := mayStart(r.spec); err != nil {
		return err
	}

	if t.kept == "" {
		row, err := rs.keepStopped(ctx, &old, attach)
		if isCalledOff(err) {
			return r.attached.hostTrouble(fmt.Errorf("keep the present state: %w", err))
		}
		if err != nil {
			return fmt.Errorf("keep the present state: %w", err)
		}
		t.kept = row.ID
	}

	// Without a pin it would be removed with the sandbox.
	if row, err := rs.store.Checkpoint(ctx, t.kept); err != nil || !row.Pinned {
		if err := errors.Join(err, rs.store.Pin(ctx, t.kept, true)); err != nil {
			return err
		}
		t.pinned = true
	}
	if r.reader, err = rs.store.OpenCheckpoint(ctx, r.row.ID); err != nil {
		return err
	}
	if err := errors.Join(r.effects.prepare(ctx), r.reader.Close()); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.recreate.after-keep"); err != nil {
		return err
	}
	t.opts.Secrets = r.spec.Secrets
	if err := rs.sandboxes.remove(context.WithoutCancel(ctx), &old, false); err != nil {
		return err
	}
	for _, a := range t.attempts { // the events were removed with the sandbox
		rs.noteAttempt(old.ID, r.row.ID, a)
	}
	r.orphan, r.c = false, runtime.Container{}
	// The lock file was removed with the record.
	r.sb.lock.Unlock()
	lock, err := rs.store.Lock(ctx, r.sb.ID, "restore", lockWait)
	if err != nil {
		return err
	}
	r.sb.lock = lock
	return failpoint.Hit("restore.recreate.after-remove")
}

// keepStopped makes a checkpoint of a sandbox's present state and stops the sandbox.
func (rs *restores) keepStopped(ctx context.Context, sb *locked, attach []string) (store.Checkpoint, error) {
	opts := runtime.CheckpointOptions{
		Trigger: runtime.TriggerUndo, TCP: runtime.TCPEstablished, Stop: true, Attach: attach,
	}
	row, err := rs.checkpoints.checkpointOf(ctx, sb, opts, "")
	if err != nil && ctx.Err() == nil && !errors.Is(err, unix.ENOSPC) && !isCalledOff(err) {
		rs.log.Warn("undo checkpoint limited to files", "sandbox", sb.ID, "err", err)
		opts.FilesOnly = true
		row, err = rs.checkpoints.checkpointOf(ctx, sb, opts, "")
	}
	return row, err
}

// forgetKept makes the undo checkpoint of the first attempt that of the whole restore, or
// removes it if none is wanted.
func (rs *restores) forgetKept(ctx context.Context, t *trying, out *runtime.Restored) error {
	if t.kept == "" {
		return nil
	}
	ctx = context.WithoutCancel(ctx)
	if t.r.attached.stranded && t.kept == t.r.attached.hostUndo() {
		return nil // it alone has the previous host files
	}
	var err error
	if t.pinned {
		err = rs.store.Pin(ctx, t.kept, false)
	}
	if t.noUndo {
		kept := t.kept
		out.Undo, t.kept = "", ""
		_, failed := rs.store.RemoveUnpinned(ctx, kept)
		return errors.Join(err, failed)
	}
	t.r.data.Undo, t.r.data.NoUndo, out.Undo = t.kept, false, t.kept
	return errors.Join(err, t.r.files.forgetUndos(ctx))
}

// safeStop puts on hold a sandbox that no strategy has restored: it is frozen, verbs
// refuse to use it, and all that is left of it is kept.
func (rs *restores) safeStop(ctx context.Context, id string, t *trying) (err error) {
	last := t.attempts[len(t.attempts)-1]
	tried := ""
	for _, a := range runtime.FoldAttempts(t.attempts) {
		tried += "\n  " + a
	}
	cause := fmt.Errorf("%w: no strategy has restored it:%s", runtime.ErrState, tried)
	sb, err := rs.acquire(ctx, id, "restore", reapWait)
	if errors.Is(err, runtime.ErrNotFound) {
		text := "The sandbox could not be made again; its checkpoints are there (agentbox checkpoint ls " +
			t.r.sb.Name + ")"
		if t.kept != "" {
			text += ", and what it had last is one of them, " + short(t.kept)
		}
		return hint(cause, text+".")
	}
	if err != nil {
		return errors.Join(cause, err)
	}
	defer sb.lock.Unlock()
	if err := failpoint.Hit("restore.hold.before-mark"); err != nil {
		return errors.Join(cause, err)
	}
	why := fmt.Sprintf("a restore to checkpoint %s failed: %s", short(t.r.row.ID), last.Error)
	if err := rs.store.Hold(ctx, id, why); err != nil {
		return errors.Join(cause, err)
	}
	t.held = true
	if err := failpoint.Hit("restore.hold.after-mark"); err != nil {
		return errors.Join(cause, err)
	}
	state := "stopped"
	c, err := sb.host.Inspect(ctx, id)
	switch {
	case err != nil:
	case c.Status == runtime.Running:
		err = sb.host.Pause(ctx, id)
		fallthrough
	case c.Status == runtime.Paused:
		state = "frozen"
	}
	if err != nil {
		return errors.Join(cause, fmt.Errorf("and it cannot be frozen: %w", err))
	}
	if err := rs.events.note(id, runtime.Event{
		Time: time.Now(), Type: runtime.EventHeld, Checkpoint: t.r.row.ID, Reason: state + ": " + why,
	}); err != nil {
		rs.log.Warn("event not recorded", "sandbox", id, "err", err)
	}
	text := fmt.Sprintf("The sandbox is %s, with the files it had before, and no verb may use it. Restore it again, or let it be used as it is with: agentbox release %s", state, sb.Name)
	if t.kept != "" {
		text += fmt.Sprintf(". Its processes and files of before are checkpoint %s", short(t.kept))
	}
	return hint(cause, text)
}

// mayUse refuses a sandbox that is on hold.
func mayUse(sb store.Sandbox) error {
	if sb.Held == "" {
		return nil
	}
	return hint(fmt.Errorf("%w: it is held: %s", runtime.ErrState, sb.Held),
		fmt.Sprintf("Restore it (agentbox restore %s), or let it be used as it is with: agentbox release %s", sb.Name,
			sb.Name))
}

// ReleaseHold ends the hold on a sandbox.
func (v hostVerbs) ReleaseHold(ctx context.Context, ref string) error {
	return v.e.verb(ctx, errorsNamed(onSandbox("release hold", ref)), func(ctx context.Context) error {
		return v.e.restores.releaseHold(ctx, ref)
	})
}

func (rs *restores) releaseHold(ctx context.Context, ref string) (err error) {
	defer func() { err = fail("release", ref, err) }()
	sb, err := rs.acquire(ctx, ref, "release", lockWait)
	if err != nil {
		return err
	}
	defer sb.lock.Unlock()
	if sb.Held == "" {
		return fmt.Errorf("%w: it is not held", runtime.ErrState)
	}
	if c, err := sb.host.Inspect(ctx, sb.ID); err != nil || c.Status != runtime.Running && c.Status != runtime.Paused {
		if err := rs.restarts.meant(sb.Sandbox); err != nil { // its restart policy must not start it
			return err
		}
	}
	rs.log.Info("hold released", "sandbox", sb.ID)
	return rs.store.Hold(ctx, sb.ID, "")
}
