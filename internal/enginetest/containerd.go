package enginetest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// ContainerdOptions modify StartContainerd.
type ContainerdOptions struct {
	Env []string // more of the daemon's environment
}

// Containerd is a containerd of the test's own. Its containers go on when it
// is restarted.
type Containerd struct {
	daemon
	Address  string // for CONTAINERD_ADDRESS
	Root     string // its data
	State    string
	StageRun string // AGENTBOX_RUN of its runtimes

	env []string
}

// StartContainerd starts a containerd that ends with the test, and has left
// nothing behind then.
func StartContainerd(t testing.TB, opts ContainerdOptions) *Containerd {
	t.Helper()
	program(t, "containerd", "containerd")
	program(t, "ctr", "containerd")
	dir := Dir(t)
	d := &Containerd{
		daemon: daemon{Dir: dir, name: "containerd"}, Address: filepath.Join(dir, "s"),
		Root: filepath.Join(dir, "data"), State: filepath.Join(dir, "x"),
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
	d.answers = func() bool { _, err := d.Try("version"); return err == nil }
	d.command = func(t testing.TB) *exec.Cmd {
		cmd := exec.Command(program(t, "containerd", "containerd"), "--config", d.config())
		cmd.Env = append(append(os.Environ(), "AGENTBOX_RUN="+d.StageRun, "TMPDIR="+d.Dir), d.env...)
		return cmd
	}
	t.Cleanup(func() { d.end(t) })
	d.Start(t)
	return d
}

func (d *Containerd) config() string { return filepath.Join(d.Dir, "config.toml") }

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
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ctr", append([]string{"--address", d.Address}, args...)...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// end ends the daemon and its containers.
func (d *Containerd) end(t testing.TB) {
	d.close(t, func() {
		spaces, err := d.Try("namespaces", "ls", "-q")
		if err != nil {
			return
		}
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
	})
	if err := os.RemoveAll(d.Dir); err != nil {
		t.Errorf("remove %s: %v", d.Dir, err)
	}
}
