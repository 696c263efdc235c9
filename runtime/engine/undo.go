package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// opUndo and opRedo are the verbs that go through a sandbox's history by steps.
const (
	opUndo = "undo"
	opRedo = "redo"
)

// redoPresent stands, in the journal's list of where redo leads, for the undo checkpoint of the
// restore itself.
const redoPresent = "present"

// maxRedo bounds the list of where redo leads. Each entry may be an undo checkpoint that stays.
const maxRedo = 256

// Undo restores a checkpoint that is some steps back; see Service.
func (v checkpointVerbs) Undo(ctx context.Context, ref string, opts runtime.UndoOptions) (runtime.Restored, error) {
	return verb(ctx, v.e, onSandbox(opUndo, ref), func(ctx context.Context) (runtime.Restored, error) {
		if len(opts.Paths) > 0 {
			return v.e.restores.undoPaths(ctx, ref, opts)
		}
		return v.e.restores.step(ctx, ref, opts, opUndo)
	})
}

// Redo restores what Undo has left; see Service.
func (v checkpointVerbs) Redo(ctx context.Context, ref string, opts runtime.UndoOptions) (runtime.Restored, error) {
	return verb(ctx, v.e, onSandbox(opRedo, ref), func(ctx context.Context) (runtime.Restored, error) {
		return v.e.restores.step(ctx, ref, opts, opRedo)
	})
}

// PlanUndo returns what Undo, or Redo, would change if it were called now.
func (v checkpointVerbs) PlanUndo(ctx context.Context, ref string, opts runtime.UndoOptions) (runtime.RestorePlan, error) {
	op := errorsNamed(reads(onSandbox("undo plan", ref)))
	return verb(ctx, v.e, op, func(ctx context.Context) (out runtime.RestorePlan, err error) {
		to, err := v.e.restores.aimAt(opts, opUndo)
		if opts.Redo {
			to, err = v.e.restores.aimAt(opts, opRedo)
		}
		if err == nil {
			out, err = v.e.restores.planTo(ctx, ref, restoreBy(opts), to)
		}
		return out, fail(opUndo, ref, err)
	})
}

// UndoList lists where Undo and Redo lead; see Service.
func (v checkpointVerbs) UndoList(ctx context.Context, ref string) (runtime.UndoList, error) {
	return verb(ctx, v.e, reads(onSandbox("undo list", ref)), func(ctx context.Context) (runtime.UndoList, error) {
		return v.e.restores.undoList(ctx, ref)
	})
}

func restoreBy(opts runtime.UndoOptions) runtime.RestoreOptions {
	return runtime.RestoreOptions{
		FilesOnly: opts.FilesOnly, NoEffects: opts.NoEffects, NoAttached: opts.NoAttached, Timeout: opts.Timeout,
		Progress: opts.Progress,
	}
}

// step is Undo or Redo.
func (rs *restores) step(
	ctx context.Context, ref string, opts runtime.UndoOptions, verb string,
) (out runtime.Restored, err error) {
	to, err := rs.aimAt(opts, verb)
	if err != nil {
		return out, err
	}
	return rs.restoreTo(ctx, ref, nil, restoreBy(opts), to)
}

// aimAt is the aim of Undo or Redo.
func (rs *restores) aimAt(opts runtime.UndoOptions, verb string) (*aim, error) {
	n := opts.Steps
	switch {
	case len(opts.Paths) > 0:
		return nil, fmt.Errorf("%w: only undo itself goes back with some paths alone", runtime.ErrInvalid)
	case n < 0:
		return nil, fmt.Errorf("%w: %d steps", runtime.ErrInvalid, n)
	case n == 0:
		n = 1
	}
	return &aim{verb: verb, choose: func(ctx context.Context, r *restoration) error {
		t, err := rs.trailOf(ctx, r.sb)
		if err != nil {
			return err
		}
		if verb == opUndo {
			r.row, r.data.Redo, err = t.undo(n)
		} else if r.row, r.data.Redo, err = t.redoTo(n); err == nil && t.changed {
			r.caveats = append(slices.Clone(r.caveats), fmt.Sprintf("files had changed since checkpoint %s: those changes are in the undo checkpoint, which the next restore replaces", short(r.sb.Head)))
		}
		if err == nil && r.row.Foreign {
			err = foreignHead(r.sb.Name, r.row)
		}
		return err
	}}, nil
}

// trail is where undo and redo lead from where a sandbox is.
type trail struct {
	sb      store.Sandbox
	changed bool               // the files are not those of the head
	at      []store.Checkpoint // the head, if it is one of the sandbox's: one at most
	before  []store.Checkpoint // the steps before the head, the nearest first
	redo    []store.Checkpoint // where redo leads, the nearest first
}

// trailOf reads the trail of a sandbox, whose lock is held.
func (rs *restores) trailOf(ctx context.Context, sb *locked) (t trail, err error) {
	t.sb = sb.Sandbox
	rows, err := rs.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
	if err != nil {
		return t, err
	}
	byID := map[string]store.Checkpoint{}
	for _, row := range rows {
		byID[row.ID] = row
	}
	line, err := rs.lineOf(ctx, sb.Head, byID)
	if err != nil {
		return t, err
	}
	if len(line) > 0 {
		t.at, t.before = line[:1], line[1:]
	}
	for _, id := range sb.Redo {
		if row, ok := byID[id]; ok { // else it was removed
			t.redo = append(t.redo, row)
		}
	}
	t.changed, err = rs.changedSince(ctx, sb, t.at)
	return t, err
}

// lineOf returns the steps from a checkpoint back. An undo checkpoint that has the files of the
// checkpoint before it is one step with that: there was nothing to undo but the step itself. The
// sandbox may be at the undo checkpoint; else the other one stands for both.
func (rs *restores) lineOf(
	ctx context.Context, id string, byID map[string]store.Checkpoint,
) (line []store.Checkpoint, err error) {
	seen, same := map[string]bool{}, false // same: the row before this one has its files
	for row, ok := byID[id]; ok && !seen[row.ID]; row, ok = byID[row.Parent] {
		seen[row.ID] = true
		switch n := len(line); {
		case !same:
			line = append(line, row)
		case n > 1:
			line[n-1] = row
		}
		if same = row.Trigger == runtime.TriggerUndo; same {
			if same, err = rs.sameFiles(ctx, row); err != nil {
				return nil, err
			}
		}
	}
	return line, nil
}

// sameFiles reports whether a checkpoint has the files of the one before it.
func (rs *restores) sameFiles(ctx context.Context, row store.Checkpoint) (bool, error) {
	err := rs.checkpoints.count(ctx, &row)
	if errors.Is(err, runtime.ErrUnsupported) { // its engine does not tell what lies below
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return *row.Changes == (store.Changes{}), nil
}

// changedSince reports whether the sandbox has changed files since its head; without a head they
// have.
func (rs *restores) changedSince(ctx context.Context, sb *locked, head []store.Checkpoint) (changed bool, err error) {
	if len(head) == 0 || head[0].Damaged != "" {
		return true, nil
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if errors.Is(err, runtime.ErrNotFound) {
		return false, hint(err, "Its container is gone; make it again with: agentbox restore "+sb.Name)
	}
	if err != nil {
		return false, err
	}
	cmp, err := rs.checkpoints.compareWith(ctx, sb, c, head[0].ID)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, cmp.close()) }()
	cmp.own = true
	same, err := cmp.same(ctx, true)
	return !same, err
}

// back returns where undo leads, the nearest first.
func (t *trail) back() []store.Checkpoint {
	if t.changed {
		return slices.Concat(t.at, t.before)
	}
	return t.before
}

// undo chooses the checkpoint n steps back, and where redo leads from there: over the steps that are
// passed to the present, and from there on as before.
func (t *trail) undo(n int) (row store.Checkpoint, redo []string, err error) {
	back := t.back()
	switch {
	case len(t.at) == 0:
		return row, nil, hint(fmt.Errorf("%w: sandbox %s is at no checkpoint of its own", runtime.ErrState, t.sb.Name),
			"Take one with: agentbox checkpoint "+t.sb.Name)
	case len(back) == 0:
		return row, nil, hint(fmt.Errorf("%w: sandbox %s is at its oldest step, %s", runtime.ErrState, t.sb.Name,
			stepText(t.at[0])), "There is nothing before it to undo.")
	case n > len(back):
		return row, nil, hint(fmt.Errorf("%w: %d steps back are more than there are: the oldest is %s", runtime.ErrState,
			n, stepText(back[len(back)-1])), fmt.Sprintf("It is reached with: agentbox undo %s %d", t.sb.Name, len(back)))
	}
	for _, passed := range slices.Backward(back[:n-1]) {
		redo = append(redo, passed.ID)
	}
	if t.changed || len(t.redo) == 0 {
		redo = append(redo, redoPresent)
	} else {
		redo = append(redo, t.at[0].ID)
	}
	for _, next := range t.redo {
		redo = append(redo, next.ID)
	}
	return back[n-1], redo[:min(len(redo), maxRedo)], nil
}

// redoTo chooses the checkpoint n steps forward, and where redo leads from there.
func (t *trail) redoTo(n int) (row store.Checkpoint, redo []string, err error) {
	switch have := len(t.redo); {
	case have == 0:
		return row, nil, hint(fmt.Errorf("%w: sandbox %s has nothing to redo", runtime.ErrState, t.sb.Name),
			"Redo goes where undo came from, until there is a new checkpoint or another restore.")
	case n > have:
		return row, nil, hint(fmt.Errorf("%w: %d steps forward are more than there are: the last is %s", runtime.ErrState,
			n, stepText(t.redo[have-1])), fmt.Sprintf("It is reached with: agentbox redo %s %d", t.sb.Name, have))
	}
	for _, next := range t.redo[n:] {
		redo = append(redo, next.ID)
	}
	return t.redo[n-1], redo, nil
}

// stepText names a checkpoint for a user.
func stepText(row store.Checkpoint) string {
	what := row.Name
	if what == "" {
		what, _, _ = strings.Cut(row.Message, "\n")
	}
	if what == "" {
		what = row.Trigger
	}
	return fmt.Sprintf("%s (%s)", short(row.ID), what)
}

func (rs *restores) undoList(ctx context.Context, ref string) (out runtime.UndoList, err error) {
	sb, err := rs.acquire(ctx, ref, opUndo, lockWait)
	if err != nil {
		return out, err
	}
	defer sb.lock.Unlock()
	t, err := rs.trailOf(ctx, sb)
	if err != nil {
		return out, err
	}
	out = runtime.UndoList{Sandbox: sb.ID, SandboxName: sb.Name, Changed: t.changed, Steps: []runtime.UndoStep{}}
	var all []*store.Checkpoint
	for _, list := range [][]store.Checkpoint{t.at, t.before, t.redo} {
		for i := range list {
			all = append(all, &list[i])
		}
	}
	rs.checkpoints.countAll(ctx, all)
	add := func(row store.Checkpoint, back int) {
		out.Steps = append(out.Steps, runtime.UndoStep{Checkpoint: checkpointView(row), Back: back})
	}
	for i, row := range slices.Backward(t.redo) {
		add(row, -1-i)
	}
	if !t.changed {
		add(t.at[0], 0)
	}
	for i, row := range t.back() {
		add(row, 1+i)
	}
	return out, nil
}

// redo returns where redo leads once the restore is done.
func (r *restoration) redo() (ids []string) {
	for _, id := range r.data.Redo {
		if id == redoPresent {
			id = r.files.undone
		}
		if id != "" { // else nothing has kept the present state
			ids = append(ids, id)
		}
	}
	return ids
}

// stepsOf returns which undo checkpoints of the sandbox are steps: where it is or went on from, and
// where redo leads.
func (r *restoration) stepsOf(ctx context.Context, undos []store.Checkpoint) (map[string]bool, error) {
	if len(undos) == 0 {
		return nil, nil
	}
	sb, err := r.e.store.Sandbox(ctx, r.sb.ID)
	if err != nil {
		return nil, err
	}
	rows, err := r.e.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
	if err != nil {
		return nil, err
	}
	parents := map[string]string{}
	for _, row := range rows {
		parents[row.ID] = row.Parent
	}
	steps := map[string]bool{}
	for id := sb.Head; id != "" && !steps[id]; id = parents[id] {
		steps[id] = true
	}
	for _, id := range sb.Redo {
		steps[id] = true
	}
	return steps, nil
}
