package enginetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// DockerdOptions modify StartDockerd.
type DockerdOptions struct {
	Wrapper string         // agentbox-runtime, registered as the runtime "agentbox"; empty: it is not
	Config  map[string]any // more of daemon.json; a nil value takes a default of ours away
	Env     []string       // more of the daemon's environment
}

// DockerMajor is the first number of the Docker daemon's version.
func DockerMajor(t testing.TB) (major int) {
	t.Helper()
	out, err := exec.Command(program(t, "dockerd", "docker.io"), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(string(out), "Docker version %d.", &major); err != nil {
		t.Fatalf("dockerd --version: %q: %v", out, err)
	}
	return major
}

// ImageStore is what a daemon.json says for containerd's image store, the default
// of Docker Engine 29. The test is skipped where it was an experiment yet, and
// where the daemon does not tell its containerd.
func ImageStore(t testing.TB) map[string]any {
	t.Helper()
	if major := DockerMajor(t); major < 27 {
		t.Skipf("containerd's image store is for Docker Engine 27 and later; this is %d", major)
	}
	return map[string]any{"features": map[string]any{"containerd-snapshotter": true}, "storage-driver": nil}
}

// Dockerd is a Docker daemon of the test's own. It goes on with its containers
// when it is restarted (live-restore).
type Dockerd struct {
	daemon
	Host     string // for DOCKER_HOST
	Root     string // its data
	ExecRoot string
	StageRun string // AGENTBOX_RUN of its runtimes
	Config   string // its daemon.json

	// Containerd is a service of its own, as on most hosts, and the one whose
	// environment reaches the OCI runtime.
	Containerd *Containerd

	env []string
}

// StartDockerd starts a Docker daemon that ends with the test, and has left
// nothing behind then.
func StartDockerd(t testing.TB, opts DockerdOptions) *Dockerd {
	t.Helper()
	program(t, "dockerd", "docker.io")
	below := StartContainerd(t, ContainerdOptions{Env: opts.Env})
	dir := Dir(t)
	d := &Dockerd{
		daemon: daemon{Dir: dir, name: "dockerd"}, Host: "unix://" + filepath.Join(dir, "s"),
		Root: filepath.Join(dir, "data"), ExecRoot: filepath.Join(dir, "x"),
		StageRun: below.StageRun, Containerd: below, Config: filepath.Join(dir, "daemon.json"), env: opts.Env,
	}
	pidfile := filepath.Join(dir, "pid")
	config := map[string]any{
		"containerd": below.Address, "data-root": d.Root, "exec-root": d.ExecRoot, "pidfile": pidfile,
		"hosts":          []string{d.Host},
		"storage-driver": "overlay2", "live-restore": true, "shutdown-timeout": 5,
		"cgroup-parent": "/" + d.cgroup(),
	}
	if systemd() {
		config["cgroup-parent"] = d.cgroup() + ".slice"
	}
	if opts.Wrapper != "" {
		config["runtimes"] = map[string]any{"agentbox": map[string]any{"path": opts.Wrapper}}
	}
	for k, v := range opts.Config {
		if config[k] = v; v == nil {
			delete(config, k)
		}
	}
	data, err := json.Marshal(config)
	if err == nil {
		err = os.WriteFile(d.Config, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.answers = d.pings
	d.command = func(t testing.TB) *exec.Cmd {
		// The pid file of a killed daemon may name another process by now, and the next daemon
		// would not start.
		_ = os.Remove(pidfile)
		cmd := exec.Command(program(t, "dockerd", "docker.io"), "--config-file", d.Config)
		cmd.Env = append(append(os.Environ(), "AGENTBOX_RUN="+d.StageRun), d.env...)
		return cmd
	}
	t.Cleanup(func() { d.end(t) })
	d.Start(t)
	return d
}

// pings reports whether the daemon serves its socket.
func (d *Dockerd) pings() bool {
	conn, err := net.DialTimeout("unix", strings.TrimPrefix(d.Host, "unix://"), time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := conn.Write([]byte("GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")); err != nil {
		return false
	}
	head := make([]byte, 64)
	n, _ := conn.Read(head)
	return bytes.Contains(head[:n], []byte(" 200 "))
}

// Docker runs the docker client and returns its output, trimmed.
func (d *Dockerd) Docker(t testing.TB, args ...string) string {
	t.Helper()
	out, err := d.Try(args...)
	if err != nil {
		t.Fatalf("docker %q: %v: %s", args, err, out)
	}
	return out
}

// Try is Docker for what may fail.
func (d *Dockerd) Try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_CONFIG="+d.Dir)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// Get asks the daemon itself, without a client's start: for what is asked often.
func (d *Dockerd) Get(path string, into any) error {
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true, // the daemon may have been restarted by the next time
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(d.Host, "unix://"))
		},
	}}
	resp, err := client.Get("http://docker" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// Import makes an image of a directory and returns its id.
func (d *Dockerd) Import(t testing.TB, name, dir string) string {
	t.Helper()
	tarball := filepath.Join(d.Dir, "image.tar")
	defer os.Remove(tarball)
	if out, err := exec.Command("tar", "-C", dir, "-cf", tarball, ".").CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return d.Docker(t, "import", "-c", `CMD ["sh"]`, tarball, name)
}

// end ends the daemon, its containers and its containerd.
func (d *Dockerd) end(t testing.TB) {
	d.close(t, func() {
		if !d.answers() {
			return
		}
		if ids, err := d.Try("ps", "-aq"); err == nil && ids != "" {
			if out, err := d.Try(append([]string{"rm", "-f", "-v"}, strings.Fields(ids)...)...); err != nil {
				t.Errorf("remove containers: %v: %s", err, out)
			}
		}
	})
	for _, pid := range members(d.cgroup()) {
		t.Errorf("left behind by dockerd: process %d of a container", pid)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	if err := os.RemoveAll(d.Dir); err != nil {
		t.Errorf("remove %s: %v", d.Dir, err)
	}
}

// cgroup is the name of the one that has those of all containers in it.
func (d *Dockerd) cgroup() string {
	return filepath.Base(filepath.Dir(d.Dir)) + "-" + filepath.Base(d.Dir)
}

// systemd reports whether Docker leaves cgroups to systemd here, by its own default.
func systemd() bool {
	for _, path := range []string{"/sys/fs/cgroup/cgroup.controllers", "/run/systemd/system"} {
		if _, err := os.Stat(path); err != nil {
			return false
		}
	}
	return true
}

func wait(limit time.Duration, ok func() bool) {
	for deadline := time.Now().Add(limit); !ok() && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		continue
	}
}

func isTest(cmdline string) bool { return strings.Contains(cmdline, "-test.") }

// unmountBelow detaches what is mounted in a directory: the mount namespace is the test's own, so
// no other process sees it.
func unmountBelow(dir string) {
	data, _ := os.ReadFile("/proc/self/mountinfo")
	lines := strings.Split(string(data), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			_ = unix.Unmount(f[4], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}
}
