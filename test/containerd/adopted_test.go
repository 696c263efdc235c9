package containerd

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// run has ctr run a container.
func (b *box) run(name string, args ...string) {
	b.Helper()
	all := append([]string{"run", "-d", "--runc-binary", filepath.Join(b.bin, "agentbox-runtime")}, args...)
	b.Ctr(b.T, append(all, image, name, "sh", "-c", counting)...)
}

func (b *box) discard(names ...string) {
	for _, n := range names {
		_, _ = b.Containerd.Try("tasks", "rm", "-f", n)
		b.Ctr(b.T, "containers", "rm", n)
	}
}

func adopted(b *box) {
	b.run("c1", "--fifo-dir", filepath.Join(b.root, "fifos"), "--cwd", "/tmp", "--env", "COLOUR=red")
	defer b.discard("c1")
	b.counts("containerd://default/c1")
	at := b.saved("containerd://default/c1", "one")
	if out := b.ok("exec", "containerd://c1", "sh", "-c", "echo $COLOUR; pwd; echo new > /new"); out != "red\n/tmp" {
		b.Errorf("exec: %q", out)
	}
	b.counts("containerd://default/c1")
	for range 2 {
		b.ok("restore", "containerd://default/c1", "one")
		if b.task("default", "c1") != "RUNNING" {
			b.Errorf("ctr: %q", b.task("default", "c1"))
		}
		if _, err := os.Stat(b.upper("containerd://c1", "new")); err == nil {
			b.Error("a file made after the checkpoint is there")
		}
		if n := b.count("c1"); n < at.low {
			b.Errorf("it counts at %d, the checkpoint is of %+v", n, at)
		}
		b.counts("c1")
	}
	b.contiguous("c1", at, at) // from the first restore on the log is ours
	// The output of a command that ends at once ctr has been seen to miss: so it stays a moment.
	if out := b.Ctr(b.T, "tasks", "exec", "--exec-id", "e", "c1", "sh", "-c",
		"cat /proc/net/dev; sleep 0.3"); !strings.Contains(out, "lo:") {
		b.Errorf("exec by ctr: %q", out)
	}
	b.Ctr(b.T, "tasks", "pause", "c1")
	b.is("c1", "paused")
	b.ok("checkpoint", "c1", "--name", "paused")
	b.is("c1", "paused")
	b.Ctr(b.T, "tasks", "resume", "c1")
	b.Restart(b.T)
	b.ok("restore", "c1", "one")
	b.counts("c1")
	b.ok("checkpoint", "c1", "--name", "last", "--stop")
	b.is("c1", "exited")
	n := b.count("c1")
	b.ok("restore", "c1", "last")
	if m := b.count("c1"); m < n {
		b.Errorf("it went on at %d, and was stopped at %d", m, n)
	}
	b.counts("c1")
	b.contiguous("c1", at, at, at) // and none at the last one
	b.ok("rm", "-f", "c1")
	if out := b.Ctr(b.T, "containers", "ls", "-q"); out != "" {
		b.Errorf("ctr containers ls: %s", out)
	}
	b.fails("not found", "inspect", "containerd://default/c1")
	b.run("c1", "--null-io") // for discard, and for the same id again
	b.fails("belongs to", "restore", "containerd://default/c1", "one")
}

func adoptedLog(b *box) {
	log := filepath.Join(b.root, "out.log")
	b.run("c2", "--log-uri", "file://"+log)
	defer b.discard("c2")
	b.counts("containerd://c2")
	at := b.saved("containerd://c2", "one")
	b.counts("containerd://c2")
	b.ok("restore", "containerd://c2", "one")
	size := func() int64 {
		st, err := os.Stat(log)
		if err != nil {
			return 0
		}
		return st.Size()
	}
	n := size()
	b.eventually("its log file goes on", func() bool { return size() > n })
	b.contiguous("containerd://c2", at)
}

func plainRunc(b *box) {
	b.Ctr(b.T, "run", "-d", "--null-io", image, "plain", "sh", "-c", counting)
	defer b.discard("plain")
	b.counts("containerd://plain")
	b.ok("checkpoint", "containerd://plain", "--name", "full")
	b.ok("checkpoint", "containerd://plain", "--name", "files", "--files-only")
	b.ok("exec", "containerd://plain", "touch", "/new")
	b.fails("runc|--runc-binary|--files-only", "restore", "containerd://plain", "full")
	b.counts("containerd://plain")
	b.ok("restore", "containerd://plain", "files")
	if _, err := os.Stat(b.upper("containerd://plain", "new")); err == nil {
		b.Error("a file made after the checkpoint is there")
	}
	b.counts("containerd://plain")
}

func adoptedNames(b *box) {
	b.fails("not found", "inspect", "containerd://nobody")
	b.fails("not found", "inspect", "containerd://default/nobody")
	b.fails("not found", "inspect", "containerd://no such/na me")
	b.run("named", "--null-io", "--label", "nerdctl/name=web")
	defer b.discard("named")
	if a, c := b.inspect("containerd://web").ID, b.inspect("containerd://default/named").ID; a != c || a == "" {
		b.Errorf("%s, %s", a, c)
	}
	if name := b.inspect("web").Name; name != "containerd://default/named" {
		b.Errorf("name %q", name)
	}
}

func adoptedPod(b *box) {
	b.run("pod", "--null-io", "--label", "io.cri-containerd.kind=container")
	defer b.discard("pod")
	b.counts("containerd://pod")
	b.ok("checkpoint", "containerd://pod")
	b.fails("kubelet", "restore", "containerd://pod")
	b.fails("kubelet", "restore", "containerd://pod", "--files-only")
	b.fails("kubelet", "rm", "-f", "containerd://pod")
	b.counts("containerd://pod")
}

// startedElsewhere: containerd's restart plugin starts a stopped container, as
// it may in the middle of a restore.
func startedElsewhere(b *box) {
	const name = "containerd://again"
	// What it has counted, in a file; and which start of it that is.
	const script = "cat /proc/sys/kernel/random/uuid > /who; i=0; while :; do i=$((i+1)); echo $i >> /log; echo $i > /count.new; mv /count.new /count; sleep 0.02; done"
	b.Ctr(b.T, "run", "-d", "--runc-binary", filepath.Join(b.bin, "agentbox-runtime"), "--null-io",
		"--label", "containerd.io/restart.status=running", "--label", "containerd.io/restart.policy=always", image,
		"again", "sh", "-c", script)
	defer b.discard("again")
	read := func(file string) string {
		data, _ := os.ReadFile(b.upper(name, file))
		return string(data)
	}
	// To the plugin a paused task is one that does not run: now and then it
	// looks just then, and makes it anew.
	var who, saved string
	var low int
	b.eventually("a checkpoint between two looks of the plugin", func() bool {
		b.counts(name)
		who, low = read("who"), b.count(name)
		saved = strings.TrimSpace(b.try(nil, "checkpoint", name).out)
		return saved != "" && read("who") == who
	})
	b.counts(name)
	var r *running
	b.eventually("a restore that begins between two looks of the plugin", func() bool {
		b.counts(name)
		b.ok("exec", name, "touch", "/new")
		r = b.begin([]string{"AGENTBOX_FAILPOINT=restore.after-stop=stop"}, "restore", name, saved)
		return r.stops()
	})
	b.eventually("the plugin has tried", func() bool {
		return strings.Contains(b.Containerd.Log(), "being restored by agentbox")
	})
	if out := b.task("default", "again"); out == "RUNNING" {
		b.Errorf("it was started while its files were exchanged: %s", out)
	}
	r.goOn()
	if n := b.count(name); n < low || read("who") != who {
		b.Errorf("it counts at %d, the checkpoint was not before %d; of another start of it: %t", n,
			low, read("who") != who)
	}
	b.counts(name)
	if steps := b.steps(read("log")); slices.ContainsFunc(steps, func(n int) bool { return n != 1 }) {
		b.Errorf("its processes and its files are not of one instant: its count goes on with %d", steps)
	}
	if _, err := os.Stat(b.upper(name, "new")); err == nil {
		b.Error("a file made after the checkpoint is there")
	}
}
