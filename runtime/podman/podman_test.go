package podman

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

const forever = "while :; do sleep 0.05; done"

func TestAdopt(t *testing.T) {
	volume := t.TempDir()
	b := newBox(t, "--name", "adopted", "-p", "127.0.0.1:18081:80/udp", "-p", "18080:80", "-v", volume+":/data:ro",
		"-v", "named:/named", "--tmpfs", "/scratch:size=1m",
		"--label", "a=b", "--memory", "64m", "--pids-limit", "50", "--user", "1000", "--hostname", "h", "--stop-signal",
		"SIGUSR1", "-i", "-e", "X=1", "bt", "sh", "-c", forever)
	t.Cleanup(func() { podman(t, "volume", "rm", "-f", "named") })
	long := podman(t, "inspect", "--format", "{{.Id}}", "adopted")
	for _, ref := range []string{"adopted", long, long[:12]} {
		s, err := b.Adopt(b.ctx, ref)
		must(t, err)
		if s.ID != long[:32] || s.Name != "adopted" || !s.Adopted || s.Backend != "podman" ||
			!strings.HasPrefix(s.ImageDigest, "sha256:") {
			t.Errorf("Adopt(%s) = %+v", ref, s)
		}
		if !slices.Equal(s.Args, []string{"sh", "-c", forever}) || !slices.Contains(s.Env, "X=1") || s.User != "1000" ||
			s.Hostname != "h" || !slices.Contains([]string{"10", "SIGUSR1"}, s.StopSignal) ||
			!s.OpenStdin || s.Labels["a"] != "b" {
			t.Errorf("Adopt(%s) = %+v", ref, s)
		}
		if s.Resources.Memory != 64<<20 || s.Resources.Pids != 50 || s.Network.Mode != runtime.NetworkBridge {
			t.Errorf("%+v %+v", s.Resources, s.Network)
		}
		if want := []runtime.Port{
			{Host: 18080, Sandbox: 80, Protocol: "tcp"},
			{HostIP: "127.0.0.1", Host: 18081, Sandbox: 80, Protocol: "udp"},
		}; !slices.Equal(s.Network.Ports, want) {
			t.Errorf("ports %+v, want %+v", s.Network.Ports, want)
		}
		if len(s.Mounts) != 3 || s.Mounts[0].Source != volume || !s.Mounts[0].ReadOnly ||
			s.Mounts[1].Type != "volume" || s.Mounts[1].Source != "named" || s.Mounts[2].Type != "tmpfs" ||
			s.Mounts[2].Target != "/scratch" {
			t.Errorf("mounts %+v", s.Mounts)
		}
	}
	c := b.inspect()
	if c.Status != runtime.Running || c.Pid == 0 || c.Address == "" || c.NoRestore != "" || c.EmptyNetwork ||
		c.AutoRemove || c.Stage.ID != long || c.Runtime.ID != long || c.Runtime.Root != "/run/runc" ||
		filepath.Base(c.Runtime.Binary) != "runc" {
		t.Errorf("%+v", c)
	}
	for _, path := range []string{"/etc/hosts", "/etc/resolv.conf", "/etc/hostname"} {
		if _, err := os.Stat(c.Managed[path]); err != nil {
			t.Errorf("managed %s: %v", path, err)
		}
	}
	for _, ref := range []string{"", "nobody", "-l", strings.Repeat("0", 32)} {
		if _, err := b.Adopt(b.ctx, ref); err == nil {
			t.Errorf("Adopt(%q) went well", ref)
		}
	}
	if _, err := b.Adopt(b.ctx, "nobody"); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("Adopt of nobody: %v", err)
	}
	if err := b.Create(b.ctx, runtime.Spec{}, nil); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("Create: %v", err)
	}
	// A name that looks like another's id is not it.
	podman(t, "create", "--name", long[:31]+"x", "bt", "true")
	t.Cleanup(func() { podman(t, "rm", long[:31]+"x") })
	if _, err := b.Inspect(b.ctx, strings.Repeat("a", 32)); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("Inspect of nobody: %v", err)
	}
}

// Containers that have no overlay, or nothing in them.
func TestRefused(t *testing.T) {
	image(t)
	b := newBackend(t)
	ctx := context.Background()
	root := filepath.Join(t.TempDir(), "root")
	podman(t, "create", "--name", "export", "bt", "true")
	t.Cleanup(func() { podman(t, "rm", "-f", "export") })
	must(t, os.Mkdir(root, 0o755))
	podman(t, "create", "--name", "rooted", "--rootfs", root, "true")
	t.Cleanup(func() { podman(t, "rm", "-f", "rooted") })
	s, err := b.Adopt(ctx, "rooted")
	must(t, err)
	if _, err := b.Inspect(ctx, s.ID); !errors.Is(err, fault.ErrUnsupported) || !strings.Contains(err.Error(), root) {
		t.Errorf("Inspect of one on --rootfs: %v", err)
	}
	upper := container{Name: "x"}
	upper.GraphDriver.Name = "vfs"
	if _, _, err := upper.layers(); !errors.Is(err, fault.ErrUnsupported) || !strings.Contains(err.Error(), "vfs") {
		t.Errorf("layers of vfs: %v", err)
	}
	gone := container{Name: "x", OCIRuntime: "nosuch"}
	if _, err := b.program(ctx, gone); !errors.Is(err, fault.ErrUnsupported) || len(fault.Hint(err)) == 0 {
		t.Errorf("an OCI runtime that is gone: %v", err)
	}
	plain := container{Name: "x"}
	if why, remedy := plain.obstacle("/usr/sbin/runc"); why == "" ||
		!strings.Contains(remedy, "agentbox setup podman") {
		t.Errorf("plain runc: %q, %q", why, remedy)
	}
	if why, _ := plain.obstacle("/x/agentbox-runtime"); why != "" {
		t.Errorf("the wrapper: %q", why)
	}
}

// A change to a managed file stays over starts of ours; Podman makes the other files anew.
func TestManaged(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", "echo changed >> /etc/hosts; echo $WHO > /who; "+forever)
	eventually(t, "it has begun", func() bool { return b.inspect().Status == runtime.Running })
	eventually(t, "it has written", func() bool {
		data, _ := os.ReadFile(b.inspect().Managed["/etc/hosts"])
		return bytes.Contains(data, []byte("changed"))
	})
	count := func() int {
		data, err := os.ReadFile(b.inspect().Managed["/etc/hosts"])
		must(t, err)
		return bytes.Count(data, []byte("changed"))
	}
	time.Sleep(1100 * time.Millisecond) // a file's time is that of the kernel's last tick
	podman(t, "exec", b.id, "sh", "-c", "echo changed >> /etc/hosts")
	for i := range 3 {
		must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
		_, err := b.Start(b.ctx, b.id, runtime.StartOptions{Env: []string{"WHO=me"}})
		must(t, err)
		eventually(t, "it has written again", func() bool { return count() == 3+i })
	}
	if got := b.read("who"); got != "me" {
		t.Errorf("the first process has WHO=%s", got)
	}
	var out bytes.Buffer
	if code, err := b.Exec(b.ctx, b.id, runtime.Process{Args: []string{"sh", "-c", "echo $WHO"}},
		runtime.Streams{Stdout: &out}); code != 0 || err != nil || out.String() != "me\n" {
		t.Errorf("Exec has WHO=%s, %d, %v", out.String(), code, err)
	}
	// Podman's own start is Podman's own.
	podman(t, "restart", "-t", "0", b.id)
	eventually(t, "only the first process's line is there", func() bool { return count() == 1 })
	if got := b.read("who"); got != "" {
		t.Errorf("after Podman's own start the first process has WHO=%s", got)
	}
}

// A restore that fails says why, through all programs between, and stays staged until it is
// taken back: a plain `podman start` starts nothing afresh.
func TestFailedRestore(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", forever)
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	c := b.inspect()
	images := t.TempDir()
	must(t, os.WriteFile(filepath.Join(images, "inventory.img"), []byte("not an image"), 0o600))
	must(t, os.WriteFile(filepath.Join(images, "descriptors.json"),
		[]byte(`["/dev/null","/dev/null","/dev/null"]`), 0o600))
	must(t, c.Stage.Put(stage.Restore{Images: images, Work: t.TempDir()}))
	for _, start := range []func() error{
		func() error { _, err := b.Start(b.ctx, b.id, runtime.StartOptions{}); return err },
		func() error { return b.do(b.ctx, "start", b.id) },
	} {
		if err := start(); err == nil || !strings.Contains(err.Error(), "restore of") ||
			!strings.Contains(err.Error(), "damaged") {
			t.Errorf("start: %v", err)
		}
		if c := b.inspect(); c.Status == runtime.Running {
			t.Errorf("it is %s", c.Status)
		}
	}
	must(t, c.Stage.Clear())
	_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
	must(t, err)
	// A held container cannot be started.
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	must(t, c.Stage.BlockCreate())
	if err := b.do(b.ctx, "start", b.id); err == nil || !strings.Contains(err.Error(), "being restored by agentbox") {
		t.Errorf("podman start of a held one: %v", err)
	}
	must(t, c.Stage.Clear())
}

// A stop is meant: no restart policy takes it back, whatever state it met.
func TestStopAgainstPolicy(t *testing.T) {
	for name, stop := range map[string]func(*box) error{
		"at once":  func(b *box) error { return b.Stop(b.ctx, b.id, runtime.StopOptions{}) },
		"asked":    func(b *box) error { return b.Stop(b.ctx, b.id, runtime.StopOptions{Timeout: 5 * time.Second}) },
		"silently": func(b *box) error { return b.Stop(b.ctx, b.id, runtime.StopOptions{Silent: true}) },
		"paused": func(b *box) error {
			must(b.t, b.Pause(b.ctx, b.id))
			return b.Stop(b.ctx, b.id, runtime.StopOptions{Silent: true})
		},
		"killed": func(b *box) error { return b.Kill(b.ctx, b.id, "KILL") },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "--restart", "always", "bt", "sh", "-c", "trap 'exit 3' TERM; "+forever)
			must(t, stop(b))
			eventually(t, "it is stopped", func() bool { return b.inspect().Status == runtime.Exited })
			time.Sleep(500 * time.Millisecond) // in which nothing must start it
			if c := b.inspect(); c.Status != runtime.Exited {
				t.Errorf("it is %s", c.Status)
			}
			_, err := b.Start(b.ctx, b.id, runtime.StartOptions{})
			must(t, err)
			if c := b.inspect(); c.Status != runtime.Running {
				t.Errorf("it is %s", c.Status)
			}
		})
	}
}

// A container whose processes were killed behind Podman's back is not running, whatever Podman
// believes; one that the kernel has frozen is paused.
func TestKernelKnows(t *testing.T) {
	b := newBox(t, "bt", "sh", "-c", forever)
	rt := criu.Runtime(b.inspect().Runtime)
	must(t, rt.Pause(b.ctx))
	if got := b.inspect().Status; got != runtime.Paused {
		t.Errorf("frozen by the OCI runtime it is %s", got)
	}
	if _, err := b.Exec(b.ctx, b.id, runtime.Process{Args: []string{"true"}},
		runtime.Streams{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("Exec: %v", err)
	}
	must(t, b.Pause(b.ctx, b.id))
	must(t, b.Unpause(b.ctx, b.id))
	if got := b.inspect().Status; got != runtime.Running {
		t.Errorf("thawed it is %s", got)
	}
	must(t, b.Pause(b.ctx, b.id))
	must(t, rt.Resume(b.ctx))
	must(t, b.Unpause(b.ctx, b.id))
	c, err := b.look(b.ctx, b.id)
	must(t, err)
	if c.status != runtime.Running || c.State.Status != "running" {
		t.Errorf("it is %s, and for Podman %s", c.status, c.State.Status)
	}
}

func TestSaid(t *testing.T) {
	for text, want := range map[string]string{
		"time=\"x\" level=warning msg=\"y\"\nError: it is so\n": "it is so",
		"Error: first\nError: second":                           "second",
		"nothing of it\n":                                       "nothing of it",
		"Error: OCI: time=x msg=y\nagentbox-runtime: why\n":     "why",
		"Error: one\nof two\n":                                  "one of two",
		"":                                                      "",
	} {
		if got := said(text); got != want {
			t.Errorf("said(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestAddressesInTime(t *testing.T) {
	at := time.Unix(1000, 0)
	m := memory{Addresses: []addresses{
		{Since: at, Networks: map[string]address{"n": {IP: "1"}}},
		{Since: at.Add(time.Minute), Networks: map[string]address{"n": {IP: "2"}}},
	}}
	for after, want := range map[time.Duration]string{
		-time.Second: "", 0: "1", 59 * time.Second: "1", time.Minute: "2", time.Hour: "2",
	} {
		if got := m.at(at.Add(after))["n"].IP; got != want {
			t.Errorf("%v after the start the address was %q, want %q", after, got, want)
		}
	}
}

// Podman must not pass variables about agentbox's places to some calls of agentbox-runtime and not
// to others.
func TestEnvironment(t *testing.T) {
	for _, name := range []string{stage.Env, "AGENTBOX_RUNTIME", "CONTAINER_HOST", "CONTAINER_CONNECTION", "KEPT"} {
		t.Setenv(name, "/elsewhere")
	}
	b := newBackend(t)
	if b.run != stage.DefaultRun {
		t.Errorf("it stages in %s", b.run)
	}
	cmd, err := b.command(t.Context(), "version")
	must(t, err)
	var set []string
	for _, kv := range cmd.Env {
		if name, is := strings.CutSuffix(kv, "=/elsewhere"); is {
			set = append(set, name)
		}
	}
	if !slices.Equal(set, []string{"KEPT"}) {
		t.Errorf("Podman is told %q", set)
	}
}
