// Package docker holds the end-to-end tests on a Docker daemon: the real
// binaries, on containers that the docker client made and on sandboxes that
// agentbox made there.
package docker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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

// host is a daemon and the binaries under test.
type host struct {
	*enginetest.Dockerd
	bin string
}

func newHost(t *testing.T, config map[string]any) *host {
	t.Helper()
	bin := enginetest.Build(t, "failpoint", "agentbox", "agentbox-runtime")
	d := enginetest.StartDockerd(t, enginetest.DockerdOptions{Wrapper: filepath.Join(bin,
		"agentbox-runtime"), Config: config})
	d.Import(t, "bt", backendtest.BusyboxLower(t)[0])
	return &host{d, bin}
}

// box is one root of agentbox on a daemon.
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
		for _, id := range strings.Fields(b.ok("ps", "-a", "-q", "--no-trunc")) {
			if r := b.try(nil, "rm", "-f", "--checkpoints", id); r.code != 0 {
				t.Errorf("rm: %s", r.err)
			}
		}
		for _, c := range strings.Fields(h.Docker(t, "ps", "-aq")) {
			h.Docker(t, "rm", "-f", "-v", c)
		}
		b.ok("recover")
		for _, what := range []string{"network ls -q --filter label=agentbox.root", "ps -aq"} {
			if out := h.Docker(t, strings.Fields(what)...); out != "" {
				t.Errorf("left behind: docker %s: %s", what, out)
			}
		}
		for _, dir := range []string{
			filepath.Join(h.StageRun, "restore"), filepath.Join(b.root, "run", "docker"),
			filepath.Join(b.root, "run", "mounts"),
		} {
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				t.Errorf("left behind: %s", filepath.Join(dir, e.Name()))
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

func (b *box) command(ctx context.Context, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(b.bin, "agentbox"),
		append([]string{"--root", b.root, "--backend", "docker"}, args...)...)
	cmd.Env = append(append(os.Environ(), "DOCKER_HOST="+b.Host, "AGENTBOX_RUN="+b.StageRun), env...)
	return cmd
}

func (b *box) try(env []string, args ...string) result {
	b.Helper()
	r := b.begin(env, args...)
	return r.wait()
}

// running is a command under way.
type running struct {
	b        *box
	cmd      *exec.Cmd
	args     []string
	out, err bytes.Buffer
	cancel   context.CancelFunc
}

func (b *box) begin(env []string, args ...string) *running {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	r := &running{b: b, cmd: b.command(ctx, env, args...), args: args, cancel: cancel}
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.err
	r.cmd.WaitDelay = time.Second
	if err := r.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	return r
}

// stopped waits until the command has stopped itself at a failpoint.
func (r *running) stopped() *running {
	r.b.Helper()
	r.b.eventually("agentbox stops at its failpoint", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			r.b.Fatalf("agentbox %q ended before its failpoint: %s", r.args, r.err.String())
		}
		return strings.Contains(string(stat), ") T ")
	})
	return r
}

// goOn lets a command go on that has stopped itself.
func (r *running) goOn() *running {
	if err := r.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		r.b.Fatal(err)
	}
	return r
}

func (r *running) wait() result {
	r.b.Helper()
	defer r.cancel()
	err := r.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) && !errors.Is(err, exec.ErrWaitDelay) {
		r.b.Fatalf("agentbox %q: %v: %s", r.args, err, r.err.String())
	}
	st, _ := r.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return result{
		r.out.String(), r.err.String(), r.cmd.ProcessState.ExitCode(), st.Signaled() && st.Signal() == syscall.SIGKILL,
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

// fails runs a command that has to fail with words in what it says.
func (b *box) fails(words string, args ...string) string {
	b.Helper()
	r := b.try(nil, args...)
	b.failed(r, words)
	return r.err
}

func (b *box) failed(r result, words string) {
	b.Helper()
	if r.code <= 0 {
		b.Errorf("it succeeded, or was killed (%d): %s%s", r.code, r.out, r.err)
	}
	for _, w := range strings.Split(words, "|") {
		if !strings.Contains(r.err, w) {
			b.Errorf("the error does not say %q: %s", w, r.err)
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

func stopAt(name string) []string { return []string{"AGENTBOX_FAILPOINT=" + name + "=stop"} }
func killAt(name string) []string { return []string{"AGENTBOX_FAILPOINT=" + name + "=kill"} }

// counting counts, in memory, in its log and in a file.
const counting = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /count.new; mv /count.new /count; sleep 0.02; done"

// run has the docker client run a container.
func (b *box) run(name string, args ...string) string {
	b.Helper()
	return b.Docker(b.T, append([]string{"run", "-d", "--runtime", "agentbox", "--name", name}, args...)...)
}

func (b *box) counter(name string, options ...string) {
	b.Helper()
	b.run(name, append(options, "bt", "sh", "-c", counting)...)
	b.counts(name)
}

// upper is a path in a container's upperdir.
func (b *box) upper(name, path string) string {
	b.Helper()
	id, dir, told := strings.Cut(
		b.state(name, `{{.Id}} {{with .GraphDriver}}{{with .Data}}{{.UpperDir}}{{end}}{{end}}`),
		" ")
	if !told || dir == "" {
		// With containerd's image store the daemon does not tell.
		mount := b.Containerd.Ctr(b.T, "-n", "moby", "snapshots", "--snapshotter", "overlayfs", "mounts", "/x", id)
		for _, o := range strings.FieldsFunc(mount, func(r rune) bool { return r == ',' || r == ' ' }) {
			if at, ok := strings.CutPrefix(o, "upperdir="); ok {
				dir = at
			}
		}
	}
	if !filepath.IsAbs(dir) {
		b.Fatalf("the upperdir of %s is %q", name, dir)
	}
	return filepath.Join(dir, path)
}

func (b *box) count(name string) int {
	b.Helper()
	return countIn(b.upper(name, "count"))
}

func countIn(file string) int {
	data, _ := os.ReadFile(file)
	n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
	return n
}

// counts waits until a container counts on, be it from 1.
func (b *box) counts(name string) {
	b.Helper()
	file := b.upper(name, "count")
	from := countIn(file)
	b.eventually(name+" counts on", func() bool {
		n := countIn(file)
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
	low := countIn(file)
	b.ok(append([]string{"checkpoint", "docker://" + name, "--name"}, args...)...)
	return span{low, countIn(file)}
}

// state asks the daemon about a container.
func (b *box) state(name, format string) string {
	b.Helper()
	return b.Docker(b.T, "inspect", "-f", format, name)
}

func (b *box) is(name, want string) {
	b.Helper()
	if got := b.state(name, "{{.State.Status}}"); got != want {
		b.Errorf("container %s is %s for the daemon, want %s", name, got, want)
	}
}

// holds reports whether a checkpoint in whose course a counter was within the
// span can go on by logging n: what is counted is one more than is in the file
// for a moment, and logged before the checkpoint or after it.
func (s span) holds(n int) bool { return s.low < n && n <= s.high+2 }

// steps are the numbers that a log which counts goes on with, where that is not
// by one.
func (b *box) steps(name string) (list []int) {
	b.Helper()
	last := 0
	for _, line := range strings.Fields(b.Docker(b.T, "logs", name)) {
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
	b.eventually(fmt.Sprintf("the log of %s is there, with %d steps", name, len(restores)), func() bool {
		steps = b.steps(name)
		return len(steps) >= len(restores)
	})
	if !slices.EqualFunc(restores, steps, span.holds) {
		b.Errorf("the log goes on with %d, after restores to %+v", steps, restores)
	}
}
