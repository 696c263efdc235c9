package enginetest

import (
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

	"golang.org/x/sys/unix"
)

// ContainerdOptions modify StartContainerd.
type ContainerdOptions struct {
	Env []string // more of the daemon's environment
}

// Containerd is a containerd of the test's own. Its containers go on when it
// is restarted.
type Containerd struct {
	Address  string // for CONTAINERD_ADDRESS
	Dir      string // everything of it
	Root     string // its data
	State    string
	StageRun string // AGENTBOX_RUN of its runtimes

	env []string
	cmd *exec.Cmd
}

// StartContainerd starts a containerd that ends with the test, and has left
// nothing behind then.
func StartContainerd(t testing.TB, opts ContainerdOptions) *Containerd {
	t.Helper()
	program(t, "containerd", "containerd")
	program(t, "ctr", "containerd")
	dir := Dir(t)
	d := &Containerd{
		Address: filepath.Join(dir, "s"), Dir: dir, Root: filepath.Join(dir, "data"), State: filepath.Join(dir, "x"),
		StageRun: filepath.Join(dir, "ab"), env: opts.Env,
	}
	// No CRI, which wants a network, and no snapshotter that needs a device.
	config := fmt.Sprintf("version = 2\nroot = %q\nstate = %q\n"+
		"disabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.snapshotter.v1.aufs\", \"io.containerd.snapshotter.v1.btrfs\", "+
		"\"io.containerd.snapshotter.v1.devmapper\", \"io.containerd.snapshotter.v1.zfs\", \"io.containerd.internal.v1.opt\"]\n"+
		"[grpc]\n  address = %q\n[ttrpc]\n  address = %q\n", d.Root, d.State, d.Address, d.Address+".ttrpc")
	if err := os.WriteFile(d.config(), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.close(t) })
	d.Start(t)
	return d
}

func (d *Containerd) config() string { return filepath.Join(d.Dir, "config.toml") }

// Start starts the daemon and returns when it answers.
func (d *Containerd) Start(t testing.TB) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(d.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command(program(t, "containerd", "containerd"), "--config", d.config())
	d.cmd.Env = append(append(os.Environ(), "AGENTBOX_RUN="+d.StageRun, "TMPDIR="+d.Dir), d.env...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// Not ended by what the terminal sends to the test.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	cmd := d.cmd
	go func() { ended <- cmd.Wait() }()
	for deadline := time.Now().Add(time.Minute); ; {
		if _, err := d.Try("version"); err == nil {
			return
		}
		select {
		case err := <-ended:
			t.Fatalf("containerd ended: %v\n%s", err, d.Log())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("containerd does not answer\n%s", d.Log())
		}
	}
}

// Pid is the daemon's.
func (d *Containerd) Pid() int { return d.cmd.Process.Pid }

// Kill ends the daemon as a crash would.
func (d *Containerd) Kill(t testing.TB) {
	t.Helper()
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	pid := d.Pid()
	until(t, "the daemon is gone", 10*time.Second, func() bool { return !alive(pid) })
}

// Restart kills the daemon and starts it again.
func (d *Containerd) Restart(t testing.TB) {
	t.Helper()
	d.Kill(t)
	d.Start(t)
}

// Log is the end of what the daemon has logged.
func (d *Containerd) Log() string {
	data, _ := os.ReadFile(filepath.Join(d.Dir, "log"))
	return string(data[max(0, len(data)-8<<10):])
}

// Ctr runs ctr and returns its output, trimmed.
func (d *Containerd) Ctr(t testing.TB, args ...string) string {
	t.Helper()
	out, err := d.Try(args...)
	if err != nil {
		t.Fatalf("ctr %q: %v: %s", args, err, out)
	}
	return out
}

// Try is Ctr for what may fail.
func (d *Containerd) Try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ctr", append([]string{"--address", d.Address}, args...)...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// close ends the daemon and its containers.
func (d *Containerd) close(t testing.TB) {
	if d.cmd == nil || d.cmd.Process == nil {
		return
	}
	if t.Failed() {
		t.Logf("containerd:\n%s", d.Log())
	}
	if spaces, err := d.Try("namespaces", "ls", "-q"); err == nil {
		for _, ns := range strings.Fields(spaces) {
			ids, _ := d.Try("-n", ns, "tasks", "ls", "-q")
			for _, id := range strings.Fields(ids) {
				_, _ = d.Try("-n", ns, "tasks", "rm", "-f", id)
			}
			ids, _ = d.Try("-n", ns, "containers", "ls", "-q")
			for _, id := range strings.Fields(ids) {
				if out, err := d.Try("-n", ns, "containers", "rm", id); err != nil {
					t.Errorf("remove container %s: %v: %s", id, err, out)
				}
			}
		}
	}
	_ = d.cmd.Process.Signal(unix.SIGTERM)
	pid := d.Pid()
	wait(20*time.Second, func() bool { return !alive(pid) })
	if alive(pid) {
		t.Errorf("containerd does not end\n%s", d.Log())
		_ = d.cmd.Process.Kill()
	}
	wait(5*time.Second, func() bool { return len(processes(d.Dir)) == 0 })
	for pid, cmdline := range processes(d.Dir) {
		if pid == os.Getppid() || isTest(cmdline) {
			continue
		}
		t.Errorf("left behind by containerd: process %d: %s", pid, cmdline)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	unmountBelow(d.Dir)
	if err := os.RemoveAll(d.Dir); err != nil {
		t.Errorf("remove %s: %v", d.Dir, err)
	}
}
