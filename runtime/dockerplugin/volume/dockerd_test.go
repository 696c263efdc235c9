package volume_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/enginetest"
)

func TestMain(m *testing.M) { os.Exit(enginetest.Main(m)) }

const socket = "/run/docker/plugins/agentbox.sock"

// host is a Docker daemon with the plugin beside it, and an agentbox.
type host struct {
	*testing.T
	d      *enginetest.Dockerd
	bin    string
	root   string // agentbox's
	src    string // what the volume lies over
	plugin *exec.Cmd
}

func newHost(t *testing.T) *host {
	t.Helper()
	// In the test's own mount namespace: the plugin's socket has one place.
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	h := &host{T: t, bin: enginetest.Build(t, "failpoint", "agentbox", "docker-agentbox")}
	h.root, h.src = enginetest.Dir(t), enginetest.Dir(t)
	h.d = enginetest.StartDockerd(t, enginetest.DockerdOptions{})
	image := enginetest.Dir(t)
	for _, args := range [][]string{
		{"mkdir", "-p", image + "/bin", image + "/work"}, {"cp", "/bin/busybox", image + "/bin/busybox"},
		{"ln", "-s", "busybox", image + "/bin/sh"}, {"ln", "-s", "busybox", image + "/bin/sleep"},
		{"ln", "-s", "busybox", image + "/bin/cat"},
		{"ln", "-s", "busybox", image + "/bin/rm"}, {"ln", "-s", "busybox", image + "/bin/wc"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, out)
		}
	}
	h.d.Import(t, "box", image)
	h.serve()
	t.Cleanup(func() {
		if ids, _ := h.d.Try("ps", "-aq"); ids != "" {
			_, _ = h.d.Try(append([]string{"rm", "-f"}, strings.Fields(ids)...)...)
		}
		h.kill()
	})
	return h
}

// serve starts the plugin and returns when it answers.
func (h *host) serve() {
	h.Helper()
	h.plugin = exec.Command(h.bin+"/docker-agentbox", "serve", "--no-authz")
	h.plugin.Env = h.env()
	h.plugin.Stderr = os.Stderr
	if err := h.plugin.Start(); err != nil {
		h.Fatal(err)
	}
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		out, err := exec.Command("curl", "-sf", "-XPOST", "--unix-socket", socket, "http://x/Plugin.Activate").Output()
		if err == nil && strings.Contains(string(out), "VolumeDriver") {
			return
		}
		if time.Now().After(deadline) {
			h.Fatalf("the plugin does not answer: %v: %s", err, out)
		}
	}
}

// kill ends the plugin as a crash would.
func (h *host) kill() {
	_ = h.plugin.Process.Kill()
	_ = h.plugin.Wait()
}

func (h *host) env() []string {
	return append(os.Environ(), "AGENTBOX_ROOT="+h.root, "DOCKER_HOST="+h.d.Host)
}

// agentbox runs a verb and returns its output and exit code.
func (h *host) agentbox(env string, args ...string) (string, int) {
	h.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.bin+"/agentbox", args...)
	cmd.Env = append(h.env(), env)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		h.Fatalf("agentbox %q: %v", args, err)
	}
	if exit != nil && exit.Sys().(syscall.WaitStatus).Signaled() {
		return string(out), 137
	}
	return strings.TrimSpace(string(out)), cmd.ProcessState.ExitCode()
}

func (h *host) must(args ...string) string {
	h.Helper()
	out, code := h.agentbox("", args...)
	if code != 0 {
		h.Fatalf("agentbox %q: exit %d: %s", args, code, out)
	}
	return out
}

// lines counts those of a file in the volume, from outside. A client of Docker 26
// was seen that got nothing of what so short a container says, and no error.
func (h *host) lines(file string) int {
	h.Helper()
	for range 3 {
		out := h.d.Docker(h, "run", "--rm", "--net", "none", "-v", "ws:/work", "box", "wc", "-l", "/work/"+file)
		if out == "" {
			continue
		}
		n, err := strconv.Atoi(strings.Fields(out)[0])
		if err != nil {
			h.Fatal(err)
		}
		return n
	}
	h.Fatalf("docker says nothing of %s", file)
	return 0
}

func (h *host) state(c string) string {
	h.Helper()
	return h.d.Docker(h, "inspect", "-f", "{{.State.Status}}", c)
}

// fast fails when the daemon takes long over something.
func (h *host) fast(limit time.Duration, args ...string) {
	h.Helper()
	began := time.Now()
	if out, err := h.d.Try(args...); err != nil {
		h.Errorf("docker %q: %v: %s", args, err, out)
	}
	if d := time.Since(began); d > limit {
		h.Errorf("docker %q took %v", args, d)
	}
}

// age lets the mounts of a volume be a minute older than they are.
func (h *host) age(name string) {
	h.Helper()
	path := filepath.Join(h.root, "volumes", name, "refs.json")
	data, err := os.ReadFile(path)
	if err != nil {
		h.Fatal(err)
	}
	var refs struct {
		Boot string           `json:"boot"`
		List []map[string]any `json:"list"`
	}
	if err := json.Unmarshal(data, &refs); err != nil {
		h.Fatal(err)
	}
	for _, r := range refs.List {
		r["since"] = time.Now().Add(-time.Minute)
	}
	if data, err = json.Marshal(refs); err == nil {
		err = os.WriteFile(path, data, 0o600)
	}
	if err != nil {
		h.Fatal(err)
	}
}

const writer = `n=$(wc -l < /work/b); while :; do n=$((n+1)); echo $n >> /work/a; echo $n >> /work/b; done`

// TestDocker goes the way of a volume from its creation through Docker to its
// removal: with two containers on it, a plugin that is killed, a daemon that is
// killed, checkpoints under load and restores.
func TestDocker(t *testing.T) {
	h := newHost(t)
	d := h.d
	for name, text := range map[string]string{"a": "", "b": "", "keep": "k", "gone": "g"} {
		if err := os.WriteFile(filepath.Join(h.src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	// Create, ls, inspect, and what is refused.
	d.Docker(t, "volume", "create", "-d", "agentbox", "-o", "from="+h.src, "ws")
	d.Docker(t, "volume", "create", "-d", "agentbox", "-o", "from="+h.src, "ws")
	d.Docker(t, "volume", "create", "-d", "agentbox", "-o", "from="+h.src, "other")
	if out := d.Docker(t, "volume", "ls"); !strings.Contains(out, "agentbox") || !strings.Contains(out, "ws") {
		t.Errorf("volume ls: %s", out)
	}
	if out := d.Docker(t, "volume", "inspect", "-f", "{{.Driver}} {{.Scope}} {{.Status.from}}",
		"ws"); out != "agentbox local "+h.src {
		t.Errorf("volume inspect: %s", out)
	}
	for _, opt := range []string{"from=relative", "from=/", "from=" + h.root, "from=/no/such/dir", "form=/tmp"} {
		if out, err := d.Try("volume", "create", "-d", "agentbox", "-o", opt, "bad"); err == nil {
			t.Errorf("-o %s: %s", opt, out)
		} else {
			t.Logf("-o %s: %s", opt, out)
		}
	}
	h.must("volume", "create", "own", "--from", h.src)
	if out := d.Docker(t, "run", "--rm", "--net", "none", "-v", "own:/work", "box", "cat", "/work/keep"); out != "k" {
		t.Errorf("a volume that agentbox made: %q", out)
	}
	h.must("volume", "rm", "own")
	if out := h.must("audit", "ls", "--sandbox", "volume://own"); !strings.Contains(out, " command[") ||
		strings.Count(out, "   ok") != 2 {
		t.Errorf("on record of a volume that agentbox made: %s", out)
	}
	if out := h.must("audit", "ls", "--sandbox", "volume://ws", "--verb", "volume create", "--outcome",
		"ok"); !strings.Contains(out, fmt.Sprintf(" docker-plugin[%d] ", h.plugin.Process.Pid)) {
		t.Errorf("on record of a volume that Docker made: %s", out)
	}

	// Two containers on one volume, checkpoints under load: each is of one
	// instant, in which b lacks at most the last line of a.
	d.Docker(t, "run", "-d", "--net", "none", "--name", "w1", "-v", "ws:/work", "box", "sh", "-c", writer)
	d.Docker(t, "run", "-d", "--net", "none", "--name", "w2", "-v", "ws:/work", "box", "sleep", "1000000")
	if out := d.Docker(t, "exec", "w2", "cat", "/work/keep"); out != "k" {
		t.Errorf("keep: %q", out)
	}
	d.Docker(t, "exec", "w2", "rm", "/work/gone")
	for i := range 5 {
		if out := h.must("checkpoint", "--name", fmt.Sprintf("c%d", i), "--format", "json",
			"volume://ws"); !strings.Contains(out, `"kind": "files"`) {
			t.Errorf("checkpoint: %s", out)
		}
		if s := h.state("w1") + h.state("w2"); s != "runningrunning" {
			t.Fatalf("after a checkpoint: %s", s)
		}
	}

	// A restore is refused while it is mounted.
	out, code := h.agentbox("", "restore", "volume://ws", "c0")
	if code != 4 || !strings.Contains(out, "w1") || !strings.Contains(out, "w2") {
		t.Errorf("restore in use: exit %d: %s", code, out)
	}
	t.Log(out)
	if s := h.state("w1") + h.state("w2"); s != "runningrunning" {
		t.Fatalf("after a refused restore: %s", s)
	}
	if out, code := h.agentbox("", "apply", "volume://ws"); code != 4 {
		t.Errorf("apply in use: exit %d: %s", code, out)
	}
	if out, code := h.agentbox("", "checkpoint", "--stop", "volume://ws"); code == 0 {
		t.Errorf("checkpoint --stop: %s", out)
	}
	if out, err := d.Try("volume", "rm", "ws"); err == nil {
		t.Errorf("volume rm in use: %s", out)
	}
	if out, code := h.agentbox("", "volume", "rm", "ws"); code != 4 {
		t.Errorf("agentbox volume rm in use: exit %d: %s", code, out)
	}
	if out := h.must("diff", "volume://ws@image"); !strings.Contains(out, "D /gone") || !strings.Contains(out, "M /a") {
		t.Errorf("diff: %s", out)
	}

	// A container that was paused before stays paused.
	d.Docker(t, "pause", "w2")
	h.must("checkpoint", "volume://ws")
	if s := h.state("w1") + h.state("w2"); s != "runningpaused" {
		t.Errorf("after a checkpoint with one paused: %s", s)
	}
	d.Docker(t, "unpause", "w2")

	// agentbox is killed before everything stands still, and while it does; the
	// next one thaws.
	if _, code := h.agentbox("AGENTBOX_FAILPOINT=volume.pause.before-container=kill", "checkpoint",
		"volume://ws"); code != 137 {
		t.Fatalf("not killed: %d", code)
	}
	h.must("ps")
	if s := h.state("w1") + h.state("w2"); s != "runningrunning" {
		t.Errorf("after a checkpoint that froze nothing: %s", s)
	}
	if _, code := h.agentbox("AGENTBOX_FAILPOINT=checkpoint.after-freeze=kill", "checkpoint",
		"volume://ws"); code != 137 {
		t.Fatalf("not killed: %d", code)
	}
	if s := h.state("w1") + h.state("w2"); s != "pausedpaused" {
		t.Errorf("frozen: %s", s)
	}
	h.must("ps")
	if s := h.state("w1") + h.state("w2"); s != "runningrunning" {
		t.Errorf("thawed: %s", s)
	}

	// The plugin is killed: containers run on, and the daemon is not wedged, not even
	// while the calls about volumes wait for it in vain.
	h.kill()
	h.fast(5*time.Second, "ps")
	h.fast(5*time.Second, "exec", "w2", "cat", "/work/keep")
	d.Docker(t, "run", "-d", "--net", "none", "--name", "plain", "box", "sleep", "1000000")
	var waiting sync.WaitGroup
	waiting.Go(func() {
		began := time.Now()
		_, err := d.Try("volume", "ls")
		t.Logf("docker volume ls with a dead plugin: %v after %v", err, time.Since(began))
	})
	waiting.Go(func() {
		began := time.Now()
		out, err := d.Try("run", "--rm", "--net", "none", "-v", "other:/work", "box", "cat", "/work/keep")
		if err == nil {
			t.Errorf("docker run with a dead plugin: %s", out)
		}
		t.Logf("docker run with a dead plugin: %v after %v: %s", err, time.Since(began), out)
	})
	waiting.Go(func() {
		h.fast(40*time.Second, "stop", "-t", "0", "w2") // the daemon cannot give the mount back
	})
	h.fast(10*time.Second, "run", "--rm", "--net", "none", "box", "cat", "/dev/null")
	h.fast(10*time.Second, "rm", "-f", "plain")
	h.fast(5*time.Second, "ps")
	waiting.Wait()
	h.fast(5*time.Second, "ps")
	h.serve()
	d.Docker(t, "start", "w2")
	if out := d.Docker(t, "volume", "ls", "-q"); !strings.Contains(out, "ws") {
		t.Errorf("volume ls after a restart of the plugin: %s", out)
	}
	d.Docker(t, "restart", "-t", "0", "w2")
	if out := d.Docker(t, "exec", "w2", "cat", "/work/keep"); out != "k" {
		t.Errorf("keep after a restart: %q", out)
	}

	// The daemon is killed, its containers live on.
	d.Restart(t)
	if s := h.state("w1") + h.state("w2"); s != "runningrunning" {
		t.Errorf("after a restart of the daemon: %s", s)
	}
	if out, code := h.agentbox("", "restore", "volume://ws", "c0"); code != 4 {
		t.Errorf("restore in use after a restart of the daemon: exit %d: %s", code, out)
	}
	h.must("checkpoint", "--name", "last", "volume://ws")
	d.Docker(t, "stop", "-t", "0", "w1", "w2")
	t.Logf("mounts after the daemon was killed: %s", h.must("volume", "inspect", "ws"))

	// Stopped, it goes back to any checkpoint.
	// The mount that was never given back counts for half a minute.
	h.age("ws")
	h.must("restore", "--verify", "volume://ws", "c0")
	for _, c := range []string{"c0", "c4", "c2", "last", "c1"} {
		h.must("restore", "--verify", "volume://ws", c)
		if a, b := h.lines("a"), h.lines("b"); a != b && a != b+1 {
			t.Errorf("%s is of more than one instant: %d and %d lines", c, a, b)
		} else {
			t.Logf("%s: %d and %d lines", c, a, b)
		}
	}

	// The containers start again, over the restored files.
	n := h.lines("b")
	d.Docker(t, "start", "w1", "w2")
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if m := h.lines("b"); m > n {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the writer does not go on")
		}
	}
	d.Docker(t, "rm", "-f", "w1", "w2")

	// Apply, and take it back.
	before, err := os.ReadFile(h.src + "/a")
	if err != nil {
		t.Fatal(err)
	}
	if out := h.must("apply", "--dry-run",
		"volume://ws"); out != "M /a (file 0644 0:0)\nM /b (file 0644 0:0)\nD /gone" {
		t.Errorf("dry run: %s", out)
	}
	h.must("apply", "volume://ws")
	if _, err := os.Stat(h.src + "/gone"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("gone after an apply: %v", err)
	}
	if after, _ := os.ReadFile(h.src + "/a"); len(after) <= len(before) {
		t.Errorf("a after an apply: %d bytes", len(after))
	}
	if out := h.must("diff", "volume://ws@image"); out != "" {
		t.Errorf("diff after an apply: %s", out)
	}
	h.must("apply", "--undo", "volume://ws")
	if after, _ := os.ReadFile(h.src + "/a"); string(after) != string(before) {
		t.Errorf("a after an undo: %d bytes", len(after))
	}
	if out := h.must("diff", "volume://ws@image"); out != "M /a\nM /b\nD /gone" {
		t.Errorf("diff after an undo: %s", out)
	}

	// An apply that is killed is taken back by any command, and one that was
	// done before is done.
	for _, point := range []string{"apply.before-backend", "apply.last-write"} {
		if _, code := h.agentbox("AGENTBOX_FAILPOINT="+point+"=kill", "apply", "volume://ws"); code != 137 {
			t.Fatalf("not killed at %s: %d", point, code)
		}
		h.must("ps")
		if after, _ := os.ReadFile(h.src + "/a"); string(after) != string(before) {
			t.Errorf("a after an apply killed at %s: %d bytes", point, len(after))
		}
	}
	if _, code := h.agentbox("AGENTBOX_FAILPOINT=apply.after-backend=kill", "apply", "volume://ws"); code != 137 {
		t.Fatalf("not killed: %d", code)
	}
	h.must("ps")
	if out := h.must("diff", "volume://ws@image"); out != "" {
		t.Errorf("diff after an apply that was killed when done: %s", out)
	}
	h.must("apply", "--undo", "volume://ws")

	// After a kill in a restore, the next user of the volume does not wait.
	if _, code := h.agentbox("AGENTBOX_FAILPOINT=restore.after-apply=kill", "restore",
		"volume://ws", "c0"); code != 137 {
		t.Fatalf("not killed: %d", code)
	}
	h.fast(30*time.Second, "run", "--rm", "--net", "none", "-v", "ws:/work", "box", "cat", "/work/keep")

	d.Docker(t, "volume", "rm", "ws", "other")
	if out := h.must("volume", "ls", "-q"); out != "" {
		t.Errorf("volumes left: %s", out)
	}
	if out := h.must("checkpoint", "ls", "-q", "volume://ws"); out == "" {
		t.Error("the checkpoints went with the volume")
	}
}
