package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func TestApply(t *testing.T) {
	f := newFake()
	try(t, f, "", "apply", "--dry-run", "volume://ws").want(t, 0, "A /a b\nD /d\n")
	try(t, f, "", "apply", "--undo", "--force", "volume://ws").want(t, 0, "A /a b\nD /d\n")
	want := []string{"Apply volume://ws true false false", "Close", "Apply volume://ws false true true", "Close"}
	if len(f.calls) != len(want) {
		t.Fatalf("calls: %q", f.calls)
	}
	for i, w := range want {
		if f.calls[i] != w {
			t.Errorf("call %d: %q, want %q", i, f.calls[i], w)
		}
	}
	try(t, newFake(), "", "apply", "--dry-run", "--undo", "volume://ws").want(t, exitUsage, "", "exclude each other")
	try(t, newFake(), "", "apply").want(t, exitUsage, "", "SANDBOX is missing")
	f.applied = runtime.Applied{Changes: []runtime.Change{
		{Path: "/l", Change: "A", New: &runtime.FileState{
			Type: "symlink", Mode: "0777", UID: 1, GID: 2, Target: "/etc/a b",
		}},
		{Path: "/f", Change: "M", New: &runtime.FileState{Type: "file", Mode: "4755", UID: 1000, GID: 100}},
		{Path: "/d", Change: "A", New: &runtime.FileState{Type: "char", Mode: "0666", Device: "1:3"}},
	}, Refused: []runtime.Refusal{
		{Path: "/f", Reason: "set-id", MayAllow: true}, {Path: "/d", Reason: "it is a device"},
	}}
	try(t, f, "", "apply", "--dry-run", "--owners", "--allow", "/x", "--allow", "/y", "volume://ws").want(t, 0,
		"A /l -> /etc/a b (symlink 1:2)\nM /f (file 4755 1000:100)\nA /d (char 1:3 0666 0:0)\n",
		"/f: set-id: apply needs --allow /f to let it through", "/d: it is a device: apply refuses it")
	if got, want := f.calls[len(f.calls)-2], "Apply volume://ws true false false owners [/x /y]"; got != want {
		t.Errorf("call %q, want %q", got, want)
	}
	f.fail["Apply"] = &runtime.Error{Err: runtime.ErrState}
	try(t, f, "", "apply", "volume://ws").want(t, exitState, "", "not possible in this state")
}

func TestApplyWorkspace(t *testing.T) {
	f := newFake()
	try(t, f, "", "apply", "--workspace", "/work", "c@HEAD~1", "--", "/work/a b", "/work/d").want(t, 0, "A a b\nD d\n",
		"/m was changed on both sides, and is merged")
	try(t, f, "", "apply", "--markers", "c").want(t, 0, "A a b\nD d\n",
		"/m was changed on both sides, and is merged", "/c was changed on both sides: it has conflict markers")
	want := []string{"Apply c@HEAD~1 false /work [/work/a b /work/d]", "Close", "Apply c false  []", "Close"}
	if !slices.Equal(f.calls, want) {
		t.Errorf("calls: %q", f.calls)
	}
	for args, says := range map[string]string{
		"--markers --ours c": "exclude each other", "--ours --theirs c": "exclude each other",
		"--force --ours c": "exclude each other", "c -- work": "is not absolute",
		"--undo c -- /work": "takes back all", "--undo --workspace /work c": "takes back all", "c d": "unexpected",
		"-m text c": "--message is for --git-commit", "--git-commit --markers c": "cannot be combined",
	} {
		try(t, newFake(), "", append([]string{"apply"}, strings.Fields(args)...)...).want(t, exitUsage, "", says)
	}
}

// On a terminal apply shows what comes, and applies just that.
func TestApplyAsks(t *testing.T) {
	const question = "Apply 2 changes to /srv/repo? [y/N] "
	p := onPty(t, "apply", "c")
	p.expect("/m was changed on both sides, and is merged")
	p.expect("D d")
	p.expect(question)
	p.write("y\n")
	p.expect("take it back with: agentbox apply --undo c")
	p.end(0)
	p = onPty(t, "apply", "c")
	p.expect(question)
	p.write("\n")
	p.expect("nothing was applied")
	p.end(exitFailure)
	for _, args := range []string{"-y c", "--dry-run c", "--undo c", "volume://ws", "--format json c"} {
		p := onPty(t, append([]string{"apply"}, strings.Fields(args)...)...)
		p.end(0)
		if strings.Contains(p.seen.String(), "[y/N]") {
			t.Errorf("%q asks", args)
		}
	}
}

// What cannot be applied as asked for is shown, with what would let it; nothing is asked or applied.
func TestApplyHeldBack(t *testing.T) {
	for args, c := range map[string]struct {
		code int
		says []string
	}{
		"torn": {exitState, []string{
			"/work/both was changed on both sides: apply needs --markers, --ours or --theirs",
			"nothing was applied to /srv/repo",
			"refs/heads/main is aa11 in the directory, and bb22 in the sandbox; to have both: apply --ours, then " +
				"git update-ref refs/agentbox/torn/heads/main bb22",
			"2 paths changed on both sides", "--ours keeps",
		}},
		"--markers torn": {exitState, []string{"/work/both was changed on both sides: apply needs --ours or --theirs"}},
		"risky": {exitDenied, []string{
			"/work/.git/config: git runs it: apply needs --allow /work/.git/config",
			"/work/null: it is a device: apply refuses it",
			"nothing was applied to /srv/repo", "2 paths need --allow",
		}},
	} {
		p := onPty(t, append([]string{"apply"}, strings.Fields(args)...)...)
		for _, says := range c.says {
			p.expect(says)
		}
		p.end(c.code)
		if seen := p.seen.String(); strings.Contains(seen, "[y/N]") || strings.Contains(seen, "take it back with") {
			t.Errorf("%q asks or applies: %s", args, seen)
		}
	}
	p := onPty(t, "apply", "--ours", "torn")
	p.expect("/work/both was changed on both sides: what the directory has stays")
	p.expect("[y/N]")
	p.write("n\n")
	p.end(exitFailure)
}

// TestUnjudged: an approval lets an apply pass, and is used up by it; a commit on a branch would leave it.
func TestUnjudged(t *testing.T) {
	for _, plan := range []runtime.Applied{
		{Validators: []runtime.Validated{{}}}, {Canaries: []runtime.Validated{{}}},
		{Approval: &runtime.Approval{}}, {Approval: &runtime.Approval{Approved: time.Now()}},
	} {
		if err := unjudged(plan); !errors.Is(err, runtime.ErrDenied) {
			t.Errorf("%+v: %v", plan, err)
		}
	}
	if err := unjudged(runtime.Applied{Risk: &runtime.Risk{Score: 9}}); err != nil {
		t.Error(err)
	}
}

// TestBranchOfAnotherName: a sandbox may have brought a branch that is a symbolic ref, and a commit on it would
// move the branch that is checked out.
func TestBranchOfAnotherName(t *testing.T) {
	dir := t.TempDir()
	r := &repository{top: dir, env: append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=a",
		"GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b")}
	for _, args := range [][]string{
		{"init", "-q"}, {"commit", "-q", "--allow-empty", "-m", "one"}, {"branch", "-M", "main"}, {"branch", "plain"},
		{"symbolic-ref", "refs/heads/other", "refs/heads/main"}, {"symbolic-ref", "refs/heads/none", "refs/heads/new"},
	} {
		if _, err := r.git(t.Context(), nil, args...); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"plain": "", "free": "", "main": "is checked out", "other": "is another name of refs/heads/main",
		"none": "is another name of refs/heads/new", "@{-1}": "does not accept", "-d": "does not accept",
	} {
		err := (&branchCommit{repository: r, name: name}).find(t.Context())
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
}
