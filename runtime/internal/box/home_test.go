package box

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

type saved struct {
	ID string `json:"id"`
}

// A sandbox whose files lead elsewhere, as in a root that others could write to, is neither
// read nor locked, and what the links lead to stays.
func TestForgedLinks(t *testing.T) {
	ctx := context.Background()
	id := strings.Repeat("a", 32)
	lead := func(from, to string) error { return errors.Join(os.RemoveAll(from), os.Symlink(to, from)) }
	for name, c := range map[string]struct {
		forge func(h home, outside string) error
		lock  bool // it can be locked, to be removed
	}{
		"itself": {func(h home, outside string) error {
			return errors.Join(os.Rename(h.Dir(id), outside+"/"+id), os.Symlink(outside+"/"+id, h.Dir(id)))
		}, false},
		"its part of run": {func(h home, outside string) error { return lead(h.RunDir(id), outside) }, false},
		"upper":           {func(h home, outside string) error { return lead(h.Dir(id, "upper"), outside) }, true},
		"merged":          {func(h home, outside string) error { return lead(h.Dir(id, "merged"), outside) }, true},
		"etc":             {func(h home, outside string) error { return lead(h.Dir(id, "etc"), outside) }, true},
		"runs":            {func(h home, outside string) error { return lead(h.Dir(id, "runs"), outside) }, true},
		"log": {func(h home, outside string) error {
			return lead(h.Dir(id, "log"), outside+"/kept")
		}, true},
		"record": {func(h home, outside string) error {
			return errors.Join(os.Rename(h.Dir(id, "container.json"), outside+"/c.json"),
				os.Symlink(outside+"/c.json", h.Dir(id, "container.json")))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			outside := filepath.Join(dir, "outside")
			must(t, os.MkdirAll(outside+"/exec", 0o700), os.WriteFile(outside+"/kept", []byte("x"), 0o600),
				os.WriteFile(outside+"/exec/kept", []byte("x"), 0o600))
			h, err := openHome(filepath.Join(dir, "root"), filepath.Join(dir, "run"), "", false)
			must(t, err)
			unlock, _, err := h.claim(ctx, id)
			must(t, err)
			must(t, h.Save(id, saved{id}), h.makeStart(id, 1), os.Mkdir(h.Dir(id, "upper"), 0o700))
			unlock()
			var rec saved
			must(t, h.ReadRecord(id, &rec, &rec.ID))
			must(t, c.forge(h, outside))
			if err := h.ReadRecord(id, &rec, &rec.ID); !errors.Is(err, fault.ErrCorrupt) ||
				!strings.Contains(err.Error(), "symbolic link") {
				t.Errorf("load: %v", err)
			}
			unlock, _, err = h.claim(ctx, id)
			if c.lock != (err == nil) || err != nil && !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("claim: %v", err)
			}
			if err == nil {
				must(t, h.ClearRun(id), h.removeFiles(id)) // as a removal does
				unlock()
			}
			for _, path := range []string{"/kept", "/exec/kept"} {
				if got, err := os.ReadFile(outside + path); err != nil || string(got) != "x" {
					t.Errorf("%s: %q, %v", path, got, err)
				}
			}
		})
	}
}

// The note of a start is written through no link, and a link is no start.
func TestForgedStarts(t *testing.T) {
	id := strings.Repeat("a", 32)
	dir := t.TempDir()
	h, err := openHome(filepath.Join(dir, "root"), filepath.Join(dir, "run"), "", false)
	must(t, err)
	must(t, os.Mkdir(h.Dir(id), 0o700), h.makeStart(id, 1))
	kept := filepath.Join(dir, "kept")
	must(t, os.WriteFile(kept, []byte("x"), 0o600), os.Symlink(kept, h.StartDir(id, 1, ".started")),
		os.Symlink(dir, h.StartDir(id, 2)))
	if err := h.NoteStart(id, 1, time.Now()); err == nil {
		t.Error("it was noted through a link")
	}
	if got, err := os.ReadFile(kept); err != nil || string(got) != "x" {
		t.Errorf("%q, %v", got, err)
	}
	if starts, err := h.Starts(id); err != nil || len(starts) != 1 || starts[0] != 1 {
		t.Errorf("%v, %v", starts, err)
	}
}

// Nor do the directories of a backend lead elsewhere.
func TestForgedHome(t *testing.T) {
	for _, part := range []string{"", "containerd"} {
		for _, name := range []string{"root/" + part + "/sandboxes", "run/" + part + "/runc"} {
			dir := t.TempDir()
			must(t, os.MkdirAll(filepath.Join(dir, name), 0o700), os.Remove(filepath.Join(dir, name)),
				os.Symlink(t.TempDir(), filepath.Join(dir, name)))
			if _, err := openHome(filepath.Join(dir, "root"), filepath.Join(dir, "run"),
				part, false); !errors.Is(err, fault.ErrDenied) {
				t.Errorf("%q, %s: %v", part, name, err)
			}
		}
	}
}

// The first that is known of an end counts, and a code counts more than none.
func TestRecordExit(t *testing.T) {
	h := home{Root: t.TempDir(), Run: t.TempDir()}
	id := strings.Repeat("a", 32)
	must(t, os.MkdirAll(h.StartDir(id, 1), 0o700))
	at := time.Now().UTC().Round(time.Second)
	for _, c := range []struct {
		code int
		at   time.Time
		want int
	}{
		{UnknownExit, at, UnknownExit}, {UnknownExit, at.Add(1), UnknownExit}, {137, at.Add(time.Hour), 137},
		{UnknownExit, at, 137}, {0, at, 137},
	} {
		must(t, h.recordExit(id, 1, Exit{Code: c.code, Finished: c.at}))
		got, ok, err := h.RecordedExit(id, 1)
		if err != nil || !ok || got.Code != c.want || !got.Finished.Equal(at) {
			t.Errorf("after %d: %+v, %v, %v", c.code, got, ok, err)
		}
	}
}

// TestHomeExisting: what is missing of an existing root is not made again.
func TestHomeExisting(t *testing.T) {
	dir := t.TempDir()
	root, run := filepath.Join(dir, "root"), filepath.Join(dir, "run")
	if _, err := openHome(root, run, "", true); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("without its root: %v", err)
	}
	if _, err := os.Lstat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the root: %v", err)
	}
	must(t, os.MkdirAll(filepath.Join(root, "sandboxes"), 0o700))
	if _, err := openHome(root, run, "", true); err != nil {
		t.Error(err)
	}
}
