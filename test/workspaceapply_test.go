package test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// repository makes the project a git repository of its owner's.
func repository(t *testing.T) (dir string) {
	t.Helper()
	dir = project(t)
	git(t, dir, "init", "-q")
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-q", "-m", "all")
	return dir
}

// git runs git as the owner of the directory.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=o", "-c", "user.email=o@example.invalid"}, args...)...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "GIT_OPTIONAL_LOCKS=0",
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	for p := dir; p != "/"; p = filepath.Dir(p) { // the temporary directory is root's
		if err := os.Chmod(p, 0o755|os.ModeSticky&modeOf(t, p)); err != nil && p != "/tmp" {
			t.Fatal(err)
		}
		if filepath.Dir(p) == os.TempDir() {
			break
		}
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

func modeOf(t *testing.T, p string) os.FileMode {
	t.Helper()
	info, err := os.Stat(p)
	if err != nil {
		t.Fatal(err)
	}
	return info.Mode()
}

// kept describes what a directory of the host has, but for times and inodes.
func kept(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		fmt.Fprintf(&b, "%s %s %d:%d", strings.TrimPrefix(p, dir), info.Mode(), st.Uid, st.Gid)
		switch {
		case info.Mode().IsRegular():
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %q", data)
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			b.WriteString(" -> " + to)
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestWorkspaceApply: an apply brings what the sandbox has changed into its owner's repository, and
// nothing else; what it applies is of one instant, and the sandbox goes on; and an undo and a restore
// of before are exact.
func TestWorkspaceApply(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c",
		"cd /work; exec 4<README.too; "+counter)
	b.reaches("s", 1)
	b.checkpoint("--name", "first", "s")
	first, clean := b.inside("s"), kept(t, dir)
	b.sh("s", works+"; chmod u+s built/out")
	one := b.inside("s")
	const changes = " D README\n D build/out\n D src/deep/er/file\n M src/main.c\n?? built/\n?? dangling\n" +
		"?? new/\n?? src/deep/other"
	pid := b.inspect("s").Pid

	out := decode[struct {
		Checkpoint string
		Original   string
		Workspaces []struct{ Path, Original string }
		Refused    []struct{ Path string }
	}](b, b.ok("apply", "--dry-run", "--format", "json", "s"))
	if out.Original != dir || len(out.Workspaces) != 1 || out.Workspaces[0].Path != "/work" || out.Checkpoint == "" {
		t.Errorf("a dry run: %+v", out)
	}
	equal(b, "the directory after a dry run", kept(t, dir), clean)
	// built/out is a program with another one's rights.
	if said := b.fails(7, "apply", "s"); !strings.Contains(said, "/work/built/out: its set-id bits") {
		t.Errorf("apply of a set-id program: %s", said)
	}
	equal(b, "the directory after a refusal", kept(t, dir), clean)

	b.ok("apply", "--allow", "/work/built/out", "s")
	equal(b, "what the owner's git says", git(t, dir, "status", "--porcelain"), strings.TrimSpace(changes))
	equal(b, "what the sandbox sees after the apply", b.inside("s"), one)
	equal(b, "its process", b.inspect("s").Pid, pid)
	b.reaches("s", b.count("s")+1)
	equal(b, "diff to the directory", b.ok("diff", "s@image", "--", "/work"), "")
	equal(b, "one more apply", b.ok("apply", "s"), "")
	applied := kept(t, dir)
	for line := range strings.SplitSeq(strings.TrimSpace(applied), "\n") {
		if !strings.Contains(line, " 1000:1000") {
			t.Errorf("another owner's: %s", line)
		}
	}

	// A restore of before shows what was before, over the directory that has the changes; and an
	// apply of that brings nothing back.
	b.ok("restore", "s", "first")
	equal(b, "what the sandbox sees, restored", b.inside("s"), first)
	equal(b, "the directory after the restore", kept(t, dir), applied)
	equal(b, "apply after the restore", b.ok("apply", "s"), "")
	equal(b, "the directory after that", kept(t, dir), applied)
	b.ok("restore", "--undo", "s")
	equal(b, "what the sandbox sees again", b.inside("s"), one)

	// Applies that had nothing to bring left the undo of the one before.
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after an undo", kept(t, dir), clean)
	b.ok("apply", "--allow", "/work/built/out", "s")
	equal(b, "the directory after one more apply", kept(t, dir), applied)
}

// TestWorkspaceApplyUndo takes applies back, of all and of parts.
func TestWorkspaceApplyUndo(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "--name", "first", "s")
	clean := kept(t, dir)
	b.sh("s", works)
	one := b.inside("s")
	b.ok("apply", "s", "--", "/work/src", "/work/new/dir")
	equal(b, "a part", git(t, dir, "status", "--porcelain"),
		"D src/deep/er/file\n M src/main.c\n?? new/\n?? src/deep/other")
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after the undo", kept(t, dir), clean)
	equal(b, "the repository after the undo", git(t, dir, "status", "--porcelain"), "")
	equal(b, "what the sandbox sees", b.inside("s"), one)
	b.fails(4, "apply", "--undo", "s")

	b.ok("apply", "s")
	b.sh("s", "cd /work; echo still >> src/main.c; rm new/dir/file; echo more > more")
	two := b.inside("s")
	put(t, dir, "src/deep/other", "the owner's\n")
	if said := b.fails(4, "apply", "--undo", "s"); !strings.Contains(said, "/work/src/deep") {
		t.Errorf("an undo over a change: %s", said)
	}
	b.ok("apply", "s")
	equal(b, "main.c", readFile(t, filepath.Join(dir, "src/main.c")), "int main() { return 0; }\nmore\nstill\n")
	equal(b, "the owner's", readFile(t, filepath.Join(dir, "src/deep/other")), "the owner's\n")
	b.ok("restore", "s", "first")
	b.ok("restore", "--undo", "s")
	equal(b, "what the sandbox sees in the end", b.inside("s"), two)
	aside := dir + ".aside"
	if err := os.Rename(dir, aside); err != nil {
		t.Fatal(err)
	}
	b.fails(3, "apply", "s")
	if err := os.Symlink(aside, dir); err != nil {
		t.Fatal(err)
	}
	if said := b.fails(7, "apply", "s"); !strings.Contains(said, "a symlink or a file has taken its place") {
		t.Errorf("behind a symlink: %s", said)
	}
	if err := errors.Join(os.Remove(dir), os.Rename(aside, dir)); err != nil {
		t.Fatal(err)
	}
	b.fails(2, "apply", "s", "--", "/elsewhere")
	equal(b, "apply of all that is below /", b.ok("apply", "--dry-run", "s", "--", "/"), "")
	b.fails(3, "apply", "s@none")
	b.fails(3, "apply", "--workspace", "/none", "s")
	b.fails(2, "apply", "--ours", "--theirs", "s")
}

// TestWorkspaceApplyMerge has the owner change the same files: what can be merged is, and what
// cannot be is named.
func TestWorkspaceApplyMerge(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	put(t, dir, "text", "1\n2\n3\n4\n5\n6\n7\n")
	put(t, dir, "both", "base\n")
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "--name", "first", "s")
	b.sh("s", "cd /work; sed -i s/1/one/ text; echo agent > both; echo b > agent")
	put(t, dir, "text", "1\n2\n3\n4\n5\n6\nseven\n")
	put(t, dir, "both", "owner\n")
	put(t, dir, "README", "the owner's\n")
	edited := kept(t, dir)
	said := b.fails(4, "apply", "s")
	if !strings.Contains(said, "/work/both") || strings.Contains(said, "/work/text") ||
		!strings.Contains(said, "--markers") {
		t.Errorf("a conflict: %s", said)
	}
	equal(b, "the directory", kept(t, dir), edited)
	r := b.try(nil, "apply", "--markers", "s")
	if r.code != 0 || !strings.Contains(r.err, "/work/text was changed on both sides, and is merged") ||
		!strings.Contains(r.err, "/work/both was changed on both sides: it has conflict markers") {
		t.Errorf("%s", r)
	}
	equal(b, "merged", readFile(t, filepath.Join(dir, "text")), "one\n2\n3\n4\n5\n6\nseven\n")
	equal(b, "markers", readFile(t, filepath.Join(dir, "both")),
		"<<<<<<< directory\nowner\n=======\nagent\n>>>>>>> sandbox\n")
	equal(b, "the owner's", readFile(t, filepath.Join(dir, "README")), "the owner's\n")
	b.ok("apply", "--undo", "s")
	equal(b, "the directory after the undo", kept(t, dir), edited)
	b.ok("apply", "--ours", "s")
	equal(b, "ours", readFile(t, filepath.Join(dir, "both")), "owner\n")

	// What was decided is not asked again, and what was merged is the base of what comes later.
	b.sh("s", "cd /work; sed -i s/3/three/ text")
	b.ok("apply", "s")
	equal(b, "merged again", readFile(t, filepath.Join(dir, "text")), "one\n2\nthree\n4\n5\n6\nseven\n")
	equal(b, "ours, still", readFile(t, filepath.Join(dir, "both")), "owner\n")
	b.sh("s", "echo again > /work/both")
	b.fails(4, "apply", "s")
	b.ok("apply", "--theirs", "s")
	equal(b, "theirs", readFile(t, filepath.Join(dir, "both")), "again\n")
}

// TestWorkspaceApplyGit: nothing that has the owner's git run programs comes unnamed.
func TestWorkspaceApplyGit(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "s")
	b.sh("s", `cd /work; echo 'touch /tmp/evil' > .git/hooks/post-checkout; chmod 755 .git/hooks/post-checkout
printf '[core]\n\tfsmonitor = touch /tmp/evil\n' >> .git/config; echo x > ok`)
	said := b.fails(7, "apply", "s")
	for _, part := range []string{
		"/work/.git/config: the configuration of git", "/work/.git/hooks/post-checkout: git runs hooks",
		"--allow /work/.git/hooks/post-checkout",
	} {
		if !strings.Contains(said, part) {
			t.Errorf("the refusal lacks %q: %s", part, said)
		}
	}
	equal(b, "the repository", git(t, dir, "status", "--porcelain"), "")
	b.ok("apply", "s", "--", "/work/ok")
	equal(b, "a part", git(t, dir, "status", "--porcelain"), "?? ok")
	b.ok("apply", "--allow", "/work/.git/hooks", "--allow", "/work/.git/config", "s")
	if _, err := os.Stat(filepath.Join(dir, ".git/hooks/post-checkout")); err != nil {
		t.Error(err)
	}
}

// TestWorkspaceApplyCommit: what comes is committed as the user that called sudo, and nothing else.
func TestWorkspaceApplyCommit(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := repository(t)
	env := []string{
		"SUDO_UID=1000", "SUDO_GID=1000", "GIT_AUTHOR_NAME=me", "GIT_AUTHOR_EMAIL=me@example.invalid",
		"GIT_COMMITTER_NAME=me", "GIT_COMMITTER_EMAIL=me@example.invalid", "GIT_CONFIG_GLOBAL=/dev/null",
	}
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.sh("s", "cd /work; echo more >> src/main.c; rm README; mkdir d; echo f > d/:f; echo ignored > x.o")
	put(t, dir, ".git/info/exclude", "*.o\n")
	put(t, dir, "mine", "staged\n")
	put(t, dir, "src/main.c", "int main() { return 0; }\n// mine\n")
	git(t, dir, "add", "mine", "src/main.c")
	if r := b.try(env, "apply", "--git-commit", "--theirs", "s"); r.code != 4 ||
		!strings.Contains(r.err, "has staged changes of what comes: src/main.c") {
		t.Errorf("over staged changes: %s", r)
	}
	git(t, dir, "checkout", "-q", "HEAD", "src/main.c")
	if r := b.try(env, "apply", "--git-commit", "-m", "From the agent", "s"); r.code != 0 ||
		!strings.Contains(r.err, "committed ") {
		t.Fatalf("%s", r)
	}
	equal(b, "the commit", git(t, dir, "show", "--no-renames", "--name-status", "--format=%an %s"),
		"me From the agent\n\nD\tREADME\nA\td/:f\nM\tsrc/main.c")
	equal(b, "the rest", git(t, dir, "status", "--porcelain"), "A  mine")
	equal(b, "what git ignores", readFile(t, filepath.Join(dir, "x.o")), "ignored\n")

	// Hooks do not run: what they run may have come with the apply.
	put(t, dir, ".git/hooks/pre-commit", "#!/bin/sh\necho no thanks >&2; exit 1\n")
	if err := os.Chmod(filepath.Join(dir, ".git/hooks/pre-commit"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.sh("s", "echo more > /work/more")
	if r := b.try(env, "apply", "--git-commit", "s"); r.code != 0 || strings.Contains(r.err, "no thanks") {
		t.Errorf("with a hook that refuses: %s", r)
	}
	equal(b, "after that", git(t, dir, "status", "--porcelain"), "A  mine")
}

// applyPoints are the instants at which an apply is killed, and whether all of it has come then.
var applyPoints = map[string]bool{
	"apply.before-backend": false, "apply.before-stage": false, "apply.after-copy": false, "apply.after-stage": false,
	"apply.before-write": false, "apply.first-write": false, "apply.mid-write": false, "apply.last-write": false,
	"apply.after-dirs": false, "apply.before-commit": false, "apply.after-commit": true, "apply.after-upper": true,
	"apply.before-end": true, "apply.after-backend": true,
}

// undoPoints are those of an undo, and whether it is finished then.
var undoPoints = map[string]bool{
	"apply.undo-before-write": false, "apply.undo-mid-write": true, "apply.after-rollback": true,
}

// TestWorkspaceApplyKilled kills an apply of two workspaces at every point: after the next command
// both directories are as they were, or both have all.
func TestWorkspaceApplyKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dirs := []string{project(t), project(t)}
	b.start("s", "--network", "none", "--workspace", dirs[0]+":/work", "--workspace", dirs[1]+":/two",
		"busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	state := func() string { return kept(t, dirs[0]) + kept(t, dirs[1]) }
	b.checkpoint("--files-only", "s")
	b.sh("s", works+"; rm -r build built; cd /two; echo two > two; rm -r build src; echo t > README")
	inside, old := b.inside("s"), state()
	b.ok("apply", "s")
	all := state()
	b.ok("apply", "--undo", "s")
	equal(b, "the directories after an undo", state(), old)
	pid := b.inspect("s").Pid
	for point, applied := range applyPoints {
		b.killedAt(point+"=kill", "apply", "s")
		b.ok("ps")
		want := old
		if applied {
			want = all
		}
		equal(b, "the directories after a kill at "+point, state(), want)
		if applied {
			b.ok("apply", "--undo", "s")
			equal(b, "the directories after an undo", state(), old)
		}
	}
	for point, back := range undoPoints {
		b.ok("apply", "s")
		b.killedAt(point+"=kill", "apply", "--undo", "s")
		b.ok("ps")
		if !back {
			equal(b, "the directories after a kill at "+point, state(), all)
			b.ok("apply", "--undo", "s")
		}
		equal(b, "the directories after "+point, state(), old)
	}
	equal(b, "its process", b.inspect("s").Pid, pid)
	equal(b, "what it sees", b.inside("s"), inside)

	// A removal takes a half-done apply back first.
	b.killedAt("apply.mid-write=kill", "apply", "s")
	b.ok("rm", "-f", "s")
	equal(b, "the directories after a removal", state(), old)
}

// TestWorkspaceApplySaving applies while the owner saves files, as an editor does: nothing of what
// was saved is lost.
func TestWorkspaceApplySaving(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	for i := range 30 {
		put(t, dir, fmt.Sprint("f", i), "old")
	}
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--files-only", "s")
	b.sh("s", "cd /work; for i in $(seq 0 29); do echo agent > f$i; done")
	stop, ended := make(chan struct{}), make(chan error, 1)
	last := [30]string{}
	go func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			p := filepath.Join(dir, fmt.Sprint("f", n%30))
			last[n%30] = fmt.Sprint("saved ", n)
			err := errors.Join(os.WriteFile(p+".tmp", []byte(last[n%30]), 0o644), os.Rename(p+".tmp", p))
			if err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 20 {
		if r := b.try(nil, "apply", "--theirs", "s"); r.code == 0 {
			break
		} else if r.code != 4 && r.code != 5 {
			t.Errorf("%s", r)
		}
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for i := range 30 {
		if now := readFile(t, filepath.Join(dir, fmt.Sprint("f", i))); now != last[i] && now != "agent\n" {
			t.Errorf("f%d is %q, was saved as %q", i, now, last[i])
		}
	}
	if left, _ := filepath.Glob(dir + "/.agentbox-*"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
