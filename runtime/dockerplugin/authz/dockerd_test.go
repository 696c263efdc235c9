package authz_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime/dockerplugin"
	"github.com/agentbox/agentbox/runtime/dockerplugin/authz"
)

const pluginPolicy = "AUTHZ_TEST_POLICY"

// TestMain is also the plugin's process, which the test kills and starts
// beside its dockerd.
func TestMain(m *testing.M) {
	if file := os.Getenv(pluginPolicy); file != "" {
		if err := plugin(file); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func plugin(file string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	policy, err := authz.Load(file)
	if err != nil {
		return err
	}
	l, err := dockerplugin.Listen(dockerplugin.DefaultSocket)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return dockerplugin.Serve(ctx, l,
		dockerplugin.Options{Authz: authz.Handler(authz.NewJudge(policy, authz.Options{}))})
}

// host is a network and mount namespace with a /run of its own, in which
// dockerd, its plugin and its client have the paths that they have anywhere.
type host struct {
	t   *testing.T
	dir string // data root, policy, directories to mount; the same outside
	pid string // of the process that holds the namespaces
}

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it runs its own dockerd")
	}
	for _, tool := range []string{"dockerd", "docker", "containerd", "runc", "nsenter", "busybox", "ip"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("this test needs %s: %v", tool, err)
		}
	}
	dir, err := os.MkdirTemp("", "az")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("left behind: %v", err)
		}
	})
	h := &host{t: t, dir: dir}
	holder := exec.Command("sh", "-ec", "mount -t tmpfs tmpfs /run; ip link set lo up; echo ready; exec cat >/dev/null")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Unshareflags: syscall.CLONE_NEWNS}
	holder.Stderr = os.Stderr
	in, err := holder.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	h.start(holder)
	h.pid = strconv.Itoa(holder.Process.Pid)
	t.Cleanup(func() {
		in.Close()
		_ = holder.Wait() // it has nothing to say
	})
	return h
}

// start starts a process that says "ready" when it is.
func (h *host) start(cmd *exec.Cmd) {
	h.t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		h.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
		h.t.Fatalf("%v did not start: %v", cmd.Args, err)
	}
}

// command runs in the namespaces of the host; nsenter becomes the command, so
// that a signal reaches it.
func (h *host) command(name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", h.pid, "-m", "-n", name}, args...)...)
}

func (h *host) plugin(log io.Writer) *exec.Cmd {
	h.t.Helper()
	cmd := h.command(os.Args[0])
	cmd.Env = append(os.Environ(), pluginPolicy+"="+filepath.Join(h.dir, "policy.yaml"))
	cmd.Stderr = log
	h.start(cmd)
	return cmd
}

// dockerd returns when the daemon answers its ping, which needs the plugin.
func (h *host) dockerd() {
	h.t.Helper()
	config := filepath.Join(h.dir, "daemon.json")
	h.write("daemon.json", fmt.Sprintf(`{"deprecated-key-path": %q}`, filepath.Join(h.dir, "key.json")))
	var log bytes.Buffer
	cmd := h.command("dockerd", "--config-file", config, "--data-root", filepath.Join(h.dir, "data"),
		"--exec-root", "/run/docker-exec",
		"-p", "/run/dockerd.pid", "-H", "unix:///run/docker.sock", "--iptables=false", "--ip6tables=false",
		"--authorization-plugin", "agentbox")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	h.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case <-ended:
		case <-time.After(2 * time.Minute):
			h.t.Error("dockerd does not stop")
			_ = cmd.Process.Kill()
			<-ended
		}
		if h.t.Failed() {
			h.t.Logf("dockerd:\n%s", log.String())
		}
	})
	// Nothing announces that the socket is there.
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			h.t.Fatalf("dockerd ended: %v", err)
		default:
		}
		if code, _, err := h.raw("GET", "/_ping", nil, ""); err == nil && code == http.StatusOK {
			return
		}
		if time.Now().After(end) {
			h.t.Fatal("dockerd does not answer")
		}
	}
}

// raw makes a call that no client would.
func (h *host) raw(method, uri string, header http.Header, body string) (int, string, error) {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", "/proc/"+h.pid+"/root/run/docker.sock")
	}}
	defer tr.CloseIdleConnections()
	req, err := http.NewRequest(method, "http://docker"+uri, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	req.Header = header.Clone()
	if req.Header == nil {
		req.Header = http.Header{"Content-Type": {"application/json"}}
	}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

func (h *host) docker(args ...string) (string, error) {
	cmd := h.command("docker", append([]string{"-H", "unix:///run/docker.sock"}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+h.dir)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (h *host) write(name, text string) {
	h.t.Helper()
	if err := os.WriteFile(filepath.Join(h.dir, name), []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

// image imports busybox, which is a call to judge, too.
func (h *host) image() {
	h.t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		h.t.Fatal(err)
	}
	bin, err := os.ReadFile(path)
	if err != nil {
		h.t.Fatal(err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	add := func(hdr *tar.Header, data []byte) {
		hdr.Size = int64(len(data))
		if err := w.WriteHeader(hdr); err != nil {
			h.t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			h.t.Fatal(err)
		}
	}
	add(&tar.Header{Name: "bin/busybox", Mode: 0o755, Typeflag: tar.TypeReg}, bin)
	for _, name := range []string{"sh", "cat", "true", "ls", "sleep"} {
		add(&tar.Header{Name: "bin/" + name, Linkname: "busybox", Typeflag: tar.TypeSymlink}, nil)
	}
	if err := w.Close(); err != nil {
		h.t.Fatal(err)
	}
	h.write("image.tar", buf.String())
	if out, err := h.docker("import", filepath.Join(h.dir, "image.tar"), "box"); err != nil {
		h.t.Fatalf("import: %s", out)
	}
}

// TestDockerd has a real dockerd ask the plugin about what its real client does.
func TestDockerd(t *testing.T) {
	h := newHost(t)
	d := h.dir
	for _, dir := range []string{"work/a", "ro"} {
		if err := os.MkdirAll(filepath.Join(d, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.write("work/a/f", "inside\n")
	h.write("ro/f", "readable\n")
	if err := os.Symlink("/", filepath.Join(d, "work/root")); err != nil {
		t.Fatal(err)
	}
	h.write("policy.yaml", fmt.Sprintf("mounts:\n  allow: [%s/work/*]\n  read_only: [%s/ro]\n", d, d))
	var log bytes.Buffer
	p := h.plugin(&log)
	stop := func() {
		if p == nil {
			return
		}
		_ = p.Process.Signal(syscall.SIGTERM)
		if err := p.Wait(); err != nil {
			t.Errorf("the plugin: %v\n%s", err, log.String())
		}
		p = nil
	}
	h.dockerd()
	// Before dockerd, whose clean-up makes no calls: cleanups run last first.
	t.Cleanup(stop)
	h.image()

	passes := func(want string, args ...string) {
		t.Helper()
		if out, err := h.docker(args...); err != nil || !strings.Contains(out, want) {
			t.Errorf("docker %v: %v\n%s", args, err, out)
		}
	}
	refused := func(key string, args ...string) {
		t.Helper()
		out, err := h.docker(args...)
		if err == nil || !strings.Contains(out, "authorization denied by plugin agentbox: ") ||
			!strings.Contains(out, "policy key "+key+")") {
			t.Errorf("docker %v: not refused for %s: %v\n%s", args, key, err, out)
		}
	}
	run := func(args ...string) []string { return append([]string{"run", "--rm"}, args...) }

	passes("fine", run("box", "sh", "-c", "echo fine")...)
	passes("inside", run("-v", d+"/work/a:/w", "box", "cat", "/w/f")...)
	passes("inside", run("--mount", "type=bind,src="+d+"/work/a,dst=/w", "box", "cat", "/w/f")...)
	passes("readable", run("-v", d+"/ro:/w:ro", "box", "cat", "/w/f")...)
	passes("", run("-v", "vol:/v", "--tmpfs", "/t", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "-m",
		"100m", "box", "true")...)
	passes("", "create", "--name", "c1", "box", "sleep", "1000")
	passes("c1", "start", "c1")
	passes("exec", "exec", "c1", "sh", "-c", "echo exec")
	passes("", "update", "--memory", "50m", "--memory-swap", "50m", "c1")
	passes("", "cp", filepath.Join(d, "policy.yaml"), "c1:/p")
	passes("", "rename", "c1", "c2")
	passes("c2", "ps")
	passes("", "commit", "-c", "ENV A=1", "c2", "box2")
	passes("", "import", "-c", "CMD true", filepath.Join(d, "image.tar"), "box3")
	// The client leaves fractions of a second away: until now would be without the last events.
	passes("c2", "events", "--since", "1h", "--until", strconv.FormatInt(time.Now().Unix()+1, 10))
	passes("", "tag", "box2", "box4")
	passes("", "rmi", "box2", "box4", "box3")
	passes("", "network", "create", "n1")
	passes("", "network", "create", "--subnet", "10.213.0.0/24", "--gateway", "10.213.0.1", "--ip-range",
		"10.213.0.128/25", "--aux-address", "a=10.213.0.2",
		"-o", "com.docker.network.driver.mtu=1400", "--label", "a=b", "n2")
	passes("10.213.0.", run("--network", "n2", "--ip", "10.213.0.9", "--network-alias", "web", "-p", "127.0.0.1:0:80",
		"--expose", "81", "--dns", "10.213.0.1",
		"--add-host", "x:10.213.0.3", "--health-cmd", "true", "--ulimit", "nofile=100:200", "--ulimit", "core=0",
		"--shm-size", "32m", "--cpus", "1",
		"--pids-limit", "50", "--oom-score-adj", "100", "--init=false", "--label", "com.docker.compose.project=p",
		"--stop-signal", "TERM", "-e", "A=1",
		"--log-opt", "max-size=1m", "--hostname", "h", "--read-only", "--mount", "type=tmpfs,dst=/t,tmpfs-size=1m",
		"--mount", "type=volume,src=vol,dst=/v,volume-nocopy",
		"box", "cat", "/etc/hosts")...)
	passes("", "network", "connect", "--alias", "a", "n2", "c2")
	passes("", "network", "disconnect", "n2", "c2")
	refused("networks.subnets", "network", "create", "--subnet", "1.1.1.0/24", "n3")
	refused("networks.subnets", "network", "create", "--subnet", "10.213.0.0/16", "n3")
	refused("networks.options", "network", "create", "-o", "com.docker.network.bridge.name=docker0", "n3")
	refused("networks.ipam_drivers", "network", "create", "--ipam-driver", "dhcp", "n3")
	refused("networks.config_from", "network", "create", "--config-from", "n1", "n3")
	refused("sysctls", "network", "connect", "--driver-opt",
		"com.docker.network.endpoint.sysctls=net.ipv4.conf.IFNAME.forwarding=1", "n1", "c2")
	refused("priority", run("--oom-score-adj", "-500", "box", "true")...)
	refused("priority", run("--ulimit", "rtprio=99", "box", "true")...)
	refused("image_urls", "import", "http://127.0.0.1:1/x.tar", "x")
	passes("", "network", "rm", "n1", "n2")
	passes("v2", "volume", "create", "-o", "type=none", "-o", "o=bind", "-o", "device="+d+"/work/a", "v2")
	passes("inside", run("-v", "v2:/w", "box", "cat", "/w/f")...)

	refused("privileged", run("--privileged", "box", "true")...)
	refused("privileged", "exec", "--privileged", "c2", "true")
	refused("mounts.docker_socket", run("-v", "/:/host", "box", "ls", "/host")...)
	refused("mounts.docker_socket", run("-v", d+"/work/root:/host", "box", "ls", "/host")...)
	refused("mounts.allow", run("-v", d+"/work/root/usr:/host", "box", "ls", "/host")...)
	refused("mounts.docker_socket", run("-v", "/var/run/docker.sock:/s", "box", "true")...)
	refused("mounts.docker_socket", run("--mount", "type=bind,src=/run,dst=/s", "box", "true")...)
	refused("mounts.allow", run("-v", d+"/ro:/w", "box", "true")...)
	refused("mounts.allow", run("-v", "/etc/ssl:/w:ro", "box", "true")...)
	refused("mounts.allow", "volume", "create", "-o", "type=none", "-o", "o=bind", "-o", "device=/usr")
	refused("host_namespaces", run("--network", "host", "box", "true")...)
	refused("host_namespaces", run("--pid", "host", "box", "true")...)
	refused("volumes_from", run("--volumes-from", "c2", "box", "true")...)
	refused("join_containers", run("--pid", "container:c2", "box", "true")...)
	refused("capabilities.allow", run("--cap-add", "SYS_ADMIN", "box", "true")...)
	refused("devices", run("--device", "/dev/zero", "box", "true")...)
	refused("security_opt", run("--security-opt", "seccomp=unconfined", "box", "true")...)
	refused("security_opt", run("--security-opt", "systempaths=unconfined", "box", "true")...)
	refused("plugins", "plugin", "install", "--grant-all-permissions", "localhost:1/x")
	refused("swarm", "swarm", "init")

	// Requests that no client sends: settings at the top, which this daemon may take; a body
	// that dockerd leaves out for its size, for the end of its address, for its declared type.
	big := `{"Image":"box","Labels":{"x":"` + strings.Repeat("x", 1<<20) + `"},"HostConfig":{"Privileged":true}}`
	for _, c := range []struct{ uri, kind, body string }{
		{"/containers/create", "application/json", `{"Image":"box","Cmd":["true"],"Privileged":true}`},
		{
			"/v1.41/containers/%63reate", "application/json",
			`{"Image":"box","Cmd":["true"],"hostconfig":{"PRIVILEGED":true}}`,
		},
		{"/containers/create", "application/json", big},
		{"/containers/create?name=/auth", "application/json", `{"Image":"box","HostConfig":{"Privileged":true}}`},
		{"/containers/create", "text/plain", `{"Image":"box","HostConfig":{"Privileged":true}}`},
		{"/v1.23/containers/c2/start", "application/json", `{"Binds":["/:/host"]}`},
		{"/v1.23/containers/c2/start", "application/json", `{"Labels":"` + big + `","Binds":["/:/host"]}`},
	} {
		code, text, err := h.raw("POST", c.uri, http.Header{"Content-Type": {c.kind}}, c.body)
		if err != nil || code != http.StatusForbidden || !strings.Contains(text, "denied by plugin agentbox") {
			t.Errorf("POST %s %.60s: %d %s %v", c.uri, c.body, code, text, err)
		}
	}
	// By its id the host's network is any network to the judge. The daemon goes
	// by the name alone, too: what it gives is not the host's namespace.
	id, err := h.docker("network", "inspect", "-f", "{{.Id}}", "host")
	if err != nil {
		t.Fatal(id)
	}
	ns, err := os.Readlink("/proc/" + h.pid + "/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := h.docker(run("--network", strings.TrimSpace(id), "box", "ls", "-l",
		"/proc/self/ns/net")...); err == nil && (strings.Contains(out, ns) || !strings.Contains(out, "net:[")) {
		t.Errorf("the host's network by its id: %s", out)
	}

	// A plugin that dies: no call passes, and the next one after its return does.
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait() // killed
	type result struct {
		out string
		err error
	}
	waiting := make(chan result, 1)
	go func() {
		out, err := h.docker("ps")
		waiting <- result{out, err}
	}()
	select {
	case r := <-waiting:
		t.Errorf("answered without the plugin: %v %s", r.err, r.out)
	case <-time.After(500 * time.Millisecond):
	}
	began := time.Now()
	p = h.plugin(&log)
	passes("fine", run("box", "sh", "-c", "echo fine")...)
	took := time.Since(began)
	refused("privileged", run("--privileged", "box", "true")...)
	select {
	case r := <-waiting:
		if r.err != nil {
			t.Errorf("the call that waited: %s", r.out)
		}
	case <-time.After(2 * time.Minute):
		t.Error("the call that waited still does")
	}
	t.Logf("plugin started and docker run done %v after the restart began", took.Round(time.Millisecond))
	passes("c2", "rm", "-f", "c2")
	passes("", "volume", "rm", "v2", "vol")
	stop()
	if !strings.Contains(log.String(), "denied method=POST path=/v1.") {
		t.Errorf("no denial in the plugin's log:\n%s", log.String())
	}
}
