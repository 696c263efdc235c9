package apply

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// gitIn runs git in a directory.
func gitIn(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=n", "-c", "user.email=e@example.invalid",
		"-c", "safe.directory=*"}, args...)...)
	cmd.Dir, cmd.Env = dir, gitEnv()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// TestGitRefs has both sides commit: what one of them has moved comes, what both have moved is a conflict
// that names both commits, and with --ours the repository is whole and has the objects of both.
func TestGitRefs(t *testing.T) {
	commit := func(file string) []string { return []string{"put " + file + " new", "add", "commit " + file} }
	for name, c := range map[string]struct {
		agent, owner []string
		conflicts    []string
		ref          string // one that both have moved
		branch       string // where HEAD is in the end, with --ours if there are conflicts
		status       string // in the end
	}{
		"only the agent": {agent: commit("a"), branch: "main"},
		"the agent on a branch": {
			agent: append([]string{"switch x"}, commit("a")...), branch: "x",
		},
		"the agent, and an edit": {agent: commit("a"), owner: []string{"put o edit"}, branch: "main", status: "?? o"},
		"the owner, and an edit": {agent: []string{"put a edit"}, owner: commit("o"), branch: "main", status: "?? a"},
		"both on main": {
			agent: commit("a"), owner: commit("o"), conflicts: []string{".git/index", ".git/refs/heads/main"},
			ref: "refs/heads/main", branch: "main", status: "?? a",
		},
		"both on branches": {
			agent: append([]string{"switch x"}, commit("a")...), owner: append([]string{"switch y"}, commit("o")...),
			conflicts: []string{".git/HEAD", ".git/index"}, branch: "y", status: "?? a",
		},
		"the agent on a branch, the owner on main": {
			agent: append([]string{"switch x"}, commit("a")...), owner: commit("o"),
			conflicts: []string{".git/HEAD", ".git/index"}, branch: "main", status: "?? a",
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, end := newLab(t, "near", 1)
			defer end()
			do := func(dir string, steps []string) {
				for _, s := range steps {
					switch verb, rest, _ := strings.Cut(s, " "); verb {
					case "put":
						edit(t, dir, s)
					case "switch":
						gitIn(t, dir, "switch", "-q", "-c", rest)
					case "add":
						gitIn(t, dir, "add", "-A")
					case "commit":
						gitIn(t, dir, "commit", "-q", "-m", rest)
					}
				}
			}
			gitIn(t, l.from(0), "init", "-q", "-b", "main", ".")
			do(l.from(0), append([]string{"put old old"}, commit("f")...))
			l.begin(t)
			agent := ""
			l.inside(t, 0, func(dir string) {
				do(dir, c.agent)
				agent = gitIn(t, dir, "rev-parse", "HEAD")
			})
			do(l.from(0), c.owner)
			owner := gitIn(t, l.from(0), "rev-parse", "HEAD")
			had := files(t, l.from(0))
			opts := runtime.ApplyOptions{}
			if len(c.conflicts) > 0 {
				for _, opts := range []runtime.ApplyOptions{{}, {Markers: true}} {
					out, err := l.run(opts, nil)
					if !errors.Is(err, fault.ErrState) {
						t.Fatalf("apply: %v", err)
					}
					var got []string
					for _, p := range out.Conflicts {
						got = append(got, strings.TrimPrefix(p, "/w0/"))
					}
					if slices.Sort(got); !slices.Equal(got, c.conflicts) {
						t.Errorf("conflicts %q, want %q", got, c.conflicts)
					}
					var hint *fault.Error
					if c.ref != "" && (len(out.Refs) != 1 || out.Refs[0].Ref != c.ref || out.Refs[0].Directory != owner ||
						out.Refs[0].Sandbox != agent || !errors.As(err, &hint) ||
						!strings.Contains(hint.Hint, "git update-ref refs/agentbox/c/heads/main "+agent)) {
						t.Errorf("refs %+v, %+v", out.Refs, err)
					}
					same(t, "the directory", files(t, l.from(0)), had)
				}
				opts.Ours = true
			}
			_, err := l.run(opts, nil)
			must(t, err)
			if got := gitIn(t, l.from(0), "symbolic-ref", "--short", "HEAD"); got != c.branch {
				t.Errorf("HEAD is %s, want %s", got, c.branch)
			}
			gitIn(t, l.from(0), "fsck", "--strict")
			gitIn(t, l.from(0), "cat-file", "-e", agent)
			gitIn(t, l.from(0), "update-ref", "refs/agentbox/c/heads/main", agent)
			if got := gitIn(t, l.from(0), "status", "--porcelain"); got != c.status {
				t.Errorf("status %q, want %q", got, c.status)
			}
			if len(c.owner) > 1 && gitIn(t, l.from(0), "rev-parse", "HEAD") != owner {
				t.Error("the owner's commit is not HEAD any more")
			}
			_, err = Undo(t.Context(), l.home(), false)
			if errors.Is(err, fault.ErrState) { // git has noted what it has seen in the index
				return
			}
			must(t, err)
		})
	}
}

func TestGitPartOf(t *testing.T) {
	for p, want := range map[string]gitPart{
		"/r/.git/refs/heads/main": gitRef, "/r/.git/modules/s/refs/heads/main": gitRef, "/r/.git/HEAD": gitHead,
		"/r/.git/worktrees/w/HEAD": gitHead, "/r/.git/index": gitIndex, "/r/.git/logs/HEAD": gitNote,
		"/r/.git/COMMIT_EDITMSG": gitNote, "/r/.git/packed-refs": gitData, "/r/.git/MERGE_HEAD": gitData,
		"/r/.git/objects/ab/cd": gitData, "/r/.git/objects/info/packs": gitNote,
		"/r/.git/config": gitOther, "/r/.git/info/exclude": gitOther,
		"/r/HEAD": gitOther, "/r/refs/heads/main": gitOther, "/r/.git/foo/HEAD": gitOther,
	} {
		if got, _ := gitPartOf(p); got != want {
			t.Errorf("%s: %d, want %d", p, got, want)
		}
	}
}
