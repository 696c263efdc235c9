package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// lookedAt is a service whose dry runs are told of.
type lookedAt struct {
	*fakeService
	plan runtime.Applied
	look func(n int, plan *runtime.Applied)
	n    int
}

func (l *lookedAt) Apply(context.Context, string, runtime.ApplyOptions) (runtime.Applied, error) {
	out := l.plan
	out.Changes = append([]runtime.Change(nil), l.plan.Changes...)
	l.n++
	l.look(l.n, &out)
	return out, nil
}

// TestApplyBranchAtOnce: the branches of several repositories move together or not at all, and only for
// what was looked at.
func TestApplyBranchAtOnce(t *testing.T) {
	t.Setenv("SUDO_UID", "")
	for _, name := range []string{"AUTHOR", "COMMITTER"} {
		t.Setenv("GIT_"+name+"_NAME", "me")
		t.Setenv("GIT_"+name+"_EMAIL", "me@example.invalid")
	}
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
	git := func(dir string, args ...string) string {
		t.Helper()
		cmd := exec.Command("git", args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	for name, look := range map[string]func(n int, dirs []string, plan *runtime.Applied){
		"all":                   func(int, []string, *runtime.Applied) {},
		"the directory changes": func(n int, _ []string, plan *runtime.Applied) { plan.Changes[1].Seen = fmt.Sprint(n) },
		"a branch moves": func(n int, dirs []string, _ *runtime.Applied) {
			if n == 2 {
				git(dirs[1], "branch", "agent")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			var plan runtime.Applied
			var dirs []string
			for i := range 2 {
				dir, at := t.TempDir(), fmt.Sprint("/work", i)
				git(dir, "init", "-q", "-b", "main")
				git(dir, "commit", "-q", "--allow-empty", "-m", "first")
				dirs = append(dirs, dir)
				plan.Workspaces = append(plan.Workspaces, runtime.AppliedWorkspace{Path: at, Original: dir})
				plan.Changes = append(plan.Changes, runtime.Change{Path: at + "/link", Change: "A", Type: "symlink",
					New: &runtime.FileState{Type: "symlink", Mode: "0777", Target: "to"}})
			}
			plan.Checkpoint = "5abc"
			out, err := os.Create(filepath.Join(t.TempDir(), "out"))
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			list, err := openRepositories(t.Context(), plan, true)
			if err != nil || len(list) != 2 {
				t.Fatal(list, err)
			}
			svc := &lookedAt{fakeService: newFake(), plan: plan, look: func(n int, p *runtime.Applied) { look(n, dirs, p) }}
			opts := applyOptions{Commit: true, Branch: "agent", Message: "From the agent"}
			err = (&app{stdout: out, stderr: out}).onBranch(t.Context(), opts, "c@5abc", list, svc, false)
			all := name == "all"
			if all != (err == nil) || !all && !errors.Is(err, runtime.ErrState) {
				t.Errorf("%v", err)
			}
			for i, dir := range dirs {
				got := git(dir, "for-each-ref", "--format=%(refname:short) %(contents:subject)")
				want := "main first"
				if all {
					want = "agent From the agent\nmain first"
				} else if i == 1 && name == "a branch moves" {
					want = "agent first\nmain first"
				}
				if got != want || git(dir, "status", "--porcelain") != "" {
					t.Errorf("repository %d has %q, want %q", i, got, want)
				}
				if all && git(dir, "cat-file", "-p", "agent:link") != "to" {
					t.Error("the link is not there")
				}
			}
		})
	}
}
