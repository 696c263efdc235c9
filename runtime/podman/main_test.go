package podman

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// within marks the second of the two processes that the tests run in: it has network and mount
// namespaces of its own, so that Podman's bridges, its firewall rules and its files below /run are
// not the host's.
const within = "AGENTBOX_TEST_WITHIN"

// dir is this run's: storage, configuration, binaries.
var dir string

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of the podman backend run real containers and must be run as root")
		os.Exit(1)
	}
	if os.Getenv(within) == "" {
		os.Exit(outside())
	}
	os.Exit(func() int {
		var err error
		if dir, err = os.MkdirTemp("", "pm"); err == nil {
			defer os.Remove(dir)
			defer unix.Unmount(dir, unix.MNT_DETACH)
			err = prepare()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code := m.Run()
		if out, err := exec.Command("podman", "rm", "--all", "--force", "--time", "0").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "podman rm: %v: %s", err, out)
			code = 1
		}
		// Podman's image store is not shared here.
		_ = unix.Unmount(filepath.Join(dir, "r", "overlay"), unix.MNT_DETACH)
		return code
	}())
}

// outside runs the tests in namespaces and removes what outlives these.
func outside() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), within+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	err := cmd.Run()
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/libpod_parent")
	more, _ := filepath.Glob("/sys/fs/cgroup/libpod_parent")
	for _, g := range append(groups, more...) {
		for _, d := range []string{"conmon", ""} {
			_ = os.Remove(filepath.Join(g, d)) // empty ones only
		}
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	manager, err := underSystemd()
	if err != nil {
		return err
	}
	// In memory, its storage and what the tests make, too: each command of
	// Podman's waits for the disk several times.
	for _, d := range []string{
		dir, "/run", "/dev/shm", "/var/lib/cni", "/var/lib/containers", "/etc/containers", "/etc/cni",
	} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", d, "tmpfs", 0, ""); err != nil {
			return err
		}
	}
	for _, m := range manager {
		if err := m.put(); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return err
	}
	wrapper := filepath.Join(dir, "agentbox-runtime")
	build := exec.Command("go", "build", "-o", wrapper, "../../cmd/agentbox-runtime")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build agentbox-runtime: %w: %s", err, out)
	}
	engine := "events_logger = \"file\"\ncgroup_manager = \"cgroupfs\"\n"
	if manager != nil {
		engine = "" // as Podman has it there: logs and events in the journal, scopes for cgroups
	}
	files := map[string]string{
		"storage.conf": fmt.Sprintf("[storage]\ndriver = \"overlay\"\ngraphroot = %q\nrunroot = \"/run/containers/storage\"\n", filepath.Join(dir, "r")),
		"containers.conf": fmt.Sprintf("[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n[engine]\n"+engine+
			"runtime = \"agentbox\"\n[engine.runtimes]\nagentbox = [%q]\n", wrapper),
		"policy.json": `{"default":[{"type":"insecureAcceptAnything"}]}`,
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return err
		}
	}
	if err := os.WriteFile("/etc/containers/policy.json", []byte(files["policy.json"]), 0o600); err != nil {
		return err
	}
	os.Setenv("CONTAINERS_STORAGE_CONF", filepath.Join(dir, "storage.conf"))
	os.Setenv("CONTAINERS_CONF", filepath.Join(dir, "containers.conf"))
	os.Setenv("TMPDIR", dir)
	os.Setenv("GOGC", "400") // a command of Podman's is over before it has much to collect
	for _, name := range []string{"AGENTBOX_RUN", "AGENTBOX_RUNTIME"} {
		os.Unsetenv(name)
	}
	return nil
}

// kept is a folder with its mounts, to be put where it was.
type kept struct {
	tree int // a detached copy of its mounts
	path string
}

// underSystemd is what a machine's own Podman asks of systemd by: its sockets, and
// the journal. It is nil where systemd does not run.
func underSystemd() (list []kept, err error) {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return nil, nil
	}
	for _, path := range []string{"/run/systemd", "/run/dbus", "/run/log"} {
		tree, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		list = append(list, kept{tree, path})
	}
	return list, nil
}

func (k kept) put() error {
	if err := os.MkdirAll(k.path, 0o755); err != nil {
		return err
	}
	defer unix.Close(k.tree)
	return unix.MoveMount(k.tree, "", unix.AT_FDCWD, k.path, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// podman runs the real thing.
func podman(t testing.TB, args ...string) string {
	t.Helper()
	cmd := exec.Command("podman", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("podman %q: %v: %s", args, err, stderr.String())
	}
	return strings.TrimSpace(string(out))
}

// eventually polls, because a container does not announce its progress.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !cond(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("gave up waiting until %s", what)
		}
	}
}

// reboot takes from Podman what a reboot does, once nothing of it runs: its mounts and
// all that is in memory.
func reboot(t *testing.T) {
	t.Helper()
	_ = unix.Unmount(filepath.Join(dir, "r", "overlay"), unix.MNT_DETACH)
	netns, _ := filepath.Glob("/run/netns/*")
	for _, f := range append(netns, "/run/netns") {
		_ = unix.Unmount(f, unix.MNT_DETACH)
	}
	for _, gone := range []string{
		"/run/containers", "/run/libpod", "/run/runc", "/run/netns", "/run/agentbox", "/dev/shm/libpod_lock",
	} {
		must(t, os.RemoveAll(gone))
	}
}

// box is a backend with one container made by Podman.
type box struct {
	*Backend
	t   *testing.T
	ctx context.Context
	id  string // the sandbox's
}

func newBackend(t *testing.T) *Backend {
	t.Helper()
	b, err := Open(Options{Root: t.TempDir()})
	must(t, err)
	return b
}

// newBox runs a container with `podman run -d` and adopts it.
func newBox(t *testing.T, args ...string) *box {
	t.Helper()
	image(t)
	b := &box{newBackend(t), t, context.Background(), ""}
	id := podman(t, append([]string{"run", "-d"}, args...)...)
	t.Cleanup(func() {
		if out, err := exec.Command("podman", "rm", "-f", "-i", "-t", "0", id).CombinedOutput(); err != nil {
			t.Errorf("podman rm: %v: %s", err, out)
		}
	})
	s, err := b.Adopt(b.ctx, id)
	must(t, err)
	b.id = s.ID
	return b
}

func (b *box) inspect() runtime.Container {
	b.t.Helper()
	c, err := b.Inspect(b.ctx, b.id)
	must(b.t, err)
	return c
}

func (b *box) read(name string) string {
	b.t.Helper()
	data, _ := os.ReadFile(filepath.Join(b.inspect().Upper, name))
	return strings.TrimSpace(string(data))
}
