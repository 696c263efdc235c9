package engine_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// past is a model of a sandbox's history. Each edit writes what was never written before.
type past struct {
	files map[string]string
	edits int
	all   map[string]*saved // by id
	head  string
	redo  []string
}

// saved is a checkpoint of a past.
type saved struct {
	files  map[string]string
	parent string
	undo   bool
}

func (p *past) save(id string, undo bool) {
	p.all[id] = &saved{maps.Clone(p.files), p.head, undo}
}

func (p *past) changed() bool { return p.head == "" || !maps.Equal(p.files, p.all[p.head].files) }

// line returns the steps from the head back.
func (p *past) line() (line []string) {
	before := ""
	for id := p.head; id != ""; before, id = id, p.all[id].parent {
		if before == "" || !p.all[before].undo || !maps.Equal(p.all[before].files, p.all[id].files) {
			line = append(line, id)
		} else if len(line) > 1 {
			line[len(line)-1] = id
		}
	}
	return line
}

func (p *past) back() []string {
	line := p.line()
	if !p.changed() {
		return line[1:]
	}
	return line
}

// restore goes to a checkpoint; undo is the id of what is kept of the present.
func (p *past) restore(to, undo string, redo []string) {
	p.save(undo, true)
	p.head, p.redo = to, redo
	p.files = maps.Clone(p.all[to].files)
	stays := map[string]bool{undo: true}
	for id := to; id != ""; id = p.all[id].parent {
		stays[id] = true
	}
	for _, id := range redo {
		stays[id] = true
	}
	for id, c := range p.all {
		if c.undo && !stays[id] {
			p.remove(id)
		}
	}
}

func (p *past) remove(id string) {
	parent := p.all[id].parent
	delete(p.all, id)
	for _, c := range p.all {
		if c.parent == id {
			c.parent = parent
		}
	}
	if p.head == id {
		p.head = parent
	}
	p.redo = slices.DeleteFunc(p.redo, func(next string) bool { return next == id })
}

// TestUndoRedo drives random edits, steps, checkpoints, restores, undos and redos against a model.
func TestUndoRedo(t *testing.T) {
	thorough.Checks(t, 40)
	r := newRig(t, nil)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		name := fmt.Sprintf("box%d", n)
		dir := t.TempDir()
		var sb runtime.Sandbox
		var upper string
		if rapid.Bool().Draw(rt, "workspace") {
			sb, upper = r.overWorkspace(t, name, dir)
		} else {
			sb = r.create(t, name)
			upper = sb.Upperdir
		}
		p := &past{files: map[string]string{}, all: map[string]*saved{}}
		if sb.Head != "" {
			p.save(sb.Head, false)
			p.head = sb.Head
		}
		// step is Undo or Redo, or is refused.
		step := func(rt *rapid.T, do func(steps int) (runtime.Restored, error), leads []string, redo func(n int) []string) {
			steps := rapid.IntRange(1, 3).Draw(rt, "steps")
			out, err := do(steps)
			if steps > len(leads) {
				if !errors.Is(err, runtime.ErrState) {
					rt.Fatalf("%d steps of %d: %v", steps, len(leads), err)
				}
				return
			}
			if err != nil {
				rt.Fatal(err)
			}
			next := redo(steps)
			if i := slices.Index(next, "present"); i >= 0 {
				next[i] = out.Undo
			}
			p.restore(leads[steps-1], out.Undo, next)
			if out.Checkpoint.ID != leads[steps-1] || out.Redo != len(next) {
				rt.Fatalf("at %s with %d to redo, want %s with %v", out.Checkpoint.ID, out.Redo, leads[steps-1], next)
			}
		}
		actions := map[string]func(*rapid.T){
			"edit": func(rt *rapid.T) {
				p.edits++
				file := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, "file")
				path := filepath.Join(upper, file)
				var err error
				if _, there := p.files[file]; there && rapid.Bool().Draw(rt, "delete") {
					delete(p.files, file)
					err = os.Remove(path)
				} else {
					p.files[file] = fmt.Sprint("edit ", p.edits)
					err = os.WriteFile(path, []byte(p.files[file]), 0o644)
				}
				if err != nil {
					rt.Fatal(err)
				}
			},
			"checkpoint": func(rt *rapid.T) {
				only := rapid.Bool().Draw(rt, "if changed")
				c := r.take(t, name, runtime.CheckpointOptions{IfChanged: only})
				if c.Reused != (only && !p.changed()) {
					rt.Fatalf("reused %v, changed %v", c.Reused, p.changed())
				}
				if !c.Reused {
					p.save(c.ID, false)
					p.head, p.redo = c.ID, nil
				}
			},
			"restore": func(rt *rapid.T) {
				if len(p.all) == 0 {
					return
				}
				to := rapid.SampledFrom(slices.Sorted(maps.Keys(p.all))).Draw(rt, "to")
				out, err := r.Restore(ctx, name, runtime.RestoreOptions{Checkpoint: to})
				if err != nil {
					rt.Fatal(err)
				}
				p.restore(to, out.Undo, nil)
			},
			"remove": func(rt *rapid.T) {
				if len(p.all) == 0 || rapid.IntRange(0, 3).Draw(rt, "seldom") > 0 {
					return
				}
				id := rapid.SampledFrom(slices.Sorted(maps.Keys(p.all))).Draw(rt, "which")
				if err := r.RemoveCheckpoint(ctx, id); err != nil {
					rt.Fatal(err)
				}
				p.remove(id)
			},
			"undo": func(rt *rapid.T) {
				back, changed, was, later := p.back(), p.changed(), p.head, slices.Clone(p.redo)
				step(rt, func(n int) (runtime.Restored, error) {
					return r.Undo(ctx, name, runtime.UndoOptions{Steps: n})
				}, back, func(n int) (redo []string) {
					redo = slices.Clone(back[:n-1])
					slices.Reverse(redo)
					if changed || len(later) == 0 {
						redo = append(redo, "present")
					} else {
						redo = append(redo, was)
					}
					return append(redo, later...)
				})
			},
			"redo": func(rt *rapid.T) {
				later := slices.Clone(p.redo)
				step(rt, func(n int) (runtime.Restored, error) {
					return r.Redo(ctx, name, runtime.UndoOptions{Steps: n})
				}, later, func(n int) []string { return later[n:] })
			},
			"": func(rt *rapid.T) {
				if d := cmp.Diff(p.files, contents(t, upper)); d != "" {
					rt.Fatal(d)
				}
				got, err := r.UndoList(ctx, name)
				if err != nil {
					rt.Fatal(err)
				}
				var have, want []string
				for _, s := range got.Steps {
					have = append(have, fmt.Sprint(s.Back, " ", s.ID))
				}
				for i, id := range slices.Backward(p.redo) {
					want = append(want, fmt.Sprint(-1-i, " ", id))
				}
				if !p.changed() {
					want = append(want, "0 "+p.head)
				}
				for i, id := range p.back() {
					want = append(want, fmt.Sprint(1+i, " ", id))
				}
				if d := cmp.Diff(want, have); d != "" || got.Changed != p.changed() {
					rt.Fatalf("changed %v, want %v; steps: %s", got.Changed, p.changed(), d)
				}
				rows, err := r.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID})
				if err != nil {
					rt.Fatal(err)
				}
				ids := map[string]bool{}
				for _, row := range rows {
					ids[row.ID] = true
				}
				for id := range p.all {
					if !ids[id] {
						rt.Fatalf("checkpoint %s is gone", id)
					}
				}
				if len(ids) != len(p.all) {
					rt.Fatalf("%d checkpoints, want %d", len(ids), len(p.all))
				}
			},
		}
		rt.Repeat(actions)
		if err := r.Remove(ctx, name, runtime.RemoveOptions{Checkpoints: true}); err != nil {
			rt.Fatal(err)
		}
	})
}

// TestUndoEnds: the errors at both ends of a history name them.
func TestUndoEnds(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "c")
	refused := func(err error, says ...string) {
		t.Helper()
		if !errors.Is(err, runtime.ErrState) {
			t.Fatalf("error %v", err)
		}
		var own *runtime.Error
		text := err.Error()
		for errors.As(err, &own) {
			text += " " + own.Hint
			err = own.Err
		}
		for _, s := range says {
			if !strings.Contains(text, s) {
				t.Errorf("error %q does not say %q", text, s)
			}
		}
	}
	undo := func(n int) error {
		_, err := r.Undo(ctx, "c", runtime.UndoOptions{Steps: n})
		return err
	}
	redo := func(n int) error {
		_, err := r.Redo(ctx, "c", runtime.UndoOptions{Steps: n})
		return err
	}
	refused(undo(1), "at no checkpoint", "agentbox checkpoint c")
	first := r.take(t, "c", runtime.CheckpointOptions{Message: "how it began"})
	refused(undo(0), "oldest step", first.ID[:12], "how it began")
	refused(redo(0), "nothing to redo")
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refused(undo(2), "the oldest is "+first.ID[:12], "agentbox undo c 1")
	plan, err := r.PlanUndo(ctx, "c", runtime.UndoOptions{})
	if err != nil || plan.Checkpoint.ID != first.ID || plan.Deleted != 1 {
		t.Errorf("plan %+v, %v", plan, err)
	}
	if err := undo(1); err != nil {
		t.Fatal(err)
	}
	refused(redo(2), "agentbox redo c 1")
	if plan, err = r.PlanUndo(ctx, "c", runtime.UndoOptions{Redo: true}); err != nil || plan.Added != 1 {
		t.Errorf("plan of redo %+v, %v", plan, err)
	}
	if err := redo(1); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Undo(ctx, "c", runtime.UndoOptions{Steps: -1}); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("a negative number: %v", err)
	}
	if _, err := r.Undo(ctx, "other", runtime.UndoOptions{}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("a sandbox that is not there: %v", err)
	}
}

// TestChangesCounted: each checkpoint tells how many paths have changed since its parent, the image or,
// once that is removed, the one before it.
func TestChangesCounted(t *testing.T) {
	r := newRig(t, nil)
	dir := t.TempDir()
	put := func(dir, name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put(dir, "a")
	put(dir, "b")
	sb, upper := r.overWorkspace(t, "c", dir)
	put(sb.Upperdir, "root")
	put(upper, "new")
	put(upper, "a") // of another time
	first := r.take(t, "c", runtime.CheckpointOptions{})
	if err := os.Remove(filepath.Join(upper, "new")); err != nil {
		t.Fatal(err)
	}
	put(dir, "mine") // the owner's
	second := r.take(t, "c", runtime.CheckpointOptions{})
	third := r.take(t, "c", runtime.CheckpointOptions{})
	count := func(id string, want runtime.Changes) {
		t.Helper()
		all, err := r.History(ctx, "c", runtime.HistoryOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range all {
			if c.ID == id && (c.Changes == nil || *c.Changes != want) {
				t.Errorf("changes %v, want %v", c.Changes, want)
			}
		}
		if c, err := r.CheckpointInfo(ctx, id); err != nil || c.Changes == nil || *c.Changes != want {
			t.Errorf("changes %v, %v, want %v", c.Changes, err, want)
		}
	}
	count(first.ID, runtime.Changes{Added: 2, Modified: 1})
	count(second.ID, runtime.Changes{Added: 1, Deleted: 1})
	count(third.ID, runtime.Changes{})
	if err := r.RemoveCheckpoint(ctx, first.ID); err != nil {
		t.Fatal(err)
	}
	count(second.ID, runtime.Changes{Added: 2, Modified: 1})
}

// TestRedoKept: neither prune nor the removal of one entry takes away where redo leads, and a checkpoint
// ends it.
func TestRedoKept(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "c")
	var ids []string
	for i := range 4 {
		if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), []byte(fmt.Sprint(i)), 0o644); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.take(t, "c", runtime.CheckpointOptions{}).ID)
	}
	redo := func(n int) runtime.Restored {
		t.Helper()
		out, err := r.Redo(ctx, "c", runtime.UndoOptions{Steps: n})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	undo := func(n int) runtime.Restored {
		t.Helper()
		out, err := r.Undo(ctx, "c", runtime.UndoOptions{Steps: n})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	first := undo(3)
	if first.Redo != 3 {
		t.Fatalf("%d to redo", first.Redo)
	}
	if _, err := r.Prune(ctx, runtime.PruneOptions{KeepLast: 1}); err != nil {
		t.Fatal(err)
	}
	left := r.left(t, sb.ID, nil)
	for _, id := range []string{ids[0], ids[1], ids[2], first.Undo} {
		if !slices.Contains(left, id) {
			t.Errorf("prune removed %s", id)
		}
	}
	if err := r.RemoveCheckpoint(ctx, ids[1]); err != nil {
		t.Fatal(err)
	}
	if out := redo(2); out.Checkpoint.ID != first.Undo || contents(t, sb.Upperdir)["a"] != "3" || out.Redo != 0 {
		t.Errorf("redo led to %+v", out.Checkpoint)
	}
	undo(1)
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "b"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	out := redo(1)
	if !slices.ContainsFunc(out.Warnings, func(w string) bool { return strings.Contains(w, "files had changed") }) {
		t.Errorf("redo over changes warns %q", out.Warnings)
	}
	if _, err := r.Restore(ctx, "c", runtime.RestoreOptions{Undo: true}); err != nil {
		t.Fatal(err)
	}
	if _, ok := contents(t, sb.Upperdir)["b"]; !ok {
		t.Error("the changes are lost")
	}
	undo(1)
	r.take(t, "c", runtime.CheckpointOptions{})
	if _, err := r.Redo(ctx, "c", runtime.UndoOptions{}); !errors.Is(err, runtime.ErrState) {
		t.Errorf("redo after a checkpoint: %v", err)
	}
	if err := r.Remove(ctx, "c", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	_, err := r.Undo(ctx, "c", runtime.UndoOptions{})
	if own := (*runtime.Error)(nil); !errors.Is(err, runtime.ErrNotFound) || !errors.As(err, &own) {
		t.Errorf("undo of a removed sandbox: %v", err)
	}
}
