package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// The phases of a restore. Before phaseSwap, Recover rolls the restore back; from then
// on the old processes may be gone, and Recover finishes it. From phaseProven on the files
// are proven to be the checkpoint's, so a running sandbox is a restored one. In phaseHosts
// the sandbox is restored and is not touched any more; only host files are put back.
const (
	phasePrepare = "prepare"
	phaseSwap    = "swap"
	phaseProven  = "proven"
	phaseHosts   = "hosts"
)

// restoring is the journal's data of a restore.
type restoring struct {
	Phase     string          `json:"phase"`
	Trees     []worktree.Tree `json:"trees"` // the trees that it changes, the upperdir first
	Attempt   int             `json:"attempt"`
	FilesOnly bool            `json:"files_only"`
	Recreated bool            `json:"recreated"` // the sandbox had been removed
	Fork      bool            `json:"fork"`      // the sandbox is a new one, of another's checkpoint
	Salvage   bool            `json:"salvage"`
	Was       runtime.Status  `json:"was"`  // before the verb
	Undo      string          `json:"undo"` // the undo checkpoint
	NoUndo    bool            `json:"no_undo"`

	// Begun is the boot of the host in which the restore began. A record from elsewhere cannot
	// know it: a restore of another boot starts nothing and writes no host files.
	Begun string `json:"begun,omitempty"`

	HostFiles []string `json:"host_files,omitempty"` // attached files that are put back
	HostUndo  string   `json:"host_undo,omitempty"`  // the checkpoint that has their previous contents, if not Undo

	// From phaseProven on: when the sandbox was last started before the restore's own
	// start, and the boot in which the files were proven.
	Started time.Time `json:"started,omitzero"`
	Boot    string    `json:"boot,omitempty"`
}

// Restore puts a sandbox back to a checkpoint. It first makes an undo checkpoint of the
// present state, then reads, proves and stages all that is needed beside the files. Then
// it stops the sandbox, swaps in what differs by renames, and starts the sandbox. If
// that fails, it puts the files back.
func (e *Engine) Restore(ctx context.Context, ref string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	return verb(ctx, e, onSandbox("restore", ref), func(ctx context.Context) (runtime.Restored, error) { return e.restoreLocked(ctx, ref, nil, opts) })
}

// restoreLocked is Restore for a sandbox whose lock it takes over; nil: it locks the
// sandbox itself.
func (e *Engine) restoreLocked(ctx context.Context, ref string, sb *locked, opts runtime.RestoreOptions) (out runtime.Restored, err error) {
	defer func() { err = fail("restore", ref, err) }()
	if err := checkRestore(opts); err != nil {
		if sb != nil {
			sb.lock.Unlock()
		}
		return runtime.Restored{}, err
	}
	if opts.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, opts.Timeout)
		defer cancel()
	}
	t := &trying{sb: sb, opts: opts, noUndo: opts.NoUndo, steps: progress.Follow(opts.Progress)}
	defer t.steps.End()
	if opts.Strategy == "" {
		out, err = e.try(ctx, ref, t)
		for more := 2; more > 0 && t.endedUnder(ctx, err); more-- {
			out, err = e.try(ctx, ref, t)
		}
	} else {
		out, err = e.escalate(ctx, ref, t)
	}
	if err == nil {
		return out, nil
	}
	if t.h != nil {
		t.h.facts.Attempts = t.attempts
		t.h.failed(ctx, err)
	}
	return out, errors.Join(err, e.alert(ctx, t, err))
}

// trying is a whole restore: one attempt, or several with different strategies.
type trying struct {
	sb       *locked // locked by the caller; nil: not yet looked up
	opts     runtime.RestoreOptions
	steps    *progress.Meter
	noUndo   bool   // no undo checkpoint is wanted once the restore is done
	way      string // of this attempt; see Strategies. Empty: as the checkpoint is
	attempts []runtime.RestoreAttempt
	h        *hooks       // of all attempts, once the sandbox is known
	r        *restoration // the last attempt, once its sandbox and checkpoint are known
	begun    bool         // no check has refused it
	kept     string       // id of the undo checkpoint of an attempt that failed or was to recreate the sandbox
	pinned   bool         // kept was pinned by this restore
	held     bool         // the sandbox is on hold, because every attempt failed

	settled     bool             // undo commands were run
	compensated []runtime.Effect // their results
	told        []string         // warnings about them
}

// endedUnder reports whether the attempt failed, without side effects, only because the
// sandbox exited while it was being inspected (as in a crash loop). It can then be
// restored like any stopped sandbox.
func (t *trying) endedUnder(ctx context.Context, err error) bool {
	if !errors.Is(err, runtime.ErrState) || isCalledOff(err) || t.sb != nil || t.r == nil || t.r.undone != "" || t.r.c.Status != runtime.Running && t.r.c.Status != runtime.Paused {
		return false
	}
	now, err := t.r.sb.host.Inspect(ctx, t.r.sb.ID)
	return err == nil && now.Status == runtime.Exited
}

// try makes one attempt to restore.
func (e *Engine) try(ctx context.Context, ref string, t *trying) (_ runtime.Restored, err error) {
	r, err := e.target(ctx, ref, t.sb, t.opts)
	if err != nil {
		return runtime.Restored{}, err
	}
	t.r, r.settled, r.commanded = r, t.settled, len(t.compensated) > 0
	r.sb.steps = t.steps
	if t.way == runtime.StrategyRecreate {
		r.data.HostUndo = t.kept
	}
	defer func() { // the next attempt reports what a failed one has compensated
		t.settled, t.told = r.settled, append(t.told, r.told...)
		t.compensated = append(t.compensated, r.compensated...)
	}()
	defer e.tidy(ctx) // once the sandbox is not held any more
	// Not a plain defer: forgetOrphan replaces the lock.
	defer func() { r.sb.lock.Unlock() }()
	if t.way == "" {
		if err := r.possible(); err != nil {
			return runtime.Restored{}, err
		}
	}
	if t.h == nil {
		h, err := e.hooksOf("restore", r.spec)
		if err != nil {
			return runtime.Restored{}, err
		}
		h.of(r.row)
		t.h = h
		if err := h.before(ctx, policy.BeforeRestore); err != nil {
			return runtime.Restored{}, err
		}
	}
	t.begun = true
	if t.way != "" {
		if err := r.possible(); err != nil {
			return runtime.Restored{}, err
		}
	}
	switch {
	case t.way == runtime.StrategyRecreate && !r.data.Recreated:
		if err := e.clearAway(ctx, r, t); err != nil {
			return runtime.Restored{}, err
		}
		r.data.HostUndo = t.kept
	case r.data.Recreated && r.data.HostUndo == "": // otherwise this restore removed it and has proven them
		if _, err := e.proveHosts(ctx, r); err != nil {
			return runtime.Restored{}, err
		}
	}
	if err := e.forgetOrphan(ctx, r); err != nil {
		return runtime.Restored{}, err
	}
	unlock, err := lockSlot(r.c)
	if err != nil {
		return runtime.Restored{}, err
	}
	defer unlock()
	if err := e.perform(ctx, r); err != nil {
		err = errors.Join(r.hostErr, err)
		if text := compensatedText(r.compensated); text != "" {
			err = hint(err, text)
		}
		return runtime.Restored{}, e.explainFull(r, err)
	}
	if r.starts() {
		e.every(r.spec)
		e.enforce(r.spec, r.c)
	} else if err := e.staysDown(r.spec, r.restart); err != nil {
		e.log.Warn("restart policy not suspended; it may start the sandbox", "sandbox", r.sb.ID, "err", err)
	}
	if r.restart && r.row.Attached != nil { // no caller reads its warnings
		e.noteHosts(r, r.hostsLeftText())
	}
	e.log.Info("sandbox restored", "sandbox", r.sb.ID, "checkpoint", r.row.ID, "down", r.down, "changed", r.changed)
	out := runtime.Restored{
		Checkpoint: checkpointView(r.row), Recreated: r.data.Recreated, Verified: t.opts.Verify, Down: r.down, Files: r.files, Warnings: slices.Concat(r.warnings, t.told, r.told),
		Attached: r.hostReport(), Undo: r.undone, Changed: r.changed, Lost: slices.Sorted(maps.Keys(r.lost)), Compensated: slices.Concat(t.compensated, r.compensated),
	}
	err = e.forgetKept(ctx, t, &out)
	if r.hostErr != nil {
		err = errors.Join(r.hostErr, err)
		if text := compensatedText(out.Compensated); text != "" {
			err = hint(err, text)
		}
		var looked error
		out.Sandbox, looked = e.inspect(context.WithoutCancel(ctx), r.sb.ID)
		return out, errors.Join(err, looked)
	}
	if err != nil {
		out.Warnings = append(slices.Clone(out.Warnings), err.Error())
	}
	// The restore is done; a caller that disconnects now does not make it fail.
	out.Sandbox, err = e.inspect(context.WithoutCancel(ctx), r.sb.ID)
	out.Warnings = slices.Concat(out.Warnings, t.h.after(ctx, policy.AfterRestore))
	return out, err
}

// perform does the restore that target has prepared.
func (e *Engine) perform(ctx context.Context, r *restoration) error {
	in := store.Intent{Op: opRestore, Sandbox: r.sb.ID, Checkpoint: r.row.ID, Lazy: true}
	r.data.Begun = bootID()
	return e.intent(ctx, in, r.data, func(seq int64) (err error) {
		var undo undo.Stack
		defer func() { undo.Run(ctx, &err) }()
		if r.data.Recreated || r.data.Fork {
			undo.Add(func(ctx context.Context) error {
				if r.data.Phase == phaseHosts {
					return nil // it is restored
				}
				return e.finishRemove(ctx, r.sb.host, r.sb.ID, false)
			})
			if err := e.create(ctx, r.spec, r.sb.Sandbox); err != nil {
				return err
			}
		}
		if err := e.open(ctx, r); err != nil {
			return err
		}
		return errors.Join(e.restore(ctx, seq, r), r.reader.Close())
	})
}

// restoration is one restore under way.
type restoration struct {
	sb          *locked
	row         store.Checkpoint
	spec        runtime.Spec
	c           runtime.Container
	reader      *store.Reader
	caller      context.Context // its end also ends the restore of processes; nil: none
	verify      bool
	orphan      bool              // the sandbox has a record, but no container
	pull        image.PullOptions // for a sandbox that is recreated
	data        restoring
	present     *making            // the undo checkpoint
	changes     []*worktree.Change // of the trees
	again       bool               // another process has started it since it was inspected
	before      time.Time          // when it was last started, as read once it was stopped
	idle        bool               // it has had no process since it was inspected
	past        bool               // the way back is not needed any more
	images      string             // where the process images are laid out
	lost        map[string]bool    // paths of the upperdir that cannot be restored
	fork        *forking
	attached    bool       // attached files are put back even if the checkpoint is foreign
	noAttached  bool       // attached files are left alone
	hosts       *hostFiles // the attached files to put back; nil: none
	hostErr     error      // why they are not put back, though the sandbox is restored
	hostsTold   string     // what Recover reports about them
	resumed     bool       // Recover resumes a restore that was killed
	stranded    bool       // some host files are not as they were; the checkpoint that has them is pinned
	warnings    []string
	restart     bool             // the restore is a restart by the sandbox's policy
	noEffects   bool             // effects are left alone
	settled     bool             // undo commands were run, by this attempt or an earlier one
	commanded   bool             // an earlier attempt ran some
	told        []string         // warnings about them
	compensated []runtime.Effect // effects whose undo commands were run, with their results

	grants  runtime.Grants // what a foreign checkpoint's spec gets
	caveats []string       // warnings about the grants

	given   []runtime.Secret     // new sources of secrets, if any
	secrets []runtime.SecretFile // the secrets that the start puts into the sandbox

	began   time.Time     // start of the work on the files
	files   time.Duration // duration of that work
	down    time.Duration
	undone  string // id of the undo checkpoint
	changed int
}

// full reports whether processes are restored.
func (r *restoration) full() bool { return r.row.Kind == runtime.KindFull && !r.data.FilesOnly }

// open inspects the sandbox and opens the checkpoint; it changes nothing.
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

// thisBoot reports whether the restore began in this boot of the host.
func (d restoring) thisBoot() bool { return d.Begun != "" && d.Begun == bootID() }

// starts reports whether the sandbox is started once the files are in place.
func (r *restoration) starts() bool {
	was := runtime.Status(r.reader.Manifest().Status)
	return (was == runtime.Running || was == runtime.Paused) && (r.fork == nil || !r.fork.noStart) && (!r.resumed || r.data.thisBoot())
}

func (e *Engine) restore(ctx context.Context, seq int64, r *restoration) (err error) {
	if r.starts() {
		if err := errors.Join(mayStart(r.spec), e.arm(ctx, r)); err != nil {
			return err
		}
	}
	r.data.Attempt, r.data.Was = r.sb.Attempt+1, r.c.Status
	if r.data.Fork {
		r.data.Attempt = 1
	}
	if !r.data.Recreated && !r.data.Fork {
		r.data.Undo = newID()
	}
	r.warnings = slices.Concat(r.row.Warnings, r.caveats, r.unplaced())
	r.planHosts()
	defer e.closeHosts(r)
	if err := errors.Join(e.plan(ctx, r), r.checkTools()); err != nil {
		return err
	}
	if err := e.advance(ctx, seq, r.data, true); err != nil {
		return err
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(context.Context) error { return r.discard() })
	if err := e.layOut(ctx, seq, r, &undo); err != nil {
		return err
	}
	if err := r.checkMounted(ctx); err != nil {
		return err
	}
	if err := e.compensate(ctx, r); err != nil {
		return err
	}
	if err := e.beginSwap(ctx, seq, r); err != nil {
		return err
	}
	undo.Release()
	// The old processes end now: a caller that disconnects must not stop the restore
	// half-way. Only CRIU, which may hang, still ends with the caller's context.
	r.caller = ctx
	return e.swap(context.WithoutCancel(ctx), seq, r)
}

// layOut proves and stages all that the restore needs, and makes an undo checkpoint of
// the present state. It leaves the sandbox frozen, so that the comparison stays true,
// and changes nothing else.
func (e *Engine) layOut(ctx context.Context, seq int64, r *restoration, undo *undo.Stack) error {
	if err := failpoint.Hit("restore.before-layout"); err != nil {
		return err
	}
	if r.c.Status != runtime.Running { // otherwise once it is frozen
		e.liftFiles(r.spec, r.c)
	}
	if err := e.layOutImages(ctx, r); err != nil {
		return err
	}
	if err := e.findLost(ctx, r); err != nil {
		return err
	}
	if err := e.layHosts(ctx, r); err != nil {
		return err
	}
	r.began = time.Now()
	aside, err := r.layAside(ctx)
	if err != nil {
		return err
	}
	if !aside {
		if err := e.keepPresent(ctx, seq, r, undo); err != nil {
			return err
		}
	}
	err = e.recallHosts(ctx, r)
	if err != nil && r.data.Recreated {
		r.hosts.err, err = err, nil // as in layHosts
	}
	if err := errors.Join(err, failpoint.Hit("restore.after-undo")); err != nil {
		return err
	}
	if r.changes == nil {
		r.sb.steps.Begin(runtime.PhaseLooking, 0)
		if err := r.layOutFiles(ctx); err != nil {
			return err
		}
	}
	return failpoint.Hit("restore.after-layout")
}

// layOutImages writes the process images where the OCI runtime can read them.
func (e *Engine) layOutImages(ctx context.Context, r *restoration) error {
	if !r.full() {
		return nil
	}
	r.images = e.store.StagedImages(r.sb.ID)
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

// keepPresent makes a checkpoint of what the restore replaces, and leaves the sandbox
// frozen. The checkpoint is also the way back if the restore fails, so it has the files
// even if no undo checkpoint is wanted.
func (e *Engine) keepPresent(ctx context.Context, seq int64, r *restoration, undo *undo.Stack) error {
	if r.data.Undo == "" {
		return nil
	}
	// The restore ends all processes, even one of files only, so the undo checkpoint
	// includes them.
	opts := runtime.CheckpointOptions{Trigger: runtime.TriggerUndo, TCP: runtime.TCPEstablished, FilesOnly: r.data.NoUndo, WithVolumes: len(r.data.Trees) > 1, Paranoid: r.verify, Attach: r.hostPaths()}
	unlearnt := false
	for {
		k, err := e.prepare(ctx, r.sb, r.c, opts)
		if err != nil && !opts.FilesOnly {
			if !errors.Is(err, runtime.ErrNotFound) { // otherwise it has no process that could be lost
				r.undoIsFiles(err)
			}
			opts.FilesOnly = true
			continue
		}
		if err != nil {
			return err
		}
		k.row.ID, k.hold = r.data.Undo, true
		if r.row.Damaged == "" && !unlearnt {
			if k.like, err = r.reader.TreePieces(ctx, 0); err != nil {
				return err
			}
		}
		var laid error
		if k.row.Kind == runtime.KindFiles && len(k.trees) >= len(r.data.Trees) {
			// Staging does not touch the sandbox.
			k.beside = func(ctx context.Context) {
				r.take(k)
				laid = r.layOutFiles(ctx)
			}
		}
		row, err := e.record(ctx, k)
		if err != nil && !opts.FilesOnly && ctx.Err() == nil && !errors.Is(err, unix.ENOSPC) && !isCalledOff(err) {
			// A sandbox that cannot be dumped can still be undone as files.
			e.log.Info("undo checkpoint limited to files", "sandbox", r.sb.ID, "err", err)
			r.undoIsFiles(err)
			opts.FilesOnly, r.data.Undo = true, newID()
			// Recover looks for the undo checkpoint that the journal names.
			if err := e.advance(ctx, seq, r.data, true); err != nil {
				return err
			}
			continue
		}
		if err != nil && k.unlearnt && !unlearnt {
			// Try once more without the file cache.
			unlearnt, r.data.Undo = true, newID()
			if err := e.advance(ctx, seq, r.data, true); err != nil {
				return err
			}
			continue
		}
		if isCalledOff(err) {
			return r.hostTrouble(fmt.Errorf("keep the present state: %w", err))
		}
		if err != nil {
			return fmt.Errorf("keep the present state: %w", err)
		}
		r.present, r.undone = k, row.ID
		undo.Add(func(ctx context.Context) error { return e.store.RemoveCheckpoint(ctx, row.ID) })
		undo.Add(func(ctx context.Context) error { return errors.Join(k.cut.End(), e.thaw(ctx, k)) })
		r.take(k)
		return laid
	}
}

// undoIsFiles warns that the processes that the restore ends are lost.
func (r *restoration) undoIsFiles(why error) {
	r.warnings = append(slices.Clone(r.warnings), fmt.Sprintf("the undo checkpoint has files only: %v; the processes that this restore has ended cannot be brought back", why))
}

// take takes over the collections of the undo checkpoint.
func (r *restoration) take(k *making) {
	for i := range r.data.Trees {
		for _, t := range k.trees {
			if t.Dir == r.data.Trees[i].Dir {
				r.data.Trees[i].Adopt(t)
			}
		}
	}
}

// lockSlot locks out agentbox processes with another root, which may have adopted the
// same container. A container that does not exist yet needs no lock.
func lockSlot(c runtime.Container) (unlock func(), err error) {
	if c.Stage.ID == "" {
		return func() {}, nil
	}
	return c.Stage.Lock()
}

func decode[T any](raw json.RawMessage) (v T, err error) {
	if len(raw) == 0 {
		return v, nil
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("journal: %w: %w", runtime.ErrCorrupt, err)
	}
	return v, nil
}
