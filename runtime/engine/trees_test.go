package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
)

// TestMemoryInTheWay has directories at the path of a file cache: there is no cache then, and
// the next one replaces them.
func TestMemoryInTheWay(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	file := filepath.Join(sb.Upperdir, "a")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	memory := r.store.FileCachePath(sb.ID, 0)
	block := func() {
		t.Helper()
		for _, path := range []string{memory, memory + ".new", memory + ".new.2"} {
			if err := os.RemoveAll(path); err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	free := func(after string) {
		t.Helper()
		if info, err := os.Lstat(memory); err != nil || !info.Mode().IsRegular() {
			t.Errorf("the memory after %s: %v, %v", after, info, err)
		}
	}
	write("old")
	block()
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	free("a checkpoint")
	for _, opts := range []runtime.RestoreOptions{{}, {NoUndo: true}} {
		write("new")
		block()
		if _, err := r.Restore(ctx, "box", opts); err != nil {
			t.Fatalf("%+v: %v", opts, err)
		}
		free("a restore")
		if d := cmp.Diff(map[string]string{"a": "old"}, contents(t, sb.Upperdir)); d != "" {
			t.Error(d)
		}
	}
}
