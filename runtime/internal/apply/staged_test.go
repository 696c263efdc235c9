package apply

import (
	"errors"
	"os"
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
				_, err := l.run(runtime.ApplyOptions{}, nil)
				if !errors.Is(err, c.want) || c.want == nil && err != nil {
					t.Fatalf("apply: %v, want %v", err, c.want)
				}
				for i := range l.n {
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
