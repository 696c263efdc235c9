package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

// TestOrphan restores a sandbox whose container was removed without agentbox. A dry run says
// so and leaves the record alone, and so does a restore that fails.
func TestOrphan(t *testing.T) {
	var backend runtime.Backend
	r := newRig(t, func(b runtime.Backend) runtime.Backend { backend = b; return b })
	sb := r.create(t, "box")
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := backend.Remove(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
	want, err := r.store.Sandbox(ctx, "box")
	if err != nil {
		t.Fatal(err)
	}
	recorded := func(after string) {
		t.Helper()
		now, err := r.store.Sandbox(ctx, "box")
		if d := cmp.Diff(want, now); err != nil || d != "" {
			t.Errorf("the record after %s: %v %s", after, err, d)
		}
	}
	plan, err := r.PlanRestore(ctx, "box", runtime.RestoreOptions{})
	if err != nil || !plan.Recreates || plan.Added != 1 || plan.Sandbox != sb.ID {
		t.Errorf("plan: %+v, %v", plan, err)
	}
	recorded("a dry run")
	if _, err := r.Restore(ctx, "box",
		runtime.RestoreOptions{Checkpoint: "nosuch"}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("a checkpoint that is not there: %v", err)
	}
	recorded("a restore of nothing")
	out, err := r.Restore(ctx, "box", runtime.RestoreOptions{})
	if err != nil || !out.Recreated || out.Sandbox.ID != sb.ID {
		t.Fatalf("restored: %+v, %v", out, err)
	}
	if d := cmp.Diff(map[string]string{"a": "kept"}, contents(t, out.Sandbox.Upperdir)); d != "" {
		t.Error(d)
	}
	// Its lock is one that others meet.
	lock, err := r.store.Lock(ctx, sb.ID, "test", 0)
	if err != nil {
		t.Fatal(err)
	}
	lock.Unlock()
}
