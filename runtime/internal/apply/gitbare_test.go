package apply

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestBareRepositories: a directory that git would take for a repository gets no programs for git
// unnamed, however it becomes one.
func TestBareRepositories(t *testing.T) {
	const bare = "put %/HEAD ref: refs/heads/main\ndir %/objects\ndir %/refs/heads"
	at := func(dir, steps string) string { return strings.ReplaceAll(steps, "%", dir) }
	for name, c := range map[string]struct {
		host, agent string
		refused     []string
	}{
		"a new one": {
			agent: at("d/x", bare) + "\nput d/x/config [core]\nput d/x/hooks/pre-commit p\nput d/x/info/attributes a" +
				"\nput d/x/info/exclude e\nput d/x/description d",
			refused: []string{"d/x/config", "d/x/hooks/pre-commit", "d/x/info/attributes"},
		},
		"without programs": {agent: at("x", bare) + "\nput x/description d"},
		"in a repository":  {agent: at(".git/x", bare) + "\nput .git/x/config c", refused: []string{".git/x/config"}},
		"the workspace":    {agent: at(".", bare) + "\nput config c", refused: []string{"config"}},
		"by another directory's": {
			agent: "put x/HEAD ref: refs/heads/main\nput x/commondir ../y", refused: []string{"x/commondir"},
		},
		"the last part": {
			host: "put x/config c\nput x/HEAD h\ndir x/objects", agent: "dir x/refs/heads", refused: []string{"x/refs"},
		},
		"the last part, HEAD as a link": {
			host: "dir x/hooks\ndir x/refs\ndir x/objects", agent: "ln x/HEAD refs/heads/main",
			refused: []string{"x/HEAD"},
		},
		"the owner's": {
			host: at("x", bare) + "\nput x/config c", agent: "put x/config C\nput x/refs/heads/main 0\nln x/hooks /tmp",
			refused: []string{"x/config", "x/hooks"},
		},
		"no more": {host: at("x", bare) + "\nput x/config c", agent: "rm x/HEAD\nput x/config C"},
		"not one": {host: "put x/HEAD h", agent: "put x/config c\nput x/hooks/h h\nput x/refs r"},
	} {
		t.Run(name, func(t *testing.T) {
			l, end := newLab(t, "near", 1)
			defer end()
			edit(t, l.from(0), c.host)
			l.begin(t)
			had := files(t, l.from(0))
			l.inside(t, 0, func(dir string) { edit(t, dir, c.agent) })
			out, err := l.run(runtime.ApplyOptions{}, nil)
			if refused := len(c.refused) > 0; refused != errors.Is(err, fault.ErrDenied) || !refused && err != nil {
				t.Fatalf("apply: %v", err)
			}
			var got, allow []string
			for _, r := range out.Refused {
				got, allow = append(got, strings.TrimPrefix(r.Path, "/w0/")), append(allow, r.Path)
				if !r.MayAllow || r.Reason == "" {
					t.Errorf("%+v", r)
				}
			}
			if slices.Sort(got); !slices.Equal(got, c.refused) {
				t.Fatalf("refused %q, want %q", got, c.refused)
			}
			if len(c.refused) == 0 {
				return
			}
			same(t, "the directory", files(t, l.from(0)), had)
			_, err = l.run(runtime.ApplyOptions{Allow: allow}, nil)
			must(t, err)
		})
	}
}

// TestRepositoryForms: what git takes for a repository is one here, too.
func TestRepositoryForms(t *testing.T) {
	git, err := exec.LookPath("git")
	must(t, err)
	const head = "put HEAD ref: refs/heads/main\n"
	for name, steps := range map[string]string{
		"whole":            head + "dir objects\ndir refs",
		"HEAD a link":      "ln HEAD refs/heads/main\ndir objects\ndir refs",
		"objects a link":   head + "ln objects /tmp\ndir refs",
		"commondir":        head + "put commondir other\ndir other/objects\ndir other/refs",
		"no HEAD":          "dir objects\ndir refs",
		"no objects":       head + "dir refs",
		"no refs":          head + "dir objects",
		"another's gitdir": "put gitdir " + t.TempDir(),
	} {
		dir := t.TempDir()
		edit(t, dir, steps)
		cmd := exec.Command(git, "rev-parse", "--git-dir")
		cmd.Dir, cmd.Env = dir, gitEnv()
		theirs := cmd.Run() == nil
		ours, err := isRepository(func(name string) (bool, error) {
			_, err := os.Lstat(filepath.Join(dir, name))
			return err == nil, nil
		})
		if must(t, err); ours != theirs {
			t.Errorf("%s: git takes it for a repository: %v, apply: %v", name, theirs, ours)
		}
	}
}
