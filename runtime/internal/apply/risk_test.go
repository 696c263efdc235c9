package apply

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/runtime"
)

func riskText(r runtime.Risk) string {
	var list []string
	for _, one := range r.Reasons {
		list = append(list, fmt.Sprintf("%s (+%d)", one.Text, one.Points))
	}
	return fmt.Sprintf("%d: %s", r.Score, strings.Join(list, ", "))
}

func many(n int, name string) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("/w/%s%04d", name, i))
	}
	return list
}

// TestRisk has a row for each reason.
func TestRisk(t *testing.T) {
	places := []Place{{At: "/w"}, {At: "/w/sub"}}
	file := func(kind, p, mode string, size int64, what ...string) runtime.Change {
		c := runtime.Change{
			Change: kind, Path: p, Type: "file", What: what, New: &runtime.FileState{Type: "file", Mode: mode, Size: size},
		}
		if kind == "M" {
			c.Old = &runtime.FileState{Type: "file", Mode: "0644", Size: 1}
		}
		return c
	}
	added := func(list []string) (out []runtime.Change) {
		for _, p := range list {
			out = append(out, file("A", p, "0644", 1))
		}
		return out
	}
	dir := runtime.Change{Change: "A", Path: "/w/.github", Type: "dir", New: &runtime.FileState{Type: "dir", Mode: "0755"}}
	for name, c := range map[string]struct {
		list    []runtime.Change
		removed []string
		want    string
	}{
		"nothing":         {want: "0: "},
		"a text":          {list: []runtime.Change{file("M", "/w/main.go", "0644", 9, "content")}, want: "0: "},
		"a deletion":      {removed: []string{"/w/a"}, want: "1: deletes /w/a (+1)"},
		"some deletions":  {removed: many(10, "x"), want: "3: deletes 10 files, such as /w/x0000 (+3)"},
		"many deletions":  {removed: many(100, "x"), want: "6: deletes 100 files, such as /w/x0000 (+5), changes 100 paths (+1)"},
		"many files":      {list: added(many(1000, "x")), want: "5: changes 1000 paths (+5)"},
		"a program":       {list: []runtime.Change{file("A", "/w/x", "0755", 9)}, want: "2: brings /w/x, executable (+2)"},
		"made executable": {list: []runtime.Change{file("M", "/w/x", "0755", 9, "mode")}, want: "2: brings /w/x, executable (+2)"},
		"size":            {list: []runtime.Change{file("A", "/w/x", "0644", 10<<20)}, want: "1: brings 10 MiB (+1)"},
		"touched, large":  {list: []runtime.Change{file("M", "/w/x", "0600", 1<<30, "mode")}, want: "0: "},
		"CI":              {list: []runtime.Change{dir, file("A", "/w/.github/w.yml", "0644", 1)}, want: "4: changes CI: /w/.github/w.yml (+4)"},
		"CI of a part":    {list: added([]string{"/w/sub/.github/w.yml"}), want: "4: changes CI: /w/sub/.github/w.yml (+4)"},
		"no CI":           {list: added([]string{"/w/docs/.github/w.yml", "/w/.githubs"}), want: "0: "},
		"CI goes":         {removed: []string{"/w/x/Jenkinsfile"}, want: "5: deletes /w/x/Jenkinsfile (+1), changes CI: /w/x/Jenkinsfile (+4)"},
		"the rules":       {list: added([]string{"/w/.agentbox.yaml"}), want: "5: changes rules of sandboxes: /w/.agentbox.yaml (+5)"},
		"a copy of rules": {list: added([]string{"/w/test/.agentbox.yaml"}), want: "0: "},
		"locks":           {list: added([]string{"/w/go.sum", "/w/a/Cargo.lock"}), want: "2: changes dependencies that are locked: 2 files, such as /w/a/Cargo.lock (+2)"},
		"infrastructure":  {list: added([]string{"/w/infra/main.tf"}), want: "4: changes infrastructure: /w/infra/main.tf (+4)"},
		"of no workspace": {list: added([]string{"/elsewhere/main.tf"}), want: "0: "},
		"several at a time": {list: added([]string{"/w/main.tf", "/w/go.sum"}), removed: []string{"/w/a"},
			want: "7: deletes /w/a (+1), changes infrastructure: /w/main.tf (+4), changes dependencies that are locked: /w/go.sum (+2)"},
	} {
		if got := riskText(RiskOf(places, c.list, c.removed)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestRiskGrows: what is changed in addition never makes the risk smaller, and the score is the sum of
// the reasons.
func TestRiskGrows(t *testing.T) {
	names := []string{"a", "go.sum", "x.tf", ".agentbox.yaml", ".github/a", "d/Jenkinsfile", "big", "d/e/f"}
	rapid.Check(t, func(t *rapid.T) {
		var list []runtime.Change
		var removed []string
		last := 0
		for i := range rapid.IntRange(1, 120).Draw(t, "n") {
			p := fmt.Sprintf("/w/%s", rapid.SampledFrom(names).Draw(t, "name"))
			if rapid.Bool().Draw(t, "own name") {
				p += fmt.Sprint(i)
			}
			if rapid.Bool().Draw(t, "goes") {
				removed = append(removed, p)
			} else {
				list = append(list, runtime.Change{Change: "A", Path: p, Type: "file", New: &runtime.FileState{
					Type: "file", Mode: rapid.SampledFrom([]string{"0644", "0755"}).Draw(t, "mode"),
					Size: rapid.Int64Range(0, 20<<20).Draw(t, "size"),
				}})
			}
			r := RiskOf([]Place{{At: "/w"}}, list, removed)
			sum := 0
			for _, one := range r.Reasons {
				sum += one.Points
			}
			if r.Score != sum || r.Score < last {
				t.Fatalf("%s after %d", riskText(r), last)
			}
			last = r.Score
		}
	})
}

// TestSum: the digest of an apply is that of its dry run, and another one as soon as anything else
// would come, go, or be replaced.
func TestSum(t *testing.T) {
	for place := range places {
		t.Run(place, func(t *testing.T) {
			l, end := newLab(t, place, 1)
			defer end()
			text := strings.Repeat("line\n", 9)
			edit(t, l.from(0), "put a A\nput both "+strings.ReplaceAll(text, "\n", `\n`)+"\nput d/x x\nput d/e/y y\nput other o\nln l a")
			l.begin(t)
			l.inside(t, 0, func(dir string) {
				edit(t, dir, "put a changed\nrm d\nput n/f f\nrm l\nln l other\nput both "+strings.ReplaceAll(text, "\n", `\n`)+"sandbox")
			})
			edit(t, l.from(0), "put both owner"+`\n`+strings.ReplaceAll(text, "\n", `\n`)) // it is merged
			sum := func() string {
				t.Helper()
				_, err := l.run(runtime.ApplyOptions{DryRun: true}, nil)
				must(t, err)
				if l.sum == "" {
					t.Fatal("no review of a dry run")
				}
				return l.sum
			}
			first := sum()
			if again := sum(); again != first {
				t.Errorf("one more dry run: %s, %s", again, first)
			}
			if want := []string{"/w0/d/e/y", "/w0/d/x"}; !slices.Equal(l.removed, want) {
				t.Errorf("removed: %q, want %q", l.removed, want)
			}
			seen := map[string]string{first: "first"}
			differs := func(what string) {
				t.Helper()
				now := sum()
				if seen[now] != "" {
					t.Errorf("%s: the digest is that of %s", what, seen[now])
				}
				seen[now] = what
			}
			inside := func(steps string) func() {
				return func() { l.inside(t, 0, func(dir string) { edit(t, dir, steps) }) }
			}
			owner := func(steps string) func() { return func() { edit(t, l.from(0), steps) } }
			for _, step := range []struct {
				what string
				do   func()
			}{
				{"another text", inside("put a Changed")}, {"another mode", inside("mode a 755")},
				{"a new file", inside("put n/g g")}, {"another link", inside("rm l\nln l n")},
				{"a new directory", inside("dir e")}, {"a directory's mode", inside("mode n 700")},
				{"another merge", owner("put both Owner\\n" + strings.ReplaceAll(text, "\n", `\n`))},
				{"what goes is another", owner("put d/x x")}, {"less comes", inside("rm n/g")},
			} {
				step.do()
				differs(step.what)
			}
			last := l.sum
			_, err := l.run(runtime.ApplyOptions{}, nil)
			must(t, err)
			if l.sum != last {
				t.Errorf("the apply has another digest than its dry run: %s, %s", l.sum, last)
			}
			if _, err := os.Lstat(filepath.Join(l.from(0), "d")); err == nil {
				t.Error("d is there after the apply")
			}
		})
	}
}
