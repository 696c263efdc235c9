package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestWorkspaceApplyBranch: a commit on another branch has what the sandbox has changed and nothing of
// the owner's own edits, and nothing else of the owner's moves: no file, no index, no other branch.
func TestWorkspaceApplyBranch(t *testing.T) {
	t.Parallel()
	bothWays(t, workspaceBranch)
}

func workspaceBranch(t *testing.T, b *box) {
	dir := repository(t)
	text := "1\n2\n3\n4\n5\n6\n7\n8\n9\n"
	put(t, dir, "text", text)
	put(t, dir, "bin", "\x00\x01")
	put(t, dir, "swap/in", "in\n")
	put(t, dir, "flat", "flat\n")
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-q", "-m", "more")
	b.env = append(b.env,
		"SUDO_UID=1000", "SUDO_GID=1000", "GIT_AUTHOR_NAME=me", "GIT_AUTHOR_EMAIL=me@example.invalid",
		"GIT_COMMITTER_NAME=me", "GIT_COMMITTER_EMAIL=me@example.invalid", "GIT_CONFIG_GLOBAL=/dev/null",
	)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.sh("s", `cd /work; sed -i s/^2$/two/ text; printf '\0\2' > bin; echo new > added; chmod 755 added; rm README
ln -s text symlink; mkdir d; echo f > d/:f; echo x > x.o; rm -r swap; echo swapped > swap
rm flat; mkdir flat; echo in > flat/in`)

	// The owner's: an edit of the same text, a staged file, an untracked one, and a hook.
	put(t, dir, ".git/info/exclude", "*.o\n")
	put(t, dir, "text", strings.Replace(text, "8\n", "eight\n", 1))
	put(t, dir, "staged", "staged\n")
	git(t, dir, "add", "staged")
	put(t, dir, "untracked", "untracked\n")
	git(t, dir, "status")
	put(t, dir, ".git/hooks/reference-transaction", "#!/bin/sh\necho no thanks >&2; exit 1\n")
	hook := filepath.Join(dir, ".git/hooks/reference-transaction")
	if err := os.Chmod(hook, 0o755); err != nil {
		t.Fatal(err)
	}
	state := func() string { return withoutObjects(kept(t, dir)) }
	was, head := state(), git(t, dir, "rev-parse", "HEAD")

	r := b.try(nil, "apply", "--git-commit", "--branch", "agent/one", "-m", "From the agent", "s")
	if r.code != 0 || !strings.Contains(r.err, "to branch agent/one of "+dir+"; the directory is as it was") {
		t.Fatalf("%s", r)
	}
	equal(b, "the commit", git(t, dir, "show", "--no-renames", "--name-status", "--format=%an %s %P", "agent/one"),
		"me From the agent "+head+"\n\nD\tREADME\nA\tadded\nM\tbin\nA\td/:f\nD\tflat\nA\tflat/in\nA\tswap\nD\tswap/in\n"+
			"A\tsymlink\nM\ttext")
	equal(b, "its text", git(t, dir, "show", "agent/one:text"),
		strings.TrimSpace(strings.Replace(text, "2\n", "two\n", 1)))
	equal(b, "its modes", git(t, dir, "ls-tree", "--format=%(objectmode) %(path)", "agent/one", "added", "symlink", "bin"),
		"100755 added\n100644 bin\n120000 symlink")
	equal(b, "its binary", git(t, dir, "cat-file", "-s", "agent/one:bin"), "2")
	branch := "/.git/refs/heads/agent"
	equal(b, "the owner's files, index and branches", leavingOut(state(), branch, "/.git/logs/refs/heads/agent"), was)
	equal(b, "its reflog", git(t, dir, "reflog", "agent/one", "--format=%gs"), "agentbox apply")

	// The same again is nothing; more goes on top; hunks can be chosen.
	if r := b.try(nil, "apply", "--git-commit", "--branch", "agent/one", "s"); r.code != 0 ||
		!strings.Contains(r.err, "nothing to commit on agent/one") {
		t.Errorf("%s", r)
	}
	b.sh("s", "cd /work; sed -i s/^5$/five/ text; echo more > more")
	if r := b.input([]byte("s\ny\nn\n"), nil, "apply", "-p", "--git-commit", "--branch", "agent/two", "-m", "A part", "s",
		"--", "/work/text"); r.code != 0 {
		t.Fatalf("%s", r)
	}
	equal(b, "a part", git(t, dir, "diff", "--name-status", head, "agent/two"), "M\ttext")
	if text := git(t, dir, "show", "agent/two:text"); !strings.HasPrefix(text, "1\ntwo\n") ||
		strings.Contains(text, "five") || strings.Contains(text, "eight") {
		t.Errorf("a part of text: %q", text)
	}
	tip := git(t, dir, "rev-parse", "agent/one")
	b.ok("apply", "--git-commit", "--branch", "agent/one", "s")
	equal(b, "one more commit", git(t, dir, "log", "--format=%s", tip+"..agent/one"),
		git(t, dir, "log", "-1", "--format=%s", "agent/one"))
	equal(b, "its files", git(t, dir, "diff", "--name-status", tip, "agent/one"), "A\tmore\nM\ttext")
	equal(b, "what is still to come", b.ok("diff", "--no-renames", "--name-only", "s", "--", "/work/more"), "/work/more")

	if err := os.Remove(hook); err != nil {
		t.Fatal(err)
	}
	// A branch that has changed the same, and one that is checked out.
	other := t.TempDir()
	if err := os.Chown(other, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	git(t, other, "-C", dir, "worktree", "add", "-q", "-b", "other", other, "HEAD")
	put(t, other, "added", "the other's\n")
	git(t, other, "add", "added")
	git(t, other, "commit", "-q", "-m", "other")
	was = state()
	if said := b.fails(4, "apply", "--git-commit", "--branch", "other", "s"); !strings.Contains(said, "is checked out") {
		t.Errorf("a branch that is checked out: %s", said)
	}
	equal(b, "after one that is checked out", state(), was)
	git(t, other, "checkout", "-q", "--detach")
	was = state()
	if said := b.fails(4, "apply", "--git-commit", "--branch", "other", "s"); !strings.Contains(said,
		"branch other has changed the same lines or files: added") {
		t.Errorf("a branch with a conflict: %s", said)
	}
	for _, name := range []string{"a..b", "-x", "@{-1}"} {
		b.fails(2, "apply", "--git-commit", "--branch="+name, "s")
	}
	b.fails(2, "apply", "--branch", "x", "s")
	equal(b, "after what was refused", state(), was)

	// What has to be judged does not get around it by a branch.
	put(t, dir, ".agentbox.yaml", "apply: {validators: ['true']}\n")
	was = state()
	if said := b.fails(7, "apply", "--git-commit", "--branch", "judged", "s"); !strings.Contains(said,
		"not judged by the rules") {
		t.Errorf("with a validator: %s", said)
	}
	equal(b, "after that", state(), was)
}

// withoutObjects leaves out the objects of a repository, which are there for commits to be.
func withoutObjects(state string) string { return leavingOut(state, "/.git/objects") }

// leavingOut leaves out the lines of some paths, and of the directories above them in .git.
func leavingOut(state string, prefixes ...string) string {
	var out []string
	for line := range strings.Lines(state) {
		skip := false
		for _, p := range prefixes {
			skip = skip || strings.HasPrefix(line, p)
		}
		if !skip {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
