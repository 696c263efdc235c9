package engine_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// said returns the full text of an error.
func said(err error) string { return fmt.Sprint(err, fault.Hint(err)) }

func (h *hosts) undos() []store.Checkpoint {
	h.t.Helper()
	list, err := h.store.Checkpoints(ctx, store.Filter{Trigger: runtime.TriggerUndo})
	h.must(err)
	return list
}

// pid returns the pid of the sandbox, which must be running.
func (h *hosts) pid() int {
	h.t.Helper()
	sb, err := h.Sandbox(ctx, "box")
	if err != nil || sb.Status != runtime.Running || sb.Held != "" {
		h.t.Errorf("the sandbox is %+v, %v", sb, err)
	}
	return sb.Pid
}

func (h *hosts) recovered() string {
	h.t.Helper()
	done, err := h.RecoverInterrupted(ctx)
	h.must(err)
	h.settled()
	return strings.Join(done.Actions, "; ")
}

// TestAttachedUntouched: a restore that fails, or is rolled back, has not changed a host file.
func TestAttachedUntouched(t *testing.T) {
	for _, broken := range []string{
		"restore.after-layout", "restore.after-apply", "restore.after-proof", "restore.after-start",
	} {
		for i, opts := range []runtime.RestoreOptions{{}, {NoUndo: true}, {NoUndo: true}} {
			if i == 2 && broken == "restore.after-start" {
				continue // it is not started
			}
			h := newHosts(t, nil, i < 2)
			var before [3]string
			for i, path := range h.paths {
				before[i] = inode(path)
			}
			t.Setenv("AGENTBOX_FAILPOINT", broken+"=error")
			_, err := h.Restore(ctx, "box", opts)
			t.Setenv("AGENTBOX_FAILPOINT", "")
			if err == nil || !strings.Contains(err.Error(), broken) {
				t.Fatalf("%s: %v (tests need the tag failpoint)", broken, err)
			}
			h.are("now", "now")
			for i, path := range h.paths {
				if now := inode(path); now != before[i] {
					t.Errorf("%s: %s is %s, and was %s", broken, path, now, before[i])
				}
			}
			h.settled()
			if left := h.undos(); opts.NoUndo && len(left) > 0 {
				t.Errorf("%s: the undo checkpoint stays: %+v", broken, left)
			}
			_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
			h.must(err)
			h.are("then", "then")
		}
	}
}

func inode(path string) string {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return fmt.Sprint(st.Ino, st.Ctim, err)
}

// TestAttachedFails: if a host file cannot be put, all are as they were and the restore says
// so. With any strategy the sandbox stays restored, and nothing is left for recovery.
func TestAttachedFails(t *testing.T) {
	for _, broken := range []string{
		"restore.attached.before-put", "restore.attached.before-replace", "restore.attached.between",
		"restore.attached.after-put",
	} {
		for i, opts := range []runtime.RestoreOptions{
			{}, {NoUndo: true}, {NoUndo: true}, {Strategy: runtime.StrategyAuto}, {Strategy: runtime.StrategyRecreate},
			{Strategy: runtime.StrategyRecreate, NoUndo: true},
		} {
			h := newHosts(t, nil, i != 2)
			t.Setenv("AGENTBOX_FAILPOINT", broken+"=error")
			out, err := h.Restore(ctx, "box", opts)
			t.Setenv("AGENTBOX_FAILPOINT", "")
			if out.Checkpoint.ID != h.then.ID || out.Sandbox.Head != h.then.ID || len(out.Attached) == 0 ||
				(out.Undo == "") != opts.NoUndo || out.Strategy != opts.Strategy &&
				opts.Strategy != runtime.StrategyAuto {
				t.Errorf("%s, %+v: it tells %+v", broken, opts, out)
			}
			for i, f := range out.Attached {
				want := []string{runtime.AttachedLeft, runtime.AttachedSame}
				switch {
				case broken == "restore.attached.after-put", broken == "restore.attached.between" && i == 0:
					want = []string{runtime.AttachedReturned, runtime.AttachedSame}
				}
				if !slices.Contains(want, f.Action) {
					t.Errorf("%s, %+v: %s is %s, want %q", broken, opts, f.Path, f.Action, want)
				}
			}
			if text := said(err); !strings.Contains(text,
				"the sandbox is restored, but its host files are as they were: ") || !strings.Contains(text, broken) ||
				!strings.Contains(text, "agentbox restore --attached box "+h.then.ID[:12]) {
				t.Errorf("%s, %+v: %s (tests need the tag failpoint)", broken, opts, text)
			}
			h.are("now", "then")
			h.settled()
			if sb, err := h.Sandbox(ctx, "box"); err != nil || sb.Held != "" || sb.Head != h.then.ID {
				t.Errorf("%s, %+v: %+v, %v", broken, opts, sb, err)
			}
			if left := h.undos(); (len(left) == 0) != opts.NoUndo || len(left) > 0 && left[0].Pinned {
				t.Errorf("%s, %+v: undo checkpoints: %+v", broken, opts, left)
			}
			if !opts.NoUndo { // which takes the sandbox back
				_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true})
				h.must(err)
				h.are("now", "now")
			}
			_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
			h.must(err)
			h.are("then", "then")
		}
	}
}

// stopping is a backend that can freeze, and calls a function while a restore has stopped the
// sandbox.
type stopping struct {
	runtime.Backend
	paused bool
	once   func()
	start  error
}

func (b *stopping) Pause(context.Context, string) error   { b.paused = true; return nil }
func (b *stopping) Unpause(context.Context, string) error { b.paused = false; return nil }

func (b *stopping) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	if b.paused && c.Status == runtime.Running {
		c.Status = runtime.Paused
	}
	return c, err
}

func (b *stopping) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	b.paused = false
	err := b.Backend.Stop(ctx, id, opts)
	if do := b.once; do != nil {
		b.once = nil
		do()
	}
	return err
}

func (b *stopping) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	if b.start != nil {
		return nil, b.start
	}
	return b.Backend.Start(ctx, id, opts)
}

// TestAttachedChanged changes a file while the sandbox is being restored: it is not
// overwritten, no other file is put, and no other strategy is tried.
func TestAttachedChanged(t *testing.T) {
	for _, strategy := range []string{"", runtime.StrategyAuto, runtime.StrategyRecreate} {
		t.Run("strategy "+strategy, func(t *testing.T) {
			b := &stopping{}
			h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
			b.once = func() { h.must(os.WriteFile(h.paths[2], []byte("theirs"), 0o600)) }
			_, err := h.Restore(ctx, "box", runtime.RestoreOptions{Strategy: strategy, NoUndo: true})
			text := said(err)
			if !errors.Is(err, runtime.ErrState) || !strings.Contains(text, h.paths[2]+": ") ||
				!strings.Contains(text, "another program has changed it") || strings.Contains(text, "not put back") {
				t.Errorf("%v", text)
			}
			if got, err := os.ReadFile(h.paths[2]); string(got) != "theirs" {
				t.Errorf("theirs is %q, %v", got, err)
			}
			h.must(os.WriteFile(h.paths[2], []byte("later now"), 0o644), os.Chmod(h.paths[2], 0o644))
			h.are("now", "then")
			h.settled()
			h.pid()
			if left := h.undos(); len(left) > 0 {
				t.Errorf("undo checkpoints: %+v", left)
			}
		})
	}
}

// TestAttachedStranded: a host file that was put and cannot be changed back is named, with the
// checkpoint that has its previous content, which is pinned against later restores.
func TestAttachedStranded(t *testing.T) {
	for _, opts := range []runtime.RestoreOptions{
		{}, {NoUndo: true}, {Strategy: runtime.StrategyRecreate}, {Strategy: runtime.StrategyRecreate, NoUndo: true},
	} {
		h := newHosts(t, nil, true)
		t.Setenv("AGENTBOX_FAILPOINT", "restore.attached.between=error,restore.attached.before-return=error")
		out, err := h.Restore(ctx, "box", opts)
		t.Setenv("AGENTBOX_FAILPOINT", "")
		if want := []string{
			runtime.AttachedPut, runtime.AttachedLeft, runtime.AttachedLeft,
		}; !slices.Equal(actions(out.Attached), want) {
			t.Errorf("%+v: it tells %+v, want %q", opts, out.Attached, want)
		}
		undos := h.undos()
		if len(undos) != 1 || !undos[0].Pinned {
			t.Fatalf("%+v: undo checkpoints: %+v (%v)", opts, undos, err)
		}
		id := undos[0].ID[:12]
		// The error's own text has it: logs and audit records have no hints.
		if text := err.Error(); !strings.Contains(text, "not put back to what they were: "+h.paths[0]+" (") ||
			strings.Contains(text, h.paths[1]+" (") || strings.Contains(text, h.paths[2]+" (") ||
			!strings.Contains(text, "undo checkpoint "+id+" has what they were, and is pinned") ||
			!strings.Contains(text, "agentbox checkpoint unpin "+id) {
			t.Errorf("%+v: %s", opts, text)
		}
		h.settled()
		h.pid()
		if got, err := os.ReadFile(h.paths[0]); string(got) != "state then" {
			t.Errorf("the first is %q, %v", got, err)
		}
		// Restores keep it, whether they put host files or leave them alone.
		for _, next := range []runtime.RestoreOptions{{NoAttached: true}, {}} {
			next.Checkpoint = h.then.ID
			_, err := h.Restore(ctx, "box", next)
			h.must(err)
		}
		h.are("then", "then")
		_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: id, Attached: true})
		h.must(err)
		h.are("now", "now")
		h.must(h.store.Pin(ctx, undos[0].ID, false))
		_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID})
		h.must(err)
		if left := h.undos(); len(left) != 1 || left[0].ID == undos[0].ID {
			t.Errorf("%+v: once it is not pinned: %+v", opts, left)
		}
	}
}

// An undo command that writes a host file is part of the restore: the file becomes what the
// checkpoint has, and what the command has written is said to be lost.
func TestAttachedEffect(t *testing.T) {
	for _, opts := range []runtime.RestoreOptions{{}, {NoUndo: true}, {Strategy: runtime.StrategyRecreate}} {
		h := newHosts(t, nil, true)
		for _, path := range []string{h.paths[0], h.paths[1]} {
			_, err := h.AddEffect(ctx, "box", runtime.EffectRequest{Command: []string{
				"sh", "-c", "echo destroyed >" + path,
			}})
			h.must(err)
		}
		plan, err := h.PlanRestore(ctx, "box", opts)
		h.must(err)
		out, err := h.Restore(ctx, "box", opts)
		if err != nil {
			t.Fatal(said(err))
		}
		h.are("then", "then")
		if !slices.Equal(actions(plan.Attached), actions(out.Attached)) || len(out.Compensated) != 2 {
			t.Errorf("%+v, planned %+v", out, plan)
		}
		for i, path := range h.paths {
			if got := slices.Contains(out.Warnings, "host file "+path+
				" was changed by an undo command; that content is not kept"); got != (i < 2) {
				t.Errorf("%s: warned %v: %q", path, got, out.Warnings)
			}
		}
		h.settled()
		if !opts.NoUndo {
			_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Undo: true})
			h.must(err)
			h.are("now", "now")
		}
	}
}

// leave ends a restore as a kill would, at a failpoint that leaves its intent.
func (h *hosts) leave(point string, opts runtime.RestoreOptions) {
	h.t.Helper()
	h.t.Setenv("AGENTBOX_FAILPOINT", point+"=error")
	_, err := h.Restore(ctx, "box", opts)
	h.t.Setenv("AGENTBOX_FAILPOINT", "")
	left, e2 := h.store.Intents(ctx)
	if h.must(e2); err == nil || len(left) != 1 {
		h.t.Fatalf("%s: %v, intents %+v (tests need the tag failpoint)", point, err, left)
	}
}

// TestAttachedResumed: recovery puts the remaining host files whatever the sandbox does by then,
// because it is restored.
func TestAttachedResumed(t *testing.T) {
	for _, started := range []bool{true, false} {
		for _, opts := range []runtime.RestoreOptions{{}, {NoUndo: true}} {
			h := newHosts(t, nil, started)
			h.leave("restore.after-head", opts)
			h.are("now", "then")
			if got := h.recovered(); !strings.Contains(got, "finished the restore") ||
				strings.Contains(got, "host files") {
				t.Errorf("%+v: %s", opts, got)
			}
			h.are("then", "then")
			if left := h.undos(); (len(left) == 0) != opts.NoUndo {
				t.Errorf("%+v: undo checkpoints: %+v", opts, left)
			}
		}
	}
}

// TestAttachedEdited edits a host file after it was put: recovery leaves and names it, and
// does not touch the sandbox, which runs by then.
func TestAttachedEdited(t *testing.T) {
	h := newHosts(t, nil, true)
	h.leave("store.remove.before-mark", runtime.RestoreOptions{NoUndo: true}) // of the undo checkpoint, when all is put
	h.are("then", "then")
	was := h.pid()
	h.must(os.WriteFile(h.paths[0], []byte("edited"), 0o600))
	undo := h.undos()[0].ID[:12]
	got := h.recovered()
	if !strings.Contains(got, h.paths[0]+" (") || strings.Contains(got, h.paths[1]) ||
		!strings.Contains(got, "undo checkpoint "+undo+" has what they were, and is pinned") ||
		!strings.Contains(got, "agentbox restore --attached box "+h.then.ID[:12]) {
		t.Error(got)
	}
	if text, err := os.ReadFile(h.paths[0]); string(text) != "edited" || h.pid() != was {
		t.Errorf("it is %q, %v", text, err)
	}
	h.must(os.WriteFile(h.paths[0], []byte("state then"), 0o640), os.Chmod(h.paths[0], 0o640))
	h.are("then", "then")
}

// TestAttachedUnknown: if the undo checkpoint is gone or damaged, recovery leaves and names the
// files that are not put yet, and finishes the rest.
func TestAttachedUnknown(t *testing.T) {
	for what, lose := range map[string]func(h *hosts){
		"gone": func(h *hosts) {
			h.leave("restore.after-head", runtime.RestoreOptions{})
			h.must(h.store.RemoveCheckpoint(ctx, h.undos()[0].ID))
		},
		"damaged": func(h *hosts) {
			before, err := filepath.Glob(filepath.Join(h.root, "packs/*/*"))
			h.must(err)
			h.leave("restore.after-head", runtime.RestoreOptions{})
			after, err := filepath.Glob(filepath.Join(h.root, "packs/*/*"))
			h.must(err)
			for _, pack := range after {
				if info, err := os.Stat(pack); err == nil && !slices.Contains(before, pack) {
					h.must(os.WriteFile(pack, make([]byte, info.Size()), 0o600))
				}
			}
		},
	} {
		t.Run(what, func(t *testing.T) {
			h := newHosts(t, nil, true)
			random := make([]byte, 100_000) // has a place in a pack of its own
			for i := range random {
				random[i] = byte(i * i >> 3)
			}
			h.must(os.WriteFile(h.paths[0], append(random, time.Now().String()...), 0o600))
			lose(h)
			got := h.recovered()
			if !strings.Contains(got, "finished the restore") || !strings.Contains(got, h.paths[0]+" (") {
				t.Error(got)
			}
			if text, err := os.ReadFile(h.paths[0]); len(text) < len(random) {
				t.Errorf("it is %q, %v", text, err)
			}
			sb, err := h.Sandbox(ctx, "box")
			h.must(err)
			h.sb = sb
			if text, err := os.ReadFile(h.inside()); string(text) != "then" {
				t.Errorf("in the sandbox is %q, %v", text, err)
			}
			h.pid()
			_, err = h.Checkpoint(ctx, "box", runtime.CheckpointOptions{FilesOnly: true}) // no later verb is refused
			h.must(err)
			// What is kept of other files is not what was lost.
			h.must(os.WriteFile(h.paths[0], []byte("another state"), 0o600),
				os.WriteFile(h.paths[2], []byte("another later"), 0o600))
			_, err = h.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: h.then.ID, NoUndo: true})
			h.must(err)
			h.are("then", "then")
		})
	}
}

// TestAttachedBusy: two restores do not put files into one directory at the same time, and
// another process cannot prevent a restore by locking the directory.
func TestAttachedBusy(t *testing.T) {
	b := &stopping{}
	h := newHosts(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b }, true)
	h.create(t, "other")
	_, err := h.Checkpoint(ctx, "other", runtime.CheckpointOptions{Attach: h.paths[:1]})
	h.must(err)
	d, err := os.Open(filepath.Dir(h.paths[0]))
	h.must(err, unix.Flock(int(d.Fd()), unix.LOCK_EX))
	defer d.Close()
	there, on, done := make(chan bool), make(chan bool), make(chan error, 1)
	b.once = func() { close(there); <-on }
	go func() {
		_, err := h.Restore(ctx, "box", runtime.RestoreOptions{})
		done <- err
	}()
	<-there
	before, err := h.Sandbox(ctx, "other")
	h.must(err)
	for _, strategy := range []string{"", runtime.StrategyRecreate} {
		begun := time.Now()
		_, err = h.Restore(ctx, "other", runtime.RestoreOptions{Strategy: strategy})
		if !errors.Is(err, runtime.ErrBusy) || !strings.Contains(err.Error(), filepath.Dir(h.paths[0])) ||
			time.Since(begun) < time.Second {
			t.Errorf("another restore is at it: %v after %v", err, time.Since(begun))
		}
		// One that is made again is not removed before it is known that its files can be put.
		if now, err := h.Sandbox(ctx, "other"); err != nil || now.Pid != before.Pid || now.Status != before.Status ||
			!now.Created.Equal(before.Created) {
			t.Errorf("strategy %q: %+v, and was %+v (%v)", strategy, now, before, err)
		}
	}
	close(on)
	h.must(<-done)
	h.are("then", "then")
	_, err = h.Restore(ctx, "other", runtime.RestoreOptions{})
	h.must(err)
	h.settled()
}
