package test

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// project is a directory of the host that belongs to a user, as a workspace's.
func project(t *testing.T) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "my project")
	put(t, dir, "README", "read me\n")
	put(t, dir, "src/main.c", "int main() { return 0; }\n")
	put(t, dir, "src/deep/er/file", "deep\n")
	put(t, dir, "build/out", "object\n")
	put(t, dir, "link target", "target\n")
	for _, err := range []error{
		os.Symlink("link target", filepath.Join(dir, "link")), os.Link(filepath.Join(dir, "README"), filepath.Join(dir, "README.too")),
		os.Chmod(filepath.Join(dir, "build/out"), 0o4750),
		filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(p, 1000, 1000))
		}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func put(t *testing.T, dir, name, text string) {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// onHost describes all that a directory of the host has.
func onHost(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.Walk(dir, func(p string, info fs.FileInfo, err error) error {
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		fmt.Fprintf(&b, "%s %s %d:%d %v %d", strings.TrimPrefix(p, dir), info.Mode(), st.Uid, st.Gid, info.ModTime(), st.Ino)
		if info.Mode().IsRegular() {
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " %x", sha256.Sum256(data))
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// inside describes all that a sandbox sees in its workspace.
func (b *box) inside(name string) string {
	b.Helper()
	return b.sh(name, `cd /work && find . | sort | while read -r f; do
if [ -L "$f" ]; then echo "$f link $(readlink "$f")"
elif [ -f "$f" ]; then echo "$f file $(stat -c '%a %u:%g %s %y' "$f") $(md5sum <"$f")"
else echo "$f dir $(stat -c '%a %u:%g %y' "$f")"; fi; done`)
}

// works is an agent at work in its workspace, then wreck one that has gone wrong.
const (
	works = `cd /work; echo more >> src/main.c; rm README; mkdir -p new/dir; echo new > new/dir/file; mv build built
rm -r src/deep; mkdir src/deep; echo other > src/deep/other; ln -s nowhere dangling; chmod 600 link\ target`
	wreck = `cd /work; rm -rf src new built; echo gone > README; echo wreck > wreck`
)

// ownerEdits changes the directory meanwhile, in each way in which it can come to differ.
func ownerEdits(t *testing.T, dir string) {
	t.Helper()
	put(t, dir, "src/main.c", "int main() { return 1; } // the owner's\n")
	put(t, dir, "mine/notes", "the owner's\n")
	put(t, dir, "src/deep/mine", "the owner's\n")
	put(t, dir, "new/dir/file", "the owner's, too\n")
	for _, err := range []error{
		os.RemoveAll(filepath.Join(dir, "build")), os.Remove(filepath.Join(dir, "link")),
		os.Mkdir(filepath.Join(dir, "link"), 0o700), os.Remove(filepath.Join(dir, "README.too")),
		os.Chmod(filepath.Join(dir, "src"), 0o700), os.WriteFile(filepath.Join(dir, "README"), []byte("again\n"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestWorkspace: a directory of the host is changed by its sandbox alone, checkpoints have what it
// shows, and a restore shows exactly that again, whatever was done to the directory since.
func TestWorkspace(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	had := onHost(t, dir)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c",
		"cd /work; exec 3>>held 4<README.too 5<src/main.c 6<build/out; echo held >&3; "+counter)
	b.reaches("s", 1)
	equal(b, "owners", b.sh("s", "stat -c %u:%g /work /work/README /work/src/main.c"), "1000:1000\n1000:1000\n1000:1000")
	b.sh("s", works)
	one := b.inside("s")
	const open = "cat /proc/1/fd/4 /proc/1/fd/5 /proc/1/fd/6; readlink /proc/1/cwd"
	opened := b.sh("s", open)
	b.checkpoint("--name", "one", "s")
	low := b.count("s")
	b.sh("s", wreck)
	wrecked := b.inside("s")
	if wrecked == one {
		t.Fatal("nothing is wrecked")
	}
	b.ok("restore", "s", "one")
	equal(b, "what it sees after a restore", b.inside("s"), one)
	equal(b, "the directory", onHost(t, dir), had)
	b.reaches("s", low+1)

	b.ok("restore", "--undo", "s")
	equal(b, "what it sees after an undo", b.inside("s"), wrecked)

	ownerEdits(t, dir)
	had = onHost(t, dir)
	b.ok("restore", "s", "one")
	equal(b, "what it sees over the changed directory", b.inside("s"), one)
	equal(b, "what a process has open", b.sh("s", open), opened)
	b.ok("restore", "s", "one")
	equal(b, "what it sees after one more", b.inside("s"), one)
	equal(b, "the changed directory", onHost(t, dir), had)
	b.ok("verify", "s@one")
	equal(b, "a file of the directory in the checkpoint", b.ok("cat", "s@one:/work/README.too"), "read me")
	equal(b, "a changed file in the checkpoint", b.ok("cat", "s@one:/work/src/main.c"), "int main() { return 0; }\nmore")
	equal(b, "the workspace in the checkpoint", b.ok("find", "s@one", "/work/src"),
		"/work/src\n/work/src/deep\n/work/src/deep/other\n/work/src/main.c")

	b.own("f")
	b.ok("fork", "--name", "f", "s@one")
	equal(b, "what a fork sees", b.inside("f"), one)
	b.sh("f", wreck)
	equal(b, "what it sees beside a fork", b.inside("s"), one)

	b.sh("s", wreck)
	b.ok("rm", "-f", "s")
	b.ok("restore", "s", "one")
	equal(b, "what it sees, made again", b.inside("s"), one)
	equal(b, "the directory in the end", onHost(t, dir), had)
}

// TestWorkspaceDiff: what changed in a workspace is a diff like any other.
func TestWorkspaceDiff(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	b.checkpoint("--name", "base", "s")
	b.sh("s", "cd /work; echo more >> src/main.c; rm README; echo new > new; mv build/out moved; echo root > /root-file")
	const want = "D /work/README\nR /work/build/out -> /work/moved\nA /work/new\nM /work/src/main.c"
	equal(b, "diff", strings.TrimSpace(b.ok("diff", "s")), strings.ReplaceAll(want, "/work/", ""))
	equal(b, "diff of all", strings.TrimSpace(b.ok("diff", "--all", "s@base")), "A /root-file\n"+want)
	patch := b.ok("diff", "--patch", "s@base", "--", "/work")
	for _, part := range []string{
		"--- a/work/README\n+++ /dev/null\n@@ -1 +0,0 @@\n-read me\n",
		"+++ b/work/src/main.c\n@@ -1 +1,2 @@\n int main() { return 0; }\n+more",
		"rename from work/build/out\nrename to work/moved\n",
	} {
		if !strings.Contains(patch, part) {
			t.Errorf("the patch lacks %q:\n%s", part, patch)
		}
	}
	equal(b, "diff of the workspace", strings.TrimSpace(b.ok("diff", "s@base", "--", "/work")), want)
	equal(b, "diff of a part", b.ok("diff", "s@base", "--", "/work/src", "/none"), "M /work/src/main.c")
	b.checkpoint("--name", "then", "s")
	put(t, dir, "mine", "the owner's\n")
	put(t, dir, "src/main.c", "the owner's\n")
	equal(b, "between checkpoints, over a changed directory", strings.TrimSpace(b.ok("diff", "-a", "s@base", "@then")),
		"A /root-file\n"+want)
	equal(b, "now, over a changed directory", strings.TrimSpace(b.ok("diff", "s@then")), "A mine")
}

// TestWorkspaceHere: in the directory no sandbox has to be named, and a patch fits the directory.
func TestWorkspaceHere(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	in := func(sub string, args ...string) string {
		t.Helper()
		b.dir = filepath.Join(dir, sub)
		defer func() { b.dir = "" }()
		r := b.try(nil, args...)
		if r.code != 0 {
			t.Fatalf("in %s: %s", sub, r)
		}
		return r.out
	}
	in("src", "checkpoint", "--name", "base")
	b.sh("s", "cd /work; echo more >> src/main.c; rm README; echo new > src/new; echo root > /root-file")
	const want = "D README\nM src/main.c\nA src/new\n"
	equal(b, "diff", in("", "diff"), want)
	equal(b, "diff of a file", in("src", "diff", "--", "new", "../build"), "A src/new\n")
	in("src/deep", "checkpoint", "--name", "then")
	equal(b, "diff after a checkpoint", in("", "diff"), want)
	equal(b, "diff from the checkpoint", in("", "diff", "HEAD"), "")
	equal(b, "apply of a part", in("src", "apply", "--dry-run", "--", "new", "../build"), "A src/new (file 0644 1000:1000)\n")
	equal(b, "apply of a checkpoint", in("src", "apply", "@base", "--", "new"), "")
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	apply := exec.Command("git", "apply", "-")
	apply.Dir, apply.Stdin = copied, strings.NewReader(in("src", "diff", "--patch"))
	if out, err := apply.CombinedOutput(); err != nil {
		t.Fatalf("git apply: %v\n%s", err, out)
	}
	for name, text := range map[string]string{"src/main.c": "int main() { return 0; }\nmore", "src/new": "new"} {
		equal(b, name, b.read(filepath.Join(copied, name)), text)
	}
	if _, err := os.Lstat(filepath.Join(copied, "README")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("README after git apply: %v", err)
	}
	in("", "restore", "@base")
	equal(b, "diff after a restore", in("", "diff"), "")
	if err := os.Mkdir(filepath.Join(dir, "other"), 0o755); err != nil {
		t.Fatal(err)
	}
	b.start("t", "--network", "none", "--workspace", filepath.Join(dir, "other"), "busybox", "sleep", "1000")
	in("other", "checkpoint", "--name", "inner")
	if list := b.checkpoints("t"); len(list) != 2 || list[0].Name != "inner" {
		t.Errorf("a checkpoint in the directory of t: %v", list)
	}
}

// TestWorkspaceBusy takes checkpoints while the owner's programs save files in the directory, as an
// editor does.
func TestWorkspaceBusy(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	stop, ended, saved := make(chan struct{}), make(chan error, 1), 0
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			name := filepath.Join(dir, fmt.Sprint(".saving", saved%7))
			err := os.WriteFile(name, []byte(fmt.Sprint(saved)), 0o600)
			if err == nil {
				err = os.Rename(name, filepath.Join(dir, fmt.Sprint("saved", saved%5)))
			}
			if saved++; err != nil {
				ended <- err
				return
			}
		}
	}()
	for range 20 {
		b.checkpoint("--files-only", "s")
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if saved < 100 {
		t.Errorf("only %d files were saved meanwhile", saved)
	}
	b.ok("verify", "--read-data")
	then := b.inside("s")
	b.checkpoint("--name", "then", "s")
	ownerEdits(t, dir)
	b.ok("restore", "s", "then")
	equal(b, "what it sees", b.inside("s"), then)
}

// TestWorkspaceChurns: a sandbox starts over a directory in which a program, as `git gc` does, removes
// thousands of names.
func TestWorkspaceChurns(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	var loose []string
	for i := range 5000 {
		name := fmt.Sprintf("loose/%d", i)
		loose = append(loose, filepath.Join(dir, name))
		put(t, dir, name, "")
	}
	ended := make(chan error, 1)
	go func() {
		for begun := time.Now(); time.Since(begun) < 2*time.Second; {
			for i, name := range loose {
				loose[i] = filepath.Join(dir, "loose", fmt.Sprintf("%s%d", rand.Text(), i))
				if err := os.Rename(name, loose[i]); err != nil {
					ended <- err
					return
				}
			}
		}
		ended <- nil
	}()
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	then := b.inside("s")
	b.checkpoint("--name", "then", "s")
	ownerEdits(t, dir)
	b.ok("restore", "s", "then")
	equal(b, "what it sees", b.inside("s"), then)
	b.ok("verify", "--read-data")
}

// TestWorkspaceMoved: a directory that was moved away is named at once, and is what it was once it is back.
func TestWorkspaceMoved(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	saw := b.inside("s")
	if err := os.Rename(dir, dir+".moved"); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	r := b.try(nil, "checkpoint", "s")
	if r.code != 3 || !strings.Contains(r.err, "the directory is not there any more") ||
		!strings.Contains(r.err, "move it back") {
		t.Error(r)
	}
	if took := time.Since(begun); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	equal(b, "what it sees", b.inside("s"), saw)
	if err := os.Rename(dir+".moved", dir); err != nil {
		t.Fatal(err)
	}
	b.checkpoint("--name", "one", "s")
	b.sh("s", works)
	b.ok("restore", "s", "one")
	equal(b, "what it sees again", b.inside("s"), saw)
}

// TestWorkspaceOdd: a directory with what no checkpoint of a sandbox's own files could have, and one
// that a sandbox before it has read already.
func TestWorkspaceOdd(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	put(t, dir, "mnt/under", "of the directory\n")
	mnt := filepath.Join(dir, "mnt")
	if err := syscall.Mount("tmpfs", mnt, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(mnt, 0) })
	put(t, dir, "mnt/over", "mounted\n")
	for i, name := range []string{"s", "t"} {
		b.start(name, "--network", "none", "--workspace", dir+":/work", "busybox", "sleep", "1000")
		equal(b, "what is below the mount", b.sh(name, "ls /work/mnt; cat /work/mnt/under"), "under\nof the directory")
		saw := b.inside(name)
		b.checkpoint("--name", "one", name)
		b.sh(name, wreck+"; rm /work/mnt/under")
		b.ok("restore", name, "one")
		equal(b, "restored", b.inside(name), saw)
		added := decode[[]struct{ Added, Bytes int64 }](b, b.ok("checkpoint", "ls", "--format", "json", name))
		if base := added[len(added)-1]; i > 0 && base.Added*2 > base.Bytes {
			t.Errorf("the base of %s added %d bytes of %d", name, base.Added, base.Bytes)
		}
	}
}

// TestWorkspaceKilled kills restores over a changed directory: afterwards the workspace shows what it
// showed before or what the checkpoint has, and the directory is what it was.
func TestWorkspaceKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", counter)
	b.reaches("s", 1)
	b.sh("s", works)
	one := b.inside("s")
	b.checkpoint("--name", "one", "s")
	ownerEdits(t, dir)
	had := onHost(t, dir)
	for _, point := range []string{
		"restore.after-undo", "restore.after-layout", "restore.between-trees", "restore.after-apply", "restore.after-proof",
	} {
		b.sh("s", wreck)
		before := b.inside("s")
		b.killedAt(point+"=kill", "restore", "s", "one")
		b.ok("recover")
		if b.inspect("s").Status != "running" {
			b.ok("start", "s")
		}
		if now := b.inside("s"); now != before && now != one {
			t.Errorf("killed at %s, it sees\n%s\nwant\n%s\nor\n%s", point, now, before, one)
		}
		equal(b, "the directory", onHost(t, dir), had)
		b.ok("restore", "s", "one")
		equal(b, "what it sees after "+point, b.inside("s"), one)
	}
}

// TestWorkspaceCarried takes a checkpoint to another root, where its workspace shows the same over
// a directory that has nothing.
func TestWorkspaceCarried(t *testing.T) {
	t.Parallel()
	b, other := memoryBox(t), memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", "sleep 1000")
	b.sh("s", works)
	one := b.inside("s")
	b.checkpoint("--name", "one", "s")
	archive := filepath.Join(t.TempDir(), "one.tar.zst")
	b.ok("checkpoint", "export", "s@one", archive)
	b.ok("rm", "-f", "s")

	other.own("s")
	other.ok("checkpoint", "import", archive)
	if said := other.fails(4, "restore", "--foreign", "--files-only", "s"); !strings.Contains(said,
		"the checkpoint has a workspace at /work") {
		t.Errorf("without a directory: %s", said)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.Mkdir(empty, 0o755); err != nil {
		t.Fatal(err)
	}
	other.ok("restore", "--foreign", "--files-only", "--workspace", empty+":/work", "s")
	equal(other, "what it sees elsewhere", other.inside("s"), one)
	if list, err := os.ReadDir(empty); err != nil || len(list) > 0 {
		t.Errorf("the directory there has %v, %v", list, err)
	}
}

// TestWorkspaceRefused: what cannot be a workspace is refused before anything is made.
func TestWorkspaceRefused(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	for _, c := range []struct {
		value, says string
	}{
		{dir + "/none:/work", "not found"},
		{dir + "/README:/work", "is not a directory"},
		{dir + ":work", "is not absolute"},
		{"/:/work", "/ cannot be a workspace"},
		{b.root + ":/work", "agentbox keeps its state in"},
		{dir + ":/", "--workspace"},
	} {
		if said := b.fails(125, "run", "--workspace", c.value, "busybox", "true"); !strings.Contains(said, c.says) {
			t.Errorf("%s: %s", c.value, said)
		}
	}
	equal(b, "sandboxes", b.ok("ps", "-aq"), "")
}
