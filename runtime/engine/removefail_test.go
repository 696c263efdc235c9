package engine_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// immovable is a backend that cannot remove anything.
type immovable struct {
	runtime.Backend
	is bool
}

func (b *immovable) Remove(ctx context.Context, id string) error {
	if b.is {
		return errors.New("a mount is busy")
	}
	return b.Backend.Remove(ctx, id)
}

// TestRemoveFails: a removal that keeps failing stays one intent, with all that was requested,
// and is reported as finished once it is.
func TestRemoveFails(t *testing.T) {
	b := &immovable{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "box")
	row, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.is = true
	for _, opts := range []runtime.RemoveOptions{{}, {}} {
		if err := r.Remove(ctx, sb.ID, opts); err == nil {
			t.Fatal("removed")
		}
		left, err := r.store.Intents(ctx)
		if err != nil || len(left) != 1 {
			t.Fatalf("in the journal: %+v, %v", left, err)
		}
		if done, err := r.RecoverInterrupted(ctx); err == nil || len(done.Actions) > 0 {
			t.Fatalf("%q, %v", done.Actions, err)
		}
	}
	// Such as an older version has left.
	for _, data := range []string{`{"checkpoints": true, "backend": "memory"}`, `{"backend": "memory"}`} {
		if _, err := r.store.Begin(ctx, store.Intent{Op: "rm", Sandbox: sb.ID, Data: []byte(data)}); err != nil {
			t.Fatal(err)
		}
	}
	b.is = false
	done, err := r.RecoverInterrupted(ctx)
	if err != nil || len(done.Actions) != 1 || !strings.HasPrefix(done.Actions[0], "finished the removal") {
		t.Errorf("%q, %v", done.Actions, err)
	}
	if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
		t.Errorf("left in the journal: %+v, %v", left, err)
	}
	if _, err := r.Sandbox(ctx, sb.ID); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("the sandbox: %v", err)
	}
	if _, err := r.CheckpointInfo(ctx, row.ID); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("its checkpoint: %v", err)
	}

	// A second attempt without the option still does what the first was asked to do.
	sb = r.create(t, "box")
	if row, err = r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	b.is = true
	if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{Checkpoints: true}); err == nil {
		t.Fatal("removed")
	}
	b.is = false
	if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.CheckpointInfo(ctx, row.ID); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("its checkpoint: %v", err)
	}
}
