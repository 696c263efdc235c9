package apply

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/overlay"
)

// TestGitIndex: of an index that both sides have changed, the one counts in which something was staged.
func TestGitIndex(t *testing.T) {
	dir := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-c", "user.name=u", "-c", "user.email=u@localhost"}, args...)...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %q: %v\n%s", args, err, out)
		}
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	index := func() side {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(dir, ".git/index"))
		if err != nil {
			t.Fatal(err)
		}
		return side{&overlay.Entry{Type: overlay.TypeFile, Size: int64(len(data))},
			func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
	}
	git("init", "-q")
	write("a", "one")
	git("add", "a")
	git("commit", "-qm", "one")
	base := index()
	write("a", "one") // another time
	git("update-index", "--refresh")
	seen := index()
	write("b", "two")
	git("add", "b")
	staged := index()
	write("b", "three")
	git("add", "b")
	other := index()
	broken := side{&overlay.Entry{Type: overlay.TypeFile, Size: 3},
		func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader([]byte("DIR"))), nil }}

	m := &merger{part: &part{}}
	m.From = "/home/u/project"
	for _, c := range []struct {
		what       string
		rel        string
		s, f       side
		take, sure bool
	}{
		{"the sandbox has staged", ".git/index", staged, seen, true, true},
		{"the owner has staged", ".git/index", seen, staged, false, true},
		{"both have staged the same", ".git/index", staged, staged, false, true},
		{"both have staged", ".git/index", staged, other, false, false},
		{"none has staged", ".git/index", seen, base, true, true},
		{"it is damaged", ".git/index", broken, seen, false, false},
		{"it is of a submodule", ".git/modules/x/index", staged, seen, true, true},
		{"it is no index", "src/index", staged, seen, false, false},
	} {
		take, sure, err := m.resolveIndex(t.Context(), c.rel, c.s, base, c.f)
		if take != c.take || sure != c.sure || err != nil {
			t.Errorf("%s: take %v, sure %v, %v", c.what, take, sure, err)
		}
	}
}
