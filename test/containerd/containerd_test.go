package containerd

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestContainerd needs root, containerd, runc, criu and a static busybox.
func TestContainerd(t *testing.T) {
	h := newHost(t)
	for _, c := range []struct {
		name string
		run  func(*box)
	}{
		{"a sandbox", ownSandbox},
		{"ports", ports},
		{"the built-in image", builtin},
		{"images", images},
		{"removed by someone else", removedElsewhere},
		{"a sandbox of another root", otherRoot},
		{"a monitor is killed", monitorKilled},
		{"reaped", reaped},
		{"looked at while it starts", lookedAt},
		{"exec sessions", execSessions},
		{"the daemon is down", daemonDown},
		{"committed", committed},
		{"secrets", secrets},
		{"adopted", adopted},
		{"adopted with a log file", adoptedLog},
		{"adopted from plain runc", plainRunc},
		{"adopted names", adoptedNames},
		{"adopted from a pod", adoptedPod},
		{"started by someone else", startedElsewhere},
		{"beside another backend", besideOCI},
		{"another snapshotter", otherSnapshotter},
		{"killed anywhere", killedAnywhere},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(h.box(t)) })
	}
}

// start runs a sandbox that counts.
func (b *box) start(name string, options ...string) {
	b.Helper()
	b.ok(append(append([]string{"run", "-d", "--name", name}, options...), "bt", "sh", "-c", counting)...)
	b.counts(name)
}

func ownSandbox(b *box) {
	b.start("one", "-m", "200m", "--pids-limit", "99")
	if out := b.ok("top", "--no-stream", "--format", "json", "one"); !strings.Contains(out,
		`"memory_limit":209715200,"pids":`) || !strings.Contains(out, `"pids_limit":99,"disk":`) {
		b.Errorf("agentbox top: %s", out)
	}
	s := b.inspect("one")
	if s.Backend != "containerd" || b.task("agentbox", s.ID) != "RUNNING" {
		b.Errorf("%+v; ctr: %q", s, b.task("agentbox", s.ID))
	}
	if out := b.Ctr(b.T, "-n", "agentbox", "containers", "info", s.ID); !strings.Contains(out,
		`"agentbox.root": "`+b.root) || !strings.Contains(out, `"agentbox.name": "one"`) {
		b.Errorf("ctr containers info: %s", out)
	}
	if out := b.ok("exec", "one", "sh", "-c",
		"mkdir /work; echo precious > /work/file; cat /work/file"); out != "precious" {
		b.Errorf("exec: %q", out)
	}
	first := b.saved("one", "first")
	b.ok("exec", "one", "rm", "-rf", "/work")
	b.ok("exec", "one", "sh", "-c", "echo new > /new")
	b.counts("one")
	second := b.saved("one", "second")
	for range 2 {
		b.ok("restore", "one", "first")
		if out := b.ok("exec", "one", "cat", "/work/file"); out != "precious" {
			b.Errorf("/work/file: %q", out)
		}
		if _, err := os.Stat(b.upper("one", "new")); err == nil {
			b.Error("a file made after the checkpoint is there")
		}
		if n := b.count("one"); n < first.low {
			b.Errorf("it counts at %d, the checkpoint is of %+v", n, first)
		}
		b.counts("one")
	}
	b.Restart(b.T)
	b.eventually("it has counted further", func() bool { return b.count("one") > second.high+2 })
	b.ok("restore", "one", "second")
	b.counts("one")
	b.contiguous("one", first, first, second)
	if b.task("agentbox", s.ID) != "RUNNING" {
		b.Errorf("ctr: %q", b.task("agentbox", s.ID))
	}
	b.ok("pause", "one")
	if b.task("agentbox", s.ID) != "PAUSED" {
		b.Errorf("ctr: %q", b.task("agentbox", s.ID))
	}
	b.ok("checkpoint", "one", "--name", "paused")
	b.ok("unpause", "one")
	b.counts("one")
	b.ok("restore", "one", "paused")
	b.is("one", "paused")
	b.ok("unpause", "one")
	b.counts("one")
	b.ok("stop", "-t", "0", "one")
	if b.task("agentbox", s.ID) != "" {
		b.Errorf("ctr: %q", b.task("agentbox", s.ID))
	}
	b.ok("restore", "one", "first", "--files-only")
	b.counts("one")
	// Removed, it comes back under its name from what its checkpoint pinned.
	b.ok("rm", "-f", "one")
	if out := b.Ctr(b.T, "-n", "agentbox", "containers", "ls", "-q"); out != "" {
		b.Errorf("ctr: %s", out)
	}
	b.ok("restore", "one", "second")
	b.counts("one")
	b.ok("recover")
	b.counts("one")
}

func ports(b *box) {
	b.ok("run", "-d", "--name", "web", "-p", "127.0.0.1:18081:80", "bt", "sh", "-c",
		"mkdir /www; echo up > /www/index.html; httpd -f -p 80 -h /www")
	get := func() string {
		client := http.Client{Timeout: 10 * time.Second}
		resp, err := client.Get("http://127.0.0.1:18081/")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		data, _ := io.ReadAll(resp.Body)
		return string(data)
	}
	b.eventually("the port answers", func() bool { return get() == "up\n" })
	address := b.inspect("web").Address
	b.ok("checkpoint", "web")
	b.ok("restore", "web")
	b.eventually("the port answers", func() bool { return get() == "up\n" })
	if now := b.inspect("web").Address; now != address || address == "" {
		b.Errorf("the address was %q and is %q", address, now)
	}
}

func builtin(b *box) {
	if out := b.ok("run", "--rm", "busybox", "echo", "hello"); out != "hello" {
		b.Errorf("%q", out)
	}
	if out := b.ok("image", "ls"); !strings.Contains(out, "busybox") || !strings.Contains(out, "bt") ||
		strings.Contains(out, "pinned") {
		b.Errorf("image ls: %s", out)
	}
	if r := b.try(nil, "run", "--rm", "--name", "code", "bt", "sh", "-c", "exit 7"); r.code != 7 {
		b.Errorf("exit %d: %s", r.code, r.err)
	}
	b.fails("not found|image import", "run", "no-such-image.invalid/x", "true")
	b.ok("image", "rm", "busybox")
	if out := b.Ctr(b.T, "-n", "agentbox", "images", "ls", "-q"); strings.Contains(out, "busybox") {
		b.Errorf("ctr images ls: %s", out)
	}
}

// images: what a sandbox has pinned outlives its name.
func images(b *box) {
	digest := func(name string) string {
		for line := range strings.Lines(b.Ctr(b.T, "-n", "agentbox", "images", "ls")) {
			if f := strings.Fields(line); len(f) > 2 && f[0] == "docker.io/library/"+name {
				return f[2]
			}
		}
		return ""
	}
	archive := filepath.Join(b.root, "img.tar")
	pack := func(more ...string) {
		if out, err := exec.Command("tar", append([]string{"-czf", archive, "-C", b.lower, "."},
			more...)...).CombinedOutput(); err != nil {
			b.Fatalf("tar: %v: %s", err, out)
		}
	}
	pack()
	b.ok("image", "import", "img:v1", archive)
	old := digest("img:v1")
	b.ok("image", "import", "img:v1", archive)
	if digest("img:v1") != old || old == "" {
		b.Errorf("the same files gave %s and %s", old, digest("img:v1"))
	}
	b.ok("run", "-d", "--name", "pinned", "img:v1", "sh", "-c", counting)
	b.ok("checkpoint", "pinned")
	b.fails("sandbox pinned, checkpoint", "image", "rm", "img:v1")
	if err := os.WriteFile(filepath.Join(b.root, "more"), []byte("more"), 0o600); err != nil {
		b.Fatal(err)
	}
	pack("-C", b.root, "more")
	b.ok("image", "import", "img:v1", archive)
	if digest("img:v1") == old {
		b.Error("other files gave the same digest")
	}
	b.ok("image", "rm", "img:v1")
	b.ok("rm", "-f", "pinned")
	b.ok("restore", "pinned")
	b.counts("pinned")
	b.fails("needs it", "image", "rm", old)
	b.ok("rm", "-f", "--checkpoints", "pinned")
	b.ok("image", "rm", old)
	for _, what := range []string{"images", "content", "snapshots"} {
		if out := b.Ctr(b.T, "-n", "agentbox", what, "ls"); strings.Contains(out, old) ||
			strings.Contains(out, "img:v1") {
			b.Errorf("ctr %s ls: %s", what, out)
		}
	}
}

func removedElsewhere(b *box) {
	b.start("gone")
	b.ok("checkpoint", "gone")
	id := b.inspect("gone").ID
	b.Ctr(b.T, "-n", "agentbox", "tasks", "rm", "-f", id)
	b.Ctr(b.T, "-n", "agentbox", "containers", "rm", id)
	b.ok("ps", "-a")
	b.ok("restore", "gone")
	b.counts("gone")
}

func otherRoot(b *box) {
	b.start("mine")
	other := &box{b.T, b.host, b.root + "x"}
	defer os.RemoveAll(other.root)
	other.fails("another root|--root", "checkpoint", "containerd://agentbox/"+b.inspect("mine").ID)
	if out := other.ok("recover"); out != "nothing to recover" {
		b.Errorf("recover of another root: %s", out)
	}
	b.counts("mine")
	// By its name, as ours.
	b.ok("checkpoint", "containerd://mine")
}

// pidOf finds a process by words in its command line.
func pidOf(words ...string) int {
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		line, _ := os.ReadFile(p)
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(string(line), w) }) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(p)))
			return pid
		}
	}
	return 0
}

// monitor is the pid of a sandbox's monitor.
func (b *box) monitor(id string) int { return pidOf("\x00monitor\x00", id+"/bundle.") }

func monitorKilled(b *box) {
	b.start("box")
	id := b.inspect("box").ID
	old := b.monitor(id)
	if old == 0 {
		b.Fatal("there is no monitor")
	}
	if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
		b.Fatal(err)
	}
	b.eventually("it is dead", func() bool { return syscall.Kill(old, 0) != nil })
	file := b.upper("box", "count") // looking has started another
	n := number(file)
	b.eventually("it prints on", func() bool { return number(file) > n+10 })
	b.eventually("another monitor", func() bool { return b.monitor(id) != 0 })
	if now := b.monitor(id); now == old {
		b.Errorf("the monitor is %d still", now)
	}
	b.contiguous("box")
	// And one that is not looked at before the end.
	if err := syscall.Kill(b.monitor(id), syscall.SIGKILL); err != nil {
		b.Fatal(err)
	}
	b.Ctr(b.T, "-n", "agentbox", "tasks", "kill", "-s", "KILL", id)
	if out := b.ok("wait", "box"); out != "137" {
		b.Errorf("wait: %q", out)
	}
	b.contiguous("box")
}

func reaped(b *box) {
	b.ok("run", "-d", "--name", "brief", "bt", "sh", "-c", "echo done; exit 3")
	b.eventually("nothing of it is left in containerd but its container", func() bool {
		id := b.inspect("brief").ID
		_, err := os.Stat(filepath.Join(b.root, "run", "containerd", id, "bundle.1"))
		return b.task("agentbox", id) == "" && err != nil
	})
	if out := b.ok("logs", "brief"); out != "done" {
		b.Errorf("logs: %q", out)
	}
	if out := b.ok("wait", "brief"); out != "3" {
		b.Errorf("wait: %q", out)
	}
	b.ok("run", "-d", "--rm", "--name", "briefer", "bt", "true")
	b.eventually("it is gone", func() bool { return !strings.Contains(b.ok("ps", "-a"), "briefer") })
}

func lookedAt(b *box) {
	for _, point := range []string{
		"after-mount", "after-spec", "after-create", "after-run", "after-attach", "after-start",
	} {
		r := b.begin([]string{"AGENTBOX_FAILPOINT=containerd.start." + point + "=stop"}, "run", "-d", "--name", "v",
			"bt", "sh", "-c", counting).stopped()
		began := time.Now()
		want := "created"
		if point == "after-start" {
			want = "running"
		}
		b.is("v", want)
		if d := time.Since(began); d > 20*time.Second {
			b.Errorf("a look at a sandbox that is being started (%s) took %v", point, d)
		}
		r.goOn()
		b.counts("v")
		b.ok("rm", "-f", "v")
	}
}

// execSessions whose callers go away.
func execSessions(b *box) {
	b.start("box")
	file := func(name string) int { return number(b.upper("box", name)) }
	cmd := func(script string) *exec.Cmd {
		c := exec.Command(filepath.Join(b.bin, "agentbox"), "--root", b.root, "exec", "box", "sh", "-c", script)
		c.Env = append(os.Environ(), "CONTAINERD_ADDRESS="+b.Address)
		return c
	}
	// Killed, its process ends with the sandbox at the latest, and holds nothing up.
	c := cmd("i=0; while :; do i=$((i+1)); echo $i > /session; sleep 0.02; done")
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.eventually("the session runs", func() bool { return file("session") > 3 })
	if err := c.Process.Kill(); err != nil {
		b.Fatal(err)
	}
	_ = c.Wait()
	if out := b.ok("exec", "box", "echo", "fine"); out != "fine" {
		b.Errorf("%q", out)
	}
	// Interrupted, it is killed.
	c = cmd("i=0; while :; do i=$((i+1)); echo $i > /other; sleep 0.02; done")
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.eventually("the session runs", func() bool { return file("other") > 3 })
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		b.Fatal(err)
	}
	_ = c.Wait()
	b.eventually("the process of an interrupted exec is gone", func() bool { return pidOf("$i > /other;") == 0 })
	// Much output, and the daemon restarted in the midst of it.
	out, err := os.Create(filepath.Join(b.TempDir(), "out"))
	if err != nil {
		b.Fatal(err)
	}
	defer out.Close()
	c = cmd("i=0; while [ $i -lt 150 ]; do i=$((i+1)); echo $i; sleep 0.02; done; exit 5")
	c.Stdout = out
	lines := func() int {
		data, _ := os.ReadFile(out.Name())
		return bytes.Count(data, []byte("\n"))
	}
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.eventually("it prints", func() bool { return lines() > 20 })
	b.Restart(b.T)
	err = c.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 5 || lines() != 150 {
		b.Errorf("%v, %d lines", err, lines())
	}
	b.ok("stop", "-t", "0", "box")
}

func daemonDown(b *box) {
	b.start("box")
	b.ok("checkpoint", "box")
	file := b.upper("box", "count")
	b.ok("pause", "box")
	b.Kill(b.T)
	up := false
	defer func() {
		if !up {
			b.Start(b.T)
		}
	}()
	b.is("box", "paused")
	n := number(file)
	b.ok("unpause", "box")
	b.eventually("it counts on", func() bool { return number(file) > n+2 })
	b.is("box", "running")
	b.fails("containerd does not answer|systemctl start containerd|CONTAINERD_ADDRESS", "run", "bt", "true")
	b.fails("containerd does not answer", "restore", "box")
	b.Start(b.T)
	up = true
	b.counts("box")
	b.ok("restore", "box")
	b.counts("box")
}

// besideOCI: one root, sandboxes of two backends.
func besideOCI(b *box) {
	b.start("ours")
	b.ok("checkpoint", "ours")
	b.ok("restore", "ours")
	b.ok("--backend", "oci", "run", "-d", "--name", "plain", "busybox", "sleep", "1000")
	if out := b.ok("recover"); out != "nothing to recover" {
		b.Errorf("recover: %s", out)
	}
	b.is("plain", "running")
	b.counts("ours")
	b.ok("stop", "-t", "0", "ours")
	if out := b.ok("--backend", "oci", "recover"); out != "nothing to recover" {
		b.Errorf("recover: %s", out)
	}
	b.ok("start", "ours")
	b.counts("ours")
}

func otherSnapshotter(b *box) {
	b.Ctr(b.T, "images", "import", "--snapshotter", "native", filepath.Join(b.Dir, "bt.tar"))
	b.Ctr(b.T, "run", "-d", "--snapshotter", "native", "--null-io", image, "native", "sh", "-c", counting)
	defer b.discard("native")
	b.fails("snapshotter native|overlay", "checkpoint", "containerd://default/native")
}

// points are the instants at which the backend can be broken, with the verb
// that passes them.
var points = []struct{ name, verb string }{
	{"containerd.create.after-snapshot", "run"},
	{"containerd.create.after-record", "run"},
	{"containerd.create.after-container", "run"},
	{"containerd.start.after-mount", "run"},
	{"containerd.start.after-network", "run"},
	{"containerd.start.after-spec", "run"},
	{"containerd.start.after-create", "run"},
	{"containerd.start.after-run", "run"},
	{"containerd.start.after-attach", "run"},
	{"containerd.start.after-start", "run"},
	{"containerd.exec.after-dir", "exec"},
	{"containerd.exec.after-exec", "exec"},
	{"containerd.exec.after-start", "exec"},
	{"containerd.stop.after-kill", "stop"},
	{"containerd.stop.after-exit", "stop"},
	{"containerd.stop.after-processes", "stop"},
	{"containerd.stop.after-task", "stop"},
	{"containerd.stop.after-delete", "stop"},
	{"containerd.stop.after-unmount", "stop"},
	{"containerd.stop.after-network", "stop"},
	{"containerd.stop.after-cgroups", "stop"},
	{"containerd.stop.after-bundle", "stop"},
	{"containerd.remove.after-stop", "rm"},
	{"containerd.remove.after-record", "rm"},
	{"containerd.remove.after-release", "rm"},
	{"containerd.remove.after-container", "rm"},
	{"containerd.remove.after-drop", "rm"},
	{"containerd.remove.after-files", "rm"},
	{"containerd.start.after-mount", "restore"},
	{"containerd.start.after-create", "restore"},
	{"containerd.start.after-start", "restore"},
	{"containerd.stop.after-task", "restore"},
}

// killedAnywhere kills agentbox at each of the backend's points; what the next
// commands find is as before the verb or as after it, and nothing is left.
func killedAnywhere(b *box) {
	for _, p := range points {
		b.Run(p.verb+" "+p.name, func(t *testing.T) {
			b := &box{t, b.host, b.root}
			args := map[string][]string{
				"run":  {"run", "-d", "--name", "v", "bt", "sh", "-c", counting},
				"stop": {"stop", "-t", "0", "v"}, "rm": {"rm", "-f", "v"}, "restore": {"restore", "v"},
				"exec": {"exec", "v", "true"},
			}[p.verb]
			if p.verb != "run" {
				b.start("v")
			}
			if p.verb == "restore" {
				b.ok("checkpoint", "v")
			}
			if r := b.try(killAt(p.name), args...); !r.killed {
				b.Fatalf("not killed: exit %d: %s%s", r.code, r.out, r.err)
			}
			b.ok("recover")
			there := strings.Contains(b.ok("ps", "-a"), " v")
			switch p.verb {
			case "restore", "exec":
				b.counts("v")
			case "rm":
				if there {
					b.Error("it is still there")
				}
			case "stop":
				if !there {
					b.Fatal("it is gone")
				}
				b.ok("stop", "-t", "0", "v") // what was killed may not have ended yet
			}
			if there {
				if b.inspect("v").Status != "running" {
					b.ok("start", "v")
				}
				b.counts("v")
				b.ok("rm", "-f", "--checkpoints", "v")
			}
			if out := b.Ctr(b.T, "-n", "agentbox", "containers", "ls", "-q"); out != "" {
				b.Errorf("left behind: %s", out)
			}
		})
	}
}
