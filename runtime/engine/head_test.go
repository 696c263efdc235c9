package engine_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestForeignHead has a sandbox be at a checkpoint from elsewhere: a restore without a name
// does not go there, and does not go anywhere else; one that names HEAD does.
func TestForeignHead(t *testing.T) {
	f := newForeign(t)
	out, err := f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "wish"})
	if err != nil {
		t.Fatal(err)
	}
	wish := out.Checkpoint.ID
	mine, err := f.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	if out, err = f.Restore(ctx, "box", runtime.RestoreOptions{}); err != nil || out.Checkpoint.ID != mine.ID {
		t.Fatalf("at its own: %+v, %v", out.Checkpoint, err)
	}
	if _, err = f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "HEAD~1"}); err != nil {
		t.Fatalf("a foreign one that is named: %v", err)
	}
	_, err = f.Restore(ctx, "box", runtime.RestoreOptions{})
	if !errors.Is(err, runtime.ErrNotFound) || !strings.Contains(err.Error(), "comes from elsewhere") ||
		!strings.Contains(fmt.Sprint(fault.Hint(err)), "agentbox restore box HEAD") {
		t.Errorf("at a foreign one: %v, hints %q", err, fault.Hint(err))
	}
	if sb, err := f.Sandbox(ctx, "box"); err != nil || sb.Head != wish {
		t.Errorf("head %s, %v, want %s", sb.Head, err, wish)
	}
	out, err = f.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: "HEAD"})
	if err != nil || out.Checkpoint.ID != wish {
		t.Errorf("HEAD by its name: %+v, %v", out.Checkpoint, err)
	}
	if _, err = f.CheckpointInfo(ctx, "box@{0s}"); err != nil {
		t.Error(err)
	}
	if err := f.RemoveCheckpoint(ctx, mine.ID); err != nil {
		t.Fatal(err)
	}
	if _, err = f.CheckpointInfo(ctx, "box@{0s}"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("a foreign one was chosen by its age: %v", err)
	}
}

// TestNoHead restores a sandbox whose head and all before it were removed: what is left
// beside its history is not chosen.
func TestNoHead(t *testing.T) {
	r := newRig(t, nil)
	r.create(t, "box")
	take := func(name string) string {
		t.Helper()
		ck, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		return ck.ID
	}
	a := take("a")
	b := take("b")
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: a}); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveCheckpoint(ctx, "box@HEAD"); err != nil {
		t.Fatal(err)
	}
	_, err := r.Restore(ctx, "box", runtime.RestoreOptions{})
	if !errors.Is(err, runtime.ErrNotFound) || !strings.Contains(err.Error(), "box is at no checkpoint") ||
		!strings.Contains(fmt.Sprint(fault.Hint(err)), "agentbox log box") {
		t.Errorf("%v, hints %q", err, fault.Hint(err))
	}
	if list, err := r.Checkpoints(ctx, runtime.CheckpointFilter{Sandbox: "box"}); err != nil || len(list) != 1 ||
		list[0].ID != b {
		t.Errorf("%+v, %v", list, err)
	}
}
