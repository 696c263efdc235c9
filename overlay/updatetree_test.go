package overlay

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestPlanTreeRefuses has trees of which most is the same as what is there.
func TestPlanTreeRefuses(t *testing.T) {
	base := t.TempDir()
	dir := base + "/dir"
	must(t, os.MkdirAll(dir+"/a/b", 0o755))
	for _, p := range []string{"a/1", "a/2", "a/b/1", "a/b/2", "c", "d"} {
		must(t, os.WriteFile(dir+"/"+p, nil, 0o644))
	}
	fileCache := base + "/memory"
	_, err := Collect(t.Context(), dir, fileCache, nil, CollectOptions{})
	must(t, err)
	tree := string(treeOf(t, dir))
	line := func(path string) string {
		for l := range strings.Lines(tree) {
			if strings.Contains(l, `"path":"`+path+`"`) {
				return l
			}
		}
		t.Fatal(path)
		return ""
	}
	for name, c := range map[string]struct {
		tree string
		err  error
	}{
		"the same":             {tree, nil},
		"empty":                {"", fault.ErrInvalid},
		"cut off":              {tree[:len(tree)-1], fault.ErrCorrupt},
		"a line that is none":  {tree + "\n", fault.ErrCorrupt},
		"one twice at the end": {tree + line("d"), fault.ErrCorrupt},
		"one twice":            {strings.Replace(tree, line("a/2"), line("a/2")+line("a/2"), 1), fault.ErrCorrupt},
		"passed before": {strings.Replace(tree, line("a/b"),
			strings.Replace(line("a/1"), "0644", "0600", 1)+line("a/b"), 1), fault.ErrCorrupt},
		"passed deeper": {tree + strings.Replace(line("a/b/2"), "a/b/2", "a/b/3", 1), fault.ErrCorrupt},
		"no parent":     {tree + strings.Replace(line("a/b/2"), "a/b/2", "x/y", 1), fault.ErrCorrupt},
	} {
		u, err := PlanUpdateTree(t.Context(), fileCache, strings.NewReader(c.tree))
		if !errors.Is(err, c.err) {
			t.Errorf("%s: want %v, got %v", name, c.err, err)
		}
		if err == nil && !u.Empty() {
			t.Errorf("%s: %q", name, kinds(t, u))
		}
	}
	own := errors.New("own")
	if _, err := PlanUpdateTree(t.Context(), fileCache, io.MultiReader(strings.NewReader(tree),
		broken{own})); !errors.Is(err, own) {
		t.Error(err)
	}
	if _, err := PlanUpdateTree(t.Context(), base+"/none",
		strings.NewReader(tree)); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	b, err := os.ReadFile(fileCache)
	must(t, err)
	b[len(b)-1] ^= 1
	must(t, os.WriteFile(fileCache, b, 0o600))
	if _, err := PlanUpdateTree(t.Context(), fileCache, strings.NewReader(tree)); !errors.Is(err, fault.ErrCorrupt) {
		t.Error(err)
	}
}
