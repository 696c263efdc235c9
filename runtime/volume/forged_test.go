package volume

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// A volume whose files agentbox has not written leads nowhere else: what its records name
// outside is neither removed nor used.
func TestForged(t *testing.T) {
	ctx := context.Background()
	lead := func(from, to string) error { return errors.Join(os.RemoveAll(from), os.Symlink(to, from)) }
	forge := func(b *bench, rec stored, head map[string]any) error {
		var st unix.Stat_t
		if err := unix.Stat(b.from, &st); err != nil {
			return err
		}
		head["version"], head["original"], head["ino"] = version, rec.From, st.Ino
		dir := b.path("ws", apply.DirApply)
		return errors.Join(os.Mkdir(dir, 0o700), record.WriteJSON(filepath.Join(dir, "plan.json"), map[string]any{}, false),
			record.WriteJSON(filepath.Join(dir, "apply.json"), head, false))
	}
	change := func(b *bench, with map[string]any) error {
		path := b.path("ws", "volume.json")
		data, err := os.ReadFile(path)
		var rec map[string]any
		if err = errors.Join(err, json.Unmarshal(data, &rec)); err != nil {
			return err
		}
		maps.Copy(rec, with)
		return record.WriteJSON(path, rec, false)
	}
	for name, lie := range map[string]func(b *bench, rec stored, outside string) error{
		"scratch": func(b *bench, rec stored, outside string) error {
			return forge(b, rec, map[string]any{
				"phase": "stage", "scratch": "../" + filepath.Base(filepath.Dir(outside)) + "/outside",
			})
		},
		"stray": func(b *bench, rec stored, outside string) error {
			return forge(b, rec, map[string]any{
				"phase": "done", "stray": "../" + filepath.Base(filepath.Dir(outside)) + "/outside",
			})
		},
		"a name in the original": func(b *bench, rec stored, _ string) error {
			return forge(b, rec, map[string]any{"phase": "rolled", "scratch": "mine"})
		},
		"id": func(b *bench, _ stored, _ string) error {
			return change(b, map[string]any{"id": "/../../../../../tmp/aaaaaaaaaaaaaa"})
		},
		"from": func(b *bench, _ stored, _ string) error {
			return change(b, map[string]any{"from": b.from + "/../x"})
		},
		"from, rel": func(b *bench, _ stored, _ string) error { return change(b, map[string]any{"from": "etc"}) },
		"upper":     func(b *bench, _ stored, outside string) error { return lead(b.path("ws", "upper"), outside) },
		"work":      func(b *bench, _ stored, outside string) error { return lead(b.path("ws", "work"), outside) },
		"merged":    func(b *bench, _ stored, outside string) error { return lead(b.path("ws", "merged"), outside) },
		"itself": func(b *bench, _ stored, outside string) error {
			return errors.Join(os.Rename(b.path("ws"), outside+"/ws"), os.Symlink(outside+"/ws", b.path("ws")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, "near")
			rec := b.create(t)
			outside := filepath.Join(t.TempDir(), "outside")
			must(t, errors.Join(os.Mkdir(outside, 0o700), os.WriteFile(outside+"/kept", []byte("x"), 0o600),
				os.Mkdir(b.from+"/mine", 0o700)))
			must(t, lie(b, rec, outside))
			settled := b.Sweep(ctx)
			_, mounted := b.Volumes.Mount(ctx, "ws", "m")
			if mounted == nil {
				must(t, b.Volumes.Unmount(ctx, "ws", "m"))
			}
			if !errors.Is(mounted, fault.ErrCorrupt) {
				t.Errorf("mount: %v (sweep: %v)", mounted, settled)
			}
			if got, err := os.ReadFile(outside + "/kept"); err != nil || string(got) != "x" {
				t.Errorf("%q, %v", got, err)
			}
			if _, err := os.Stat(b.from + "/mine"); err != nil {
				t.Error(err)
			}
		})
	}
}
