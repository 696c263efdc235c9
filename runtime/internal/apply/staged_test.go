package apply

import (
	"context"
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestReview: the error of a review ends an apply before it touches anything, and so does any change of
// the directory since the plan, also where nothing comes.
func TestReview(t *testing.T) {
	refused := errors.New("refused")
	for place := range places {
		for name, c := range map[string]struct {
			steps string // the owner's, while the review is under way
			err   error  // the review's
			lax   bool
			want  error
		}{
			"refused":    {err: refused, want: refused},
			"new file":   {steps: "put other/new n", want: fault.ErrState},
			"new at top": {steps: "put new n", want: fault.ErrState},
			"changed":    {steps: "put other/file changed", want: fault.ErrState},
			"same text":  {steps: "put other/file o", want: fault.ErrState},
			"mode":       {steps: "mode other/file 600", want: fault.ErrState},
			"top's mode": {steps: "mode . 700", want: fault.ErrState},
			"removed":    {steps: "rm other", want: fault.ErrState},
			"passed":     {},
			"unjudged":   {steps: "put other/new n", lax: true},
			"in the way": {steps: "put a mine", lax: true, want: fault.ErrState},
		} {
			t.Run(place+"/"+name, func(t *testing.T) {
				l, end := newLab(t, place, 2)
				defer end()
				for i := range l.n {
					edit(t, l.from(i), "put a A\nput other/file o")
				}
				l.begin(t)
				for i := range l.n {
					l.inside(t, i, func(dir string) { edit(t, dir, "put a changed\nput b/c new") })
				}
				l.review = func() error {
					edit(t, l.from(1), c.steps)
					return c.err
				}
				l.lax = c.lax
				_, err := l.run(runtime.ApplyOptions{}, nil)
				if !errors.Is(err, c.want) || c.want == nil && err != nil {
					t.Fatalf("apply: %v, want %v", err, c.want)
				}
				for i := range l.n {
					if name == "in the way" && i == 1 {
						continue
					}
					text, err := os.ReadFile(l.from(i) + "/a")
					must(t, err)
					if want := map[bool]string{true: "changed", false: "A"}[c.want == nil]; string(text) != want {
						t.Errorf("a is %q, want %q", text, want)
					}
				}
				if _, err := os.Lstat(l.home().path(DirApply)); err == nil {
					t.Error("an apply is left")
				}
			})
		}
	}
}

// TestCanary: a canary comes first, its check finds the directories with just that, and what it refuses
// takes all back.
func TestCanary(t *testing.T) {
	refused := errors.New("refused")
	for place := range places {
		for name, c := range map[string]struct {
			errs []error // of the checks, in order
			want error
		}{
			"passed": {}, "first refused": {[]error{refused}, refused}, "second refused": {[]error{nil, refused}, refused},
		} {
			t.Run(place+"/"+name, func(t *testing.T) {
				l, old, new := two(t, place)
				var seen []map[string]string
				check := func(context.Context) (err error) {
					for i := range l.n {
						has := files(t, l.from(i))
						maps.DeleteFunc(has, func(p, _ string) bool { return strings.HasPrefix(p, scratchPrefix) })
						seen = append(seen, has)
					}
					if n := len(seen)/2 - 1; n < len(c.errs) {
						err = c.errs[n]
					}
					return err
				}
				takes := func(at string, paths ...string) func(string, string) bool {
					return func(have, rel string) bool { return have == at && slices.Contains(paths, rel) }
				}
				l.canaries = []Canary{
					{Takes: takes("/w0", "n/deep/f", "gone/z", "nosuch"), Check: check},
					{Takes: takes("/w1", "nosuch"), Check: func(context.Context) error { return errors.New("checked") }},
					{Takes: func(at, rel string) bool { return at == "/w1" && rel == "a" || at == "/w0" }, Check: check},
				}
				_, err := l.run(runtime.ApplyOptions{}, nil)
				if !errors.Is(err, c.want) || c.want == nil && err != nil {
					t.Fatalf("apply: %v, want %v", err, c.want)
				}
				first := maps.Clone(old[0])
				delete(first, "gone/z") // the directory goes as a whole
				first["n/deep/f"] = new[0]["n/deep/f"]
				same(t, "w0 at the first check", seen[0], first)
				same(t, "w1 at the first check", seen[1], old[1])
				if name != "first refused" {
					second := maps.Clone(old[1])
					second["a"] = new[1]["a"]
					same(t, "w0 at the second check", seen[2], new[0])
					same(t, "w1 at the second check", seen[3], second)
				}
				want := new
				if c.want != nil {
					want = old
				}
				for i := range l.n {
					same(t, "the directory", files(t, l.from(i)), want[i])
				}
				if c.want == nil {
					_, err := Undo(t.Context(), l.home(), false)
					must(t, err)
					for i := range l.n {
						same(t, "the directory after an undo", files(t, l.from(i)), old[i])
					}
				}
			})
		}
	}
}
