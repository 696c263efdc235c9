package engine_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// lines returns changes in readable form.
func lines(d runtime.Diff) (list []string) {
	for _, c := range d.Changes {
		s := c.Change + " " + c.Path
		if c.From != "" {
			s = c.Change + " " + c.From + " -> " + c.Path
		}
		list = append(list, s)
	}
	return list
}

func (r *rig) diff(t *testing.T, req runtime.DiffRequest) runtime.Diff {
	t.Helper()
	d, err := r.Diff(ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	if data, err := json.Marshal(d); err != nil || !json.Valid(data) {
		t.Fatal(err)
	}
	return d
}

func TestDiff(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	// As a mounted overlay has it: the root is the image's until it is changed.
	if err := os.Chmod(sb.Upperdir, 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, data string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(sb.Upperdir, name), []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint := func(name string) runtime.Checkpoint {
		t.Helper()
		c, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	is := func(d runtime.Diff, want ...string) {
		t.Helper()
		if got := lines(d); !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	write("a", "one")
	d := r.diff(t, runtime.DiffRequest{Sandbox: "box"})
	is(d, "A /a")
	if d.From.Kind != runtime.DiffOfImage || d.To.Kind != runtime.DiffOfNow || d.Sandbox != sb.ID ||
		d.SandboxName != "box" {
		t.Errorf("%+v", d)
	}
	first := checkpoint("first")
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box"}))
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", From: runtime.DiffImage}), "A /a")
	write("a", "two")
	write("b\xff\n", "of some length")
	d = r.diff(t, runtime.DiffRequest{Sandbox: "box"})
	is(d, "M /a", "A /b\xff\n")
	if d.From.Checkpoint != first.ID || d.From.Name != "first" || d.Changes[1].PathB64 != "L2L/Cg==" {
		t.Errorf("%+v", d)
	}
	if c := d.Changes[0]; !slices.Equal(c.What, []string{"content", "mtime"}) || c.Old.Size != 3 ||
		c.New.Mode != "0644" || c.Type != "file" {
		t.Errorf("%+v", c)
	}
	checkpoint("second")
	for file, to := range map[string]string{"b\xff\n": "c"} {
		if err := os.Rename(filepath.Join(sb.Upperdir, file), filepath.Join(sb.Upperdir, to)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mknod(filepath.Join(sb.Upperdir, "bin"), unix.S_IFCHR, 0); err != nil { // deleted
		t.Fatal(err)
	}
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box"}), "D /bin", "R /b\xff\n -> /c")
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", NoRenames: true}), "D /bin", "D /b\xff\n", "A /c")
	d = r.diff(t, runtime.DiffRequest{Sandbox: "box", NoRenames: true, Limit: 2})
	if is(d, "D /bin", "D /b\xff\n"); !d.Truncated {
		t.Error("not truncated")
	}
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", From: "first", To: "second"}), "M /a", "A /b\xff\n")
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", From: "second", To: "first"}), "M /a", "D /b\xff\n")
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", From: first.ID[:8], To: runtime.DiffImage}), "D /a")
	is(r.diff(t, runtime.DiffRequest{Sandbox: sb.ID[:8], From: "box@first", To: "box@first"}))

	// Of another sandbox, over the same image and over another one.
	other := r.create(t, "other")
	if err := os.Chmod(other.Upperdir, 0o755); err != nil {
		t.Fatal(err)
	}
	is(r.diff(t, runtime.DiffRequest{Sandbox: "other", From: "box@first"}), "D /a")
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "f"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := r.ImportImage(ctx, "base2", tree); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "alien", Image: "base2", Args: []string{"true"}, Network: runtime.Network{Mode: "none"},
	}}); err != nil {
		t.Fatal(err)
	}
	fails := func(want error, says string, req runtime.DiffRequest) {
		t.Helper()
		_, err := r.Diff(ctx, req)
		if !errors.Is(err, want) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %v that says %q", err, want, says)
		}
	}
	fails(runtime.ErrState, "not over the same image", runtime.DiffRequest{Sandbox: "alien", From: "box@first"})
	fails(runtime.ErrNotFound, "diff nobody", runtime.DiffRequest{Sandbox: "nobody"})
	fails(runtime.ErrNotFound, "third", runtime.DiffRequest{Sandbox: "box", From: "third"})
	if other.Head != "" {
		t.Error(other)
	}

	// A removed one still has its checkpoints.
	if err := r.Remove(ctx, "box", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	is(r.diff(t, runtime.DiffRequest{Sandbox: "box", From: "first", To: "second"}), "M /a", "A /b\xff\n")
	fails(runtime.ErrState, "removed", runtime.DiffRequest{Sandbox: "box"})
	fails(runtime.ErrState, "removed", runtime.DiffRequest{Sandbox: "box", From: "first"})
}

func TestHistoryTree(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	checkpoint := func(name string) string {
		t.Helper()
		c, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return c.ID
	}
	one, two := checkpoint("one"), checkpoint("two")
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "one", NoUndo: true}); err != nil {
		t.Fatal(err)
	}
	three := checkpoint("three")
	four := checkpoint("four")
	if err := r.RemoveCheckpoint(ctx, three); err != nil {
		t.Fatal(err)
	}
	check := func(head string) {
		t.Helper()
		list, err := r.History(ctx, "box", runtime.HistoryOptions{})
		if err != nil {
			t.Fatal(err)
		}
		want := []runtime.HistoryEntry{
			{Checkpoint: runtime.Checkpoint{ID: four, Parent: one}, ParentDeleted: true},
			{Checkpoint: runtime.Checkpoint{ID: two, Parent: one}},
			{Checkpoint: runtime.Checkpoint{ID: one}, Children: []string{four, two}},
		}
		if len(list) != len(want) {
			t.Fatalf("%+v", list)
		}
		for i, w := range want {
			g := list[i]
			if g.ID != w.ID || g.Parent != w.Parent || g.ParentDeleted != w.ParentDeleted ||
				!slices.Equal(g.Children, w.Children) || g.Head != (g.ID == head) || g.Sandbox != sb.ID {
				t.Errorf("%+v, want %+v", g, w)
			}
		}
	}
	check(four)
	if err := r.Remove(ctx, "box", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	check("")
	if _, err := r.History(ctx, "nobody", runtime.HistoryOptions{}); !errors.Is(err, runtime.ErrNotFound) ||
		strings.Count(err.Error(), "nobody") != 2 {
		t.Error(err)
	}
	r.create(t, "new")
	if list, err := r.History(ctx, "new", runtime.HistoryOptions{}); err != nil || list == nil || len(list) != 0 {
		t.Error(list, err)
	}
}

// TestForkNamedLikeAnID gives a fork a name that is a prefix of an id.
func TestForkNamedLikeAnID(t *testing.T) {
	r := newRig(t, nil)
	name := r.create(t, "box").ID[:2]
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	forks, err := r.Fork(ctx, "box", runtime.ForkOptions{Names: []string{name}, NoStart: true})
	if err != nil || len(forks) != 1 || forks[0].Sandbox.Name != name {
		t.Errorf("%+v, %v", forks, err)
	}
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{
		Names: []string{name}, NoStart: true,
	}); !errors.Is(err, runtime.ErrExists) {
		t.Errorf("a second one of the name: %v", err)
	}
}

// TestHistoryForks has the history of a sandbox name its forks, with and without
// checkpoints of their own, also when the sandboxes are gone.
func TestHistoryForks(t *testing.T) {
	r := newRig(t, nil)
	r.create(t, "box")
	one, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "one"})
	if err == nil {
		_, err = r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "two"})
	}
	if err == nil {
		_, err = r.Fork(ctx, "box", runtime.ForkOptions{
			Checkpoint: "one", Count: 3, Names: []string{"c", "a", "b"}, NoStart: true,
		})
	}
	if err == nil {
		_, err = r.Fork(ctx, "box", runtime.ForkOptions{Checkpoint: "two", Names: []string{"d"}, NoStart: true})
	}
	for range 2 {
		if err == nil {
			_, err = r.Checkpoint(ctx, "b", runtime.CheckpointOptions{})
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	check := func(of, want string) {
		t.Helper()
		list, err := r.History(ctx, of, runtime.HistoryOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, c := range list {
			names := []string{}
			for _, f := range c.Forks {
				names = append(names, f.SandboxName)
			}
			got = append(got, fmt.Sprint(c.Name, names))
		}
		if fmt.Sprint(got) != want {
			t.Errorf("forks of %s: %v, want %s", of, got, want)
		}
	}
	check("box", "[two[d] one[a b c]]")
	check("b", "[[] []]")
	for _, name := range []string{"a", "b", "box"} {
		if err := r.Remove(ctx, name, runtime.RemoveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	check("box", "[two[d] one[b c]]")
	if err := r.RemoveCheckpoint(ctx, one.ID); err != nil {
		t.Fatal(err)
	}
	check("box", "[two[d]]")
}
