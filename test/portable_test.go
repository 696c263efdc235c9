package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/stats"
)

// A checkpoint goes as a file to another root, where its sandbox goes on; the
// file is the same each time, here and there.
func TestExportImport(t *testing.T) {
	a, b := newBox(t), newBox(t)
	a.start("c", "--network", "none", "busybox", "sh", "-c",
		"rm /bin/vi; rm -r /tmp; mkdir /tmp; echo hi > /tmp/file; "+counter)
	a.reaches("c", 10)
	id := a.checkpoint("c", "--name", "first", "--stop")
	last, _ := strconv.Atoi(a.file("c", "count"))
	file, again := filepath.Join(a.root, "1.tar.zst"), filepath.Join(a.root, "2.tar.zst")
	a.ok("checkpoint", "export", id, file)
	a.ok("checkpoint", "export", id, again)
	first, second := readFile(t, file), readFile(t, again)
	equal(a, "the second export is the same", first == second, true)
	// Where Podman has it, and checkpointctl looks for it.
	if out, err := exec.Command("tar", "-C", a.root, "--zstd", "-xf", file, "stats-dump").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	root, err := os.Open(a.root)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if st, err := stats.CriuGetDumpStats(root); err != nil || st.GetPagesWritten() == 0 {
		t.Errorf("what CRIU measured: %v (%v)", st, err)
	}

	b.ok("image", "ls") // makes the built-in image, which is the same everywhere
	r := b.input([]byte(first), nil, "checkpoint", "import", "-")
	if r.code != 0 {
		t.Fatalf("%s", r)
	}
	b.own("c")
	b.ok("restore", "--foreign", "c")
	b.wentOn("c", 0, last, last)
	equal(b, "its files", b.sh("c", "cat /tmp/file; ls /tmp /bin/vi 2>&1; true"),
		"hi\nls: /bin/vi: No such file or directory\n/tmp:\nfile")
	out := filepath.Join(b.root, "3.tar.zst")
	b.ok("checkpoint", "export", strings.TrimSpace(r.out), out)
	equal(b, "bytes differ after the way there", readFile(t, out) != first, false)

	damaged := []byte(first)
	for i := range 1024 { // one bit may be of those that zstd does not look at
		damaged[len(damaged)/2+i] ^= 1
	}
	if r := b.input(damaged, nil, "checkpoint", "import", "--name", "bad", "-"); r.code == 0 {
		t.Error("a damaged archive was taken")
	}
	equal(b, "checkpoints after it", len(b.checkpoints("c")) > 0, true)
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Podman goes on with a checkpoint that agentbox exported: both have the image by the digest of
// its configuration.
func TestExportToPodman(t *testing.T) {
	p := newPodman(t)
	p.ok("podman", "save", "--format", "oci-archive", "-o", p.path("bb.oci"), "localhost/bb:latest")
	p.ok("agentbox", "image", "tag", p.ok("agentbox", "image", "pull",
		"oci-archive:"+p.path("bb.oci")), "localhost/bb:latest")
	p.ok("agentbox", "run", "-d", "--network", "none", "--userns", "host", "--name", "c", "localhost/bb:latest", "sh",
		"-c", "echo hi > /tmp/file; "+counter)
	count := func() int {
		out, _, _ := p.try("agentbox", "exec", "c", "cat", "/count")
		n, _ := strconv.Atoi(out)
		return n
	}
	p.eventually("it counts", func() bool { return count() >= 10 })
	low := count()
	id := p.ok("agentbox", "checkpoint", "c")
	last := count()
	p.ok("agentbox", "rm", "-f", "c")
	p.ok("agentbox", "checkpoint", "export", id, p.path("c.tar.zst"))
	p.ok("podman", "container", "restore", "--import", p.path("c.tar.zst"))
	n := p.reaches("c", 10)
	p.reaches("c", n+5)
	var printed []int
	p.eventually("it prints", func() bool { printed = p.printed("c"); return len(printed) > 0 })
	if printed[0] < low || printed[0] > last+1 {
		t.Errorf("it goes on with %d, was between %d and %d", printed[0], low, last)
	}
	if got := p.ok("podman", "exec", "c", "cat", "/tmp/file"); got != "hi" {
		t.Errorf("its file: %q", got)
	}
}

// agentbox goes on with a checkpoint that Podman exported, confined as what it starts itself.
func TestImportFromPodman(t *testing.T) {
	p := newPodman(t)
	p.ok("agentbox", "image", "import", "bb", p.path("image.tar"))
	p.ok("podman", "run", "-d", "--name", "c", "--network", "none", "-e", "MARK=1", "bb", "sh", "-c",
		"rm /etc/passwd; echo hi > /tmp/file; exec 3>/dev/shm/open; "+counter)
	low := p.reaches("c", 10)
	p.ok("podman", "container", "checkpoint", "--export", p.path("c.tar.gz"), "--compress", "gzip", "c")
	p.ok("podman", "rm", "-f", "c")
	p.ok("agentbox", "checkpoint", "import", "--image", "bb", p.path("c.tar.gz"))
	p.ok("agentbox", "restore", "--foreign", "c")
	if got := p.ok("agentbox", "exec", "c", "sh", "-c",
		"cat /tmp/file; ls /etc/passwd 2>&1; tr '\\0' '\\n' < /proc/1/environ | grep ^MARK; ls /dev/shm"); got !=
		"hi\nls: /etc/passwd: No such file or directory\nMARK=1\nopen" {
		t.Errorf("in the sandbox: %q", got)
	}
	now := func() int {
		n, _ := strconv.Atoi(p.ok("agentbox", "exec", "c", "cat", "/count"))
		return n
	}
	first := now()
	if first < low {
		t.Errorf("it goes on at %d, was at %d", first, low)
	}
	p.eventually("it counts on", func() bool { return now() > first })
	p.confined("c", 1)
	p.ok("agentbox", "rm", "-f", "--checkpoints", "c")

	// Threads, which were dumped in no profile at all. As any program of Go theirs has a file
	// of its cgroup open; of sockets of MPTCP, which CRIU does not dump, it has to be told.
	p.ok("cp", filepath.Join(programRoot(t, "echo"), "echo"), p.path("image/bin/echod"))
	p.ok("tar", "-C", p.path("image"), "-cf", p.path("echo.tar"), ".")
	p.ok("podman", "import", p.path("echo.tar"), "echo")
	p.ok("agentbox", "image", "import", "echo", p.path("echo.tar"))
	p.ok("podman", "run", "-d", "--name", "d", "--network", "none", "--security-opt", "apparmor=unconfined", "-e",
		"GODEBUG=multipathtcp=0", "echo", "/bin/echod", "127.0.0.1:7")
	p.eventually("it listens", func() bool { return p.ok("podman", "logs", "d") == "ready" })
	p.ok("podman", "container", "checkpoint", "--export", p.path("d.tar"), "--compress", "none", "d")
	p.ok("podman", "rm", "-f", "d")
	p.ok("agentbox", "checkpoint", "import", "--image", "echo", p.path("d.tar"))
	p.ok("agentbox", "restore", "--foreign", "d")
	p.confined("d", 3)
	if got := p.ok("agentbox", "exec", "d", "cat", "/proc/1/comm"); got != "echod" {
		t.Errorf("its first process is %q", got)
	}
	p.ok("agentbox", "rm", "-f", "--checkpoints", "d")
}

// confined looks for agentbox's AppArmor profile, where the host has AppArmor, in
// the threads of a sandbox, of which there are so many at least.
func (p *podmanBox) confined(name string, least int) {
	p.Helper()
	labels := p.ok("agentbox", "exec", name, "sh", "-c", "cat /proc/[0-9]*/task/*/attr/current 2>/dev/null; true")
	if on, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled"); !strings.HasPrefix(string(on), "Y") {
		return
	}
	list := strings.Split(labels, "\n")
	for _, l := range list {
		if l != "agentbox-default (enforce)" {
			p.Errorf("a thread of %s is in %q", name, l)
		}
	}
	if len(list) < least+1 { // the command's own
		p.Errorf("threads of %s: %q", name, list)
	}
}
