package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/store"
)

// restores brings sandboxes back to checkpoints, and makes new ones from them.
type restores struct {
	*core

	events      *eventLog
	restarts    *restartLog
	admission   *admission
	transfers   *transfers
	sandboxes   *sandboxes
	checkpoints *checkpoints
	leases      *leases
	supervisor  *supervisor
	recovery    *recovery
	upkeep      *upkeep

	engine *Engine // of the parts of a restore
}

// Restore puts a sandbox back to a checkpoint. It first makes an undo checkpoint of the
// present state, then reads, proves and stages all that is needed beside the files. Then
// it stops the sandbox, swaps in what differs by renames, and starts the sandbox. If
// that fails, it puts the files back.
func (v checkpointVerbs) Restore(ctx context.Context, ref string, opts runtime.RestoreOptions) (runtime.Restored, error) {
	return verb(ctx, v.e, onSandbox("restore", ref), func(ctx context.Context) (runtime.Restored, error) {
		return v.e.restores.restoreLocked(ctx, ref, nil, opts)
	})
}

// restoreLocked is Restore for a sandbox whose lock it takes over; nil: it locks the
// sandbox itself.
func (rs *restores) restoreLocked(
	ctx context.Context, ref string, sb *locked, opts runtime.RestoreOptions,
) (runtime.Restored, error) {
	return rs.restoreTo(ctx, ref, sb, opts, nil)
}

// restoreTo is restoreLocked for an aim; nil: the options name the checkpoint.
func (rs *restores) restoreTo(
	ctx context.Context, ref string, sb *locked, opts runtime.RestoreOptions, to *aim,
) (out runtime.Restored, err error) {
	verb := opRestore
	if to != nil {
		verb = to.verb
	}
	defer func() { err = fail(verb, ref, err) }()
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
	t := &trying{sb: sb, opts: opts, to: to, noUndo: opts.NoUndo, steps: progress.Follow(opts.Progress)}
	defer t.steps.End()
	if opts.Strategy == "" {
		out, err = rs.try(ctx, ref, t)
		for more := 2; more > 0 && t.endedUnder(ctx, err); more-- {
			out, err = rs.try(ctx, ref, t)
		}
	} else {
		out, err = rs.escalate(ctx, ref, t)
	}
	if err == nil {
		return out, nil
	}
	if t.h != nil {
		t.h.facts.Attempts = t.attempts
		t.h.failed(ctx, err)
	}
	return out, errors.Join(err, rs.alert(ctx, t, err))
}

// trying is a whole restore: one attempt, or several with different strategies.
type trying struct {
	sb       *locked // locked by the caller; nil: not yet looked up
	opts     runtime.RestoreOptions
	to       *aim // nil: opts name the checkpoint
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
	if !errors.Is(err, runtime.ErrState) || isCalledOff(err) || t.sb != nil || t.r == nil || t.r.files.undone != "" ||
		t.r.c.Status != runtime.Running && t.r.c.Status != runtime.Paused {
		return false
	}
	now, err := t.r.sb.host.Inspect(ctx, t.r.sb.ID)
	return err == nil && now.Status == runtime.Exited
}

// try makes one attempt to restore.
func (rs *restores) try(ctx context.Context, ref string, t *trying) (_ runtime.Restored, err error) {
	r, err := rs.target(ctx, ref, t.sb, t.opts, t.to)
	if err != nil {
		return runtime.Restored{}, err
	}
	t.r, r.effects.settled, r.effects.commanded = r, t.settled, len(t.compensated) > 0
	r.sb.steps = t.steps
	if t.way == runtime.StrategyRecreate {
		r.data.HostUndo = t.kept
	}
	defer func() { // the next attempt reports what a failed one has compensated
		t.settled, t.told = r.effects.settled, append(t.told, r.told...)
		t.compensated = append(t.compensated, r.effects.compensated...)
	}()
	defer rs.upkeep.tidy(ctx) // once the sandbox is not held any more
	// Not a plain defer: forgetOrphan replaces the lock.
	defer func() { r.sb.lock.Unlock() }()
	if err := rs.ready(ctx, r, t); err != nil {
		return runtime.Restored{}, err
	}
	if err := rs.forgetOrphan(ctx, r); err != nil {
		return runtime.Restored{}, err
	}
	unlock, err := lockSlot(r.c)
	if err != nil {
		return runtime.Restored{}, err
	}
	defer unlock()
	if err := rs.perform(ctx, r); err != nil {
		err = errors.Join(r.attached.err, err)
		if text := compensatedText(r.effects.compensated); text != "" {
			err = hint(err, text)
		}
		return runtime.Restored{}, rs.explainFull(r, err)
	}
	if r.starts() {
		rs.supervisor.enforce(r.spec, r.c)
	} else if err := rs.restarts.staysDown(r.spec, r.restart); err != nil {
		rs.log.Warn("restart policy not suspended; it may start the sandbox", "sandbox", r.sb.ID, "err", err)
	}
	if r.restart && r.row.Attached != nil { // no caller reads its warnings
		r.attached.noteHosts(r.attached.hostsLeftText())
	}
	rs.log.Info("sandbox restored", "sandbox", r.sb.ID, "checkpoint", r.row.ID, "down", r.down,
		"changed", r.files.changed)
	out := t.restored()
	err = rs.forgetKept(ctx, t, &out)
	if r.attached.err != nil {
		err = errors.Join(r.attached.err, err)
		if text := compensatedText(out.Compensated); text != "" {
			err = hint(err, text)
		}
		var looked error
		out.Sandbox, looked = rs.sandboxes.inspect(context.WithoutCancel(ctx), r.sb.ID)
		return out, errors.Join(err, looked)
	}
	if err != nil {
		out.Warnings = append(slices.Clone(out.Warnings), err.Error())
	}

	// The restore is done; a caller that disconnects now does not make it fail.
	out.Sandbox, err = rs.sandboxes.inspect(context.WithoutCancel(ctx), r.sb.ID)
	out.Warnings = slices.Concat(out.Warnings, t.h.after(ctx, policy.AfterRestore))
	return out, err
}

// ready refuses an attempt that cannot work, has the hooks of the first one run, and clears away
// a sandbox that is to be recreated.
func (rs *restores) ready(ctx context.Context, r *restoration, t *trying) error {
	if t.way == "" {
		if err := r.possible(); err != nil {
			return err
		}
	}
	if t.h == nil {
		h, err := rs.admission.hooksOf("restore", r.spec)
		if err != nil {
			return err
		}
		h.of(r.row)
		t.h = h
		if err := h.before(ctx, policy.BeforeRestore); err != nil {
			return err
		}
	}
	t.begun = true
	if t.way != "" {
		if err := r.possible(); err != nil {
			return err
		}
	}
	switch {
	case t.way == runtime.StrategyRecreate && !r.data.Recreated:
		if err := rs.clearAway(ctx, r, t); err != nil {
			return err
		}
		r.data.HostUndo = t.kept
	case r.data.Recreated && r.data.HostUndo == "": // otherwise this restore removed it and has proven them
		if _, err := r.attached.proveHosts(ctx); err != nil {
			return err
		}
	}
	return nil
}

// restored reports the last attempt, which has succeeded.
func (t *trying) restored() runtime.Restored {
	r := t.r
	return runtime.Restored{
		Checkpoint: checkpointView(r.row), Recreated: r.data.Recreated, Verified: t.opts.Verify,
		Undo: r.files.undone, Changed: r.files.changed, Lost: slices.Sorted(maps.Keys(r.files.lost)),
		Attached: r.attached.hostReport(), Compensated: slices.Concat(t.compensated, r.effects.compensated),
		Warnings: slices.Concat(r.warnings, t.told, r.told), Down: r.down, Files: r.files.took,
		Redo: len(r.data.Redo),
	}
}

// perform does the restore that target has prepared.
func (rs *restores) perform(ctx context.Context, r *restoration) error {
	in := store.Intent{Op: opRestore, Sandbox: r.sb.ID, Checkpoint: r.row.ID, Lazy: true}
	r.data.Begun = bootID()
	return rs.intent(ctx, in, r.data, func(seq int64) (err error) {
		var undo undo.Stack
		defer func() { undo.Run(ctx, &err) }()
		if r.data.Recreated || r.data.Fork {
			undo.Add(func(ctx context.Context) error {
				if r.data.Phase == phaseHosts {
					return nil // it is restored
				}
				return rs.sandboxes.finishRemove(ctx, r.sb.host, r.sb.ID, false)
			})
			if err := rs.sandboxes.create(ctx, r.sb, r.spec, "", nil); err != nil {
				return err
			}
		}
		if err := rs.open(ctx, r); err != nil {
			return err
		}
		r.seq, r.data.Was, r.data.Attempt = seq, r.c.Status, r.sb.Attempt+1
		if r.data.Fork {
			r.data.Attempt = 1
		} else if !r.data.Recreated {
			r.data.Undo = newID()
		}
		r.warnings = slices.Concat(r.row.Warnings, r.caveats)
		return errors.Join(r.run(ctx), r.reader.Close())
	})
}

// restoration is one restore under way; each of its parts has a state of its own.
type restoration struct {
	e      *Engine
	seq    int64 // of its intent
	sb     *locked
	row    store.Checkpoint
	spec   runtime.Spec
	c      runtime.Container
	reader *store.Reader
	data   restoring

	manner
	findings
	partList
}

// manner is how a restore is done.
type manner struct {
	verify   bool
	resumed  bool              // Recovery resumes a restore that was killed
	restart  bool              // the restore is a restart by the sandbox's policy
	strategy string            // of a plan; empty: as the checkpoint is
	orphan   bool              // the sandbox has a record, but no container
	pull     image.PullOptions // for a sandbox that is recreated
	grants   runtime.Grants    // what a foreign checkpoint's spec gets
}

// findings are what a restore reports.
type findings struct {
	caveats  []string // warnings about the grants
	warnings []string
	told     []string // warnings about effects and host files, also of a restore that fails
	down     time.Duration
}

// partList is the parts of a restore.
type partList struct {
	parts     []part // in the order of their steps
	processes *processesPart
	secrets   *secretsPart
	managed   *managedPart
	files     *filesPart
	mounts    *mountsPart
	attached  *attachedPart
	effects   *effectsPart
	fork      *forkPart // nil: it is none
}

// full reports whether processes are restored.
func (r *restoration) full() bool { return r.row.Kind == runtime.KindFull && !r.data.FilesOnly }

// open inspects the sandbox and opens the checkpoint; it changes nothing.
func (rs *restores) open(ctx context.Context, r *restoration) (err error) {
	if !r.spec.Adopted {
		if _, err := r.sb.host.Images.ResolveDigest(ctx, r.sb.ImageDigest); err != nil {
			return err
		}
	}
	if r.c, err = r.sb.host.Inspect(ctx, r.sb.ID); err != nil {
		return err
	}
	r.reader, err = rs.store.OpenCheckpoint(ctx, r.row.ID)
	return err
}

// starts reports whether the sandbox is started once the files are in place.
func (r *restoration) starts() bool {
	was := runtime.Status(r.reader.Manifest().Status)
	// A base is what a sandbox was before it was started, and not stopped.
	again := isBase(r.row) && (r.data.Was == runtime.Running || r.fork != nil)
	return (was == runtime.Running || was == runtime.Paused || again) && (r.fork == nil || !r.fork.noStart) &&
		(!r.resumed || r.data.thisBoot())
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
