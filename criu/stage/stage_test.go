package stage

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestLifeOfARestore(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	if _, err := At(run, "c1").Load(); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("Load of nothing: %v, want ErrNotFound", err)
	}
	if err := At(run, "c1").MarkRestored(); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("MarkRestored of nothing: %v, want ErrNotFound", err)
	}
	want := Restore{Images: "/i", Work: "/w", Flags: []string{"--tcp-established"}, Config: "/c", Timeout: time.Second}
	if err := At(run, "c1").Put(want); err != nil {
		t.Fatal(err)
	}
	got, err := At(run, "c1").Load()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("Load = %+v, %v; want %+v", got, err, want)
	}
	if At(run, "c1").Restored() {
		t.Fatal("restored before it was")
	}
	// A delete of the container before that leaves it staged.
	if err := At(run, "c1").ClearRestored(); err != nil {
		t.Fatal(err)
	}
	if _, err := At(run, "c1").Load(); err != nil {
		t.Fatalf("ClearRestored took what was staged: %v", err)
	}
	if err := At(run, "c1").MarkRestored(); err != nil {
		t.Fatal(err)
	}
	if !At(run, "c1").Restored() {
		t.Fatal("not marked")
	}
	if _, err := At(run, "c1").Load(); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("still staged after the mark: %v", err)
	}
	if ids, err := List(run); err != nil || !reflect.DeepEqual(ids, []string{"c1"}) {
		t.Fatalf("List = %v, %v", ids, err)
	}
	// Staging anew takes the old mark away.
	if err := At(run, "c1").Put(want); err != nil {
		t.Fatal(err)
	}
	if At(run, "c1").Restored() {
		t.Fatal("mark of the earlier restore survived Put")
	}
	for range 2 {
		if err := At(run, "c1").Clear(); err != nil {
			t.Fatal(err)
		}
	}
	if ids, err := List(run); err != nil || len(ids) != 0 {
		t.Fatalf("List after Clear = %v, %v", ids, err)
	}
	if err := At(run, "c1").ClearRestored(); err != nil {
		t.Fatalf("ClearRestored of nothing: %v", err)
	}
}

func TestModes(t *testing.T) {
	run := t.TempDir()
	if err := At(run, "c").Put(Restore{Images: "/i", Work: "/w"}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{
		"restore": 0o700, "restore/c": 0o700, "restore/c/restore.json": 0o600,
	} {
		st, err := os.Stat(filepath.Join(run, path))
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != want {
			t.Errorf("%s has mode %o, want %o", path, st.Mode().Perm(), want)
		}
	}
}

func TestBadNames(t *testing.T) {
	run := t.TempDir()
	for _, id := range []string{"", ".", "..", "a/b", "../x", "a b", "a\n", "-x", strings.Repeat("x", 256)} {
		if err := At(run, id).Put(Restore{Images: "/i", Work: "/w"}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("Put(%q): %v, want ErrInvalid", id, err)
		}
		if At(run, id).Restored() {
			t.Errorf("Restored(%q)", id)
		}
	}
	if err := At("relative", "c").Put(Restore{Images: "/i", Work: "/w"}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("relative run: %v", err)
	}
	if err := At(run, "c").Put(Restore{}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("empty restore: %v", err)
	}
}

func TestCorrupt(t *testing.T) {
	run := t.TempDir()
	dir := filepath.Join(run, "restore", "c")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "{", `{"images":"/i"}`, strings.Repeat(" ", maxStaged+1)} {
		if err := os.WriteFile(filepath.Join(dir, "restore.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := At(run, "c").Load(); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("Load of %.20q: %v, want ErrCorrupt", text, err)
		}
	}
}
