package engine_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// TestRestoreAside: a restore without an undo checkpoint that fails puts the displaced files
// back, and makes no checkpoint for that.
func TestRestoreAside(t *testing.T) {
	for _, broken := range []string{
		"overlay.update.op", "overlay.update.end", "restore.after-apply", "restore.after-proof", "",
	} {
		t.Run(broken, func(t *testing.T) {
			r := newRig(t, nil)
			sb := r.create(t, "box")
			at := func(name string) string { return filepath.Join(sb.Upperdir, name) }
			steps := func(list ...error) {
				t.Helper()
				for _, err := range list {
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			steps(os.Mkdir(at("dir"), 0o750), os.WriteFile(at("dir/goes"), []byte("goes"), 0o600),
				os.WriteFile(at("file"), []byte("old"), 0o600))
			if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
				t.Fatal(err)
			}
			then := contents(t, sb.Upperdir)
			steps(os.RemoveAll(at("dir")), os.WriteFile(at("dir"), []byte("a file now"), 0o600), os.Remove(at("file")),
				os.Mkdir(at("file"), 0o700),
				os.WriteFile(at("file/in"), []byte(strings.Repeat("a directory now ", 5000)), 0o640))
			want := contents(t, sb.Upperdir)
			if broken == "" {
				want = then
			}
			t.Setenv("AGENTBOX_FAILPOINT", broken+"=error")
			_, err := r.Restore(ctx, "box", runtime.RestoreOptions{NoUndo: true})
			t.Setenv("AGENTBOX_FAILPOINT", "")
			// Where all updates fail, the next command brings the files to the checkpoint.
			unfinished := broken == "overlay.update.end"
			if (err == nil) != (broken == "") {
				t.Fatalf("the restore: %v (tests need the tag failpoint)", err)
			}
			if done, err := r.RecoverInterrupted(ctx); err != nil || len(done.Actions) > 0 != unfinished {
				t.Fatalf("recovery: %+v, %v", done, err)
			}
			if unfinished {
				want = then
			}
			if d := cmp.Diff(want, contents(t, sb.Upperdir)); d != "" {
				t.Error(d)
			}
			if rows, err := r.store.Checkpoints(ctx, store.Filter{All: true}); err != nil || len(rows) != 1 {
				t.Errorf("checkpoints: %+v, %v", rows, err)
			}
			if beside, err := filepath.Glob(sb.Upperdir + ".*"); err != nil || len(beside) > 0 {
				t.Errorf("left beside the files: %q, %v", beside, err)
			}
		})
	}
}

// TestAsideKnownDamaged damages the file cache; the restore detects it.
func TestAsideKnownDamaged(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	file := filepath.Join(sb.Upperdir, "file")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(file, "old")
	write(filepath.Join(sb.Upperdir, "other"), "other")
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	want := contents(t, sb.Upperdir)
	memory := r.store.FileCachePath(sb.ID, 0)
	for at := 0; ; at += 37 {
		write(file, "new")
		known, err := os.ReadFile(memory)
		if err != nil {
			t.Fatal(err)
		}
		if at >= len(known) {
			break
		}
		known[at] ^= 1
		write(memory, string(known))
		if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{NoUndo: true}); err != nil {
			t.Fatalf("damage at %d: %v", at, err)
		}
		if d := cmp.Diff(want, contents(t, sb.Upperdir)); d != "" {
			t.Fatalf("damage at %d: %s", at, d)
		}
	}
}

// TestAsideKnown restores to the checkpoint that the files were last at, and to another one:
// each time the file cache is proven, and is that checkpoint's.
func TestAsideKnown(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	memory := r.store.FileCachePath(sb.ID, 0)
	write := func(text string) {
		t.Helper()
		for _, name := range []string{"a", "b"} {
			if err := os.WriteFile(filepath.Join(sb.Upperdir, name), []byte(name+text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	var ids []string
	var want []map[string]string
	for _, text := range []string{"first", "second"} {
		write(text)
		c, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
		if err != nil {
			t.Fatal(err)
		}
		ids, want = append(ids, c.ID), append(want, contents(t, sb.Upperdir))
	}
	for i, to := range []int{1, 1, 0, 0, 0, 1} {
		write("changed")
		if err := os.WriteFile(filepath.Join(sb.Upperdir, "more"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: ids[to], NoUndo: true}); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want[to], contents(t, sb.Upperdir)); d != "" {
			t.Errorf("restore %d: %s", i, d)
		}
		if base, err := overlay.CacheBase(memory, true); base != ids[to] || err != nil {
			t.Errorf("restore %d: what is known is of %q, %v", i, base, err)
		}
	}
}
