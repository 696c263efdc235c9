package test

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestUserNamespace has a sandbox with a range of ids of its own: nobody on the
// host has them, on disk and in checkpoints they are the sandbox's, and its
// processes, of several users, and its connections come back.
func TestUserNamespace(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.ok("image", "import", "echo", programRoot(t, "echo"))
	shared := t.TempDir()
	token := filepath.Join(shared, "token")
	if err := os.WriteFile(token, []byte("hush"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start("mapped", "--userns", "auto", "-w", "/made", "-v", shared+":/shared", "--secret", "token=file:"+token, "busybox", "sh", "-c",
		`mkdir /w; echo root > /w/root; echo user > /w/user; chown 1000:1001 /w/user; chmod 640 /w/*; `+counter)
	b.eventually("it counts", func() bool { return b.count("mapped") > 2 })
	ids := idsOf(b, "mapped")
	if ids.Base < 524288 || ids.Size != 65536 {
		t.Fatalf("ids: %+v", ids)
	}
	equal(b, "its map", strings.Join(strings.Fields(b.sh("mapped", "cat /proc/self/uid_map /proc/self/gid_map")), " "),
		fmt.Sprintf("0 %d 65536 0 %[1]d 65536", ids.Base))
	owner := func(path string) (int, int) {
		t.Helper()
		st, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		sys := st.Sys().(*syscall.Stat_t)
		return int(sys.Uid), int(sys.Gid)
	}
	host := func(pid int) string {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(data)) {
			if strings.HasPrefix(line, "Uid:") {
				return strings.Fields(line)[1]
			}
		}
		return ""
	}
	equal(b, "the first process's user on the host", host(b.inspect("mapped").Pid), fmt.Sprint(ids.Base))
	if uid, gid := owner(filepath.Join(b.upperdir("mapped"), "w/user")); uid != 1000 || gid != 1001 {
		t.Errorf("on disk the file belongs to %d:%d", uid, gid)
	}

	b.ok("exec", "-d", "--user", "1000", "mapped", "sleep", "1000")
	one := b.checkpoint("mapped")
	b.ok("exec", "mapped", "sh", "-c", "rm /w/user; echo new > /new")
	for range 2 {
		b.ok("restore", "--secret", "token=file:"+token, "mapped", one)
		equal(b, "its files", b.sh("mapped", "cd /w; stat -c '%n %u:%g %a' *; ls /new 2>/dev/null; stat -c %u:%g /made /etc/hosts"), "root 0:0 640\nuser 1000:1001 640\n0:0\n0:0")
		// A volume's files are the host's, whose root is the sandbox's there.
		b.sh("mapped", "echo from inside > /shared/file; chown 1000 /shared/file")
		if uid, gid := owner(filepath.Join(shared, "file")); uid != 1000 || gid != 0 {
			t.Errorf("in the volume the file belongs to %d:%d", uid, gid)
		}
		equal(b, "its secret", b.sh("mapped", "cat /run/secrets/token; stat -c %u:%a /run/secrets/token"), "hush0:400")
		n := b.count("mapped")
		b.eventually("it counts on", func() bool { return b.count("mapped") > n })
		equal(b, "the restored process's user on the host", host(b.inspect("mapped").Pid), fmt.Sprint(ids.Base))
	}

	// Files go in and out with the owners that the sandbox knows.
	dir := t.TempDir()
	file, out := filepath.Join(dir, "file"), filepath.Join(dir, "out")
	if err := os.WriteFile(file, []byte("in\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, 7, 8); err != nil {
		t.Fatal(err)
	}
	b.ok("cp", "-a", file, "mapped:/w/in")
	equal(b, "what came in", b.sh("mapped", "stat -c '%u:%g %a' /w/in; cat /w/in"), "7:8 600\nin")
	b.ok("cp", "-a", "mapped:/w", out)
	if uid, gid := owner(filepath.Join(out, "user")); uid != 1000 || gid != 1001 {
		t.Errorf("what came out belongs to %d:%d", uid, gid)
	}
	b.ok("cp", "mapped:/w/in", out)
	if data := b.read(filepath.Join(out, "in")); data != "in" {
		t.Errorf("what came out is %q", data)
	}

	// Capabilities of files and access control lists have ids in them, too.
	attributes := map[string]string{
		"security.capability":     "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"system.posix_acl_access": "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x02\x00\x04\x00\xe8\x03\x00\x00\x04\x00\x04\x00\xff\xff\xff\xff\x10\x00\x06\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff",
	}
	for name, value := range attributes {
		if err := unix.Setxattr(file, name, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	b.ok("cp", "-a", file, "mapped:/w/dressed")
	b.ok("cp", "-a", "mapped:/w/dressed", out)
	for _, path := range []string{filepath.Join(b.upperdir("mapped"), "w/dressed"), filepath.Join(out, "dressed")} {
		for name, value := range attributes {
			buf := make([]byte, 100)
			n, err := unix.Getxattr(path, name, buf)
			if err != nil || string(buf[:n]) != value {
				t.Errorf("%s of %s: %q, %v", name, path, buf[:max(n, 0)], err)
			}
		}
	}

	// A fork is of the same family of ids, and another sandbox of none.
	b.ok("fork", "mapped@"+one, "--name", "forked")
	b.own("forked")
	if got := idsOf(b, "forked"); got != ids {
		t.Errorf("the fork's ids: %+v", got)
	}
	b.start("other", "--userns", "auto", "--network", "bridge", "echo", "/echo", ":7777")
	if got := idsOf(b, "other"); got.Base == ids.Base || got.Base == 0 {
		t.Errorf("another sandbox's ids: %+v", got)
	}
	// A connection is there before a restore and after it.
	b.eventually("it listens", func() bool { return strings.Contains(b.ok("logs", "other"), "ready") })
	conn, err := net.DialTimeout("tcp", b.inspect("other").Address+":7777", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	say := func(what string) {
		t.Helper()
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintln(conn, what); err != nil {
			t.Fatal(err)
		}
		if got, err := in.ReadString('\n'); got != what+"\n" {
			t.Fatalf("the echo of %s is %q, %v", what, got, err)
		}
	}
	say("before")
	stopped := b.checkpoint("--stop", "other")
	b.ok("restore", "other", stopped)
	say("after")

	b.fails(125, "run", "--userns", "somehow", "busybox", "true")
	b.fails(125, "run", "--rm", "--userns", "auto", "--network", "host", "busybox", "true")
	// Removed, it comes back with the ids that its images have.
	b.ok("rm", "-f", "mapped")
	b.ok("restore", "--secret", "token=file:"+token, "mapped", one)
	if got := idsOf(b, "mapped"); got != ids {
		t.Errorf("made again, its ids are %+v", got)
	}
}

type idMap struct{ Base, Size int }

func idsOf(b *box, name string) idMap {
	b.Helper()
	list := decode[[]struct{ Spec struct{ IDs idMap } }](b, b.ok("inspect", name))
	return list[0].Spec.IDs
}
