package enginetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
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

// Dockerd is a Docker daemon of the test's own. It goes on with its containers
// when it is restarted (live-restore).
type Dockerd struct {
	Host     string // for DOCKER_HOST
	Dir      string // everything of it
	Root     string // its data
	ExecRoot string
	StageRun string // AGENTBOX_RUN of its runtimes
	Config   string // its daemon.json

	// Containerd is a service of its own, as on most hosts, and the one whose
	// environment reaches the OCI runtime.
	Containerd *Containerd

	env []string
	cmd *exec.Cmd
}

// StartDockerd starts a Docker daemon that ends with the test, and has left
// nothing behind then.
func StartDockerd(t testing.TB, opts DockerdOptions) *Dockerd {
	t.Helper()
	program(t, "dockerd", "docker.io")
	below := StartContainerd(t, ContainerdOptions{Env: opts.Env})
	dir := Dir(t)
	d := &Dockerd{
		Host: "unix://" + filepath.Join(dir, "s"), Dir: dir, Root: filepath.Join(dir, "data"), ExecRoot: filepath.Join(dir, "x"),
		StageRun: below.StageRun, Containerd: below, Config: filepath.Join(dir, "daemon.json"), env: opts.Env,
	}
	config := map[string]any{
		"containerd": below.Address, "data-root": d.Root, "exec-root": d.ExecRoot, "pidfile": filepath.Join(dir, "pid"), "hosts": []string{d.Host},
		"storage-driver": "overlay2", "live-restore": true, "shutdown-timeout": 5,
		"cgroup-parent": "/" + d.cgroup(),
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
	t.Cleanup(func() { d.close(t) })
	d.Start(t)
	return d
}

// Start starts the daemon and returns when it answers.
func (d *Dockerd) Start(t testing.TB) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(d.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	d.cmd = exec.Command(program(t, "dockerd", "docker.io"), "--config-file", d.Config)
	d.cmd.Env = append(append(os.Environ(), "AGENTBOX_RUN="+d.StageRun), d.env...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// Not ended by what the terminal sends to the test.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	cmd := d.cmd
	go func() { ended <- cmd.Wait() }()
	for deadline := time.Now().Add(time.Minute); !d.answers(); {
		select {
		case err := <-ended:
			t.Fatalf("dockerd ended: %v\n%s", err, d.Log())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("dockerd does not answer\n%s", d.Log())
		}
	}
}

// answers tells whether the daemon serves its socket.
func (d *Dockerd) answers() bool {
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

// Pid is the daemon's.
func (d *Dockerd) Pid() int { return d.cmd.Process.Pid }

// Kill ends the daemon as a crash would.
func (d *Dockerd) Kill(t testing.TB) {
	t.Helper()
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	pid := d.Pid()
	until(t, "the daemon is gone", 10*time.Second, func() bool { return !alive(pid) })
}

// Restart kills the daemon and starts it again.
func (d *Dockerd) Restart(t testing.TB) {
	t.Helper()
	d.Kill(t)
	d.Start(t)
}

// Log is the end of what the daemon has logged.
func (d *Dockerd) Log() string {
	data, _ := os.ReadFile(filepath.Join(d.Dir, "log"))
	return string(data[max(0, len(data)-2<<10):])
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host, "DOCKER_CONFIG="+d.Dir)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
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

// close ends the daemon, its containers and its containerd.
func (d *Dockerd) close(t testing.TB) {
	if d.cmd == nil || d.cmd.Process == nil {
		return
	}
	if t.Failed() {
		t.Logf("dockerd:\n%s", d.Log())
	}
	if d.answers() {
		if ids, err := d.Try("ps", "-aq"); err == nil && ids != "" {
			if out, err := d.Try(append([]string{"rm", "-f", "-v"}, strings.Fields(ids)...)...); err != nil {
				t.Errorf("remove containers: %v: %s", err, out)
			}
		}
	}
	_ = d.cmd.Process.Signal(unix.SIGTERM)
	pid := d.Pid()
	wait(20*time.Second, func() bool { return !alive(pid) })
	if alive(pid) {
		t.Errorf("dockerd does not end\n%s", d.Log())
		_ = d.cmd.Process.Kill()
	}
	wait(5*time.Second, func() bool { return len(processes(d.Dir)) == 0 })
	for pid, cmdline := range processes(d.Dir) {
		if pid == os.Getppid() || isTest(cmdline) {
			continue
		}
		t.Errorf("left behind by dockerd: process %d: %s", pid, cmdline)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	for _, pid := range members(d.cgroup()) {
		t.Errorf("left behind by dockerd: process %d of a container", pid)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	unmountBelow(d.Dir)
	if err := os.RemoveAll(d.Dir); err != nil {
		t.Errorf("remove %s: %v", d.Dir, err)
	}
}

// cgroup is the name of the one that has those of all containers in it.
func (d *Dockerd) cgroup() string {
	return filepath.Base(filepath.Dir(d.Dir)) + "-" + filepath.Base(d.Dir)
}

func wait(limit time.Duration, ok func() bool) {
	for deadline := time.Now().Add(limit); !ok() && time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		continue
	}
}

func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func isTest(cmdline string) bool { return strings.Contains(cmdline, "-test.") }

// unmountBelow detaches what is mounted in a directory: the mount namespace is
// the test's own, so it is nobody else's.
func unmountBelow(dir string) {
	data, _ := os.ReadFile("/proc/self/mountinfo")
	lines := strings.Split(string(data), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if f := strings.Fields(lines[i]); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			_ = unix.Unmount(f[4], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		}
	}
}
