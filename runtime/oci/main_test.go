package oci

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of the oci backend run real containers and must be run as root")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// fixture is a backend in directories of its own. When its test ends nothing that
// it made may be left.
type fixture struct {
	*Backend
	t     *testing.T
	lower string
}

func newBox(t *testing.T, change ...func(*Options)) *fixture {
	t.Helper()
	dir := t.TempDir()
	opts := Options{Root: filepath.Join(dir, "root"), Run: filepath.Join(dir, "run")}
	for _, c := range change {
		c(&opts)
	}
	b, err := Open(opts)
	if err != nil {
		t.Fatal(err)
	}
	x := &fixture{b, t, rootfs(t)}
	t.Cleanup(x.sweep)
	return x
}

// rootfs makes a busybox image.
func rootfs(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "rootfs")
	for _, d := range []string{"bin", "etc", "tmp", "root"} {
		must(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	data, err := os.ReadFile(busybox)
	must(t, err)
	write(t, filepath.Join(dir, "bin/busybox"), string(data), 0o755)
	applets, err := exec.Command(busybox, "--list").Output()
	must(t, err)
	for name := range strings.FieldsSeq(string(applets)) {
		if name != "busybox" {
			must(t, os.Symlink("busybox", filepath.Join(dir, "bin", name)))
		}
	}
	write(t, filepath.Join(dir, "etc/passwd"),
		"root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1001::/home/alice:/bin/sh\n", 0o644)
	write(t, filepath.Join(dir, "etc/group"),
		"root:x:0:\nalice:x:1001:\nwheel:x:10:alice\naudio:x:29:bob,alice\n", 0o644)
	must(t, os.Chmod(filepath.Join(dir, "tmp"), 0o1777))
	must(t, os.Chmod(dir, 0o751))
	return dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), mode))
}

func mkfifo(t *testing.T, path string) {
	t.Helper()
	must(t, unix.Mkfifo(path, 0o644))
}

func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func spec(args ...string) runtime.Spec {
	return runtime.Spec{
		ID: newID(), Name: "test", Args: args, Workdir: "/", Hostname: "box",
		Network: runtime.Network{Mode: runtime.NetworkNone},
	}
}

func sh(script string) runtime.Spec { return spec("sh", "-c", script) }

func with(s runtime.Spec, change func(*runtime.Spec)) runtime.Spec {
	change(&s)
	return s
}

// create makes a container and returns its id.
func (x *fixture) create(s runtime.Spec) string {
	x.t.Helper()
	must(x.t, x.Create(x.t.Context(), s, []string{x.lower}))
	return s.ID
}

// start starts a container without a caller attached.
func (x *fixture) start(id string) {
	x.t.Helper()
	_, err := x.Start(x.t.Context(), id, runtime.StartOptions{})
	must(x.t, err)
}

// up makes and starts a container.
func (x *fixture) up(s runtime.Spec) string {
	x.t.Helper()
	id := x.create(s)
	x.start(id)
	return id
}

// buffer is a writer that a test may read meanwhile.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *buffer) has(s string) func() bool {
	return func() bool { return strings.Contains(b.String(), s) }
}

// run runs a new container to its end and returns what it printed.
func (x *fixture) run(s runtime.Spec, stdin string) (stdout, stderr string, exit int) {
	x.t.Helper()
	id := x.create(s)
	var out, errw buffer
	streams := runtime.Streams{Stdout: &out, Stderr: &errw}
	if s.OpenStdin {
		streams.Stdin = strings.NewReader(stdin)
	}
	wait, err := x.Start(x.t.Context(), id, runtime.StartOptions{Streams: &streams})
	must(x.t, err)
	must(x.t, wait())
	end, err := x.Wait(x.t.Context(), id)
	must(x.t, err)
	return out.String(), errw.String(), end.Code
}

// exec runs a command in a container and returns what it printed.
func (x *fixture) exec(id string, args ...string) (string, int) {
	x.t.Helper()
	var out buffer
	exit, err := x.Exec(x.t.Context(), id, runtime.Process{Args: args}, runtime.Streams{Stdout: &out, Stderr: &out})
	must(x.t, err)
	return out.String(), exit
}

func (x *fixture) inspect(id string) runtime.Container {
	x.t.Helper()
	c, err := x.Inspect(x.t.Context(), id)
	must(x.t, err)
	return c
}

func (x *fixture) logs(id string, opts runtime.LogOptions) (stdout, stderr string) {
	x.t.Helper()
	var out, errw buffer
	must(x.t, x.Logs(x.t.Context(), id, opts, &out, &errw))
	return out.String(), errw.String()
}

func (x *fixture) pause(id string) {
	x.t.Helper()
	must(x.t, x.Pause(x.t.Context(), id))
}

func (x *fixture) resume(id string) {
	x.t.Helper()
	must(x.t, x.Unpause(x.t.Context(), id))
}

// eventually waits for something that the kernel does not announce to us.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// sweep removes every container and fails the test if anything is left.
func (x *fixture) sweep() {
	ctx := context.Background()
	ids, err := x.List(ctx)
	if err != nil {
		x.t.Error(err)
	}
	for _, id := range ids {
		if err := x.Remove(ctx, id); err != nil {
			x.t.Errorf("remove: %v", err)
		}
		x.gone(id)
	}
	if left := x.leftovers(); len(left) > 0 {
		x.t.Errorf("left over:\n%s", strings.Join(left, "\n"))
	}
}

// leftovers lists what exists of a backend without containers that should not,
// or of that what starts with one of the prefixes. A monitor and its exit
// command end a moment after the container; nothing announces it.
func (x *fixture) leftovers(prefixes ...string) []string {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		left := slices.DeleteFunc(x.search(), func(s string) bool {
			return len(prefixes) > 0 && !slices.ContainsFunc(prefixes, func(p string) bool {
				return strings.HasPrefix(s, p)
			})
		})
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

func (x *fixture) search() []string {
	var left []string
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(i.Mountpoint, filepath.Dir(x.box.Base)+"/"), false
	})
	if err != nil {
		left = append(left, err.Error())
	}
	for _, i := range infos {
		left = append(left, "mount "+i.Mountpoint)
	}
	pids, err := kernel.AllPids()
	if err != nil {
		left = append(left, err.Error())
	}
	for _, pid := range pids {
		if ours, err := kernel.Names(pid, x.box.Run); pid != os.Getpid() && (ours || err != nil) {
			data, _, _ := record.Read(fmt.Sprintf("/proc/%d/cmdline", pid))
			left = append(left, fmt.Sprintf("process %d %q", pid, data))
		}
	}
	for _, dir := range []string{filepath.Join(x.box.Base, "sandboxes"), x.box.State, filepath.Join(x.box.Run, "tmp")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			left = append(left, err.Error())
		}
		for _, e := range entries {
			left = append(left, filepath.Join(dir, e.Name()))
		}
	}
	entries, _ := os.ReadDir(x.box.Run)
	for _, e := range entries {
		path := filepath.Join(x.box.Run, e.Name())
		if slices.Contains([]string{"runc", "exits", "tmp", "userns.json"}, e.Name()) {
			continue
		}
		if below, err := os.ReadDir(path); e.Name() == "restore" && err == nil && len(below) == 0 {
			continue // the parent of staged restores
		}
		left = append(left, path)
	}
	return left
}

// gone fails if a cgroup of the container is left.
func (x *fixture) gone(id string) {
	x.t.Helper()
	for _, m := range x.box.Cgroups {
		if _, err := os.Lstat(filepath.Join(m.Path, x.box.Cgroup(id))); err == nil {
			x.t.Errorf("cgroup %s is left", filepath.Join(m.Path, x.box.Cgroup(id)))
		}
	}
}

func isExec(err error, code int) bool {
	var e *runtime.ExecError
	return errors.As(err, &e) && e.Code == code
}
