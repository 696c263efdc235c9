package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// frozen is a backend whose containers are frozen until they are thawed.
type frozen struct {
	runtime.Backend
	thawed bool
}

func (b *frozen) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	if c.Status = runtime.Paused; b.thawed {
		c.Status = runtime.Running
	}
	return c, err
}

func (b *frozen) Unpause(context.Context, string) error {
	b.thawed = true
	return nil
}

// TestRecoverThawsFirst: a sandbox that a killed verb froze is thawed at once, even while
// another process has the store locked, or the store cannot be read, and the outcome of the
// checkpoint is unknown.
func TestRecoverThawsFirst(t *testing.T) {
	for verb, data := range map[string]any{
		"checkpoint": map[string]any{"was": "running"},
		"restore": map[string]any{
			"was": "running", "phase": "prepare", "undo": store.NewID(),
			"trees": []any{map[string]any{"dir": "/nonexistent"}},
		},
	} {
		t.Run(verb, func(t *testing.T) {
			b := &frozen{}
			r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
			sb := r.create(t, "box")
			text, err := json.Marshal(data)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.store.Begin(ctx, store.Intent{
				Op: verb, Sandbox: sb.ID, Checkpoint: store.NewID(), Data: text,
			}); err != nil {
				t.Fatal(err)
			}
			lock, err := os.OpenFile(filepath.Join(r.root, "locks", "store"), os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Close()
			if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
				t.Fatal(err)
			}
			soon, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			if _, err := r.RecoverInterrupted(soon); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("it did not wait for the store: %v", err)
			}
			if !b.thawed {
				t.Error("it is left frozen")
			}
			b.thawed = false // its user pauses it
			if err := lock.Close(); err != nil {
				t.Fatal(err)
			}
			if _, err := r.RecoverInterrupted(ctx); err != nil {
				t.Error(err)
			}
			if b.thawed {
				t.Error("what its user paused is thawed")
			}
			if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
				t.Errorf("intents left: %v, %v", left, err)
			}
		})
	}
}

// TestRecoverSupervises: the storage limit of a sandbox is supervised even after a killed start.
func TestRecoverSupervises(t *testing.T) {
	r := newRig(t, nil)
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"sleep", "1000"},
		Network:   runtime.Network{Mode: runtime.NetworkNone},
		Resources: runtime.Resources{Storage: 1 << 30},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Begin(ctx, store.Intent{Op: "start", Sandbox: sb.ID}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.RecoverInterrupted(ctx); err != nil {
		t.Fatal(err)
	}
	if r.started != 2 || !slices.Equal(r.marks(t), []string{"box"}) {
		t.Errorf("%d supervisors started, want 2; marks %q", r.started, r.marks(t))
	}
}

// TestRecoverCheckpointStop: a checkpoint with Stop that was killed once it was ready counts as
// a stop by the owner: the restart policy does not start the sandbox.
func TestRecoverCheckpointStop(t *testing.T) {
	r := newRig(t, nil)
	sb := r.restarting(t, runtime.RestartFromCommand)
	row, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	in := store.Intent{
		Op: "checkpoint", Sandbox: sb.ID, Checkpoint: row.ID, Data: []byte(`{"was": "running", "stop": true}`),
	}
	if _, err := r.store.Begin(ctx, in); err != nil {
		t.Fatal(err)
	}
	if done, err := r.RecoverInterrupted(ctx); err != nil || len(done.Actions) != 1 {
		t.Fatalf("%+v, %v", done, err)
	}
	got, err := r.Sandbox(ctx, sb.ID)
	if err != nil || got.Status != runtime.Exited || got.Restarts == nil || !got.Restarts.Stopped {
		t.Errorf("%s, restarts: %+v, %v", got.Status, got.Restarts, err)
	}
}

// gone is a backend whose engine does not answer.
type gone struct {
	runtime.Backend
	is bool
}

func (b *gone) Stop(ctx context.Context, id string, o runtime.StopOptions) error {
	if b.is {
		return errors.New("the engine is gone")
	}
	return b.Backend.Stop(ctx, id, o)
}

// TestUnrecoveredRefuses: an interrupted verb that could not be recovered blocks other verbs
// until it is: recovered later, it would undo their work.
func TestUnrecoveredRefuses(t *testing.T) {
	b := &gone{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "box")
	file := filepath.Join(sb.Upperdir, "file")
	var list []runtime.Checkpoint
	for _, text := range []string{"one", "two"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		row, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, row)
	}
	if _, err := r.store.Begin(ctx, store.Intent{Op: "start", Sandbox: sb.ID}); err != nil {
		t.Fatal(err)
	}
	b.is = true
	if _, err := r.RecoverInterrupted(ctx); err == nil {
		t.Error("it was recovered without its engine")
	}
	b.is = false
	_, err := r.Restore(ctx, sb.ID, runtime.RestoreOptions{Checkpoint: list[0].ID, NoUndo: true})
	if !errors.Is(err, runtime.ErrState) {
		t.Errorf("restore: %v", err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "two" {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{}); !errors.Is(err, runtime.ErrState) {
		t.Errorf("checkpoint: %v", err)
	}
	if _, err := r.RecoverInterrupted(ctx); err != nil {
		t.Fatal(err)
	}

	// It can be removed at any time, and what was begun in it is then moot.
	if _, err := r.store.Begin(ctx, store.Intent{Op: "start", Sandbox: sb.ID}); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
		t.Errorf("left in the journal: %+v, %v", left, err)
	}
	if _, err := r.Restore(ctx, sb.ID, runtime.RestoreOptions{Checkpoint: list[0].ID, NoUndo: true}); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "one" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestRecoverForged: a restore in the journal changes and removes only the sandbox's own files,
// whatever directories it names.
func TestRecoverForged(t *testing.T) {
	for name, data := range map[string]map[string]any{
		"prepare":    {"phase": "prepare"},
		"aside":      {"phase": "prepare", "no_undo": true},
		"swap":       {"phase": "swap"},
		"proven":     {"phase": "proven"},
		"host files": {"phase": "hosts", "host_files": []string{"/nonexistent"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil)
			sb := r.create(t, "box")
			ck, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{})
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			want := map[string]string{"x/kept": "x", "x.new/kept": "y", "x.old/kept": "z"}
			for path, text := range want {
				if err := errors.Join(os.MkdirAll(filepath.Join(dir, filepath.Dir(path)), 0o700),
					os.WriteFile(filepath.Join(dir, path), []byte(text), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			data["was"], data["undo"] = "exited", store.NewID()
			data["trees"] = []any{map[string]any{"dir": filepath.Join(dir, "x"), "aside": name == "aside"}}
			text, err := json.Marshal(data)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.store.Begin(ctx, store.Intent{
				Op: "restore", Sandbox: sb.ID, Checkpoint: ck.ID, Data: text,
			}); err != nil {
				t.Fatal(err)
			}
			_, err = r.RecoverInterrupted(ctx)
			left, e2 := r.store.Intents(ctx)
			if swap := data["phase"] == "swap" || data["phase"] == "proven"; swap != errors.Is(err,
				runtime.ErrCorrupt) || swap != (len(left) == 1) || e2 != nil {
				t.Errorf("%v, and %d intents are left (%v)", err, len(left), e2)
			}
			if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{}); err != nil { // the way out
				t.Error(err)
			}
			for path, text := range want {
				if got, err := os.ReadFile(filepath.Join(dir, path)); err != nil || string(got) != text {
					t.Errorf("%s: %q, %v", path, got, err)
				}
			}
			if list, err := os.ReadDir(filepath.Join(dir, "x")); err != nil || len(list) != 1 {
				t.Errorf("%v, %v", list, err)
			}
		})
	}
}

// TestForgedSpec: a spec with another id than its record is refused, because the id becomes
// part of paths.
func TestForgedSpec(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	if err := r.store.SetSpec(ctx, sb.ID, json.RawMessage(`{"id": "../../outside"}`)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); !errors.Is(err, runtime.ErrCorrupt) {
		t.Errorf("start: %v", err)
	}
	if _, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{}); !errors.Is(err, runtime.ErrCorrupt) {
		t.Errorf("checkpoint: %v", err)
	}
	if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{}); err != nil {
		t.Errorf("rm: %v", err)
	}
}

// posing is a backend that reports the status that a test wants.
type posing struct {
	runtime.Backend
	as runtime.Status // empty: the actual status
}

func (b *posing) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	if b.as != "" {
		c.Status = b.as
	}
	return c, err
}

// TestRecoverOtherBoot: a restore that began in another boot of the host, or claims so, as in
// a root from elsewhere, is finished in the sandbox's files only: nothing is started.
func TestRecoverOtherBoot(t *testing.T) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	for begun, want := range map[string]runtime.Status{
		strings.TrimSpace(string(boot)): runtime.Running, "": runtime.Exited,
		"11111111-2222-3333-4444-555555555555": runtime.Exited,
	} {
		b := &posing{}
		r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
		sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
			Name: "box", Image: "base", Args: []string{"sleep", "1000"},
			Network: runtime.Network{Mode: runtime.NetworkNone},
		}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Start(ctx, sb.ID, nil); err != nil {
			t.Fatal(err)
		}
		b.as = runtime.Paused // the memory backend freezes nothing
		ck, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{FilesOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		b.as = ""
		if err := r.Stop(ctx, sb.ID, time.Second); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(sb.Upperdir, "later")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		text, err := json.Marshal(map[string]any{
			"phase": "swap", "was": "running", "begun": begun, "trees": []any{map[string]any{"dir": sb.Upperdir}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.store.Begin(ctx, store.Intent{
			Op: "restore", Sandbox: sb.ID, Checkpoint: ck.ID, Data: text,
		}); err != nil {
			t.Fatal(err)
		}
		did, err := r.RecoverInterrupted(ctx)
		if err != nil || len(did.Actions) != 1 || strings.Contains(did.Actions[0],
			"is not started any more") != (want == runtime.Exited) {
			t.Errorf("begun %q: %q, %v", begun, did.Actions, err)
		}
		if got, err := r.Sandbox(ctx, sb.ID); err != nil || got.Status != want || got.Head != ck.ID {
			t.Errorf("begun %q: it is %s at %q, want %s at %s (%v)", begun, got.Status, got.Head, want, ck.ID, err)
		}
		if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("begun %q: its files are not the checkpoint's: %v", begun, err)
		}
	}
}
