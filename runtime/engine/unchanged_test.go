package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestIfChanged: a checkpoint is taken if a file has changed since the head, and only then.
func TestIfChanged(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "c")
	opts := runtime.CheckpointOptions{IfChanged: true, Message: "first\nof all"}
	take := func(reused bool) runtime.Checkpoint {
		t.Helper()
		c := r.take(t, "c", opts)
		if c.Reused != reused || reused && (!c.Unchanged || c.Added != 0) {
			t.Fatalf("reused %v, unchanged %v, added %d; want reused %v", c.Reused, c.Unchanged, c.Added, reused)
		}
		return c
	}
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	first := take(false) // there was none
	if first.Message != opts.Message {
		t.Errorf("message %q", first.Message)
	}
	opts.Message = "second"
	if c := take(true); c.ID != first.ID || c.Message != first.Message {
		t.Errorf("%s (%q) was returned, want the head", c.ID, c.Message)
	}
	write("x")
	second := take(false)
	if second.Parent != first.ID || second.Message != "second" {
		t.Errorf("%+v", second)
	}

	// After a restore the file cache is of the restored checkpoint, or of the undo checkpoint.
	write("y")
	if _, err := r.Restore(ctx, "c", runtime.RestoreOptions{Checkpoint: first.ID}); err != nil {
		t.Fatal(err)
	}
	if c := take(true); c.ID != first.ID {
		t.Errorf("%s was returned, want the head", c.ID)
	}
	if _, err := r.Restore(ctx, "c", runtime.RestoreOptions{Checkpoint: second.ID}); err != nil {
		t.Fatal(err)
	}
	if c := take(true); c.ID != second.ID {
		t.Errorf("%s was returned, want the head", c.ID)
	}
	for _, change := range []func() error{
		func() error { return os.Chmod(filepath.Join(sb.Upperdir, "a"), 0o600) },
		func() error { return os.Remove(filepath.Join(sb.Upperdir, "a")) },
		func() error { return os.Mkdir(filepath.Join(sb.Upperdir, "d"), 0o755) },
		func() error { return os.Symlink("d", filepath.Join(sb.Upperdir, "l")) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		take(false)
		take(true)
	}
	if err := r.RemoveCheckpoint(ctx, "c@HEAD"); err != nil {
		t.Fatal(err)
	}
	take(false)

	// What is to be taken anyhow is refused.
	opts.Name = "n"
	if _, err := r.Checkpoint(ctx, "c", opts); !errors.Is(err, runtime.ErrInvalid) {
		t.Errorf("with a name: %v", err)
	}
	for _, bad := range []string{strings.Repeat("x", 1001), "\x1b[2J", "\xff"} {
		if _, err := r.Checkpoint(ctx, "c", runtime.CheckpointOptions{Message: bad}); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("message %.10q: %v", bad, err)
		}
	}
}

// overWorkspace creates a sandbox with a workspace over a directory, and returns the upperdir of that.
func (r *rig) overWorkspace(t testing.TB, name, dir string) (sb runtime.Sandbox, upper string) {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: name, Image: "base", Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Mounts: []runtime.Mount{{Type: runtime.MountWorkspace, Source: dir, Target: "/work"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return sb, filepath.Join(filepath.Dir(sb.Upperdir), "work-0")
}

// TestIfChangedWorkspace: what a workspace shows counts, be it the sandbox's or the directory's
// below, unless a restore has made it show again what the head has.
func TestIfChangedWorkspace(t *testing.T) {
	r := newRig(t, nil)
	dir := t.TempDir()
	write := func(dir, content string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "a"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(dir, "mine")
	_, upper := r.overWorkspace(t, "c", dir)
	take := func(reused bool) runtime.Checkpoint {
		t.Helper()
		c := r.take(t, "c", runtime.CheckpointOptions{IfChanged: true, Progress: func(runtime.Step) {}})
		if c.Reused != reused {
			t.Fatalf("reused %v, want %v", c.Reused, reused)
		}
		return c
	}
	if _, err := r.Checkpoint(ctx, "c", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	first := take(true)
	write(upper, "the agent's")
	take(false)
	take(true)
	write(dir, "mine, too") // which the agent's file hides
	take(true)
	if _, err := r.Restore(ctx, "c", runtime.RestoreOptions{Checkpoint: first.ID}); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, upper)["a"]; got != "mine" {
		t.Fatalf("after the restore a is %q", got)
	}
	take(true)
	write(dir, "again mine") // which the restored file hides
	take(true)
	if err := os.Mkdir(filepath.Join(dir, "new"), 0o755); err != nil {
		t.Fatal(err)
	}
	take(false)
}
