package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// aim is a verb that chooses the checkpoint of its restore once the sandbox is locked.
type aim struct {
	verb   string
	choose func(ctx context.Context, r *restoration) error // sets r.row and r.data.Redo
}

// target finds the sandbox and the checkpoint to restore, and locks the sandbox unless the
// caller has. A nil aim: the options name the checkpoint. The restore will recreate a sandbox that was removed.
func (rs *restores) target(
	ctx context.Context, ref string, sb *locked, opts runtime.RestoreOptions, to *aim,
) (*restoration, error) {
	r := rs.newRestoration(sb, restoring{
		Phase: phasePrepare, FilesOnly: opts.FilesOnly, Salvage: opts.Salvage, NoUndo: opts.NoUndo,
	})
	r.restart, r.verify, r.pull, r.grants = sb != nil, opts.Verify, opts.Pull, opts.Grants
	r.effects.off, r.attached.all, r.attached.none, r.secrets.given = opts.NoEffects, opts.Attached,
		opts.NoAttached, opts.Secrets
	err := callerLists(ctx, opts.Grants.Mounts)
	if err == nil {
		err = rs.checkpoints.match(ctx, ref, &opts)
	}
	if err != nil {
		if r.sb != nil {
			r.sb.lock.Unlock()
		}
		return nil, err
	}
	if r.sb == nil {
		if r.sb, err = rs.acquire(ctx, ref, "restore", lockWait); errors.Is(err, runtime.ErrNotFound) && to == nil {
			return r, rs.recreate(ctx, r, ref, opts, err)
		}
	}
	if errors.Is(err, runtime.ErrNotFound) && to != nil {
		if _, none := rs.newestOfGone(ctx, ref, false); none == nil {
			err = hint(err, "It was removed; make it again with: agentbox restore "+ref)
		}
	}
	if err == nil {
		if err = rs.certain(ctx, ref, r.sb.Sandbox); err != nil {
			r.sb.lock.Unlock()
		}
	}
	if err != nil {
		return nil, err
	}
	if to != nil {
		err = to.choose(ctx, r)
	} else {
		r.row, err = rs.choose(ctx, r.sb.Sandbox, opts.Checkpoint, opts.Undo, opts.Foreign)
	}
	if r.restart { // it ends no redo
		r.data.Redo = r.sb.Redo
	}
	if err == nil {
		err = checkDamage(r.sb.Name, r.row, r.data.Salvage)
	}
	if err == nil {
		r.spec, err = spec(r.sb.Sandbox)
	}
	if err == nil {
		r.c, err = r.sb.host.Inspect(ctx, r.sb.ID)
	}
	if errors.Is(err, runtime.ErrNotFound) && !r.spec.Adopted && r.spec.ID != "" {
		// Its container was removed without agentbox.
		r.orphan = true
		err = rs.again(ctx, r, err)
	} else if err == nil {
		err = r.keepGiven(opts)
	}
	if err != nil {
		r.sb.lock.Unlock()
		return nil, err
	}
	return r, nil
}

// keepGiven has an existing sandbox keep what it was given, whatever the checkpoint asks for.
func (r *restoration) keepGiven(opts runtime.RestoreOptions) error {
	again := opts.Strategy == runtime.StrategyRecreate || opts.Strategy == runtime.StrategyAuto
	if !r.row.Foreign {
		return noGrants(opts.Grants, madeHere)
	}
	if !again {
		r.caveats = []string{"the checkpoint comes from elsewhere, and what is in it gets all that the sandbox has"}
		err := noGrants(opts.Grants, "the sandbox is there, and keeps what it was given")
		if err == nil && opts.Strategy != runtime.StrategyFiles {
			err = r.fits()
		}
		return err
	}
	return nil
}

// choose finds the named checkpoint of a sandbox. Without a name it is the one that the
// sandbox was last at, with undo the newest undo checkpoint, and with foreign the newest
// other one, which may then be a foreign one.
func (rs *restores) choose(
	ctx context.Context, sb store.Sandbox, ref string, undo, foreign bool,
) (row store.Checkpoint, err error) {
	switch {
	case ref == "" && (undo || foreign):
		return rs.newest(ctx, sb, undo, foreign)
	case ref == "":
		row, err = rs.atHead(ctx, sb)
	default:
		row, err = rs.checkpointIn(ctx, sb.ID, ref)
	}
	if err == nil {
		if err := notOwn(sb, ref, row); err != nil {
			return row, err
		}
	}

	switch {
	case errors.Is(err, runtime.ErrNotFound) && len(fault.Hint(err)) > 0: // the hint names the sandbox already
		return row, err
	case errors.Is(err, runtime.ErrNotFound):
		return row, hint(err, "List what there is with: agentbox checkpoint ls "+sb.Name)
	case err != nil:
		return row, err
	case row.ImageDigest != sb.ImageDigest:
		return row, hint(fmt.Errorf("%w: checkpoint %s was taken over image %s, the sandbox runs over %s",
			runtime.ErrState, short(row.ID), row.ImageDigest, sb.ImageDigest),
			"Restore it under the name of its own sandbox, "+row.SandboxName+".")
	case row.SandboxID != sb.ID:
		return row, hint(fmt.Errorf("%w: checkpoint %s belongs to sandbox %s", runtime.ErrState,
			short(row.ID), row.SandboxName),
			"A sandbox is restored and forked from checkpoints of its own.")
	case row.Status != runtime.CheckpointReady:
		return row, fmt.Errorf("%w: checkpoint %s is %s: %s", runtime.ErrState, short(row.ID), row.Status, row.Error)
	}
	return row, nil
}

// atHead finds the checkpoint that a sandbox was last at, unless that is a foreign one,
// which has to be named.
func (rs *restores) atHead(ctx context.Context, sb store.Sandbox) (store.Checkpoint, error) {
	row, err := rs.store.Head(ctx, sb)
	switch {
	case err == nil && row.Foreign:
		return row, foreignHead(sb.Name, row)
	case errors.Is(err, runtime.ErrNotFound) && sb.Head == "":
		// The reason may be that there is none at all.
		if _, none := rs.newest(ctx, sb, false, false); none != nil {
			return row, none
		}
	}
	return row, err
}

// newest finds the newest ready checkpoint of a sandbox: an undo checkpoint with undo,
// another one without. Only with foreign may it be a foreign one.
func (rs *restores) newest(
	ctx context.Context, sb store.Sandbox, undo, foreign bool,
) (row store.Checkpoint, err error) {
	rows, err := rs.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
	if err != nil {
		return row, err
	}
	only := false
	for _, row := range rows {
		if (row.Trigger == runtime.TriggerUndo) != undo {
			continue
		}
		if foreign || !row.Foreign {
			return row, nil
		}
		only = true
	}
	if only && !undo {
		return row, onlyForeign(sb.Name)
	}
	if undo {
		return row, hint(fmt.Errorf("undo checkpoint of %s: %w", sb.Name, runtime.ErrNotFound),
			"A restore keeps what it replaces, unless it is told --no-undo.")
	}
	return row, hint(fmt.Errorf("checkpoint of %s: %w", sb.Name, runtime.ErrNotFound),
		"Take one with: agentbox checkpoint "+sb.Name)
}

// notOwn refuses a bare name that matches only a checkpoint of another sandbox: a bare name
// means a checkpoint of the given sandbox.
func notOwn(sb store.Sandbox, ref string, row store.Checkpoint) error {
	if row.SandboxID == sb.ID || strings.Contains(ref, "@") || strings.HasPrefix(row.ID, ref) {
		return nil
	}
	if row.SandboxName == sb.Name {
		return hint(fmt.Errorf("sandbox %s has no checkpoint %q: %w: %s belongs to an earlier sandbox of that name",
			sb.Name, ref, runtime.ErrNotFound, short(row.ID)),
			"List those of "+sb.Name+" with: agentbox checkpoint ls "+sb.Name)
	}
	return hint(fmt.Errorf("sandbox %s has no checkpoint %q: %w", sb.Name, ref, runtime.ErrNotFound),
		fmt.Sprintf("Sandbox %[1]s has one: %[1]s@%[2]s. List those of %[3]s with: agentbox checkpoint ls %[3]s",
			row.SandboxName, ref, sb.Name))
}

// recreate plans to create a removed sandbox again from the spec of its checkpoint. The
// sandbox keeps its id, so that what its processes remember of it stays true.
func (rs *restores) recreate(
	ctx context.Context, r *restoration, name string, opts runtime.RestoreOptions, missing error,
) error {
	ref, undo := opts.Checkpoint, opts.Undo
	row, err := rs.newestOfGone(ctx, name, opts.Foreign)
	if errors.Is(err, runtime.ErrNotFound) {
		return missing
	}
	if err != nil {
		return err
	}
	if undo && ref == "" {
		return hint(fmt.Errorf("undo checkpoint of %s: %w", name, runtime.ErrNotFound),
			"The sandbox was removed, and what its last restore had replaced went with it; make it again with: agentbox restore "+name)
	}
	if ref == "" && row.Foreign && !opts.Foreign {
		return onlyForeign(name)
	}

	if ref != "" {
		// The checkpoint may belong to an older of several removed sandboxes of that name.
		if row, err = rs.checkpointIn(ctx, name, ref); err != nil {
			return err
		}
		if row.SandboxName != name && row.SandboxID != name {
			if err := notOwn(store.Sandbox{Name: name}, ref, row); err != nil {
				return err
			}
			return hint(fmt.Errorf("%w: checkpoint %s belongs to sandbox %s", runtime.ErrState,
				short(row.ID), row.SandboxName),
				"Restore puts a sandbox back to a checkpoint of its own.")
		}
		if row.Status != runtime.CheckpointReady {
			return fmt.Errorf("%w: checkpoint %s is %s: %s", runtime.ErrState, short(row.ID), row.Status, row.Error)
		}
		if _, err := rs.store.Sandbox(ctx, row.SandboxID); !errors.Is(err, runtime.ErrNotFound) {
			return errors.Join(err, fmt.Errorf("%w: checkpoint %s belongs to a sandbox that was not removed",
				runtime.ErrState, short(row.ID)))
		}
	}
	lock, err := rs.store.Lock(ctx, row.SandboxID, "restore", lockWait)
	if err != nil {
		return err
	}
	r.sb, r.row = &locked{Sandbox: store.Sandbox{ID: row.SandboxID, Name: row.SandboxName}, lock: lock}, row
	if err = rs.again(ctx, r, missing); err == nil {
		err = checkDamage(r.sb.Name, r.row, r.data.Salvage)
	}
	if err != nil {
		lock.Unlock()
	}
	return err
}

// again plans to recreate a sandbox, whose lock is held, from the spec of its checkpoint.
func (rs *restores) again(ctx context.Context, r *restoration, missing error) (err error) {
	gone := store.Sandbox{
		ID: r.row.SandboxID, Name: r.row.SandboxName, ImageDigest: r.row.ImageDigest, Spec: r.row.Spec,
	}
	if r.spec, err = specOf(gone.ID, gone.Spec); err != nil {
		return err
	}
	r.spec.ID = gone.ID // regardless of what its author wrote
	if r.caveats, err = claim(&r.spec, r.row, r.grants, r.full()); err != nil {
		return err
	}
	if r.spec.Adopted {
		return hint(fmt.Errorf("its container is gone: %w", missing),
			"Agentbox did not make it and cannot make it again; its checkpoints are still there (agentbox checkpoint ls "+gone.Name+").")
	}
	var known runtime.Spec
	if r.orphan && !r.row.Foreign {
		if known, err = spec(r.sb.Sandbox); err != nil {
			return err
		}
	}
	if r.spec.Secrets, err = sources(r.spec, r.secrets.given, known.Secrets); err != nil {
		return err
	}
	if err := rs.admission.readmitOf(r.row, &r.spec, r.grants, r.full()); err != nil {
		return err
	}
	gone.Backend = cmp.Or(r.spec.Backend, rs.first)
	host, err := rs.host(gone.Backend)
	if err != nil {
		return err
	}
	if err := checkFilter(r.spec, host); err != nil {
		return err
	}
	img, err := imageOf(ctx, host.Images, gone.ImageDigest, r.spec, r.pull)
	if err != nil {
		return err
	}
	if err := rs.sandboxes.keepIDs(ctx, &r.spec, host, img.Lower, r.full(), r.row.Foreign); err != nil {
		return err
	}
	gone.Image, gone.Lower, gone.Labels = r.spec.Image, img.Lower, r.spec.Labels
	gone.Attempt, gone.Created = 1, time.Now()
	if old := r.sb.Sandbox; r.orphan { // it is the same sandbox
		gone.Lease, gone.Group, gone.Kept, gone.Attempt = old.Lease, old.Group, old.Kept, max(old.Attempt, 1)
	}
	r.sb.Sandbox, r.sb.host, r.data.Recreated = gone, host, true
	return nil
}

// forgetOrphan removes the record of a sandbox whose container is gone, before both are
// recreated.
func (rs *restores) forgetOrphan(ctx context.Context, r *restoration) error {
	if !r.orphan {
		return nil
	}
	if err := rs.store.DeleteSandbox(ctx, r.sb.ID); err != nil {
		return err
	}
	// The lock file was removed with the record.
	r.sb.lock.Unlock()
	lock, err := rs.store.Lock(ctx, r.sb.ID, "restore", lockWait)
	if err == nil {
		r.sb.lock = lock
	}
	return err
}

// checkDamage refuses a checkpoint that is known to be damaged, unless what is intact of it
// is wanted.
func checkDamage(sandbox string, row store.Checkpoint, salvage bool) error {
	err := damage(row)
	if err == nil || salvage {
		return nil
	}
	return hint(err, fmt.Sprintf("Restore what is intact of it with: agentbox restore --salvage %s %s",
		sandbox, short(row.ID)))
}

// damage returns the damage that the last verification found, or nil.
func damage(row store.Checkpoint) error {
	if row.Damaged == "" {
		return nil
	}
	return fmt.Errorf("checkpoint %s: %w: %s", short(row.ID), runtime.ErrCorrupt, row.Damaged)
}

// newestOfGone finds the newest checkpoint of a removed sandbox, by its name or its id.
// Unless foreign is set, it prefers checkpoints that are not foreign.
func (e *core) newestOfGone(ctx context.Context, ref string, foreign bool) (store.Checkpoint, error) {
	row, err := e.store.NewestOfName(ctx, ref, foreign)
	if !errors.Is(err, runtime.ErrNotFound) {
		return row, err
	}
	rows, e2 := e.store.Checkpoints(ctx, store.Filter{SandboxID: ref})
	if e2 != nil || len(rows) == 0 {
		return row, cmp.Or(e2, err)
	}
	best := rows[0]
	rank := func(c store.Checkpoint) (n int) {
		if c.Trigger == runtime.TriggerUndo {
			n = 1
		}
		if c.Foreign && !foreign {
			n += 2
		}
		return n
	}
	for _, row := range rows {
		if rank(row) < rank(best) {
			best = row
		}
	}
	return best, nil
}
