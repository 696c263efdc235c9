package runtime_test

import (
	"os"
	"slices"
	"strings"
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

// A restore whose host files could not be put says, with its error, what it has done.
func TestAttachedTold(t *testing.T) {
	for _, strategy := range []string{"", runtime.StrategyAuto} {
		h := newHosts(t, nil, true)
		t.Setenv("AGENTBOX_FAILPOINT", "restore.attached.between=error,restore.attached.before-return=error")
		out, err := h.Restore(ctx, "box", runtime.RestoreOptions{Strategy: strategy})
		t.Setenv("AGENTBOX_FAILPOINT", "")
		if err == nil || out.Checkpoint.ID != h.then.ID || out.Sandbox.ID != h.sb.ID || out.Undo != h.undos()[0].ID {
			t.Errorf("%+v, %v", out, err)
		}
		if got := actions(out.Attached); !slices.Equal(got, []string{"put", "left", "left"}) {
			t.Errorf("%q", got)
		}
		var events []runtime.Event
		h.must(h.Events(ctx, "box", runtime.EventOptions{Types: []string{runtime.EventHostFiles}}, func(e runtime.Event) error { events = append(events, e); return nil }))
		if len(events) != 1 || !strings.Contains(events[0].Reason, "not put back to what they were: "+h.paths[0]) || events[0].Checkpoint != h.then.ID {
			t.Errorf("events: %+v", events)
		}
	}
}

// What recovery has left of host files is on record, for the command that says it may be
// anybody's.
func TestAttachedLeftEvent(t *testing.T) {
	h := newHosts(t, nil, true)
	h.leave("restore.after-head", runtime.RestoreOptions{})
	h.must(os.WriteFile(h.paths[0], []byte("edited"), 0o600))
	h.recovered()
	var events []runtime.Event
	h.must(h.Events(ctx, "box", runtime.EventOptions{Types: []string{runtime.EventHostFiles}}, func(e runtime.Event) error { events = append(events, e); return nil }))
	if len(events) != 1 || !strings.Contains(events[0].Reason, h.paths[0]+" (") || !strings.Contains(events[0].Reason, "is pinned") {
		t.Errorf("events: %+v", events)
	}
}
