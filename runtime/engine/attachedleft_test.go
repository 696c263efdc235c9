package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestAttachedUndoStays: the undo checkpoint with previous host files is kept by a restore that
// leaves host files alone, which an agent may request, and by prune.
func TestAttachedUndoStays(t *testing.T) {
	h := newHosts(t, nil, true)
	none, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{FilesOnly: true})
	h.must(err)
	first, err := h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
	h.must(err)
	for _, opts := range []runtime.RestoreOptions{
		{NoAttached: true, Checkpoint: h.then.ID}, {Checkpoint: none.ID}, {NoUndo: true, Checkpoint: none.ID},
	} {
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

// TestAttachedTold: a restore that could not put its host files returns its result with the
// error.
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
		h.must(h.Events(ctx, "box", runtime.EventOptions{Types: []string{runtime.EventHostFiles}},
			func(e runtime.Event) error { events = append(events, e); return nil }))
		if len(events) != 1 || !strings.Contains(events[0].Reason, "not put back to what they were: "+h.paths[0]) ||
			events[0].Checkpoint != h.then.ID {
			t.Errorf("events: %+v", events)
		}
	}
}

// TestAttachedLeftEvent: the host files that recovery leaves are on record as an event,
// because any command may be the one that reports them.
func TestAttachedLeftEvent(t *testing.T) {
	h := newHosts(t, nil, true)
	h.leave("restore.after-head", runtime.RestoreOptions{})
	h.must(os.WriteFile(h.paths[0], []byte("edited"), 0o600))
	h.recovered()
	var events []runtime.Event
	h.must(h.Events(ctx, "box", runtime.EventOptions{Types: []string{runtime.EventHostFiles}},
		func(e runtime.Event) error { events = append(events, e); return nil }))
	if len(events) != 1 || !strings.Contains(events[0].Reason, h.paths[0]+" (") ||
		!strings.Contains(events[0].Reason, "is pinned") {
		t.Errorf("events: %+v", events)
	}
}

// TestAttachMounted: a file that is itself bind mounted cannot be attached, because the mount
// is of the file that a restore replaces.
func TestAttachMounted(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	h.must(os.WriteFile(file, nil, 0o600), os.Symlink("f", filepath.Join(dir, "link")))
	for name, source := range map[string]string{"itself": file, "linked": filepath.Join(dir, "link"), "beneath": dir} {
		_, err := h.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{Name: name, Image: "base",
			Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
			Mounts: []runtime.Mount{{Type: "bind", Source: source, Target: "/w"}}}})
		h.must(err)
		_, err = h.Checkpoint(ctx, name, runtime.CheckpointOptions{Attach: []string{file}})
		if source == dir {
			h.must(err)
		} else if !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "mounted by itself at /w") ||
			!strings.Contains(said(err), "Mount the directory") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestAttachedLate: files that a sandbox has mounted are put after it has resumed, and the
// restore says so.
func TestAttachedLate(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	file := filepath.Join(dir, "in", "f")
	h.must(os.Mkdir(filepath.Join(dir, "in"), 0o700), os.WriteFile(file, []byte("then"), 0o600))
	_, err := h.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{Name: "late", Image: "base",
		Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Mounts: []runtime.Mount{{Type: "bind", Source: dir, Target: "/w"}}}})
	h.must(err)
	const says = "is put once the sandbox goes on, which has it at /w/in/f"
	for _, started := range []bool{false, true} {
		if started {
			_, err := h.Start(ctx, "late", nil)
			h.must(err)
		}
		_, err := h.Checkpoint(ctx, "late", runtime.CheckpointOptions{Attach: []string{file}, FilesOnly: true})
		h.must(err)
		for _, now := range []string{"now", "then"} { // then nothing is put
			h.must(os.WriteFile(file, []byte(now), 0o600))
			if now == "then" {
				_, err := h.Restore(ctx, "late", runtime.RestoreOptions{})
				h.must(err)
			}
			plan, err := h.PlanRestore(ctx, "late", runtime.RestoreOptions{})
			h.must(err)
			out, err := h.Restore(ctx, "late", runtime.RestoreOptions{})
			h.must(err)
			want := started && now == "now"
			if planned, told := strings.Contains(strings.Join(plan.Effects, "\n"), says),
				strings.Contains(strings.Join(out.Warnings, "\n"), says); planned != want || told != want {
				t.Errorf("started %v, %s: planned %v, told %v: %q, %q", started, now, planned, told,
					plan.Effects, out.Warnings)
			}
		}
	}
}

// TestAttachMistyped: a missing file causes a warning, because its path may be mistyped, and a
// name that cannot be recorded is refused, even behind a symlink.
func TestAttachMistyped(t *testing.T) {
	h := newHosts(t, nil, false)
	dir := t.TempDir()
	odd := filepath.Join(dir, "\xff")
	h.must(os.Mkdir(odd, 0o700), os.Symlink(odd, filepath.Join(dir, "link")))
	c, err := h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{filepath.Join(dir, "missing")}})
	if h.must(err); !strings.Contains(strings.Join(c.Warnings, "\n"),
		"host file "+dir+"/missing is not there: a restore removes what is there then") {
		t.Errorf("%q", c.Warnings)
	}
	_, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{Attach: []string{filepath.Join(dir, "link", "f")}})
	if !errors.Is(err, runtime.ErrInvalid) || !strings.Contains(err.Error(), "not valid UTF-8") {
		t.Errorf("%v", err)
	}
}
