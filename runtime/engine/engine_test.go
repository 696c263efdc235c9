package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/images"
	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

var ctx = context.Background()

// rig is an engine over a real store, real images and the in-memory backend.
type rig struct {
	*engine.Engine
	opts    engine.Options
	root    string
	store   *store.Store
	started int // supervisors, none of which does anything
	log     *onLog
}

func newRig(t testing.TB, wrap func(runtime.Backend) runtime.Backend) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it keeps owners and xattrs")
	}
	// In memory: how long a disk takes to sync is not what these tests are about.
	root, err := os.MkdirTemp("/dev/shm", "engine")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	return newRigAt(t, root, wrap)
}

func newRigAt(t testing.TB, root string, wrap func(runtime.Backend) runtime.Backend) *rig {
	t.Helper()
	st, err := store.Open(ctx, root)
	if err != nil {
		t.Fatal(err)
	}
	img, err := images.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(root, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := img.Import(ctx, "base", tree); err != nil {
		t.Fatal(err)
	}
	var b runtime.Backend = backendtest.NewMemory(filepath.Join(root, "memory"))
	if wrap != nil {
		b = wrap(b)
	}
	r := &rig{root: root, store: st, log: &onLog{Handler: slog.Default().Handler()}}
	r.opts = engine.Options{Log: slog.New(r.log), Run: filepath.Join(root, "run"), Store: st, Backend: "memory",
		Supervisor: func(*os.File) error { r.started++; return nil },
		Open:       func(string) (engine.Host, error) { return engine.Host{Backend: b, Images: img}, nil }}
	r.Engine = engine.New(r.opts)
	t.Cleanup(func() { r.Close() })
	return r
}

// supervise supervises all in this process, until nothing is left to supervise.
func (r *rig) supervise(ctx context.Context) error {
	own, err := engine.TakeSupervision(filepath.Join(r.root, "run"))
	if err != nil {
		return err
	}
	return r.Supervise(ctx, own)
}

// marks returns the names of the sandboxes that are marked, sorted.
func (r *rig) marks(t testing.TB) (names []string) {
	t.Helper()
	list, err := os.ReadDir(filepath.Join(r.root, "supervised"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, entry := range list {
		if sb, err := r.store.Sandbox(ctx, entry.Name()); err == nil {
			names = append(names, sb.Name)
		} else {
			names = append(names, entry.Name())
		}
	}
	slices.Sort(names)
	return names
}

func (r *rig) create(t testing.TB, name string) runtime.Sandbox {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// restarting creates a sandbox that is restarted whenever it ends.
func (r *rig) restarting(t testing.TB, from string) runtime.Sandbox {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "s", Image: "base", Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Restart: runtime.Restart{Policy: runtime.RestartAlways, From: from},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// contents reads all files below a directory.
func contents(t testing.TB, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		files[rel] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestHistory drives random writes, checkpoints, restores in any order,
// removals of checkpoints and of the sandbox itself, against a model.
func TestHistory(t *testing.T) {
	thorough.Checks(t, 30)
	r := newRig(t, nil)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		name := fmt.Sprintf("box%d", n)
		sb := r.create(t, name)
		type saved struct {
			id    string
			files map[string]string
		}
		files := map[string]string{}
		var replaced map[string]string // by the last restore
		var history []saved
		states := map[string]map[string]string{} // of all checkpoints, undo ones included, by id
		at := ""                                 // the id of the one that it was last at
		check := func() {
			got, err := r.Sandbox(ctx, name)
			if err != nil {
				rt.Fatal(err)
			}
			if d := cmp.Diff(files, contents(t, got.Upperdir)); d != "" {
				rt.Fatal(d)
			}
			if got.Head != at {
				rt.Fatalf("head %s, want %s", got.Head, at)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"write": func(rt *rapid.T) {
				file := rapid.SampledFrom([]string{"a", ".git", "b", "ü"}).Draw(rt, "file")
				files[file] = rapid.StringN(0, 40, -1).Draw(rt, "content")
				if err := os.WriteFile(filepath.Join(sb.Upperdir, file), []byte(files[file]), 0o644); err != nil {
					rt.Fatal(err)
				}
			},
			"delete": func(rt *rapid.T) {
				if len(files) == 0 {
					return
				}
				file := rapid.SampledFrom(slices.Sorted(maps.Keys(files))).Draw(rt, "file")
				delete(files, file)
				if err := os.Remove(filepath.Join(sb.Upperdir, file)); err != nil {
					rt.Fatal(err)
				}
			},
			"checkpoint": func(rt *rapid.T) {
				ck, err := r.Checkpoint(ctx, name, runtime.CheckpointOptions{})
				if err != nil {
					rt.Fatal(err)
				}
				if ck.Kind != runtime.KindFiles || ck.Status != runtime.CheckpointReady ||
					ck.Files != int64(len(files))+1 {
					rt.Fatalf("checkpoint: %+v", ck)
				}
				history = append(history, saved{ck.ID, maps.Clone(files)})
				at, states[ck.ID] = ck.ID, maps.Clone(files)
			},
			"restore to head": func(rt *rapid.T) {
				res, err := r.Restore(ctx, name, runtime.RestoreOptions{Verify: true})
				if at == "" {
					if !errors.Is(err, runtime.ErrNotFound) {
						rt.Fatalf("restore to no head: %v", err)
					}
					return
				}
				if err != nil || res.Checkpoint.ID != at {
					rt.Fatalf("restored to %s, want %s: %v", res.Checkpoint.ID, at, err)
				}
				replaced, files = files, maps.Clone(states[at])
			},
			"restore": func(rt *rapid.T) {
				if len(history) == 0 {
					return
				}
				i := rapid.IntRange(0, len(history)-1).Draw(rt, "which")
				opts := runtime.RestoreOptions{Checkpoint: history[i].id, Verify: true}
				res, err := r.Restore(ctx, name, opts)
				if err != nil {
					rt.Fatal(err)
				}
				if res.Sandbox.Head != history[i].id {
					rt.Fatalf("head %s, want %s", res.Sandbox.Head, history[i].id)
				}
				at, replaced, files = history[i].id, files, maps.Clone(history[i].files)
			},
			"undo": func(rt *rapid.T) {
				res, err := r.Restore(ctx, name, runtime.RestoreOptions{Undo: true})
				if replaced == nil {
					if !errors.Is(err, runtime.ErrNotFound) {
						rt.Fatalf("an undo of nothing: %v", err)
					}
					return
				}
				if err != nil {
					rt.Fatal(err)
				}
				at, replaced, files = res.Checkpoint.ID, files, replaced
				states[at] = maps.Clone(files)
			},
			"prune": func(rt *rapid.T) {
				if _, err := r.Prune(ctx, runtime.PruneOptions{MaxWaste: 0.01}); err != nil {
					rt.Fatal(err)
				}
			},
			"forget": func(rt *rapid.T) {
				if len(history) == 0 {
					return
				}
				i := rapid.IntRange(0, len(history)-1).Draw(rt, "which")
				if err := r.RemoveCheckpoint(ctx, history[i].id); err != nil {
					rt.Fatal(err)
				}
				if history[i].id == at { // the nearest before it that is left
					now, err := r.Sandbox(ctx, name)
					if err != nil || now.Head == at || now.Head != "" && states[now.Head] == nil {
						rt.Fatalf("head after the removal of %s: %q, %v", at, now.Head, err)
					}
					at = now.Head
				}
				history = slices.Delete(history, i, i+1)
			},
			"lose": func(rt *rapid.T) {
				if len(history) == 0 {
					return
				}
				if err := r.Remove(ctx, name, runtime.RemoveOptions{}); err != nil {
					rt.Fatal(err)
				}
				res, err := r.Restore(ctx, name, runtime.RestoreOptions{})
				if err != nil {
					rt.Fatal(err)
				}
				if !res.Recreated || res.Sandbox.ID != sb.ID {
					rt.Fatalf("restored after rm: %+v", res)
				}
				replaced = nil
				at, files = history[len(history)-1].id, maps.Clone(history[len(history)-1].files)
			},
			"": func(*rapid.T) { check() },
		})
		list, err := r.Checkpoints(ctx, runtime.CheckpointFilter{Sandbox: name})
		if err != nil {
			rt.Fatal(err)
		}
		if len(list) != len(history) {
			rt.Fatalf("%d checkpoints listed, want %d", len(list), len(history))
		}
	})
	intents, err := r.store.Intents(ctx)
	if err != nil || len(intents) > 0 {
		t.Fatalf("journal: %v, %v", intents, err)
	}
	left, err := filepath.Glob(filepath.Join(r.root, "memory", "*", "*.new"))
	if err != nil || len(left) > 0 {
		t.Fatalf("left: %v, %v", left, err)
	}
}

// TestDamage flips bytes all over a stored checkpoint: every restore of it must
// be refused, and leave the sandbox as it was.
func TestDamage(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"),
		[]byte(strings.Repeat("precious ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	ck, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "b"), []byte("later"), 0o600); err != nil {
		t.Fatal(err)
	}
	// What is there as the checkpoint has it need not be read.
	if err := os.Remove(filepath.Join(sb.Upperdir, "a")); err != nil {
		t.Fatal(err)
	}
	want := contents(t, sb.Upperdir)
	packs, err := filepath.Glob(filepath.Join(r.root, "packs/*/*"))
	if err != nil || len(packs) != 1 {
		t.Fatal(packs, err)
	}
	for _, path := range []string{filepath.Join(r.root, "checkpoints", ck.ID, "manifest.json"), packs[0]} {
		name := filepath.Base(path)
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(whole); i += len(whole)/20 + 1 {
			bad := slices.Clone(whole)
			bad[i] ^= 1
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := r.Restore(ctx, "box", runtime.RestoreOptions{NoUndo: true})
			if path == packs[0] && err == nil {
				// It needed nothing of what is damaged there. Verify does.
				if got := contents(t, sb.Upperdir); len(got) != 1 || got["a"] != strings.Repeat("precious ", 1000) {
					t.Fatalf("byte %d: restored to %q", i, got)
				}
				rep, err := r.Verify(ctx, runtime.VerifyOptions{ReadData: true})
				if err != nil || len(rep.Damaged)+len(rep.Notes) == 0 {
					t.Fatalf("byte %d: %+v, %v", i, rep, err)
				}
				if err := os.WriteFile(path, whole, 0o600); err != nil {
					t.Fatal(err)
				}
				if rep, err = r.Verify(ctx, runtime.VerifyOptions{ReadData: true}); err != nil || len(rep.Damaged) > 0 {
					t.Fatalf("byte %d, once it is whole again: %+v, %v", i, rep, err)
				}
				if err := errors.Join(os.Remove(filepath.Join(sb.Upperdir, "a")),
					os.WriteFile(filepath.Join(sb.Upperdir, "b"), []byte("later"), 0o600)); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if !errors.Is(err, runtime.ErrCorrupt) {
				t.Fatalf("%s, byte %d: %v", name, i, err)
			}
			if d := cmp.Diff(want, contents(t, sb.Upperdir)); d != "" {
				t.Fatal(d)
			}
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
}

// TestRefusals makes the mistakes that a user may make.
func TestRefusals(t *testing.T) {
	r := newRig(t, nil)
	r.create(t, "one")
	r.create(t, "two")
	ck, err := r.Checkpoint(ctx, "one", runtime.CheckpointOptions{Name: "start"})
	if err != nil {
		t.Fatal(err)
	}
	create := func(change func(*runtime.Spec)) error {
		s := runtime.Spec{Name: "three", Image: "base", Args: []string{"true"}}
		change(&s)
		_, err := r.Create(ctx, runtime.CreateRequest{Spec: s})
		return err
	}
	for _, c := range []struct {
		name string
		err  error
		want error
	}{
		{"a name that is taken", create(func(s *runtime.Spec) { s.Name = "one" }), runtime.ErrExists},
		{"a name with a slash", create(func(s *runtime.Spec) { s.Name = "a/b" }), runtime.ErrInvalid},
		{"a name of dots", create(func(s *runtime.Spec) { s.Name = ".." }), runtime.ErrInvalid},
		{"a long name", create(func(s *runtime.Spec) { s.Name = strings.Repeat("x", 255) }), runtime.ErrInvalid},
		{"an unknown image", create(func(s *runtime.Spec) { s.Image = "localhost:1/nosuch" }), runtime.ErrNotFound},
		{"an unknown network", create(func(s *runtime.Spec) { s.Network.Mode = "moon" }), runtime.ErrInvalid},
		{"ports without a bridge", create(func(s *runtime.Spec) {
			s.Network = runtime.Network{Mode: "none", Ports: []runtime.Port{{Host: 1, Sandbox: 1, Protocol: "tcp"}}}
		}), runtime.ErrInvalid},
		{"a bind source that is not there", create(func(s *runtime.Spec) {
			s.Mounts = []runtime.Mount{{Type: "bind", Source: "/nosuch/dir", Target: "/x"}}
		}), runtime.ErrNotFound},
		{"a mount over everything", create(func(s *runtime.Spec) {
			s.Mounts = []runtime.Mount{{Type: "tmpfs", Target: "/"}}
		}), runtime.ErrInvalid},
		{"a negative limit", create(func(s *runtime.Spec) { s.Resources.Pids = -1 }), runtime.ErrInvalid},
		{"a tiny memory limit", create(func(s *runtime.Spec) { s.Resources.Memory = 1 }), runtime.ErrInvalid},
		{"a checkpoint name that is taken", second(r.Checkpoint(ctx, "one",
			runtime.CheckpointOptions{Name: "start"})), runtime.ErrExists},
		{"an unknown tcp mode", second(r.Checkpoint(ctx, "one",
			runtime.CheckpointOptions{TCP: "maybe"})), runtime.ErrInvalid},
		{"a checkpoint of nothing", second(r.Checkpoint(ctx, "nosuch",
			runtime.CheckpointOptions{})), runtime.ErrNotFound},
		{"another sandbox's checkpoint", second(r.Restore(ctx, "two",
			runtime.RestoreOptions{Checkpoint: ck.ID})), runtime.ErrState},
		{"an unknown checkpoint", second(r.Restore(ctx, "one",
			runtime.RestoreOptions{Checkpoint: "nosuch"})), runtime.ErrNotFound},
		{"an unknown sandbox", second(r.Restore(ctx, "nosuch", runtime.RestoreOptions{})), runtime.ErrNotFound},
		{"an image in use", r.RemoveImage(ctx, "base"), runtime.ErrState},
	} {
		if !errors.Is(c.err, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, c.err, c.want)
		}
	}
	list, err := r.Sandboxes(ctx)
	if err != nil || len(list) != 2 {
		t.Fatalf("sandboxes: %v, %v", list, err)
	}
}

func second[T any](_ T, err error) error { return err }

// TestBusy runs a verb while another one holds the sandbox.
func TestBusy(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	lock, err := r.store.Lock(ctx, sb.ID, "checkpoint", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	_, err = r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if !errors.Is(err, runtime.ErrBusy) || !strings.Contains(err.Error(),
		fmt.Sprintf("checkpoint by pid %d", os.Getpid())) {
		t.Fatalf("got %v", err)
	}
}

// TestVolumes: a checkpoint includes volumes on request, and its restore puts them back. A
// restore that fails, at any point, leaves them as they were.
func TestVolumes(t *testing.T) {
	for _, broken := range []string{
		"", "restore.after-layout", "restore.after-stop", "restore.between-trees", "restore.after-apply",
	} {
		r := newRig(t, nil)
		sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
			Name: "v", Image: "base", Args: []string{"sleep", "1000"},
			Network: runtime.Network{Mode: runtime.NetworkNone},
			Mounts: []runtime.Mount{
				{Type: "volume", Source: "one", Target: "/one"}, {Type: "volume", Source: "two", Target: "/two"},
			},
		}})
		if err != nil {
			t.Fatal(err)
		}
		dirs := []string{
			sb.Upperdir, filepath.Join(r.root, "memory/volumes/one/data"),
			filepath.Join(r.root, "memory/volumes/two/data"),
		}
		put := func(text string) {
			for i, dir := range dirs {
				if err := os.WriteFile(filepath.Join(dir, "f"), []byte(fmt.Sprint(text, i)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		has := func(text string) {
			t.Helper()
			for i, dir := range dirs {
				if d := cmp.Diff(map[string]string{"f": fmt.Sprint(text, i)}, contents(t, dir)); d != "" {
					t.Error(dir, d)
				}
				if beside, _ := os.ReadDir(filepath.Dir(dir)); slices.ContainsFunc(beside, func(e os.DirEntry) bool {
					return strings.HasSuffix(e.Name(), ".new")
				}) {
					t.Errorf("left beside %s: %v", dir, beside)
				}
			}
		}
		put("old")
		if _, err := r.Start(ctx, "v", nil); err != nil {
			t.Fatal(err)
		}
		if err := r.Stop(ctx, "v", 0); err != nil {
			t.Fatal(err)
		}
		ck, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{WithVolumes: true})
		if err != nil {
			t.Fatal(err)
		}
		plain, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(fmt.Sprint(plain.Warnings), "volume one and not part") || len(ck.Warnings) > 0 {
			t.Errorf("warnings: %v and %v", plain.Warnings, ck.Warnings)
		}
		if err := r.VerifyCheckpoint(ctx, ck.ID); err != nil {
			t.Error(err)
		}
		put("new")
		if broken != "" {
			t.Setenv("AGENTBOX_FAILPOINT", broken+"=error")
			if _, err := r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: ck.ID}); err == nil {
				t.Errorf("%s: the restore succeeded (tests need the tag failpoint)", broken)
			}
			has("new")
			t.Setenv("AGENTBOX_FAILPOINT", "")
		}
		if _, err := r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: ck.ID, Verify: true}); err != nil {
			t.Fatal(err)
		}
		has("old")
	}
}
