package runtime_test

import (
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// What a restore has replaced of host files is not forgotten for one that leaves them alone,
// which an agent, say, may ask for; nor is it pruned.
func TestAttachedUndoStays(t *testing.T) {
	h := newHosts(t, nil, true)
	none, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{FilesOnly: true})
	h.must(err)
	first, err := h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
	h.must(err)
	for _, opts := range []runtime.RestoreOptions{{NoAttached: true, Checkpoint: h.then.ID}, {Checkpoint: none.ID}, {NoUndo: true, Checkpoint: none.ID}} {
		_, err := h.Restore(ctx, "box", opts)
		h.must(err)
	}
	h.must(h.store.Pin(ctx, h.then.ID, true))
	_, err = h.Prune(ctx, runtime.PruneOptions{MaxBytes: 1})
	h.must(err)
	left := h.undos()
	if len(left) != 2 || left[1].ID != first.Undo { // one of the sandbox, one of the host files
		t.Fatalf("undo checkpoints: %+v, of the first restore %s", left, first.Undo)
	}
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: first.Undo})
	h.must(err)
	h.are("now", "now")
	_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
	h.must(err)
	if left := h.undos(); len(left) != 1 || left[0].ID == first.Undo {
		t.Errorf("once another one has the files: %+v", left)
	}
}
