package volume_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
	"github.com/agentbox/agentbox/runtime/volume"
)

// someone is an engine with the containers that a test gives it.
type someone struct{ users []volume.User }

func (s *someone) Using(context.Context, string, string) ([]volume.User, error) {
	return slices.Clone(s.users), nil
}

func (s *someone) Pause(context.Context, string) error {
	s.users[0].Paused = true
	return nil
}

func (s *someone) Unpause(context.Context, string) error {
	s.users[0].Paused = false
	return nil
}

// TestEngine drives volumes through the engine, as the verbs do.
func TestEngine(t *testing.T) {
	ctx := context.Background()
	root, err := os.MkdirTemp("", "vol")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	from := t.TempDir()
	st, err := store.Open(ctx, root)
	if err != nil {
		t.Fatal(err)
	}
	users := &someone{}
	v, err := volume.Open(volume.Options{Root: root, Run: root + "/run", Engine: users})
	if err != nil {
		t.Fatal(err)
	}
	b := volume.Backend{Volumes: v}
	e := engine.New(engine.Options{Run: root + "/run", Store: st, Backend: "volume",
		Open: func(string) (engine.Host, error) {
			return engine.Host{Backend: b, Original: b}, nil
		}})
	defer e.Close()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, text string) {
		t.Helper()
		must(v.With(ctx, "ws", func(p string) error {
			return os.WriteFile(filepath.Join(p, name), []byte(text), 0o644)
		}))
	}
	read := func(name string) (text string) {
		t.Helper()
		must(v.With(ctx, "ws", func(p string) error {
			data, err := os.ReadFile(filepath.Join(p, name))
			if errors.Is(err, os.ErrNotExist) {
				data, err = []byte("none"), nil
			}
			text = string(data)
			return err
		}))
		return text
	}
	const ws = "volume://ws"
	if _, err := e.Sandbox(ctx, ws); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("a volume that is not there: %v", err)
	}
	must(os.WriteFile(from+"/f", []byte("original"), 0o644))
	must(v.Create(ctx, "ws", volume.CreateOptions{From: from}))
	sb, err := e.Sandbox(ctx, ws)
	must(err)
	if sb.Status != runtime.Exited || sb.Name != ws || sb.Image != "dir:"+from || !sb.Spec.Adopted {
		t.Errorf("%+v", sb)
	}
	write("f", "one")
	one, err := e.Checkpoint(ctx, ws, runtime.CheckpointOptions{Name: "one"})
	must(err)
	if one.Kind != runtime.KindFiles {
		t.Errorf("%+v", one)
	}
	write("f", "two")
	write("new", "two")

	// In use: a checkpoint freezes the users, a restore is refused.
	p, err := v.Mount(ctx, "ws", "someone")
	must(err)
	users.users = []volume.User{{ID: "1", Name: "web", Pid: os.Getpid(), Mounts: 1}}
	if _, err := e.Restore(ctx, ws, runtime.RestoreOptions{Checkpoint: "one"}); !errors.Is(err, runtime.ErrState) ||
		!strings.Contains(err.Error(), "container (web)") {
		t.Errorf("restore in use: %v", err)
	}
	if _, err := e.Checkpoint(ctx, ws, runtime.CheckpointOptions{Stop: true}); !errors.Is(err, runtime.ErrUnsupported) {
		t.Errorf("checkpoint and stop in use: %v", err)
	}
	live, err := e.Checkpoint(ctx, ws, runtime.CheckpointOptions{Name: "two"})
	must(err)
	if live.Kind != runtime.KindFiles || users.users[0].Paused {
		t.Errorf("%+v, %+v", live, users.users)
	}
	if data, err := os.ReadFile(p + "/f"); err != nil || string(data) != "two" {
		t.Errorf("%q, %v", data, err)
	}
	must(v.Unmount(ctx, "ws", "someone"))
	users.users = nil

	_, err = e.Restore(ctx, ws, runtime.RestoreOptions{Checkpoint: "one", Verify: true})
	must(err)
	if f, n := read("f"), read("new"); f != "one" || n != "none" {
		t.Errorf("after a restore: %q, %q", f, n)
	}
	_, err = e.Restore(ctx, ws, runtime.RestoreOptions{Checkpoint: "two"})
	must(err)
	if f, n := read("f"), read("new"); f != "two" || n != "two" {
		t.Errorf("after another: %q, %q", f, n)
	}
	d, err := e.Diff(ctx, runtime.DiffRequest{Sandbox: ws, From: "image"})
	must(err)
	if len(d.Changes) != 2 || d.Changes[0].Change+d.Changes[0].Path+d.Changes[1].Change+
		d.Changes[1].Path != "M/fA/new" {
		t.Errorf("%+v", d.Changes)
	}
	// The directory's own rules ask for what a volume cannot have, or are not known.
	for text, want := range map[string]error{
		"apply: {validators: [make]}\n": runtime.ErrUnsupported, "apply: {approve: {paths: [f]}}\n": runtime.ErrUnsupported,
		"apply: [\n": runtime.ErrInvalid,
	} {
		must(os.WriteFile(from+"/.agentbox.yaml", []byte(text), 0o600))
		for _, dry := range []bool{true, false} {
			_, err := e.Apply(ctx, ws, runtime.ApplyOptions{Force: true, DryRun: dry})
			if !errors.Is(err, want) || !strings.Contains(err.Error(), from+"/.agentbox.yaml") {
				t.Errorf("%q: %v, want %v", text, err, want)
			}
		}
	}
	if data, _ := os.ReadFile(from + "/f"); string(data) != "original" {
		t.Errorf("the original: %q", data)
	}
	must(os.Remove(from + "/.agentbox.yaml"))
	out, err := e.Apply(ctx, ws, runtime.ApplyOptions{Force: true})
	must(err)
	if len(out.Changes) != 2 || out.SandboxName != ws || out.Original != from {
		t.Errorf("%+v", out)
	}
	if data, _ := os.ReadFile(from + "/f"); string(data) != "two" {
		t.Errorf("the original: %q", data)
	}
	_, err = e.Apply(ctx, ws, runtime.ApplyOptions{Undo: true})
	must(err)
	if data, _ := os.ReadFile(from + "/f"); string(data) != "original" {
		t.Errorf("the original after an undo: %q", data)
	}
	for what, err := range map[string]error{
		"exec": func() error {
			_, err := e.Exec(ctx, ws, runtime.Process{Args: []string{"x"}}, runtime.Streams{})
			return err
		}(),
		"logs":   e.Logs(ctx, ws, runtime.LogOptions{}, nil, nil),
		"create": b.Create(ctx, runtime.Spec{}, nil),
	} {
		if !errors.Is(err, runtime.ErrUnsupported) && !errors.Is(err, runtime.ErrState) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = e.Reconcile(ctx)
	must(err)

	// A volume made anew is another sandbox; the checkpoints of the old stay.
	must(e.Remove(ctx, ws, runtime.RemoveOptions{}))
	if list, err := v.List(ctx); err != nil || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	must(v.Create(ctx, "ws", volume.CreateOptions{From: from}))
	again, err := e.Sandbox(ctx, ws)
	must(err)
	if again.ID == sb.ID || again.Head != "" {
		t.Errorf("%+v", again)
	}
	if _, err := e.Restore(ctx, ws, runtime.RestoreOptions{Checkpoint: one.ID}); !errors.Is(err, runtime.ErrState) ||
		!strings.Contains(err.Error(), "belongs to") {
		t.Errorf("restore of another volume's checkpoint: %v", err)
	}
}
