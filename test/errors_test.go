package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBadInput(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sleep", "1000")
	b.start("d", "--network", "none", "busybox", "sleep", "1000")
	ck := b.checkpoint("--name", "one", "c")
	pid := b.inspect("c").Pid
	long := strings.Repeat("x", 300)
	for _, try := range []struct {
		code int
		says string
		args []string
	}{
		{3, "nobody", []string{"inspect", "nobody"}},
		{3, "nobody", []string{"checkpoint", "nobody"}},
		{3, "nobody", []string{"restore", "nobody"}},
		{3, "nothing", []string{"restore", "c", "nothing"}},
		{3, "", []string{"restore", "d"}}, // it has no checkpoint
		{3, "", []string{"checkpoint", "inspect", "c@two"}},
		{125, "nobody", []string{"exec", "nobody", "true"}},
		{125, "nowhere", []string{"run", "nowhere", "true"}},
		{3, "nowhere", []string{"create", "nowhere", "true"}},
		{4, "c", []string{"create", "--name", "c", "busybox", "true"}},
		{127, "no-such-command", []string{"run", "--rm", "--network", "none", "busybox", "no-such-command"}},
		{126, "/etc/passwd", []string{"run", "--rm", "--network", "none", "busybox", "/etc/passwd"}},
		{127, "no-such-command", []string{"exec", "c", "no-such-command"}},
		{126, "/etc", []string{"exec", "c", "/etc"}},
		{2, "", []string{"create", "--name", "a/b", "busybox", "true"}},
		{2, "", []string{"create", "--name", "..", "busybox", "true"}},
		{2, "", []string{"create", "--name", "../x", "busybox", "true"}},
		{2, "", []string{"create", "--name", "new\nline", "busybox", "true"}},
		{2, "", []string{"create", "--name", "\xff", "busybox", "true"}},
		{2, "", []string{"create", "--name", long, "busybox", "true"}},
		{2, "", []string{"checkpoint", "--name", "a/b", "c"}},
		{2, "", []string{"checkpoint", "--name", "..", "c"}},
		{2, "", []string{"image", "import", "../x", "/"}},
		{3, "/no/such/place", []string{"create", "-v", "/no/such/place:/mnt", "busybox", "true"}},
		{8, "named volume relative", []string{"create", "-v", "relative:/mnt", "busybox", "true"}},
		{3, "relative", []string{"create", "-v", "./relative:/mnt", "busybox", "true"}},
		{2, "", []string{"create", "-v", "/:mnt", "busybox", "true"}},
		{2, "", []string{"create", "--memory", "lots", "busybox", "true"}},
		{2, "", []string{"create", "--memory", "-5m", "busybox", "true"}},
		{2, "", []string{"create", "--memory", "1k", "busybox", "true"}},
		{2, "", []string{"create", "--cpus", "-1", "busybox", "true"}},
		{2, "", []string{"create", "--label", "=x", "busybox", "true"}},
		{2, "", []string{"create", "--network", "carrier-pigeon", "busybox", "true"}},
		{2, "", []string{"create", "-p", "80:99999", "busybox", "true"}},
		{2, "", []string{"checkpoint", "--tcp", "maybe", "c"}},
		{2, "", []string{"checkpoint", "--timeout", "-1s", "c"}},
		{2, "", []string{"frobnicate"}},
		{4, "d", []string{"restore", "d", ck}}, // another sandbox's
		{4, "", []string{"start", "c"}},
		{4, "", []string{"unpause", "c"}},
		{4, "", []string{"rm", "c"}}, // it runs
		{3, "no.such", []string{"image", "import", "x", "/no.such.tar"}},
	} {
		r := b.try(nil, try.args...)
		if r.code != try.code || r.err == "" || !strings.Contains(r.err, try.says) {
			t.Errorf("want exit %d and %q: %s", try.code, try.says, r)
		}
	}
	for _, s := range decode[[]sandbox](b, b.ok("ps", "-a", "--format", "json")) {
		if s.Name != "c" && s.Name != "d" {
			t.Errorf("a refused command left sandbox %+v", s)
			b.ok("rm", "-f", s.Name)
		}
	}
	equal(b, "pid after all that was refused", b.inspect("c").Pid, pid)

	// A sandbox that exits passes its code on.
	equal(b, "exit of run", b.try(nil, "run", "--rm", "--network", "none", "busybox", "sh", "-c", "exit 7").code, 7)
	equal(b, "exit of exec", b.try(nil, "exec", "c", "sh", "-c", "kill -9 $$").code, 137)
}

func TestOtherImage(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sleep", "1000")
	ck := b.checkpoint("c")
	b.ok("stop", "-t", "0", "c")
	tar := b.try(nil, "cp", "c:/", "-")
	if tar.code != 0 {
		t.Fatal(tar.err)
	}
	b.ok("rm", "-f", "c")
	// An image that differs in one file.
	dir := t.TempDir()
	extract := exec.Command("tar", "-x", "-C", dir)
	extract.Stdin = strings.NewReader(tar.out)
	if out, err := extract.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.WriteFile(filepath.Join(dir, "etc/other"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.ok("image", "import", "other", dir)
	b.start("c", "--network", "none", "other", "sleep", "1000")
	pid := b.inspect("c").Pid
	if msg := b.fails(4, "restore", "c", ck); !strings.Contains(msg, "image") {
		t.Errorf("the refusal does not say that it is about the image: %s", msg)
	}
	equal(b, "pid after the refused restore", b.inspect("c").Pid, pid)
	b.fails(4, "image", "rm", "other") // the sandbox needs it
}

const talk = `
import socket, threading, time
s = socket.socket(); s.bind(("127.0.0.1", 7000)); s.listen()
c = socket.create_connection(("127.0.0.1", 7000)); a, _ = s.accept()
n = 0
while True:
    c.sendall(b"x"); assert a.recv(1) == b"x"
    n += 1
    open("/n", "w").write(str(n)); time.sleep(0.02)
`

func TestTCPModes(t *testing.T) {
	b := debianBox(t)
	b.start("tcp", "--network", "none", "debian", "python3", "-c", talk)
	b.eventually("the connection is used", func() bool { return b.file("tcp", "n") != "" })
	pid := b.inspect("tcp").Pid
	r := b.try(nil, "checkpoint", "--tcp", "refuse", "tcp")
	if r.code == 0 || !strings.Contains(r.err, "TCP") {
		t.Errorf("want a refusal that says TCP: %s", r)
	}
	equal(b, "status", b.inspect("tcp").Status, "running")
	equal(b, "pid", b.inspect("tcp").Pid, pid)
	n := b.file("tcp", "n")
	b.eventually("it goes on", func() bool { return b.file("tcp", "n") != n })
	for _, ck := range b.checkpoints("tcp") {
		if ck.Status != "failed" || ck.Error == "" {
			t.Errorf("the refused checkpoint is listed as %+v", ck)
		}
	}
	if out := b.ok("checkpoint", "ls", "-q", "tcp"); out != "" {
		t.Errorf("listed as ready: %s", out)
	}
	// Closed after the restore: the program's next send fails.
	b.checkpoint("--tcp", "close", "tcp")
	n = b.file("tcp", "n")
	b.eventually("it goes on after a checkpoint that closes", func() bool { return b.file("tcp", "n") != n })
	b.ok("restore", "tcp")
	b.eventually("the program finds its connection closed", func() bool { return b.inspect("tcp").Status == "exited" })
}

func TestExecSessions(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("c", 3)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	session := b.command(ctx, "exec", "c", "sh", "-c", "echo up > /up; sleep 999")
	if err := session.Start(); err != nil {
		t.Fatal(err)
	}
	defer session.Wait()
	defer cancel()
	b.eventually("the session runs", func() bool { return b.file("c", "up") != "" })
	r := b.try(nil, "checkpoint", "--strict", "c")
	if r.code != 4 || !strings.Contains(r.err, "exec session") || !strings.Contains(r.err, "sleep 999") {
		t.Errorf("want a refusal that names the session: %s", r)
	}
	r = b.try(nil, "checkpoint", "c")
	if r.code != 0 || !strings.Contains(r.err, "came in through an exec") || !strings.Contains(r.err, "sleep 999") {
		t.Errorf("want a warning that names the session: %s", r)
	}
	// A process that exec left in the background is no session: it is in the dump.
	b.sh("c", "(while :; do echo x >> /background; sleep 0.05; done) > /dev/null 2>&1 < /dev/null &")
	b.eventually("the background process runs", func() bool { return b.file("c", "background") != "" })
	b.sh("c", "kill $(ps | awk '/sleep 99[9]/ { print $1 }')")
	_ = session.Wait()
	b.eventually("the session is over", func() bool { return !strings.Contains(b.ok("exec", "c", "ps"), "sleep 999") })
	r = b.try(nil, "checkpoint", "--strict", "c")
	if r.code != 0 {
		t.Fatal(r)
	}
	b.ok("restore", "c")
	n := len(b.file("c", "background"))
	b.eventually("the background process goes on after the restore", func() bool {
		return len(b.file("c", "background")) > n
	})
}

// flip changes one byte in the middle of a file and returns how to undo it.
func flip(t *testing.T, path string) (undo func()) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func() {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		text[len(text)/2] ^= 0x40
	}
	text[len(text)/2] ^= 0x40
	write()
	return write
}

func TestCorrupt(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c",
		"dd if=/dev/urandom of=/random bs=1k count=300 2> /dev/null; echo one > /marker; "+counter)
	b.reaches("c", 3)
	ck := b.checkpoint("c")
	b.sh("c", "echo two > /marker; rm /random")
	packs, _ := filepath.Glob(filepath.Join(b.root, "packs/*/*"))
	if len(packs) != 1 {
		t.Fatalf("packs: %q", packs)
	}
	pack, err := filepath.Rel(b.root, packs[0])
	if err != nil {
		t.Fatal(err)
	}
	pid := b.inspect("c").Pid
	untouched := func(what string) {
		t.Helper()
		s := b.inspect("c")
		equal(b, what+": status", s.Status, "running")
		equal(b, what+": pid", s.Pid, pid)
		equal(b, what+": marker", b.file("c", "marker"), "two")
		n := b.count("c")
		b.reaches("c", n+1)
	}
	for _, name := range []string{filepath.Join("checkpoints", ck, "manifest.json"), pack} {
		path := filepath.Join(b.root, name)
		undo := flip(t, path)
		b.fails(6, "checkpoint", "verify", ck)
		b.fails(6, "restore", "c")
		untouched("a flipped byte in " + name)
		undo()

		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, int64(len(text)/2)); err != nil {
			t.Fatal(err)
		}
		b.fails(6, "checkpoint", "verify", ck)
		b.fails(6, "restore", "c")
		untouched("a truncated " + name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		b.fails(6, "checkpoint", "verify", ck)
		b.fails(6, "restore", "c")
		untouched("a missing " + name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b.ok("checkpoint", "verify", ck)
	b.ok("restore", "c")
	equal(b, "marker", b.file("c", "marker"), "one")
}

// held starts a command that stops itself at a failpoint, and returns how to
// let it go on to its end.
func (b *box) held(point string, args ...string) (release func() error) {
	b.Helper()
	cmd := b.command(context.Background(), args...)
	cmd.Env = append(cmd.Env, failpoint(point, "stop")...)
	stderr, err := os.CreateTemp(b.TempDir(), "stderr") // not a pipe: a monitor would keep it open
	if err != nil {
		b.Fatal(err)
	}
	defer stderr.Close()
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.eventually("the command stops at "+point, func() bool {
		var st unix.Siginfo
		err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &st, unix.WSTOPPED|unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err != nil {
			b.Fatal(err)
		}
		if st.Code == 1 || st.Code == 2 { // CLD_EXITED, CLD_KILLED
			_ = cmd.Wait()
			b.Fatalf("agentbox %v never reached %s: %s", args, point, b.read(stderr.Name()))
		}
		return st.Signo != 0
	})
	return func() error {
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			return err
		}
		if err := cmd.Wait(); err != nil {
			return errors.Join(err, errors.New(b.read(stderr.Name())))
		}
		return nil
	}
}

func TestBusy(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	b.start("other", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("c", 3)
	b.checkpoint("c")

	release := b.held("checkpoint.after-freeze", "checkpoint", "c")
	for _, args := range [][]string{
		{"checkpoint", "c"}, {"restore", "c"}, {"stop", "c"}, {"rm", "-f", "c"}, {"pause", "c"},
	} {
		if msg := b.fails(5, args...); !strings.Contains(msg, "checkpoint") {
			t.Errorf("%v: does not say who holds it: %s", args, msg)
		}
	}
	// Looking is allowed, and a verb that lives is no business of recover's.
	equal(b, "status while frozen", b.inspect("c").Status, "paused")
	n := b.count("c")
	b.ok("recover")
	b.ok("ps")
	equal(b, "status after recover", b.inspect("c").Status, "paused")
	equal(b, "count after recover", b.count("c"), n)
	// Other sandboxes are not held up.
	b.ok("restore", b.start("third", "--network", "none", "busybox", "sh", "-c", counter), b.checkpoint("third"))
	b.checkpoint("other")
	if err := release(); err != nil {
		t.Fatalf("the checkpoint that was held: %v", err)
	}
	b.reaches("c", n+1)
	if len(b.checkpoints("c")) != 2 {
		t.Errorf("checkpoints: %+v", b.checkpoints("c"))
	}

	release = b.held("restore.after-layout", "restore", "c")
	b.fails(5, "checkpoint", "c")
	b.fails(5, "restore", "c")
	b.fails(5, "stop", "c")
	if err := release(); err != nil {
		t.Fatalf("the restore that was held: %v", err)
	}
	equal(b, "status", b.inspect("c").Status, "running")
}

// small mounts an ext4 of some megabytes and returns a directory in it.
func small(t *testing.T, megabytes int64) string {
	t.Helper()
	root, err := filesystem(t, megabytes, "loop", "mkfs.ext4", "-q", "-m", "0")
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// filesystem mounts one of its own, of some megabytes, and returns a directory in
// it; the error is why this host cannot make or mount such a one.
func filesystem(t *testing.T, megabytes int64, options string, mkfs ...string) (root string, _ error) {
	t.Helper()
	dir, err := os.MkdirTemp("", "abfs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "m")
	f, err := os.Create(image)
	if err != nil {
		t.Fatal(err)
	}
	// Users of the sandbox's own range have to get to its root.
	if err := errors.Join(f.Truncate(megabytes<<20), f.Close(), os.Chmod(dir, 0o711), os.Mkdir(at, 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{append(mkfs, image), {"mount", "-o", options, image, at}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return "", fmt.Errorf("%q: %w: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", at).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	root = filepath.Join(at, "r")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	return root, nil
}

// fill leaves about so many bytes free on a root's filesystem.
func fill(b *box, leave int64) (ballast string) {
	b.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(b.root, &st); err != nil {
		b.Fatal(err)
	}
	ballast = filepath.Join(filepath.Dir(b.root), "ballast")
	if err := os.WriteFile(ballast, make([]byte, int64(st.Bavail)*st.Bsize-leave), 0o600); err != nil {
		b.Fatal(err)
	}
	return ballast
}

func TestNoSpace(t *testing.T) {
	b := boxAt(t, small(t, 64))
	b.start("c", "--network", "none", "busybox", "sh", "-c",
		"dd if=/dev/urandom of=/random bs=1k count=8000 2> /dev/null; echo one > /marker; "+counter)
	b.reaches("c", 3)
	first := b.checkpoint("c")
	// All of it is needed anew: a checkpoint has to store, a restore to write it.
	b.sh("c", "echo two > /marker; rm /random; dd if=/dev/urandom of=/random bs=1k count=8000 2> /dev/null")
	pid := b.inspect("c").Pid
	ballast := fill(b, 4<<20)
	for _, args := range [][]string{{"checkpoint", "c"}, {"checkpoint", "--files-only", "c"}, {"restore", "c"}} {
		r := b.try(nil, args...)
		if r.code == 0 || !strings.Contains(r.err, "space") {
			t.Errorf("want a failure for want of space: %s", r)
		}
		s := b.inspect("c")
		equal(b, "status", s.Status, "running")
		equal(b, "pid", s.Pid, pid)
		n := b.count("c")
		b.reaches("c", n+1)
		equal(b, "ready checkpoints", b.ok("checkpoint", "ls", "-q", "--no-trunc"), first)
		equal(b, "marker", b.file("c", "marker"), "two")
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	b.checkpoint("c")
	b.sh("c", "echo three > /marker")
	b.ok("restore", "c")
	equal(b, "marker", b.file("c", "marker"), "two")
	b.ok("restore", "c", first)
	equal(b, "marker", b.file("c", "marker"), "one")
}
