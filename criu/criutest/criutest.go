// Package criutest makes real containers for tests: a busybox bundle, run by
// the real runc, with its state, files and images in the test's directory.
package criutest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/host"
)

// Root fails the test unless it runs as root and the programs are there.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test runs real containers: run it as root")
	}
	for _, p := range []string{"runc", "criu", "busybox"} {
		if _, err := host.Find(p, nil); err != nil {
			t.Fatalf("%s is missing: scripts/install-deps.sh installs it", p)
		}
	}
}

// Box is one container.
type Box struct {
	t      testing.TB
	ID     string
	State  string // the runtime's --root
	Bundle string
	Files  string // the root filesystem
	Images string
	Work   string
	Config string // CRIU's configuration file, named by the bundle's annotation; empty to begin with
	Binary string // the OCI runtime; runc
}

// Store is the shell's way to store $i where Count looks for it. The file is
// never truncated: a process that is dumped with it open wants it back in the
// size it had then.
const Store = "printf %08d $i 1<>/count"

// Counter prints and stores an ever growing number.
var Counter = []string{"sh", "-c", "i=0; while :; do i=$((i+1)); echo $i; " + Store + "; sleep 0.05; done"}

// New makes a bundle for args; edit, when given, changes its spec.
func New(t testing.TB, args []string, edit func(*specs.Spec)) *Box {
	t.Helper()
	Root(t)
	runc, err := host.Find("runc", nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	b := &Box{
		t: t, ID: fmt.Sprintf("abtest-%d-%d", os.Getpid(), time.Now().UnixNano()), Binary: runc,
		State: filepath.Join(dir, "state"), Bundle: filepath.Join(dir, "bundle"),
		Files:  filepath.Join(dir, "bundle", "rootfs"),
		Images: filepath.Join(dir, "images"), Work: filepath.Join(dir, "work"), Config: filepath.Join(dir, "criu.conf"),
	}
	for _, d := range []string{b.State, b.Images, b.Work} {
		must(t, os.MkdirAll(d, 0o700))
	}
	for _, d := range []string{"bin", "proc", "sys", "dev", "tmp", "etc"} {
		must(t, os.MkdirAll(filepath.Join(b.Files, d), 0o755))
	}
	must(t, os.WriteFile(b.Config, nil, 0o600))
	busybox, err := host.Find("busybox", nil)
	must(t, err)
	data, err := os.ReadFile(busybox)
	must(t, err)
	must(t, os.WriteFile(filepath.Join(b.Files, "bin", "busybox"), data, 0o755))
	for _, a := range []string{"sh", "sleep", "echo", "cat", "tail", "nc", "touch", "true", "kill", "rm", "flock"} {
		must(t, os.Symlink("busybox", filepath.Join(b.Files, "bin", a)))
	}
	cmd := exec.Command(runc, "spec", "--bundle", b.Bundle)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("runc spec: %v: %s", err, out)
	}
	path := filepath.Join(b.Bundle, "config.json")
	data, err = os.ReadFile(path)
	must(t, err)
	var spec specs.Spec
	must(t, json.Unmarshal(data, &spec))
	spec.Process.Terminal = false
	spec.Process.Args = args
	spec.Process.Rlimits = nil // a root without CAP_SYS_RESOURCE cannot raise them
	spec.Root.Readonly = false
	spec.Annotations = map[string]string{"org.criu.config": b.Config}
	if edit != nil {
		edit(&spec)
	}
	data, err = json.Marshal(spec)
	must(t, err)
	must(t, os.WriteFile(path, data, 0o600))
	t.Cleanup(b.destroy)
	return b
}

// Start runs the container with its output going to out; nil drops it.
func (b *Box) Start(out *os.File) {
	b.t.Helper()
	b.ok(b.Cmd(out, "create", "--bundle", b.Bundle, b.ID))
	b.ok(b.Cmd(out, "start", b.ID))
}

// Cmd is a call of the runtime. Its stdio are files, never pipes of ours,
// because a container inherits them.
func (b *Box) Cmd(out *os.File, args ...string) *exec.Cmd {
	cmd := exec.Command(b.Binary, append([]string{"--root", b.State}, args...)...)
	if out != nil {
		cmd.Stdout, cmd.Stderr = out, out
	}
	cmd.Env = host.Environ()
	return cmd
}

// Do runs a call that starts no process, and returns what it printed.
func (b *Box) Do(args ...string) (string, error) {
	var out bytes.Buffer
	cmd := b.Cmd(nil, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Status returns the runtime's word for the container's state.
func (b *Box) Status() string {
	out, err := b.Do("state", b.ID)
	if err != nil {
		return "gone"
	}
	var s struct{ Status string }
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		b.t.Fatalf("runc state: %v: %s", err, out)
	}
	return s.Status
}

// Pid returns the init's pid on the host.
func (b *Box) Pid() int {
	out, err := b.Do("state", b.ID)
	if err != nil {
		b.t.Fatalf("runc state: %v: %s", err, out)
	}
	var s struct{ Pid int }
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		b.t.Fatal(err)
	}
	return s.Pid
}

// Keep returns a function that makes the file of Count what it is now, to the
// byte: a process that was dumped as it wrote it wants it back like that.
func (b *Box) Keep() (putBack func()) {
	b.t.Helper()
	name := filepath.Join(b.Files, "count")
	data, err := os.ReadFile(name)
	if err != nil {
		b.t.Fatal(err)
	}
	return func() {
		b.t.Helper()
		if err := os.WriteFile(name, data, 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
}

// Count returns what Counter last stored.
func (b *Box) Count() int {
	data, err := os.ReadFile(filepath.Join(b.Files, "count"))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
	return n
}

// Until polls cond, because a container does not report its progress.
func (b *Box) Until(what string, cond func() bool) {
	b.t.Helper()
	Until(b.t, what, cond)
}

// Until polls cond and fails the test after two minutes.
func Until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("gave up waiting until %s", what)
		}
	}
}

// End kills the container and deletes it.
func (b *Box) End() {
	b.t.Helper()
	_, _ = b.Do("kill", b.ID, "KILL")
	_, _ = b.Do("resume", b.ID) // cgroup v1 keeps the killed frozen
	b.Until("the container is gone", func() bool {
		_, err := b.Do("delete", "--force", b.ID)
		return err == nil && b.Status() == "gone"
	})
}

func (b *Box) destroy() {
	_ = host.SweepRestore(b.State, b.ID, b.Work)
	b.Binary, _ = host.Find("runc", nil)
	if _, err := os.Stat(filepath.Join(b.State, b.ID)); err == nil {
		b.End()
	}
}

func (b *Box) ok(cmd *exec.Cmd) {
	b.t.Helper()
	log := filepath.Join(b.State, "log")
	cmd.Args = append([]string{cmd.Args[0], "--log", log}, cmd.Args[1:]...)
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(log)
		b.t.Fatalf("%s: %v: %s", strings.Join(cmd.Args, " "), err, text)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
