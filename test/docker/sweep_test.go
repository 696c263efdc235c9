package docker

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestSweep kills agentbox at every instant that a checkpoint and a restore have a name for, on a
// container that is not agentbox's: the next command leaves it as before or as after the verb,
// running, and nothing half-made.
func TestSweep(t *testing.T) {
	h := newHost(t, nil)
	b := h.box(t)
	b.counter("swept", "--restart", "unless-stopped")
	b.ok("checkpoint", "--name", "base", "docker://swept")
	b.Docker(t, "exec", "swept", "touch", "/later")
	fired := 0
	for _, point := range points(t) {
		verb := []string{"checkpoint", "--name", "new", "docker://swept"}
		if strings.HasPrefix(point, "restore.") {
			verb = []string{"restore", "docker://swept", "base"}
		}
		r := b.try(killAt(point), verb...)
		if r.killed {
			fired++
		} else if r.code != 0 {
			t.Fatalf("%s: %s", point, r.err)
		}
		b.ok("recover")
		b.is("swept", "running")
		b.counts("swept")
		if left := b.ok("recover"); left != "nothing to recover" {
			t.Errorf("%s: a second recover found %q", point, left)
		}
		if staged, _ := os.ReadDir(filepath.Join(h.StageRun, "restore")); len(staged) > 0 {
			t.Errorf("%s: staged: %v", point, staged)
		}
		_, err := os.Stat(b.upper("swept", "later"))
		if restored := err != nil; restored && verb[0] != "restore" {
			t.Errorf("%s: a checkpoint changed the files", point)
		}
		if beside, _ := filepath.Glob(b.upper("swept", "") + ".new"); len(beside) > 0 {
			t.Errorf("%s: left beside the upperdir: %v", point, beside)
		}
		for _, id := range strings.Fields(b.ok("checkpoint", "ls", "-a", "-q", "docker://swept")) {
			info := b.ok("checkpoint", "inspect", id)
			if strings.Contains(info, `"name": "base"`) {
				b.ok("checkpoint", "verify", id)
				continue
			}
			if strings.Contains(info, `"status": "pending"`) {
				t.Errorf("%s: left pending: %s", point, info)
			}
			b.ok("checkpoint", "rm", id)
		}
		b.Docker(t, "exec", "swept", "touch", "/later")
	}
	if fired < 15 {
		t.Errorf("only %d points fired", fired)
	}
}

// points are the names of the Engine's instants in the two verbs.
func points(t *testing.T) (names []string) {
	t.Helper()
	hit := regexp.MustCompile(`failpoint\.Hit\("((?:checkpoint|restore)\.[^"]+)"\)`)
	err := filepath.WalkDir("../../runtime", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range hit.FindAllStringSubmatch(string(text), -1) {
			names = append(names, m[1])
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
