package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// swap ends the old processes, swaps in what differs and starts the sandbox.
func (e *Engine) swap(ctx context.Context, seq int64, r *restoration) (err error) {
	gone := time.Now()
	defer func() {
		if err == nil || errors.Is(err, errUnfinished) || r.data.Recreated || r.data.Fork {
			return
		}
		// --rm must not remove what a failed restore has put back.
		err = errors.Join(err, e.store.Keep(ctx, r.sb.ID, true))
		now, e2 := r.sb.host.Inspect(ctx, r.sb.ID)
		switch {
		case errors.Is(e2, runtime.ErrNotFound):
			err = fmt.Errorf("%w: it was removed while it was being restored", runtime.ErrState)
		case e2 != nil:
		case now.Status == runtime.Running || now.Status == runtime.Paused:
			err = errors.Join(err, e.begun(r.spec)) // its restart policy stays in force
			err = hint(err, "The sandbox could not be stopped and goes on, with the files it had before.")
		case r.present != nil && r.present.row.Kind == runtime.KindFull && !r.data.NoUndo:
			err = hint(err, "The sandbox is stopped, with the files it had before; bring its processes back with: agentbox restore --undo "+r.sb.Name+", or start it afresh with: agentbox start "+r.sb.Name)
		case r.c.Status == runtime.Running:
			err = hint(err, "The sandbox is stopped, with the files it had before; start it afresh with: agentbox start "+r.sb.Name)
		}
	}()
	var undo undo.Stack
	started, touched, replaces := false, false, false
	unfinished := func() bool { return errors.Is(err, errUnfinished) }
	defer func() {
		if err != nil && started {
			// The files must stay as they are while processes may run on them.
			if e2 := e.halt(ctx, seq, r); e2 != nil {
				err = fmt.Errorf("%w; and it cannot be stopped: %w (%w)", err, e2, errUnfinished)
				return
			}
		}
		undo.Run(ctx, &err)
	}()
	undo.Add(func(ctx context.Context) error {
		if r.present == nil {
			r.past = r.past || !replaces
			return r.discard()
		}
		// Thaw first: deleting may take long.
		err := errors.Join(r.present.cut.End(), e.thaw(ctx, r.present))
		err = errors.Join(err, r.discard())
		// Keep the checkpoint as the way back until the files are back.
		if !touched || r.data.NoUndo && !unfinished() {
			err = errors.Join(err, e.store.RemoveCheckpoint(ctx, r.undone))
		}
		return err
	})
	if err := errors.Join(failpoint.Hit("restore.before-stop"), r.checkAlone(ctx)); err != nil {
		return err
	}
	// Nothing else may start the sandbox between here and the start below, which clients
	// of an engine's daemon otherwise could.
	if err := r.c.Stage.Hold(); err != nil {
		return err
	}
	undo.Add(func(context.Context) error { return r.c.Stage.Clear() })
	if r.idle, err = r.stoodStill(ctx); err != nil {
		return err
	}
	if !r.idle && r.data.Trees[0].Displaced() != "" {
		return fmt.Errorf("%w: another program started it while it was being restored", runtime.ErrState)
	}
	touched = true
	e.keepHits(ctx, r.sb.Sandbox, r.c) // the counters go with the processes
	// From here on only this restore starts it or, if this fails, its owner.
	if err := e.staysDown(r.spec, r.restart); err != nil {
		return err
	}
	r.sb.steps.Begin(runtime.PhaseStopping, 0)
	stopping := time.Now()
	if err := r.sb.host.Stop(ctx, r.sb.ID, runtime.StopOptions{Silent: true}); err != nil {
		return err
	}
	r.files -= time.Since(stopping)
	if r.present != nil {
		r.present.thawn = true // its processes are gone
		cut := r.present.cut
		r.present.cut = nil
		if err := cut.End(); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("restore.after-stop"); err != nil {
		return err
	}
	if err := r.checkAlone(ctx); err != nil {
		return err
	}
	if r.again, err = r.startedAgain(ctx); err != nil {
		return err
	}
	undo.Add(func(ctx context.Context) error { return e.putBack(ctx, r) })
	replaces = true
	r.sb.steps.Begin(runtime.PhasePutting, 0)
	for _, c := range r.changes {
		apply := c.Apply
		if r.again {
			apply = c.Force
		}
		if err := apply(ctx); err != nil {
			return err
		}
	}
	return e.bringUp(ctx, seq, r, &undo, &started, gone)
}

// stoodStill reports whether the sandbox, which cannot be started now, has had no
// process since the restore began. A process could have written to files after they
// were read.
func (r *restoration) stoodStill(ctx context.Context) (bool, error) {
	if r.c.Status != runtime.Created && r.c.Status != runtime.Exited {
		return false, nil
	}
	now, err := r.sb.host.Inspect(ctx, r.sb.ID)
	r.before = now.Started
	still := now.Status == r.c.Status && now.Started.Equal(r.c.Started)
	if now.Started.IsZero() { // its engine does not remember
		still = still && now.Finished.Equal(r.c.Finished)
	}
	return still, err
}

// startedAgain reports whether a sandbox that ran, and is stopped now, was restarted by
// another process since the restore began. Its files may then differ from those that were
// read. Not every engine remembers when an exited container was started.
func (r *restoration) startedAgain(ctx context.Context) (bool, error) {
	if r.c.Status != runtime.Running && r.c.Status != runtime.Paused {
		return false, nil
	}
	now, err := r.sb.host.Inspect(ctx, r.sb.ID)
	r.before = now.Started
	return !now.Started.IsZero() && !now.Started.Equal(r.c.Started), err
}

// findLost reads all files of a damaged checkpoint to find those that cannot be restored.
func (e *Engine) findLost(ctx context.Context, r *restoration) error {
	if !r.data.Salvage {
		return nil
	}
	r.lost = map[string]bool{}
	r.sb.steps.Begin(runtime.PhaseLooking, 0)
	source := r.sb.steps.Source(runtime.PhaseLooking, r.reader.Source())
	for entry, err := range worktree.Entries(ctx, r.reader, 0) {
		if err != nil {
			return err
		}
		if entry.Type != overlay.TypeFile || entry.Size == 0 {
			continue
		}
		if entry.Hardlink != "" {
			if r.lost[entry.Hardlink] {
				r.lost[entry.Path] = true
			}
			continue
		}
		data, err := source.Data(ctx, entry)
		if err == nil {
			_, err = io.Copy(io.Discard, data)
			err = errors.Join(err, data.Close())
		}
		if errors.Is(err, runtime.ErrCorrupt) {
			r.lost[entry.Path] = true
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// bringUp proves the files and starts what ran at the time of the checkpoint.
func (e *Engine) bringUp(ctx context.Context, seq int64, r *restoration, undo *undo.Stack, started *bool, gone time.Time) error {
	if err := failpoint.Hit("restore.after-apply"); err != nil {
		return err
	}
	r.sb.steps.Begin(runtime.PhaseProving, 0)
	for _, c := range r.changes {
		if err := c.Verify(ctx, worktree.VerifyOptions{Still: r.idle, Paranoid: r.verify}); err != nil {
			return err
		}
	}
	r.files += time.Since(r.began)
	if r.data.Phase != phaseProven {
		if err := forgetManaged(r.c.Managed); err != nil {
			return err
		}
		r.data.Phase, r.data.Started, r.data.Boot = phaseProven, r.before, bootID()
		if err := e.advance(ctx, seq, r.data, true); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("restore.after-proof"); err != nil {
		return err
	}
	if !r.data.Fork { // which has managed files of its own
		undo.Add(func(context.Context) error { return revertManaged(r.c.Managed) })
		if err := putManaged(r.c.Managed, r.reader.Manifest(), r.spec.IDs); err != nil {
			return err
		}
		if r.resumed || r.restart { // no caller reads its warnings
			for _, text := range r.unplaced() {
				e.log.Warn(text, "sandbox", r.sb.ID)
			}
		}
	}
	if r.fork != nil {
		if err := e.reseed(ctx, r); err != nil {
			return err
		}
	}
	durable := guard.Start(func() error {
		syncing := time.Now()
		err := worktree.Sync(ctx, r.data.Trees)
		r.files += time.Since(syncing)
		return err
	})
	*started = true
	r.sb.steps.Begin(runtime.PhaseStarting, 0)
	err := e.resume(ctx, r)
	r.down = time.Since(gone)
	r.sb.steps.Begin(runtime.PhaseSyncing, 0)
	for _, c := range r.changes {
		c.Learn() // during the sync: the file caches need not be durable
	}
	if err = errors.Join(err, <-durable); err != nil {
		return err
	}
	undo.Release()
	*started = false
	if err := errors.Join(forgetManaged(r.c.Managed), e.restored(ctx, seq, r)); err != nil {
		return fmt.Errorf("the sandbox is restored, but: %w (%w)", err, errUnfinished)
	}
	return nil
}

// halt stops a sandbox whose start has failed, so that the restore can be rolled back. If
// it cannot, nothing else may start the sandbox until Recover has finished the restore.
func (e *Engine) halt(ctx context.Context, seq int64, r *restoration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Timeout)
	defer cancel()
	// A start of the sandbox does not prove any more that it is restored.
	r.data.Phase = phaseSwap
	if err := e.advance(ctx, seq, r.data, true); err != nil {
		return err
	}
	err := r.sb.host.Stop(ctx, r.sb.ID, runtime.StopOptions{})
	if errors.Is(err, runtime.ErrNotFound) {
		return nil // it was removed
	}
	if err != nil {
		r.data.Phase = phaseProven
		err = errors.Join(err, e.advance(ctx, seq, r.data, true), r.c.Stage.Hold())
	}
	return err
}

// hasRun reports whether the sandbox was started after the restore was proven, by the
// restore or by a later verb, even if it has ended since: its changes to the files are its
// own. A start before a reboot does not count: what was not on the disk then is lost.
func (r *restoration) hasRun() bool {
	if r.c.Status == runtime.Running || r.c.Status == runtime.Paused {
		return true
	}
	return r.data.Boot != "" && r.data.Boot == bootID() && !r.c.Started.IsZero() && !r.c.Started.Equal(r.data.Started)
}

// restored ends a restore whose sandbox is in place. Host files come last, because a
// failure with them does not change the sandbox.
func (e *Engine) restored(ctx context.Context, seq int64, r *restoration) error {
	if err := e.store.SetHead(ctx, r.sb.ID, r.row.ID, r.data.Attempt); err != nil {
		return err
	}
	if r.sb.Held != "" {
		if err := e.store.Hold(ctx, r.sb.ID, ""); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("restore.after-head"); err != nil {
		return err
	}
	if len(r.data.HostFiles) > 0 {
		r.data.Phase = phaseHosts
		if err := e.advance(ctx, seq, r.data, false); err != nil {
			return err
		}
		if r.resumed {
			r.hostsTold = e.resumeHosts(ctx, r)
		} else {
			r.sb.steps.Begin(runtime.PhaseHostFiles, 0)
			e.putHosts(ctx, r)
		}
	}
	err := e.forgetWay(ctx, r)
	if r.hostErr != nil {
		// An intent left in the journal would have Recover put them after all.
		r.hostErr, err = errors.Join(r.hostErr, err), nil
	}
	return err
}

// forgetWay removes what only an unfinished restore needs.
func (e *Engine) forgetWay(ctx context.Context, r *restoration) error {
	r.past = true
	if r.images == "" {
		r.images = e.store.StagedImages(r.sb.ID)
	}
	return errors.Join(r.discard(), e.forgetUndos(ctx, r))
}

// forgetUndos removes the undo checkpoints that a newer one has replaced. It keeps those
// that are pinned, named or tagged, the one that the sandbox is at, and those that alone
// have previous host files: the caller of this restore may have no say over these.
func (e *Engine) forgetUndos(ctx context.Context, r *restoration) error {
	rows, err := e.store.Checkpoints(ctx, store.Filter{SandboxID: r.sb.ID, Trigger: runtime.TriggerUndo})
	var kept *store.Attached
	for _, row := range rows {
		if row.ID == r.data.Undo {
			kept = row.Attached
		}
	}
	for _, row := range rows {
		newest := row.ID == r.data.Undo && !r.data.NoUndo
		if newest || row.ID == r.row.ID || row.Pinned || row.Name != "" || len(row.Tags) > 0 {
			continue
		}
		if r.data.NoUndo && row.ID != r.data.Undo {
			continue // no newer one has replaced it
		}
		if row.ID != r.data.Undo && !kept.Covers(row.Attached) {
			continue
		}
		_, failed := e.store.RemoveUnpinned(ctx, row.ID)
		err = errors.Join(err, failed)
	}
	if r.data.NoUndo {
		r.undone = ""
	}
	return err
}

// resume starts what ran at the time of the checkpoint.
func (e *Engine) resume(ctx context.Context, r *restoration) (failed error) {
	manifest := r.reader.Manifest()
	was := runtime.Status(manifest.Status)
	place := r.c.Stage
	if !r.starts() {
		return place.Release()
	}
	if err := e.arm(ctx, r); err != nil {
		return err
	}
	work := filepath.Join(e.run, r.sb.ID, "restore")
	if r.full() {
		if err := os.MkdirAll(work, 0o700); err != nil {
			return err
		}
		if r.data.Fork {
			was, manifest.TCP = runtime.Paused, runtime.TCPClose // the fork has another address
		}
		if err := errors.Join(criu.ContinueWaits(r.images), criu.AdoptZombies(r.images)); err != nil {
			return err
		}
		if err := hand(r.spec.IDs, r.images); err != nil {
			return err
		}
		times, remove, err := remapped(r.c.Upper, r.images)
		if err != nil {
			return err
		}
		defer func() {
			if failed != nil {
				failed = errors.Join(failed, remove())
			}
		}()
		options := criu.Options{TCP: manifest.TCP, EmptyNetwork: r.c.EmptyNetwork}
		config := filepath.Join(e.run, r.sb.ID, "criu.conf")
		if err := criu.WriteConfig(config, options); err != nil {
			return err
		}
		if err := criu.ClearRestoreFailure(work); err != nil {
			return err
		}
		staged := stage.Restore{Images: r.images, Work: work, Flags: options.RuntimeFlags(), Config: config, Paused: was == runtime.Paused, Times: times, Taken: manifest.Created}
		if r.c.EmptyNetwork {
			var err error
			if staged.Addresses, err = criu.Addresses(r.images, manifest.TCP); err != nil {
				return err
			}
		}
		if staged.Timeout, err = r.timeLeft(); err != nil {
			return err
		}
		if err := place.Put(staged); err != nil {
			return err
		}
		defer place.Clear()
		defer r.callOff()()
		if err := failpoint.Hit("restore.after-stage"); err != nil {
			return err
		}
	}
	if err := place.Release(); err != nil {
		return err
	}
	_, err := r.sb.host.Start(ctx, r.sb.ID, runtime.StartOptions{Env: identity(r.spec, r.data.Attempt), Secrets: r.secrets})
	if r.full() {
		err = criu.RestoreFailure(work, err)
	}
	if err = r.judge(ctx, err); err != nil && r.caller != nil && r.caller.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(r.caller), err)
	}
	if err == nil && r.full() {
		r.tellProof(work)
	}
	if err == nil && r.full() && r.spec.Adopted && !r.c.EmptyNetwork {
		// The images of a network namespace that CRIU dumps contain the cut that was
		// in force during the dump.
		var now runtime.Container
		if now, err = r.sb.host.Inspect(ctx, r.sb.ID); err == nil && now.Pid != 0 {
			err = criu.Reconnect(now.Pid)
		}
	}
	if err == nil && r.fork != nil && r.full() {
		err = e.awaken(ctx, r)
	}
	if err != nil {
		return err
	}
	return failpoint.Hit("restore.after-start")
}

// tellProof warns of restored processes that differ from the checkpoint.
func (r *restoration) tellProof(work string) {
	report, err := proof.ReadReport(work)
	if err != nil {
		r.warnings = append(slices.Clone(r.warnings), fmt.Sprintf("the report of the restored processes cannot be read: %v", err))
	}
	for _, d := range report.Different {
		if d.Inode && r.data.Fork {
			continue // all of its files are new
		}
		r.warnings = append(slices.Clone(r.warnings), "restored "+d.String())
	}
}

// judge turns the error of a start into that of the restore that was staged for it.
func (r *restoration) judge(ctx context.Context, err error) error {
	if !r.full() {
		return err
	}
	place := r.c.Stage
	used := place.Used()
	if errors.Is(err, runtime.ErrState) && used {
		// Another process may have started the sandbox, and thereby restored it, since we
		// staged. A restored sandbox that has ended again has used up the stage as well.
		now, e2 := r.sb.host.Inspect(ctx, r.sb.ID)
		if e2 == nil && (now.Status == runtime.Running || now.Status == runtime.Paused) {
			err = nil
		}
	}
	if err == nil && !used {
		err = hint(fmt.Errorf("%w: it was started afresh, because its engine does not look for restores in %s", runtime.ErrUnsupported, place.Run),
			"Set AGENTBOX_RUN to what it is in the environment of the engine, or unset it in both, and restore it again.")
	}
	return err
}
