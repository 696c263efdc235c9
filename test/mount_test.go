package test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// mounting is an agentbox mount that is at work.
type mounting struct {
	*box
	cmd  *exec.Cmd
	dir  string
	told *bufio.Reader
}

// mount mounts files of a checkpoint on a new directory.
func (b *box) mount(ref string, env ...string) *mounting {
	b.Helper()
	m := &mounting{box: b, dir: filepath.Join(b.TempDir(), "here")}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		b.Fatal(err)
	}
	m.cmd = b.command(context.Background(), "mount", ref, m.dir)
	m.cmd.Env = append(m.cmd.Env, env...)
	stderr, err := m.cmd.StderrPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := m.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if m.cmd.ProcessState == nil {
			_ = m.cmd.Process.Kill()
			_ = m.cmd.Wait()
		}
	})
	m.told = bufio.NewReader(stderr)
	line, err := m.told.ReadString('\n')
	if want := ref + " is mounted on " + m.dir + "; Ctrl-C or umount ends it\n"; line != want {
		b.Fatalf("%q, %v, want %q", line, err, want)
	}
	return m
}

// ends waits for the end of the command. Nothing is left of the mount then.
func (m *mounting) ends(code int, said string) {
	m.Helper()
	m.toEnd(code, said)
	m.gone()
}

func (m *mounting) gone() {
	m.Helper()
	if list, err := os.ReadDir(m.dir); err != nil || len(list) > 0 {
		m.Errorf("in its directory are %v, %v", list, err)
	}
	if list, err := os.ReadDir(filepath.Join(m.root, "mounts")); err != nil || len(list) > 0 {
		m.Errorf("of the mount are left %v, %v", list, err)
	}
}

// tar archives what is mounted.
func (m *mounting) tar() map[string]string {
	m.Helper()
	out, err := exec.Command("tar", "--format=posix", "--xattrs", "--xattrs-include=*", "--numeric-owner", "-C", m.dir,
		"-cf", "-", ".").Output()
	if err != nil {
		m.Fatal(err)
	}
	return m.archived(string(out))
}

// mounted makes a sandbox that has changed files in every way, with a workspace in another, and a
// checkpoint of it.
func mounted(t *testing.T) (b *box, dir string) {
	b = memoryBox(t)
	dir = project(t)
	inner := t.TempDir()
	put(t, inner, "file", "inner\n")
	b.start("s", "--network", "none", "--workspace", dir+":/work", "--workspace", inner+":/work/src/inner",
		"--tmpfs", "/scratch", "busybox", "sleep", "1000")
	b.sh("s", works+`; echo in > /scratch/it; echo more >> /work/src/inner/file; cd /
		mkdir -p made/sub; echo one > made/one; ln made/one made/two; chmod 4755 made/one; chown 5:6 made/sub
		echo changed >> /etc/passwd; rm /bin/ls; rm -r /var; mkdir -m 1777 /var; echo new > /var/new
		rm -r /root; echo 'a file now' > /root; ln -s ../../../.. up; mkfifo fifo; echo 1.2.3.4 far >> /etc/hosts
		touch -t 202103040506.07 made/sub; dd if=/dev/zero of=sparse bs=1 count=1 seek=5000000 2>/dev/null`)
	b.checkpoint("--name", "k", "s")
	return b, dir
}

// TestMount: what is mounted of a checkpoint is what a copy has of it, whatever becomes of the sandbox,
// the checkpoint and the image; and nothing is left of it when it is unmounted.
func TestMount(t *testing.T) {
	t.Parallel()
	b, dir := mounted(t)
	copied := b.try(nil, "cp", "s@k:/", "-")
	if !strings.Contains(copied.err, `not copied: "./scratch"`) {
		t.Errorf("%s", copied.err)
	}
	want := without(b.archived(copied.out))
	image := without(b.archived(b.ok("cp", "s@image:/", "-")))
	m := b.mount("s@k")
	got := without(m.tar())
	b.sameArchive("the mount", want, got)
	if len(got) < 100 || got["work/src/inner/file"] == "" || got["bin/ls"] != "" || got["scratch/it"] != "" ||
		b.read(filepath.Join(m.dir, "work/src/inner/file")) != "inner\nmore" {
		t.Errorf("%d entries: %v", len(got), got)
	}
	if err := os.WriteFile(filepath.Join(m.dir, "made/one"), nil, 0o644); err == nil {
		t.Error("it can be written to")
	}
	var fs syscall.Statfs_t
	const guarded = syscall.MS_RDONLY | syscall.MS_NOSUID | syscall.MS_NODEV
	if err := syscall.Statfs(m.dir, &fs); err != nil || fs.Flags&guarded != guarded {
		t.Errorf("flags %x, %v", fs.Flags, err)
	}

	put(t, dir, "src/main.c", "the owner's\n")
	digest := b.inspect("s").ImageDigest
	of := b.mount("s@image")
	b.sameArchive("the mount of the image", image, without(of.tar()))
	b.ok("rm", "-f", "--checkpoints", "s")
	if said := b.fails(4, "image", "rm", "busybox"); !strings.Contains(said, "the mount on "+m.dir) {
		t.Errorf("%s", said)
	}
	b.ok("prune")
	b.sameArchive("the mount of a checkpoint that is gone", want, without(m.tar()))
	if !strings.HasPrefix(digest, "sha256:") {
		t.Errorf("digest %q", digest)
	}
	for _, one := range []*mounting{of, m} {
		if err := syscall.Unmount(one.dir, 0); err != nil {
			t.Fatal(err)
		}
		one.toEnd(0, "")
	}
	m.gone()
	if text := b.ok("image", "prune", "--all", "--force"); strings.Contains(text, "needs it") {
		t.Errorf("%s", text)
	}
}

// toEnd is ends for one of several mounts.
func (m *mounting) toEnd(code int, said string) {
	m.Helper()
	text := new(strings.Builder)
	if _, err := m.told.WriteTo(text); err != nil {
		m.Fatal(err)
	}
	_ = m.cmd.Wait()
	if got := m.cmd.ProcessState.ExitCode(); got != code || !strings.Contains(text.String(), said) ||
		said == "" && text.String() != "" {
		m.Errorf("exit %d, %q; want %d, %q", got, text, code, said)
	}
}

// TestMountEnds: a signal ends a mount, also one that is in use, and so does the end of the service or
// of its caller. What is killed at any instant is freed by the next command.
func TestMountEnds(t *testing.T) {
	t.Parallel()
	b, _ := mounted(t)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		m := b.mount("s@k")
		user := exec.Command("sleep", "1000")
		user.Dir = filepath.Join(m.dir, "work")
		if err := user.Start(); err != nil {
			t.Fatal(err)
		}
		if err := m.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		m.ends(0, "")
		if err := user.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = user.Wait()
	}

	m := b.mount("s@k")
	if err := m.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.toEnd(-1, "")
	if r := b.try(nil, "ps"); r.code != 0 || !strings.Contains(r.err, "freed a mount of s@k that was left on "+m.dir) {
		t.Errorf("%s", r)
	}
	m.gone()
	for _, at := range []string{"mount.after-layout", "mount.after-mount"} {
		dir := t.TempDir()
		if r := b.try(failpoint(at, "kill"), "mount", "s@k", dir); !r.killed {
			t.Fatalf("not killed at %s: %s", at, r)
		}
		b.ok("ps")
		(&mounting{box: b, dir: dir}).gone()
		if r := b.try(failpoint(at, "error"), "mount", "s@k", dir); r.code != 1 {
			t.Errorf("%s: %s", at, r)
		}
		(&mounting{box: b, dir: dir}).gone()
	}
	m = b.mount("s@k", failpoint("mount.after-detach", "kill")...)
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	m.toEnd(-1, "")
	b.ok("ps")
	m.gone()

	serve, _ := b.serve()
	m = b.mount("s@k")
	if err := m.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	m.ends(0, "")
	m = b.mount("s@k")
	if err := m.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	m.toEnd(-1, "")
	b.eventually("it is gone with its caller", func() bool {
		list, err := os.ReadDir(filepath.Join(b.root, "mounts"))
		return err == nil && len(list) == 0
	})
	m.gone()
	m = b.mount("s@k")
	if err := syscall.Unmount(m.dir, 0); err != nil {
		t.Fatal(err)
	}
	m.ends(0, "")
	m = b.mount("s@k")
	if err := serve.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	m.ends(5, "the service is about to end")
	if err := serve.Wait(); err != nil {
		t.Error(err)
	}
}

// TestMountRefused: what is no empty directory of the caller's is not mounted on, and files that change
// are not mounted.
func TestMountRefused(t *testing.T) {
	t.Parallel()
	b, dir := mounted(t)
	empty := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(empty, link); err != nil {
		t.Fatal(err)
	}
	in := filepath.Join(b.root, "in")
	if err := os.Mkdir(in, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code           int
		ref, dir, said string
	}{
		{2, "s", empty, "agentbox mount s@HEAD DIR"}, {3, "s@none", empty, "not found"}, {3, "none@k", empty, "not found"},
		{2, "s@k", dir, "it is not empty"}, {3, "s@k", filepath.Join(empty, "none"), "mkdir"},
		{2, "s@k", link, "it is not a directory"}, {2, "s@k", filepath.Join(dir, "README"), "it is not a directory"},
		{2, "s@k", in, "agentbox keeps its state in"}, {2, "s@", empty, "names no checkpoint"},
	} {
		if said := b.fails(c.code, "mount", c.ref, c.dir); !strings.Contains(said, c.said) {
			t.Errorf("%s on %s: %s", c.ref, c.dir, said)
		}
	}
	if list, err := os.ReadDir(filepath.Join(b.root, "mounts")); err == nil && len(list) > 0 {
		t.Errorf("left: %v", list)
	}
}
