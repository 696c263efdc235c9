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
	"slices"
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
	h := &host{
		bin: enginetest.Build(t, "failpoint", "agentbox", "agentbox-runtime"), lower: backendtest.BusyboxLower(t)[0],
	}
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
		for _, dir := range []string{
			filepath.Join(h.StageRun, "restore"), filepath.Join(run, "restore"),
			filepath.Join(run, "containerd", "runc", "agentbox"), filepath.Join(b.root, "containerd", "sandboxes"),
		} {
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
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "agentbox"),
		append([]string{"--root", b.root, "--backend", "containerd"}, args...)...)
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
	return result{
		out.String(), stderr.String(), cmd.ProcessState.ExitCode(), st.Signaled() && st.Signal() == syscall.SIGKILL,
	}
}

// running is a command under way.
type running struct {
	b   *box
	cmd *exec.Cmd
	err bytes.Buffer
}

func (b *box) begin(env []string, args ...string) *running {
	b.Helper()
	r := &running{b: b, cmd: exec.Command(filepath.Join(b.bin, "agentbox"),
		append([]string{"--root", b.root, "--backend", "containerd"}, args...)...)}
	r.cmd.Env = append(append(os.Environ(), "CONTAINERD_ADDRESS="+b.Address), env...)
	r.cmd.Stderr = &r.err
	if err := r.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	return r
}

// stops waits until the command has stopped itself at a failpoint, and reports whether it has;
// otherwise it has ended.
func (r *running) stops() (stopped bool) {
	r.b.Helper()
	r.b.eventually("agentbox stops at its failpoint", func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(r.cmd.Process.Pid) + "/stat")
		stopped = strings.Contains(string(stat), ") T ")
		return stopped || err != nil || strings.Contains(string(stat), ") Z ")
	})
	if !stopped {
		_ = r.cmd.Wait()
	}
	return stopped
}

// stopped is stops, for what has to stop.
func (r *running) stopped() *running {
	r.b.Helper()
	if !r.stops() {
		r.b.Fatalf("agentbox %q ended before its failpoint: %s", r.cmd.Args, r.err.String())
	}
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
	const end = 2 * time.Minute
	for deadline := time.Now().Add(end); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("still not so after %v: %s", end, what)
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

// counts waits until a container counts on, be it from 1.
func (b *box) counts(name string) {
	b.Helper()
	file := b.upper(name, "count")
	from := number(file)
	b.eventually(name+" counts on", func() bool {
		n := number(file)
		from = min(from, n)
		return n > from+2
	})
}

// span is what a counter said before an event and after it.
type span struct{ low, high int }

// saved takes a checkpoint of a container; what that has of its counter is in
// the span.
func (b *box) saved(name string, args ...string) span {
	b.Helper()
	file := b.upper(name, "count")
	low := number(file)
	b.ok(append([]string{"checkpoint", name, "--name"}, args...)...)
	return span{low, number(file)}
}

// holds reports whether a checkpoint in whose course a counter was within the
// span can go on by logging n: what is counted is one more than is in the file
// for a moment, and logged before the checkpoint or after it.
func (s span) holds(n int) bool { return s.low < n && n <= s.high+2 }

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

// steps are the numbers that a log which counts goes on with, where that is not
// by one.
func (b *box) steps(log string) (list []int) {
	b.Helper()
	last := 0
	for _, line := range strings.Fields(log) {
		n, err := strconv.Atoi(line)
		if err != nil {
			b.Fatalf("the log has %q", line)
		}
		if n != last+1 {
			list = append(list, n)
		}
		last = n
	}
	return list
}

// contiguous checks that a log counts without a gap, but for one step at each
// restore, to what its checkpoint has.
func (b *box) contiguous(name string, restores ...span) {
	b.Helper()
	var steps []int
	b.eventually("the log of "+name+" has "+strconv.Itoa(len(restores))+" steps", func() bool {
		steps = b.steps(b.ok("logs", name))
		return len(steps) >= len(restores)
	})
	if !slices.EqualFunc(restores, steps, span.holds) {
		b.Errorf("the log goes on with %d, after restores to %+v", steps, restores)
	}
}
