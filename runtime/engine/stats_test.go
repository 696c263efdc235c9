package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestStats: files are counted on request, unless they were counted recently, and undo
// checkpoints do not count as the newest.
func TestStats(t *testing.T) {
	r := newRig(t, nil)
	one, two := r.create(t, "one"), r.create(t, "two")
	stats := func(opts runtime.StatsOptions) []runtime.Stats {
		t.Helper()
		list, err := r.Stats(ctx, opts)
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	write := func(name string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(one.Upperdir, name), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	ck, err := r.Checkpoint(ctx, "one", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	write("second")
	if _, err := r.Restore(ctx, "one", runtime.RestoreOptions{}); err != nil { // leaves an undo checkpoint
		t.Fatal(err)
	}
	if got := stats(runtime.StatsOptions{}); got == nil || len(got) != 0 {
		t.Errorf("none runs: %+v", got)
	}
	if got := stats(runtime.StatsOptions{All: true}); len(got) != 2 || got[0].Sandbox != two.ID ||
		got[1].Sandbox != one.ID || got[0].Disk != nil || !got[0].Checkpoint.IsZero() {
		t.Errorf("all: %+v", got)
	}
	named := runtime.StatsOptions{Sandboxes: []string{"one", one.ID[:8], "one"}, Disk: true}
	for range 2 {
		got := stats(named)
		if len(got) != 1 || got[0].Status != runtime.Created || got[0].Disk == nil || *got[0].Disk < 1<<20 ||
			*got[0].Disk > 3<<19 || !got[0].Checkpoint.Equal(ck.Created) {
			t.Errorf("one: %+v", got)
		}
		write("second")
	}
	if _, err := r.Stats(ctx, runtime.StatsOptions{Sandboxes: []string{
		"one", "nobody",
	}}); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("of one that is not there: %v", err)
	}
	if err := os.RemoveAll(two.Upperdir); err != nil {
		t.Fatal(err)
	}
	if got := stats(runtime.StatsOptions{All: true, Disk: true}); len(got) != 2 ||
		got[0].Disk != nil || got[1].Disk == nil {
		t.Errorf("without its files: %+v", got)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := r.Stats(over, runtime.StatsOptions{All: true, Disk: true}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
