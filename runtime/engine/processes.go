package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/proof"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
)

// processesPart is the processes of the sandbox: those that end, and those that are restored, or
// started afresh.
type processesPart struct {
	noWork
	*restoration
	caller  context.Context // its end also ends the restore of processes; nil: none
	images  string          // where the process images are laid out
	gone    time.Time       // since when the old processes end
	before  time.Time       // when the sandbox was last started, as read once it was stopped
	idle    bool            // it has had no process since it was inspected
	again   bool            // another process has started it since it was inspected
	ending  bool            // the stop has begun
	touched bool            // the processes may have ended
	stopped bool
	held    bool // nothing else can start the sandbox
	started bool // it may run
}

func (r *processesPart) check(ctx context.Context) error {
	r.caller = ctx
	if r.starts() {
		if err := mayStart(r.spec); err != nil {
			return err
		}
	}
	return r.checkTools()
}

// prepare writes the process images where the OCI runtime can read them.
func (r *processesPart) prepare(ctx context.Context) error {
	if !r.full() {
		return nil
	}
	r.images = r.e.store.StagedImages(r.sb.ID)
	if err := os.RemoveAll(r.images); err != nil {
		return err
	}
	r.sb.steps.Begin(runtime.PhaseImages, r.reader.Manifest().Processes.Bytes())
	r.reader.CountImages(r.sb.steps.Adder(runtime.PhaseImages))
	err := r.reader.ExtractImages(ctx, r.images)
	if errors.Is(err, runtime.ErrCorrupt) && r.data.Salvage {
		r.data.FilesOnly = true
		r.warnings = append(slices.Clone(r.warnings), fmt.Sprintf("the processes are lost: %v", err))
		return os.RemoveAll(r.images)
	}
	return err
}

// stop ends the old processes. From then on only this restore starts the sandbox or, if it
// fails, its owner.
func (r *processesPart) stop(ctx context.Context) (err error) {
	r.gone, r.ending = time.Now(), true
	if !r.resumed {
		if err := errors.Join(failpoint.Hit("restore.before-stop"), r.checkAlone(ctx)); err != nil {
			return err
		}
	}

	// Nothing else may start the sandbox between here and the start below, which clients
	// of an engine's daemon otherwise could.
	if err := r.c.Stage.BlockCreate(); err != nil {
		return err
	}
	r.held = true
	if !r.resumed {
		if r.idle, err = r.stoodStill(ctx); err != nil {
			return err
		}
		if !r.idle && r.data.Trees[0].Displaced() != "" {
			return fmt.Errorf("%w: another program started it while it was being restored", runtime.ErrState)
		}
	}
	r.touched = true
	r.e.events.keepHits(ctx, r.sb.Sandbox, r.c) // the counters go with the processes
	if err := r.e.restarts.staysDown(r.spec, r.resumed || r.restart); err != nil {
		return err
	}

	r.sb.steps.Begin(runtime.PhaseStopping, 0)
	stopping := time.Now()
	if err := r.sb.host.Stop(ctx, r.sb.ID, runtime.StopOptions{Silent: true}); err != nil {
		return err
	}
	r.stopped = true
	r.files.took -= time.Since(stopping)
	if err := r.files.stopped(); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.after-stop"); err != nil {
		return err
	}
	if err := r.checkAlone(ctx); err != nil || r.idle {
		return err
	}
	now, err := r.sb.host.Inspect(ctx, r.sb.ID)
	r.before = now.Started
	r.again = r.resumed || r.startedAgain(now)
	return err
}

// revert lets others start the sandbox again. What has been put back is its to use.
func (r *processesPart) revert(context.Context) error {
	var errs []error
	if r.held {
		errs = append(errs, r.c.Stage.Clear())
	}
	if r.images != "" {
		errs = append(errs, os.RemoveAll(r.images))
	}
	return errors.Join(errs...)
}

func (r *processesPart) settle(context.Context) error {
	return os.RemoveAll(r.e.store.StagedImages(r.sb.ID))
}

// stoodStill reports whether the sandbox, which cannot be started now, has had no
// process since the restore began. A process could have written to files after they
// were read.
func (r *processesPart) stoodStill(ctx context.Context) (bool, error) {
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
func (r *processesPart) startedAgain(now runtime.Container) bool {
	ran := r.c.Status == runtime.Running || r.c.Status == runtime.Paused
	return ran && !now.Started.IsZero() && !now.Started.Equal(r.c.Started)
}

// halt stops a sandbox whose start has failed, so that the restore can be rolled back. If
// it cannot, nothing else may start the sandbox until recovery has finished the restore.
func (r *processesPart) halt(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Timeout)
	defer cancel()
	// A start of the sandbox does not prove any more that it is restored.
	r.data.Phase = phaseSwap
	if err := r.note(ctx, true); err != nil {
		return err
	}
	err := r.sb.host.Stop(ctx, r.sb.ID, runtime.StopOptions{})
	if errors.Is(err, runtime.ErrNotFound) {
		return nil // it was removed
	}
	if err != nil {
		r.data.Phase = phaseProven
		err = errors.Join(err, r.note(ctx, true), r.c.Stage.BlockCreate())
	}
	return err
}

// start starts what ran at the time of the checkpoint.
func (r *processesPart) start(ctx context.Context) error {
	r.started = true
	r.sb.steps.Begin(runtime.PhaseStarting, 0)
	err := r.resume(ctx)
	r.down = time.Since(r.gone)
	return err
}

func (r *processesPart) resume(ctx context.Context) (failed error) {
	place := r.c.Stage
	if !r.starts() {
		return place.AllowCreate()
	}
	work := filepath.Join(r.e.run, r.sb.ID, "restore")
	if r.full() {
		remove, err := r.stage(work)
		defer func() {
			if failed != nil {
				failed = errors.Join(failed, remove())
			}
		}()
		if err != nil {
			return err
		}
		defer place.Clear()
		defer r.callOff()()
		if err := failpoint.Hit("restore.after-stage"); err != nil {
			return err
		}
	}
	if err := place.AllowCreate(); err != nil {
		return err
	}
	_, err := r.sb.host.Start(ctx, r.sb.ID, runtime.StartOptions{
		Env: identity(r.spec, r.data.Attempt), Secrets: r.secrets.files,
	})
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
		err = r.fork.awaken(ctx)
	}
	if err != nil {
		return err
	}
	return failpoint.Hit("restore.after-start")
}

// stage has the next start restore the processes from their images; remove takes back what that
// needs in the upperdir.
func (r *processesPart) stage(work string) (remove func() error, err error) {
	remove = func() error { return nil }
	manifest := r.reader.Manifest()
	paused, tcp := runtime.Status(manifest.Status) == runtime.Paused, manifest.TCP
	if r.data.Fork {
		paused, tcp = true, runtime.TCPClose // the fork has another address
	}
	if err := os.MkdirAll(work, 0o700); err != nil {
		return remove, err
	}
	if err := errors.Join(criu.ContinueWaits(r.images), criu.AdoptZombies(r.images)); err != nil {
		return remove, err
	}
	if err := hand(r.spec.IDs, r.images); err != nil {
		return remove, err
	}
	times, remove, err := remapped(r.c, r.images)
	if err != nil {
		return remove, err
	}

	options := criu.Options{TCP: tcp, EmptyNetwork: r.c.EmptyNetwork}
	config := filepath.Join(r.e.run, r.sb.ID, "criu.conf")
	if err := errors.Join(criu.WriteConfig(config, options), criu.ClearRestoreFailure(work)); err != nil {
		return remove, err
	}
	staged := stage.Restore{
		Images: r.images, Work: work, Flags: options.RuntimeFlags(), Config: config,
		Paused: paused, Times: times, Taken: manifest.Created,
	}
	if r.c.EmptyNetwork {
		if staged.Addresses, err = criu.Addresses(r.images, tcp); err != nil {
			return remove, err
		}
	}
	if staged.Timeout, err = r.timeLeft(); err != nil {
		return remove, err
	}
	return remove, r.c.Stage.Put(staged)
}

// tellProof warns of restored processes that differ from the checkpoint.
func (r *processesPart) tellProof(work string) {
	report, err := proof.ReadReport(work)
	if err != nil {
		r.warnings = append(slices.Clone(r.warnings),
			fmt.Sprintf("the report of the restored processes cannot be read: %v", err))
	}
	for _, d := range report.Different {
		if d.Inode && r.data.Fork {
			continue // all of its files are new
		}
		r.warnings = append(slices.Clone(r.warnings), "restored "+d.String())
	}
}

// judge turns the error of a start into that of the restore that was staged for it.
func (r *processesPart) judge(ctx context.Context, err error) error {
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
		err = hint(fmt.Errorf("%w: it was started afresh, because its engine does not look for restores in %s",
			runtime.ErrUnsupported, place.Run),
			"Set AGENTBOX_RUN to what it is in the environment of the engine, or unset it in both, and restore it again.")
	}
	return err
}
