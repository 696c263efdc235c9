package overlay

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestSkipAndKnown captures a directory as it was before something was added
// to it and its time changed.
func TestSkipAndFixed(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(filepath.Join(dir, "tmp", "keep"), 0o755))
	must(os.Chtimes(filepath.Join(dir, "tmp"), time.Unix(1, 2), time.Unix(1, 2)))
	tree := func(opts CaptureOptions) string {
		t.Helper()
		var b bytes.Buffer
		w := NewTreeWriter(&b)
		opts.Entry = w.Write
		var archive bytes.Buffer
		_, err := Capture(ctx, dir, &archive, opts)
		must(err)
		must(w.Close())
		to := t.TempDir()
		_, err = Apply(ctx, &archive, to, ApplyOptions{})
		must(err)
		differences, err := Verify(ctx, to, bytes.NewReader(b.Bytes()), CompareOptions{})
		must(err)
		if len(differences) > 0 {
			t.Fatalf("the archive is not what was reported: %v", differences)
		}
		return b.String()
	}
	want := tree(CaptureOptions{})
	known := map[string]Entry{}
	for _, path := range []string{".", "tmp"} {
		e, err := ReadDir(dir, path)
		must(err)
		known[path] = e
	}
	must(os.MkdirAll(filepath.Join(dir, "tmp", "passing", "deep"), 0o755))
	must(os.WriteFile(filepath.Join(dir, "new"), nil, 0o644))
	if tree(CaptureOptions{}) == want {
		t.Fatal("nothing changed")
	}
	skip := func(path string) bool { return path == "tmp/passing" || path == "new" }
	if got := tree(CaptureOptions{Skip: skip, Fixed: known}); got != want {
		t.Fatalf("got\n%s\nwant\n%s", got, want)
	}
	must(os.Symlink("tmp", filepath.Join(dir, "link")))
	for _, path := range []string{"nosuch", "new", "link", "link/keep", "../x"} {
		if _, err := ReadDir(dir, path); err == nil {
			t.Errorf("ReadDir(%q) succeeded", path)
		} else if path != "../x" && !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("ReadDir(%q): %v", path, err)
		}
	}
}
