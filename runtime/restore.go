package runtime

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// How far a restore has come. Until it swaps, Recover takes it back; from then
// on the old processes may be gone and Recover finishes it.
const (
	phasePrepare = "prepare"
	phaseSwap    = "swap"
)

// restoring is the journal's data of a restore.
type restoring struct {
	Phase     string `json:"phase"`
	Trees     []tree `json:"trees"` // what it replaces, the upperdir first
	Attempt   int    `json:"attempt"`
	FilesOnly bool   `json:"files_only"`
	Recreated bool   `json:"recreated"` // the sandbox had been removed
}

// Restore puts a sandbox back to a checkpoint. All that is needed is read,
// verified and laid out beside the running sandbox first; then the sandbox is
// stopped, the two upperdirs are exchanged by one rename, and it is started.
// When the start fails the exchange is taken back.
func (e *Engine) Restore(ctx context.Context, ref string, opts RestoreOptions) (_ Restored, err error) {
	defer func() { err = fail("restore", ref, err) }()
	r, err := e.target(ctx, ref, opts)
	if err != nil {
		return Restored{}, err
	}
	defer r.sb.lock.Unlock()
	if err := r.possible(); err != nil {
		return Restored{}, err
	}
	unlock, err := lockSlot(r.c)
	if err != nil {
		return Restored{}, err
	}
	defer unlock()
	in := store.Intent{Op: opRestore, Sandbox: r.sb.ID, Checkpoint: r.row.ID}
	err = e.intent(ctx, in, r.data, func(seq int64) (err error) {
		var undo undo
		defer func() { undo.run(ctx, &err) }()
		if r.data.Recreated {
			undo.add(func(ctx context.Context) error { return e.finishRemove(ctx, r.sb.host, r.sb.ID, false) })
			if err := e.create(ctx, r.spec, r.sb.Sandbox); err != nil {
				return err
			}
		}
		if err := e.open(ctx, r); err != nil {
			return err
		}
		return errors.Join(e.restore(ctx, seq, r), r.reader.Close())
	})
	if err != nil {
		return Restored{}, err
	}
	e.log.Info("restored", "sandbox", r.sb.ID, "checkpoint", r.row.ID, "down", r.down)
	out := Restored{Checkpoint: checkpointView(r.row), Recreated: r.data.Recreated, Verified: opts.Verify, Down: r.down, Warnings: r.row.Warnings}
	// It is done: a caller who goes away now does not make it a failure.
	out.Sandbox, err = e.Sandbox(context.WithoutCancel(ctx), r.sb.ID)
	return out, err
}

// target finds the sandbox and the checkpoint to restore, and locks the
// sandbox. One that was removed is made again in the course of the restore.
func (e *Engine) target(ctx context.Context, ref string, opts RestoreOptions) (*restoration, error) {
	r := &restoration{verify: opts.Verify, data: restoring{Phase: phasePrepare, FilesOnly: opts.FilesOnly}}
	var err error
	if r.sb, err = e.acquire(ctx, ref, "restore", lockWait); errors.Is(err, ErrNotFound) {
		return r, e.recreate(ctx, r, ref, opts.Checkpoint, err)
	}
	if err != nil {
		return nil, err
	}
	if r.row, err = e.choose(ctx, r.sb.Sandbox, opts.Checkpoint); err == nil {
		r.spec, err = spec(r.sb.Sandbox)
	}
	if err == nil {
		r.c, err = r.sb.host.Inspect(ctx, r.sb.ID)
	}
	if errors.Is(err, ErrNotFound) && !r.spec.Adopted && r.spec.ID != "" {
		// Its container was removed behind our back.
		if err = e.store.DeleteSandbox(ctx, r.sb.ID); err == nil {
			r.sb.lock.Unlock()
			return r, e.recreate(ctx, r, r.sb.Name, r.row.ID, ErrNotFound)
		}
	}
	if err != nil {
		r.sb.lock.Unlock()
		return nil, err
	}
	return r, nil
}

// choose finds the named checkpoint of a sandbox, or its newest ready one.
func (e *Engine) choose(ctx context.Context, sb store.Sandbox, ref string) (row store.Checkpoint, err error) {
	if ref == "" {
		rows, err := e.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
		if err != nil {
			return row, err
		}
		if len(rows) == 0 {
			return row, hint(fmt.Errorf("checkpoint of %s: %w", sb.Name, ErrNotFound), "Take one with: agentbox checkpoint "+sb.Name)
		}
		return rows[0], nil
	}
	row, err = e.store.Checkpoint(ctx, sb.ID+"@"+ref)
	if errors.Is(err, ErrNotFound) {
		row, err = e.checkpoint(ctx, ref)
	}
	switch {
	case errors.Is(err, ErrNotFound):
		return row, hint(err, "List what there is with: agentbox checkpoint ls "+sb.Name)
	case err != nil:
		return row, err
	case row.ImageDigest != sb.ImageDigest:
		return row, hint(fmt.Errorf("%w: checkpoint %s was taken over image %s, the sandbox runs over %s", ErrState, short(row.ID), row.ImageDigest, sb.ImageDigest),
			"Restore it under the name of its own sandbox, "+row.SandboxName+".")
	case row.SandboxID != sb.ID:
		return row, hint(fmt.Errorf("%w: checkpoint %s belongs to sandbox %s", ErrState, short(row.ID), row.SandboxName),
			"Restore puts a sandbox back to a checkpoint of its own.")
	case row.Status != CheckpointReady:
		return row, fmt.Errorf("%w: checkpoint %s is %s: %s", ErrState, short(row.ID), row.Status, row.Error)
	}
	return row, nil
}

// recreate plans to make a removed sandbox again from the spec of its
// checkpoint, with its old id, so that what its processes remember of
// themselves stays true.
func (e *Engine) recreate(ctx context.Context, r *restoration, name, ref string, missing error) error {
	row, err := e.newestOfGone(ctx, name)
	if errors.Is(err, ErrNotFound) {
		return missing
	}
	if err != nil {
		return err
	}
	if ref != "" {
		// Of several removed sandboxes of one name it may be an older one's.
		if row, err = e.store.Checkpoint(ctx, name+"@"+ref); errors.Is(err, ErrNotFound) {
			row, err = e.checkpoint(ctx, ref)
		}
		if err != nil {
			return err
		}
		if row.SandboxName != name && row.SandboxID != name {
			return hint(fmt.Errorf("%w: checkpoint %s belongs to sandbox %s", ErrState, short(row.ID), row.SandboxName),
				"Restore puts a sandbox back to a checkpoint of its own.")
		}
		if row.Status != CheckpointReady {
			return fmt.Errorf("%w: checkpoint %s is %s: %s", ErrState, short(row.ID), row.Status, row.Error)
		}
		if _, err := e.store.Sandbox(ctx, row.SandboxID); !errors.Is(err, ErrNotFound) {
			return errors.Join(err, fmt.Errorf("%w: checkpoint %s belongs to a sandbox that was not removed", ErrState, short(row.ID)))
		}
	}
	gone := store.Sandbox{ID: row.SandboxID, Name: row.SandboxName, ImageDigest: row.ImageDigest}
	gone.Spec = row.Spec
	if r.spec, err = spec(gone); err != nil {
		return err
	}
	if r.spec.Adopted {
		return hint(fmt.Errorf("its container is gone: %w", missing), "Agentbox did not make it and cannot make it again; its checkpoints are still there (agentbox checkpoint ls "+gone.Name+").")
	}
	gone.Backend = cmp.Or(r.spec.Backend, e.first)
	host, err := e.host(gone.Backend)
	if err != nil {
		return err
	}
	img, err := host.Images.ResolveDigest(ctx, gone.ImageDigest)
	if err != nil {
		return err
	}
	gone.Image, gone.Lower, gone.Labels = r.spec.Image, img.Lower, r.spec.Labels
	gone.Attempt, gone.Created = 1, time.Now()
	lock, err := e.store.Lock(ctx, gone.ID, "restore", lockWait)
	if err != nil {
		return err
	}
	r.sb, r.row, r.data.Recreated = &locked{gone, host, lock}, row, true
	return nil
}

// newestOfGone finds the newest checkpoint of a removed sandbox, by its name or
// its id.
func (e *Engine) newestOfGone(ctx context.Context, ref string) (store.Checkpoint, error) {
	row, err := e.store.NewestOfName(ctx, ref)
	if !errors.Is(err, ErrNotFound) {
		return row, err
	}
	rows, e2 := e.store.Checkpoints(ctx, store.Filter{SandboxID: ref})
	if e2 != nil || len(rows) == 0 {
		return row, cmp.Or(e2, err)
	}
	return rows[0], nil
}

// restoration is one restore under way.
type restoration struct {
	sb     *locked
	row    store.Checkpoint
	spec   Spec
	c      Container
	reader *store.Reader
	verify bool
	data   restoring
	down   time.Duration
}

// full tells whether processes are restored.
func (r *restoration) full() bool { return r.row.Kind == KindFull && !r.data.FilesOnly }

// open looks at the sandbox and opens the checkpoint; it changes nothing.
func (e *Engine) open(ctx context.Context, r *restoration) (err error) {
	if !r.spec.Adopted {
		if _, err := r.sb.host.Images.ResolveDigest(ctx, r.sb.ImageDigest); err != nil {
			return err
		}
	}
	if r.c, err = r.sb.host.Inspect(ctx, r.sb.ID); err != nil {
		return err
	}
	r.reader, err = e.store.OpenCheckpoint(ctx, r.row.ID)
	return err
}

func (e *Engine) restore(ctx context.Context, seq int64, r *restoration) error {
	r.data.Attempt = r.sb.Attempt + 1
	if err := r.plan(); err != nil {
		return err
	}
	if err := r.checkTools(); err != nil {
		return err
	}
	if err := e.advance(ctx, seq, r.data); err != nil {
		return err
	}
	if err := e.layOut(ctx, r); err != nil {
		return errors.Join(err, r.data.discard())
	}
	if err := r.checkMounted(); err != nil {
		return errors.Join(err, r.data.discard())
	}
	if err := e.commitTo(ctx, seq, r); err != nil {
		return errors.Join(err, r.data.discard())
	}
	// The old processes end now: a caller who goes away must not stop us
	// half-way.
	return e.swap(context.WithoutCancel(ctx), r)
}

// commitTo records that the sandbox is about to be touched, and how to tell
// afterwards how far that came.
func (e *Engine) commitTo(ctx context.Context, seq int64, r *restoration) error {
	for i := range r.data.Trees {
		if err := r.data.Trees[i].mark(); err != nil {
			return err
		}
	}
	r.data.Phase = phaseSwap
	return e.advance(ctx, seq, r.data)
}

// layOut verifies the checkpoint while it builds the new upperdir beside the
// old one. Nothing of the sandbox is touched.
func (e *Engine) layOut(ctx context.Context, r *restoration) error {
	if err := failpoint.Hit("restore.before-layout"); err != nil {
		return err
	}
	group, gctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		return each(gctx, r.data.Trees, func(ctx context.Context, t tree) error { return t.layOut(ctx, r.reader) })
	})
	if r.full() {
		group.Go(func() error { return r.reader.VerifyImages(gctx) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.after-layout"); err != nil {
		return err
	}
	if !r.verify {
		return nil
	}
	return r.prove(ctx)
}

// prove compares all that is laid out with the checkpoint, in every respect.
func (r *restoration) prove(ctx context.Context) error {
	return each(ctx, r.data.Trees, func(ctx context.Context, t tree) error { return t.prove(ctx, r.reader) })
}

// extract unpacks the files of a checkpoint into dir and compares every entry,
// as it was written, with the checkpoint's own list.
func extract(ctx context.Context, reader content, dir string) (err error) {
	files, err := reader.Files(ctx)
	if err != nil {
		return err
	}
	defer func() { err = firstOf(err, files.Close()) }()
	tree, err := reader.Tree(ctx)
	if err != nil {
		return err
	}
	defer func() { err = firstOf(err, tree.Close()) }()
	enough := errors.New("enough")
	written := func(yield func(overlay.Entry, error) bool) {
		_, err := overlay.Apply(ctx, files, dir, overlay.ApplyOptions{Entry: func(entry overlay.Entry) error {
			if !yield(entry, nil) {
				return enough
			}
			return nil
		}})
		if err != nil && err != enough {
			yield(overlay.Entry{}, err)
		}
	}
	return equal(overlay.Compare(overlay.TreeEntries(tree), written, overlay.CompareOptions{Limit: 1}))
}

// firstOf is for readers, whose Close repeats what reading has told.
func firstOf(err, closing error) error {
	if err != nil {
		return err
	}
	return closing
}

// equal turns the outcome of a comparison into an error.
func equal(differences []overlay.Difference, err error) error {
	if err == nil && len(differences) > 0 {
		err = fmt.Errorf("%w: the files differ from the manifest: %v", ErrCorrupt, differences[0])
	}
	return err
}

// swap ends the old processes, exchanges the upperdirs and starts the sandbox.
func (e *Engine) swap(ctx context.Context, r *restoration) (err error) {
	if err := errors.Join(failpoint.Hit("restore.before-stop"), e.checkAlone(ctx, r)); err != nil {
		return errors.Join(err, r.data.discard())
	}
	gone := time.Now()
	defer func() {
		if err == nil || errors.Is(err, errUnfinished) || r.data.Recreated {
			return
		}
		// Whoever asked for --rm did not ask for the loss of what a failed
		// restore has put back.
		err = errors.Join(err, e.store.Keep(ctx, r.sb.ID, true))
		now, e2 := r.sb.host.Inspect(ctx, r.sb.ID)
		switch {
		case errors.Is(e2, ErrNotFound):
			err = fmt.Errorf("%w: it was removed while it was being restored", ErrState)
		case e2 != nil:
		case now.Status == Running || now.Status == Paused:
			err = hint(err, "The sandbox could not be stopped and goes on, with the files it had before.")
		case r.c.Status == Running:
			err = hint(err, "The sandbox is stopped, with the files it had before; start it afresh with: agentbox start "+r.sb.Name)
		}
	}()
	var undo undo
	started := false
	defer func() {
		if err != nil && started {
			// While anything may run on the files that are in place, they must stay
			// there: a directory that is taken away from under an overlay takes along
			// all that is written from then on.
			if e2 := e.halt(ctx, r); e2 != nil {
				err = fmt.Errorf("%w; and it cannot be stopped: %w (%w)", err, e2, errUnfinished)
				return
			}
		}
		undo.run(ctx, &err)
	}()
	undo.add(func(context.Context) error { return r.data.discard() })
	// Between here and the start below nobody else may start it: with a
	// daemon, others have ways to.
	if err := stage.Hold(r.c.Stage.Run, r.c.Stage.ID); err != nil {
		return err
	}
	undo.add(func(context.Context) error { return stage.Clear(r.c.Stage.Run, r.c.Stage.ID) })
	if err := r.sb.host.Stop(ctx, r.sb.ID, StopOptions{Silent: true}); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.after-stop"); err != nil {
		return err
	}
	if err := e.checkAlone(ctx, r); err != nil {
		return err
	}
	if !r.data.Trees[0].exchanged() {
		if err := forgetManaged(r.c.Managed); err != nil {
			return err
		}
	}
	for _, t := range r.data.Trees {
		undo.add(func(context.Context) error {
			if !t.exchanged() {
				return nil
			}
			return exchange(t.Dir, t.Staged)
		})
		if t.exchanged() {
			continue
		}
		if err := exchange(t.Dir, t.Staged); err != nil {
			return err
		}
		if err := failpoint.Hit("restore.between-exchanges"); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("restore.after-exchange"); err != nil {
		return err
	}
	undo.add(func(context.Context) error { return revertManaged(r.c.Managed) })
	if err := putManaged(r.c.Managed, r.reader.Manifest()); err != nil {
		return err
	}
	durable := make(chan error, 1)
	go func() {
		durable <- each(ctx, r.data.Trees, func(_ context.Context, t tree) error { return syncfs(t.Dir) })
	}()
	started = true
	err = e.resume(ctx, r)
	r.down = time.Since(gone)
	if err = errors.Join(err, <-durable); err != nil {
		return err
	}
	undo.steps, started = nil, false
	if err := errors.Join(forgetManaged(r.c.Managed), e.restored(ctx, r.sb.ID, r.row.ID, r.data)); err != nil {
		return fmt.Errorf("the sandbox is restored, but: %w (%w)", err, errUnfinished)
	}
	return nil
}

// halt stops a sandbox whose start has failed, so that the restore can be taken
// back. When it cannot, nobody else may start it until Recover has finished.
func (e *Engine) halt(ctx context.Context, r *restoration) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := r.sb.host.Stop(ctx, r.sb.ID, StopOptions{})
	if errors.Is(err, ErrNotFound) {
		return nil // somebody removed it
	}
	if err != nil {
		err = errors.Join(err, stage.Hold(r.c.Stage.Run, r.c.Stage.ID))
	}
	return err
}

// restored ends a restore whose sandbox is as it should be.
func (e *Engine) restored(ctx context.Context, sandbox, checkpoint string, data restoring) error {
	if err := e.store.SetHead(ctx, sandbox, checkpoint, data.Attempt); err != nil {
		return err
	}
	if err := failpoint.Hit("restore.after-head"); err != nil {
		return err
	}
	return data.discard()
}

// resume starts what ran at the checkpoint.
func (e *Engine) resume(ctx context.Context, r *restoration) error {
	manifest := r.reader.Manifest()
	was := Status(manifest.Status)
	place := r.c.Stage
	if was != Running && was != Paused {
		return stage.Release(place.Run, place.ID)
	}
	if r.full() {
		work := filepath.Join(e.run, r.sb.ID, "restore")
		if err := os.MkdirAll(work, 0o700); err != nil {
			return err
		}
		options := criu.Options{TCP: manifest.TCP, LeaveStopped: was == Paused, EmptyNetwork: r.c.EmptyNetwork}
		config := filepath.Join(e.run, r.sb.ID, "criu.conf")
		if err := criu.WriteConfig(config, options); err != nil {
			return err
		}
		staged := stage.Restore{Images: r.reader.CRIUDir(), Work: work, Flags: options.RuntimeFlags(), Config: config, Paused: was == Paused}
		for _, p := range manifest.Processes.List {
			if p.Stopped {
				staged.Stopped = append(staged.Stopped, p.Pid)
			}
		}
		if err := stage.Put(place.Run, place.ID, staged); err != nil {
			return err
		}
		defer stage.Clear(place.Run, place.ID)
		if err := failpoint.Hit("restore.after-stage"); err != nil {
			return err
		}
	}
	if err := stage.Release(place.Run, place.ID); err != nil {
		return err
	}
	_, err := r.sb.host.Start(ctx, r.sb.ID, StartOptions{Env: identity(r.spec, r.data.Attempt)})
	if errors.Is(err, ErrState) && r.full() && stage.Used(place.Run, place.ID) {
		err = nil // somebody else started it since we staged, and thereby restored it
	}
	if err == nil && r.full() && r.spec.Adopted && !r.c.EmptyNetwork {
		// The images of a namespace that is CRIU's to keep have the cut in
		// them under which they were made.
		var now Container
		if now, err = r.sb.host.Inspect(ctx, r.sb.ID); err == nil && now.Pid != 0 {
			err = criu.Reconnect(now.Pid)
		}
	}
	if err != nil {
		return err
	}
	return failpoint.Hit("restore.after-start")
}

// lockSlot keeps agentboxes with another root, which may have taken on the same
// container, away from it. One that is yet to be made nobody else has.
func lockSlot(c Container) (unlock func(), err error) {
	if c.Stage.ID == "" {
		return func() {}, nil
	}
	return stage.Lock(c.Stage.Run, c.Stage.ID)
}

// exchange swaps two directories by one atomic rename and makes it last.
func exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return fmt.Errorf("exchange %s and %s: %w", a, b, err)
	}
	dir, err := os.Open(filepath.Dir(a))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// syncfs makes all that was written to the filesystem of dir durable.
func syncfs(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(f.Fd())), f.Close())
}

// discard deletes a staged upperdir. RemoveAll works beneath directory
// handles and follows no symlink.
func discard(dir string) error { return os.RemoveAll(dir) }

func decode[T any](raw json.RawMessage) (v T, err error) {
	if len(raw) == 0 {
		return v, nil
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("journal: %w: %w", ErrCorrupt, err)
	}
	return v, nil
}
