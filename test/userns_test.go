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

// TestUserNamespace has a sandbox with a range of ids of its own: no user of the host has them,
// on disk and in checkpoints they are the sandbox's, and its processes, of several users, and its
// connections come back.
func TestUserNamespace(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.ok("image", "import", "echo", programRoot(t, "echo"))
	shared := t.TempDir()
	token := filepath.Join(shared, "token")
	if err := os.WriteFile(token, []byte("hush"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start("mapped", "--userns", "auto", "-w", "/made", "-v", shared+":/shared", "--secret",
		"token=file:"+token, "busybox", "sh", "-c",
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
		equal(b, "its files", b.sh("mapped",
			"cd /w; stat -c '%n %u:%g %a' *; ls /new 2>/dev/null; stat -c %u:%g /made /etc/hosts"),
			"root 0:0 640\nuser 1000:1001 640\n0:0\n0:0")
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

// TestUserNamespaceDefault: a sandbox has user ids of its own unless something
// that it is to have, or the host, speaks against it; then it is told what.
func TestUserNamespaceDefault(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("mapped", "--network", "none", "busybox", "sleep", "1000")
	if ids, why := idsOf(b, "mapped"), hostIDs(b, "mapped"); ids.Size != 65536 || why != "" {
		t.Fatalf("ids %+v, %q", ids, why)
	}
	theirs := t.TempDir()
	if err := os.Chown(theirs, 70000, 0); err != nil {
		t.Fatal(err)
	}
	image := t.TempDir()
	if err := os.WriteFile(filepath.Join(image, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(filepath.Join(image, "file"), 0, 70001); err != nil {
		t.Fatal(err)
	}
	b.ok("image", "import", "largeids", image)
	b.start("plain", "--network", "none", "--userns", "host", "busybox", "sleep", "1000")
	if ids, why := idsOf(b, "plain"), hostIDs(b, "plain"); ids.Size != 0 || why != "" {
		t.Errorf("as asked: %+v, %q", ids, why)
	}
	overlay := filepath.Join(b.root, "sandboxes", b.inspect("plain").ID, "merged")
	for i, c := range []struct {
		why  string
		args []string
	}{
		{"--network host", []string{"--network", "host", "busybox"}},
		{"capability MKNOD", []string{"--cap-add", "MKNOD", "busybox"}},
		{"user 70000", []string{"--user", "70000", "busybox"}},
		{"user 0:65536", []string{"--user", "0:65536", "busybox"}},
		{theirs + " belongs to 70000:0", []string{"-v", theirs + ":/t", "busybox"}},
		{"the ids of " + overlay + " cannot be mapped", []string{"-v", overlay + ":/o", "busybox"}},
		{"files of 70001", []string{"largeids"}},
	} {
		name := fmt.Sprint("host", i)
		b.ok(append(append([]string{"create", "--name", name}, c.args...), "true")...)
		if why := hostIDs(b, name); !strings.Contains(why, c.why) || idsOf(b, name).Size != 0 {
			t.Errorf("%q: %+v, %q", c.args, idsOf(b, name), why)
		}
		if said := b.fails(8, append(append([]string{"create", "--userns", "auto"}, c.args...),
			"true")...); !strings.Contains(said, c.why) {
			t.Errorf("%q --userns auto: %s", c.args, said)
		}
	}

	// A policy can ask for them.
	required := filepath.Join(t.TempDir(), "required.yaml")
	if err := os.WriteFile(required, []byte("base: default\nuser: {namespace: required}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.ok("create", "--name", "required", "--policy", required, "busybox", "true")
	if idsOf(b, "required").Size == 0 {
		t.Error("a policy that requires ids of its own had none given")
	}
	for _, c := range []struct {
		why  string
		args []string
	}{
		{"user.namespace: required: --network host", []string{"--policy", required, "--network", "host"}},
		{"user.namespace: required", []string{"--policy", required, "--userns", "host"}},
		{"user.namespace: preferred", []string{"--policy", "strict", "--userns", "host"}},
	} {
		if said := b.fails(7, append(append([]string{"create"}, c.args...), "busybox",
			"true")...); !strings.Contains(said, "denied") || !strings.Contains(said, c.why) {
			t.Errorf("%q: %s", c.args, said)
		}
	}

	// A sandbox with the host's ids keeps them, and so do its forks.
	ck := b.checkpoint("plain")
	b.ok("restore", "plain", ck)
	b.ok("fork", "plain@"+ck, "--name", "forked")
	b.ok("rm", "-f", "plain")
	b.ok("restore", "plain", ck)
	for _, name := range []string{"plain", "forked"} {
		if got := strings.Fields(b.sh(name, "cat /proc/self/uid_map")); len(got) != 3 || got[1] != "0" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// TestUserNamespacePassed: a root that others cannot get to has none.
func TestUserNamespacePassed(t *testing.T) {
	t.Parallel()
	top, err := os.MkdirTemp("/dev/shm", "ab") // 0700
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(top); err != nil {
			t.Error(err)
		}
	})
	root := filepath.Join(top, "root")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	b := boxAt(t, root)
	b.ok("create", "--name", "c", "busybox", "true")
	if why := hostIDs(b, "c"); !strings.Contains(why, "only root passes "+top) {
		t.Errorf("why: %q", why)
	}
}

type idMap struct{ Base, Size int }

// hostIDs is why a sandbox has the host's user ids.
func hostIDs(b *box, name string) string {
	b.Helper()
	list := decode[[]struct {
		Spec struct {
			HostIDs string `json:"host_ids"`
		}
	}](b, b.ok("inspect", name))
	return list[0].Spec.HostIDs
}

func idsOf(b *box, name string) idMap {
	b.Helper()
	list := decode[[]struct{ Spec struct{ IDs idMap } }](b, b.ok("inspect", name))
	return list[0].Spec.IDs
}
