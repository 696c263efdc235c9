// Package containerd holds the end-to-end tests on a containerd: the real
// binaries, on sandboxes that agentbox made there and on containers that ctr
// made.
package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/enginetest"
	"github.com/agentbox/agentbox/runtime/backendtest"
)

func TestMain(m *testing.M) { os.Exit(enginetest.Main(m)) }

// image is what ctr calls the image under test.
const image = "docker.io/library/bt:latest"

// host is a containerd and the binaries under test.
type host struct {
	*enginetest.Containerd
	bin   string
	lower string
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{bin: enginetest.Build(t, "failpoint", "agentbox", "agentbox-runtime"), lower: backendtest.BusyboxLower(t)[0]}
	h.Containerd = enginetest.StartContainerd(t, enginetest.ContainerdOptions{})
	b := &box{t, h, enginetest.Dir(t)}
	b.ok("image", "import", "bt", h.lower)
	archive := filepath.Join(h.Dir, "bt.tar")
	h.Ctr(t, "-n", "agentbox", "images", "export", archive, image)
	h.Ctr(t, "images", "import", archive)
	return h
}

// box is one root of agentbox on a containerd.
type box struct {
	*testing.T
	*host
	root string
}

// box returns a root whose test leaves nothing on the daemon.
func (h *host) box(t *testing.T) *box {
	t.Helper()
	b := &box{t, h, enginetest.Dir(t)}
	t.Cleanup(func() {
		for _, id := range strings.Fields(b.ok("ps", "-aq", "--no-trunc")) {
			b.ok("rm", "-f", "--checkpoints", id)
		}
		b.ok("recover")
		for _, ns := range []string{"default", "agentbox"} {
			for _, what := range []string{"tasks", "containers"} {
				if out := h.Ctr(t, "-n", ns, what, "ls", "-q"); out != "" {
					t.Errorf("left behind in namespace %s: %s %s", ns, what, out)
				}
			}
			if out := h.Ctr(t, "-n", ns, "snapshots", "ls"); strings.Contains(out, "Active") {
				t.Errorf("left behind in namespace %s: %s", ns, out)
			}
		}
		run := filepath.Join(b.root, "run")
		for _, dir := range []string{filepath.Join(h.StageRun, "restore"), filepath.Join(run, "restore"), filepath.Join(run, "containerd", "runc", "agentbox"), filepath.Join(b.root, "containerd", "sandboxes")} {
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				t.Errorf("left behind: %s", filepath.Join(dir, e.Name()))
			}
		}
		entries, _ := os.ReadDir(filepath.Join(run, "containerd"))
		for _, e := range entries {
			if e.Name() != "runc" {
				t.Errorf("left behind: %s", filepath.Join(run, "containerd", e.Name()))
			}
		}
	})
	return b
}

// result is how a command ended.
type result struct {
	out, err string
	code     int
	killed   bool
}

func (b *box) try(env []string, args ...string) result {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "agentbox"), append([]string{"--root", b.root, "--backend", "containerd"}, args...)...)
	cmd.Env = append(append(os.Environ(), "CONTAINERD_ADDRESS="+b.Address), env...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		b.Fatalf("agentbox %q: %v: %s", args, err, stderr.String())
	}
	if ctx.Err() != nil {
		b.Fatalf("agentbox %q hangs: %s%s", args, out.String(), stderr.String())
	}
	st, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return result{out.String(), stderr.String(), cmd.ProcessState.ExitCode(), st.Signaled() && st.Signal() == syscall.SIGKILL}
}

// running is a command under way.
type running struct {
	b   *box
	cmd *exec.Cmd
	err bytes.Buffer
}

// begin runs a command until it stops itself at a failpoint.
func (b *box) begin(env []string, args ...string) *running {
	b.Helper()
	r := &running{b: b, cmd: exec.Command(filepath.Join(b.bin, "agentbox"), append([]string{"--root", b.root, "--backend", "containerd"}, args...)...)}
	r.cmd.Env = append(append(os.Environ(), "CONTAINERD_ADDRESS="+b.Address), env...)
	r.cmd.Stderr = &r.err
	if err := r.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.eventually("agentbox stops at its failpoint", func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(r.cmd.Process.Pid) + "/stat")
		if err != nil || strings.Contains(string(stat), ") Z ") {
			b.Fatalf("agentbox %q ended before its failpoint: %s", args, r.err.String())
		}
		return strings.Contains(string(stat), ") T ")
	})
	return r
}

// goOn lets it end.
func (r *running) goOn() {
	r.b.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		r.b.Fatal(err)
	}
	if err := r.cmd.Wait(); err != nil {
		r.b.Errorf("agentbox: %v: %s", err, r.err.String())
	}
}

func (b *box) ok(args ...string) string {
	b.Helper()
	r := b.try(nil, args...)
	if r.code != 0 {
		b.Fatalf("agentbox %q: exit %d: %s%s", args, r.code, r.out, r.err)
	}
	return strings.TrimSpace(r.out)
}

// fails runs a command that has to fail with words, separated by |, in what it
// says.
func (b *box) fails(words string, args ...string) {
	b.Helper()
	r := b.try(nil, args...)
	if r.code <= 0 {
		b.Errorf("agentbox %q succeeded, or was killed (%d): %s%s", args, r.code, r.out, r.err)
	}
	for w := range strings.SplitSeq(words, "|") {
		if !strings.Contains(r.err, w) {
			b.Errorf("agentbox %q: the error does not say %q: %s", args, w, r.err)
		}
	}
}

func (b *box) eventually(what string, ok func() bool) {
	b.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("still not so after 20 s: %s", what)
		}
	}
}

func killAt(name string) []string { return []string{"AGENTBOX_FAILPOINT=" + name + "=kill"} }

// counting counts, in memory, in its log and in a file.
const counting = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /count.new; mv /count.new /count; sleep 0.02; done"

// sandbox is what `agentbox inspect` documents.
type sandbox struct {
	ID       string `json:"id"`
	Name     string `json:"name"`
	Status   string `json:"status"`
	Pid      int    `json:"pid"`
	Upperdir string `json:"upperdir"`
	Backend  string `json:"backend"`
	Address  string `json:"address"`
}

func (b *box) inspect(name string) sandbox {
	b.Helper()
	var list []sandbox
	if err := json.Unmarshal([]byte(b.ok("inspect", name)), &list); err != nil || len(list) != 1 {
		b.Fatalf("inspect %s: %v", name, err)
	}
	return list[0]
}

func (b *box) is(name, want string) {
	b.Helper()
	if got := b.inspect(name).Status; got != want {
		b.Errorf("%s is %s, want %s", name, got, want)
	}
}

// upper is a path in a container's upperdir.
func (b *box) upper(name, path string) string {
	b.Helper()
	return filepath.Join(b.inspect(name).Upperdir, path)
}

func number(path string) int {
	data, _ := os.ReadFile(path)
	n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
	return n
}

func (b *box) count(name string) int {
	b.Helper()
	return number(b.upper(name, "count"))
}

// counts waits until a container counts on.
func (b *box) counts(name string) {
	b.Helper()
	file := b.upper(name, "count")
	n := number(file)
	b.eventually(name+" counts on", func() bool { return number(file) > n+2 })
}

// task is what containerd says of a task: its status, or nothing.
func (b *box) task(ns, id string) string {
	b.Helper()
	for line := range strings.Lines(b.Ctr(b.T, "-n", ns, "tasks", "ls")) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == id {
			return f[2]
		}
	}
	return ""
}

// contiguous fails when a log has gone back by anything but so many restores,
// or has lost a line.
func (b *box) contiguous(name string, restores int) {
	b.Helper()
	last, back := 0, 0
	for line := range strings.Lines(b.ok("logs", name)) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			b.Fatalf("the log has %q", line)
		}
		switch {
		case n <= last:
			back++
		case n != last+1 && last != 0:
			b.Errorf("the log goes on from %d to %d", last, n)
		}
		last = n
	}
	if back != restores {
		b.Errorf("the log goes back %d times, after %d restores", back, restores)
	}
}
