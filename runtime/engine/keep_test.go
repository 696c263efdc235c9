package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestFailuresGo has checkpoints fail, long ago and just now: prune removes the records that
// are old or that a newer checkpoint supersedes.
func TestFailuresGo(t *testing.T) {
	r := newRig(t, nil)
	fail := func(sb runtime.Sandbox, name string, age time.Duration) {
		t.Helper()
		draft, err := r.store.BeginCheckpoint(ctx, store.Checkpoint{Name: name, SandboxID: sb.ID,
			SandboxName: sb.Name, Kind: store.KindFiles,
			ImageDigest: sb.ImageDigest, Spec: []byte("{}"), Created: time.Now().Add(-age)})
		if err == nil {
			err = draft.Abort(ctx, fmt.Errorf("the disk was full"))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	names := func(list []runtime.Checkpoint) (names []string) {
		for _, c := range list {
			names = append(names, c.SandboxName+"@"+c.Name)
		}
		slices.Sort(names)
		return names
	}
	left := func() []string {
		t.Helper()
		list, err := r.Checkpoints(ctx, runtime.CheckpointFilter{All: true})
		if err != nil {
			t.Fatal(err)
		}
		return names(list)
	}
	prune := func(opts runtime.PruneOptions) (gone []string) {
		t.Helper()
		out, err := r.Prune(ctx, opts)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range out.Removed {
			if len(p.Reasons) != 1 || p.Checkpoint.Status != runtime.CheckpointFailed {
				t.Errorf("removed: %+v", p)
			}
			gone = append(gone, p.Checkpoint.SandboxName+"@"+p.Checkpoint.Name)
		}
		slices.Sort(gone)
		return gone
	}
	one, two := r.create(t, "one"), r.create(t, "two")
	fail(one, "old", 25*time.Hour)
	fail(one, "before", time.Minute)
	if _, err := r.Checkpoint(ctx, "one", runtime.CheckpointOptions{Name: "ready"}); err != nil {
		t.Fatal(err)
	}
	fail(one, "after", time.Minute)
	fail(two, "old", 25*time.Hour)
	fail(two, "fresh", time.Minute)
	check := func(what string, got []string, want ...string) {
		t.Helper()
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", what, d)
		}
	}
	all := []string{"one@after", "one@before", "one@old", "one@ready", "two@fresh", "two@old"}
	check("a dry run shows", prune(runtime.PruneOptions{DryRun: true}), "one@before", "one@old", "two@old")
	check("and leaves", left(), all...)
	check("pruned of one", prune(runtime.PruneOptions{Sandbox: "one", KeepLast: 5}), "one@before", "one@old")
	check("then there is", left(), "one@after", "one@ready", "two@fresh", "two@old")
	// Automatic clean-up leaves failures that a user may still want to look at.
	fail(one, "older", 25*time.Hour)
	if _, err := r.Restore(ctx, "one", runtime.RestoreOptions{NoUndo: true}); err != nil {
		t.Fatal(err)
	}
	check("after a restore there is", left(), "one@after", "one@ready", "two@fresh")
	list, err := r.Checkpoints(ctx, runtime.CheckpointFilter{All: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list {
		if c.Name == "fresh" {
			if err := r.RemoveCheckpoint(ctx, c.ID); err != nil {
				t.Error(err)
			}
		}
	}
	check("removed by its id", left(), "one@after", "one@ready")
}

// TestPruneBesideCheckpoints adds and removes checkpoints during dry runs of prune, and during
// prune by bytes: neither disturbs the other.
func TestPruneBesideCheckpoints(t *testing.T) {
	r := newRig(t, nil)
	r.create(t, "one")
	r.create(t, "two")
	for range 3 {
		if _, err := r.Checkpoint(ctx, "one", runtime.CheckpointOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	done, came := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-done:
				close(came)
				return
			default:
			}
			c, err := r.Checkpoint(ctx, "two", runtime.CheckpointOptions{})
			if err == nil {
				err = r.RemoveCheckpoint(ctx, c.ID)
			}
			if err != nil {
				came <- err
				return
			}
		}
	}()
	for range 100 {
		if _, err := r.Prune(ctx, runtime.PruneOptions{Sandbox: "one", KeepLast: 1, DryRun: true}); err != nil {
			t.Error("keep the last:", err)
			break
		}
		if _, err := r.Prune(ctx, runtime.PruneOptions{MaxBytes: 1 << 40, DryRun: true}); err != nil {
			t.Error("by bytes:", err)
			break
		}
	}
	close(done)
	if err := <-came; err != nil {
		t.Error(err)
	}
	// What it would leave is what it leaves, but for the frames of packs.
	opts := runtime.PruneOptions{KeepLast: 1, MaxWaste: 1e-9}
	did, err := r.Prune(ctx, runtime.PruneOptions{MaxWaste: 1e-9})
	if err != nil {
		t.Fatal(err)
	}
	opts.DryRun = true
	would, err := r.Prune(ctx, opts)
	if err == nil {
		opts.DryRun = false
		did, err = r.Prune(ctx, opts)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(did.Removed) == 0 || would.Freed > did.Freed || would.After < did.After {
		t.Errorf("%d removed; it would free %d and leave %d, and frees %d and leaves %d", len(did.Removed), would.Freed,
			would.After, did.Freed, did.After)
	}
}
