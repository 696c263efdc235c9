package stage

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestLifeOfAStart(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	want := Start{
		Env:   []string{"A=1", "B="},
		Files: []File{{Path: "/f", Mode: 0o4755, UID: 1, GID: 2, Data: []byte{0, 0xff}}},
		Reap:  []string{"/bin/true", "x"},
	}
	if _, err := At(run, "c").LoadStart(); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("LoadStart of nothing: %v", err)
	}
	for range 2 {
		if err := At(run, "c").PutStart(want); err != nil {
			t.Fatal(err)
		}
	}
	got, err := At(run, "c").LoadStart()
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("LoadStart = %+v, %v; want %+v", got, err, want)
	}
	if At(run, "c").Armed() {
		t.Error("armed before its create")
	}
	if err := At(run, "c").UseStart(got); err != nil {
		t.Fatal(err)
	}
	if _, err := At(run, "c").LoadStart(); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("LoadStart of a used one: %v", err)
	}
	if !At(run, "c").Armed() {
		t.Error("not armed")
	}
	// Clearing what is staged leaves alone what its `start` is to write.
	if err := At(run, "c").Clear(); err != nil {
		t.Fatal(err)
	}
	for _, want := range [][]File{want.Files, nil} {
		if files, err := At(run, "c").TakeFiles(); err != nil || !reflect.DeepEqual(files, want) {
			t.Fatalf("TakeFiles = %+v, %v; want %+v", files, err, want)
		}
	}
	if err := errors.Join(At(run, "c").UseStart(want), At(run, "c").UseStart(Start{Reap: want.Reap})); err != nil {
		t.Fatal(err)
	}
	if files, err := At(run, "c").TakeFiles(); err != nil || files != nil {
		t.Fatalf("files of an earlier create: %+v, %v", files, err)
	}
	// Deleted without having been started: nothing is owed.
	if reap, err := At(run, "c").TakeReap(); err != nil || reap != nil || At(run, "c").Armed() {
		t.Fatalf("TakeReap before the start = %q, %v", reap, err)
	}

	if err := At(run, "c").UseStart(want); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := At(run, "c").ArmReap(); err != nil {
			t.Fatal(err)
		}
	}
	// Staging for the next start and clearing that leave it alone.
	if err := errors.Join(At(run, "c").PutStart(Start{}), At(run, "c").Clear()); err != nil {
		t.Fatal(err)
	}
	if reap, err := At(run, "c").TakeReap(); err != nil || !reflect.DeepEqual(reap, want.Reap) {
		t.Fatalf("TakeReap = %q, %v", reap, err)
	}
	if reap, err := At(run, "c").TakeReap(); err != nil || reap != nil {
		t.Fatalf("TakeReap again = %q, %v", reap, err)
	}

	// A start without one ends what an earlier one owed.
	if err := errors.Join(At(run, "c").UseStart(want), At(run, "c").ArmReap(),
		At(run, "c").UseStart(Start{})); err != nil {
		t.Fatal(err)
	}
	if At(run, "c").Armed() {
		t.Error("still armed")
	}
	if err := errors.Join(At(run, "c").UseStart(want), At(run, "c").ArmReap(), At(run, "c").Disarm(),
		At(run, "c").Disarm()); err != nil || At(run, "c").Armed() {
		t.Errorf("Disarm: %v", err)
	}
	if err := errors.Join(At(run, "c").PutStart(Start{}), At(run, "c").ClearStart(),
		At(run, "c").ClearStart()); err != nil {
		t.Error(err)
	}
	if ids, err := List(run); err != nil || len(ids) != 0 {
		t.Errorf("List = %q, %v", ids, err)
	}
}

func TestPausedMark(t *testing.T) {
	run := t.TempDir()
	if At(run, "c").TakePaused() {
		t.Error("paused before it was said")
	}
	if err := errors.Join(At(run, "c").KeepPaused(), At(run, "c").KeepPaused(), At(run, "c").Clear()); err != nil {
		t.Fatal(err)
	}
	if !At(run, "c").TakePaused() || At(run, "c").TakePaused() {
		t.Error("the mark is not there once, over Clear")
	}
	if err := At(run, "../c").KeepPaused(); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("KeepPaused(../c): %v", err)
	}
}

func TestBadStarts(t *testing.T) {
	run := t.TempDir()
	for name, s := range map[string]Start{
		"no value":       {Env: []string{"A"}},
		"no name":        {Env: []string{"=A"}},
		"a zero byte":    {Env: []string{"A=\x00"}},
		"relative file":  {Files: []File{{Path: "f"}}},
		"mode":           {Files: []File{{Path: "/f", Mode: 0o100644}}},
		"relative reap":  {Reap: []string{"true"}},
		"far too large":  {Files: []File{{Path: "/f", Data: make([]byte, maxStart)}}},
		"empty reap arg": {Reap: []string{""}},
	} {
		if err := At(run, "c").PutStart(s); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	for _, id := range []string{"", "..", "a/b"} {
		if err := At(run, id).PutStart(Start{}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("PutStart(%q): %v", id, err)
		}
		if At(run, id).Armed() {
			t.Errorf("Armed(%q)", id)
		}
	}
	path := filepath.Join(run, "reap", "due", "c")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if reap, err := At(run, "c").TakeReap(); !errors.Is(err, fault.ErrCorrupt) || reap != nil {
		t.Errorf("TakeReap of garbage = %q, %v", reap, err)
	}
	if At(run, "c").Armed() {
		t.Error("garbage stays")
	}
}
