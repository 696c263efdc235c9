package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// refused runs a restore that must be refused with nothing touched: the same
// processes go on.
func (b *box) refused(code int, says []string, args ...string) {
	b.Helper()
	name := args[0]
	pid := b.inspect(name).Pid
	msg := b.fails(code, append([]string{"restore"}, args...)...)
	for _, part := range says {
		if !strings.Contains(msg, part) {
			b.Errorf("the refusal lacks %q: %s", part, msg)
		}
	}
	b.untouched(name, pid)
}

func (b *box) untouched(name string, pid int) {
	b.Helper()
	s := b.inspect(name)
	equal(b, "status after the refusal", s.Status, "running")
	equal(b, "pid after the refusal", s.Pid, pid)
	n := b.count(name)
	b.eventually("it goes on counting", func() bool { return b.count(name) > n })
	if _, err := os.Lstat(s.Upperdir + ".new"); err == nil {
		b.Error("the refused restore left its staged upperdir")
	}
}

// restored restores, and checks that the counter is another process that goes
// on where the checkpoint has it.
func (b *box) restored(name, ck string) {
	b.Helper()
	pid := b.inspect(name).Pid
	low := b.count(name)
	b.ok("restore", name, ck)
	if b.inspect(name).Pid == pid {
		b.Errorf("%s: the processes are still the old ones", name)
	}
	n := b.count(name)
	b.eventually("it goes on counting", func() bool { return b.count(name) > n })
	last, step := 0, 3
	for _, m := range b.printed(name) {
		if m != last+1 {
			step = m
		}
		last = m
	}
	if n < 3 || step < 3 || step > low+1 {
		b.Errorf("%s: the counter is at %d after the restore, went on with %d, and was at %d before", name, n, step,
			low)
	}
}

// Files that processes have open in a bind mount are in no checkpoint.
func TestRestoreBindChanged(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	src := t.TempDir()
	log, dir, single := filepath.Join(src, "src/log"), filepath.Join(src, "src/dir"), filepath.Join(src, "single")
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	must(os.Mkdir(src+"/empty", 0o755), os.MkdirAll(dir, 0o755), os.WriteFile(log, []byte("hello world\n"), 0o644),
		os.WriteFile(single, []byte("x\n"), 0o644))
	b.start("c", "--network", "none", "-v", src+"/src:/work", "-v", single+":/work/dir/single", "-v",
		src+"/empty:/mnt/empty", "busybox", "sh", "-c",
		// Open: a file, one that is only appended to, one that is deleted, a
		// FIFO, a bind of one file; a directory that is deleted, and one that
		// is not, are worked in.
		`exec 3</work/log 4>>/work/appended 5<>/work/deleted 7</work/dir/single; echo gone >&5; rm /work/deleted; mkfifo /work/fifo; exec 8<>/work/fifo
(mkdir /work/left; cd /work/left; rmdir /work/left; exec sleep 1000) &
mkdir /work/cwd; (cd /work/cwd; exec sleep 1000) &
`+counter)
	b.reaches("c", 3)
	ck := b.checkpoint("c")

	hint := "agentbox restore c " + ck[:12] + " --files-only"
	must(os.WriteFile(log, []byte("hello world\nhello world\n"), 0o644))
	b.refused(4, []string{"/work/log", "24 bytes", "had 12", hint}, "c", ck)
	must(os.Remove(log))
	b.refused(4, []string{"/work/log", "is gone", hint}, "c", ck)
	must(os.Mkdir(log, 0o755))
	b.refused(4, []string{"/work/log", "type", hint}, "c", ck)
	must(os.Remove(log), os.WriteFile(log, []byte("HELLO WORLD\n"), 0o600))
	b.refused(4, []string{"/work/log", "mode", hint}, "c", ck)
	must(os.Chmod(log, 0o644))

	must(os.Remove(filepath.Join(src, "src/cwd")))
	b.refused(4, []string{"/work/cwd", "is gone", hint}, "c", ck)
	must(os.Mkdir(filepath.Join(src, "src/cwd"), 0o755))

	must(os.WriteFile(single, []byte("longer\n"), 0o644))
	b.refused(4, []string{"/work/dir/single", "7 bytes", hint}, "c", ck)
	must(os.WriteFile(single, []byte("y\n"), 0o644))

	must(os.Rename(src+"/src", src+"/away"))
	b.refused(3, []string{src + "/src"}, "c", ck)
	b.refused(3, []string{src + "/src"}, "c", ck, "--files-only")
	must(os.Rename(src+"/away", src+"/src"))

	away := src + "/empty"
	must(os.Rename(src+"/empty", src+"/was"), os.WriteFile(away, nil, 0o644))
	b.refused(4, []string{away, "directory"}, "c", ck, "--files-only")
	b.refused(4, []string{away, "directory"}, "c", ck)
	must(os.Remove(away), os.Rename(src+"/was", away))
	must(os.Rename(single, single+".away"), os.Mkdir(single, 0o755))
	b.refused(4, []string{single}, "c", ck)
	must(os.Remove(single), os.Rename(single+".away", single))

	// All is as it was, apart from what does not matter.
	must(os.WriteFile(src+"/src/appended", []byte("more"), 0o644))
	b.restored("c", ck)
	equal(b, "the deleted file", b.sh("c", "cat /proc/1/fd/5"), "gone")
	// Files alone never care.
	must(os.WriteFile(log, nil, 0o644))
	b.refused(4, []string{"/work/log"}, "c", ck)
	b.ok("restore", "--files-only", "c", ck)
	equal(b, "status", b.inspect("c").Status, "running")
}

// Edits of the files that agentbox itself writes are kept like all others.
func TestRestoreManaged(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	hold := `while [ ! -e /go ]; do sleep 0.02; done; exec 3</etc/hosts; ` + counter
	b.start("c", "busybox", "sh", "-c", hold)
	fresh := b.sh("c", "cat /etc/hosts")
	read := func() string { return b.sh("c", "cat /etc/hosts /etc/resolv.conf; stat -c %a:%u /etc/hosts") }
	b.sh("c", "echo 10.1.2.3 mine >> /etc/hosts; echo nameserver 10.9.9.9 > /etc/resolv.conf; chmod 600 /etc/hosts; chown 7 /etc/hosts; touch /go")
	b.reaches("c", 3)
	want := read()
	ck := b.checkpoint("c")
	b.sh("c", "echo 10.1.2.4 more and longer >> /etc/hosts; echo > /etc/resolv.conf; chmod 644 /etc/hosts")
	changed := read()
	b.ok("restore", "c", ck)
	equal(b, "after the restore", read(), want)
	equal(b, "the open file", b.sh("c", "cat /proc/1/fd/3"), b.sh("c", "cat /etc/hosts"))
	b.ok("checkpoint", "verify", ck)

	// A start leaves them alone; so does a files-only restore that it follows.
	b.ok("stop", "-t", "0", "c")
	b.ok("start", "c")
	equal(b, "after a restart", read(), want)
	b.sh("c", "echo 10.1.2.4 more and longer >> /etc/hosts; echo > /etc/resolv.conf; chmod 644 /etc/hosts; touch /go")
	equal(b, "changed again", read(), changed)
	b.ok("restore", "--files-only", "c", ck)
	equal(b, "after a files-only restore", read(), want)

	// A restore that fails puts back what it found, one that is killed is
	// finished.
	b.sh("c", "echo 10.1.2.4 more and longer >> /etc/hosts; echo > /etc/resolv.conf; chmod 644 /etc/hosts; touch /go")
	if r := b.try(failpoint("restore.after-stage", "error"), "restore", "c", ck); r.code == 0 {
		t.Fatal(r)
	}
	b.ok("start", "c")
	equal(b, "after a failed restore", read(), changed)
	for _, point := range []string{"restore.after-apply", "restore.after-stage", "restore.after-start"} {
		if r := b.try(failpoint(point, "kill"), "restore", "c", ck); !r.killed {
			t.Fatal(r)
		}
		b.ok("recover")
		equal(b, "after the recovery from "+point, read(), want)
		b.sh("c", "echo longer >> /etc/hosts")
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(b.inspect("c").Upperdir), "etc/*.old")); len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}

	// A sandbox that is made again gets them, too; files without changes are still agentbox's to
	// write.
	b.ok("rm", "-f", "c")
	b.ok("restore", "c", ck)
	equal(b, "in a sandbox made again", read(), want)
	b.start("plain", "busybox", "sleep", "1000")
	hosts := filepath.Join(filepath.Dir(b.inspect("plain").Upperdir), "etc/hosts")
	if fresh == "" || b.sh("plain", "cat /etc/hosts") == fresh {
		t.Fatalf("hosts: %q", fresh)
	}
	text := b.sh("plain", "cat /etc/hosts")
	old := strings.Replace(text, b.ip("plain"), "10.255.255.254", 1)
	if old == text {
		t.Fatalf("no address in %q", text)
	}
	b.ok("stop", "-t", "0", "plain")
	if err := os.WriteFile(hosts, []byte(old+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	b.ok("start", "plain")
	equal(b, "hosts that nobody changed", b.sh("plain", "cat /etc/hosts"), text)
}

func (b *box) ip(name string) string {
	b.Helper()
	return decode[[]struct{ Address string }](b, b.ok("inspect", name))[0].Address
}

// Restored processes keep their users, whatever has become of /etc/passwd.
func TestRestoreWithoutUser(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	for what, break_ := range map[string]string{
		"fifo":  "rm -f /etc/passwd; mkfifo /etc/passwd",
		"large": "yes x:x:1:1:::: | head -c 5000000 > /etc/passwd",
		"gone":  "rm -f /etc/passwd",
		"line":  "head -c 200000 /dev/zero | tr '\\0' x > /etc/passwd",
	} {
		b.start(what, "-u", "root", "--network", "none", "busybox", "sh", "-c", break_+"; "+counter)
		b.reaches(what, 3)
		b.restored(what, b.checkpoint(what))
		if what == "fifo" {
			// The runtime would wait for ever for a writer.
			if r := b.try(nil, "exec", "-u", "0", what, "true"); r.code == 0 ||
				!strings.Contains(r.err, "agentbox cp") {
				t.Errorf("want a refusal: %s", r)
			}
		}
		if what == "gone" || what == "large" {
			b.ok("exec", "-u", "0", what, "rm", "-f", "/etc/passwd")
		}
		good := filepath.Join(t.TempDir(), "passwd")
		if err := os.WriteFile(good, []byte("root:x:0:0:root:/root:/bin/sh\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		b.ok("cp", good, what+":/etc/passwd")
		b.ok("exec", "-u", "root", what, "true")
	}
}

// Without CRIU nothing is stopped that could not be brought back.
func TestRestoreWithoutCRIU(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("c", 3)
	ck := b.checkpoint("c")
	pid := b.inspect("c").Pid
	// In a mount namespace of its own, where no criu is a program.
	script := `for d in $(echo "$PATH" | tr : ' ') /usr/local/sbin /usr/local/bin /usr/sbin /usr/bin /sbin /bin; do
[ -f $d/criu ] && mount --bind /dev/null $d/criu; done; exec "$@"`
	out, err := exec.Command("unshare", "-m", "sh", "-c", script, "sh", filepath.Join(bin, "agentbox"), "--root",
		b.root, "restore", "c", ck).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "criu") || !strings.Contains(string(out), "--files-only") {
		t.Errorf("want a refusal that names criu: %v: %s", err, out)
	}
	b.untouched("c", pid)
	b.ok("restore", "c", ck)
}
