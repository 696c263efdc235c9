package setup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// A realDockerd is a daemon of the test's own: private directories, in a
// network and mount namespace of its own.
type realDockerd struct {
	t      *testing.T
	dir    string
	config string
	host   string
	cmd    *exec.Cmd
	log    *os.File
}

func startDockerd(t *testing.T, config string) *realDockerd {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test starts a dockerd: run it as root")
	}
	dir, err := os.MkdirTemp("", "abd") // short: sockets lie in it
	if err != nil {
		t.Fatal(err)
	}
	d := &realDockerd{t: t, dir: dir, config: filepath.Join(dir, "daemon.json"), host: "unix://" + dir + "/s"}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile(d.config, []byte(config), 0o640); err != nil {
		t.Fatal(err)
	}
	d.start()
	return d
}

func (d *realDockerd) start() {
	d.t.Helper()
	log, err := os.OpenFile(filepath.Join(d.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	d.log = log
	// dockerd 20.10 writes a key to /etc/docker whatever it is told.
	d.cmd = exec.Command("sh", "-c", `mount -t tmpfs none /etc/docker && exec dockerd "$@"`, "sh", "--config-file",
		d.config, "--data-root", d.dir+"/data", "--exec-root", d.dir+"/exec",
		"--pidfile", d.dir+"/pid", "-H", d.host, "--bridge", "none", "--iptables=false", "--ip6tables=false")
	d.cmd.Stdout, d.cmd.Stderr = log, log
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	if err := d.cmd.Start(); err != nil {
		d.t.Fatalf("these tests need docker.io: %v", err)
	}
	d.t.Cleanup(d.stop)
	deadline := time.Now().Add(60 * time.Second)
	for peer(d.host) == 0 || exec.Command("docker", "-H", d.host, "info", "-f", "{{.ServerVersion}}").Run() != nil {
		if time.Now().After(deadline) {
			data, _ := os.ReadFile(log.Name())
			d.t.Fatalf("dockerd does not answer:\n%s", data)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (d *realDockerd) stop() {
	if d.cmd == nil {
		return
	}
	if ids := strings.Fields(d.docker("ps", "-aq")); len(ids) > 0 {
		d.docker(append([]string{"rm", "-f"}, ids...)...)
	}
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(30*time.Second, func() { _ = d.cmd.Process.Kill() })
	_ = d.cmd.Wait()
	timer.Stop()
	d.log.Close()
	d.cmd = nil
}

func (d *realDockerd) docker(args ...string) string {
	d.t.Helper()
	out, err := exec.Command("docker", append([]string{"-H", d.host}, args...)...).CombinedOutput()
	if err != nil {
		d.t.Errorf("docker %q: %v: %s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// runtimes is what the daemon itself says.
func (d *realDockerd) runtimes() (names map[string]any, def string) {
	d.t.Helper()
	text, def, _ := strings.Cut(d.docker("info", "-f", "{{json .Runtimes}}\t{{.DefaultRuntime}}"), "\t")
	if err := json.Unmarshal([]byte(text), &names); err != nil {
		d.t.Fatal(err)
	}
	return names, def
}

func (d *realDockerd) read() string {
	d.t.Helper()
	data, err := os.ReadFile(d.config)
	if err != nil {
		d.t.Fatal(err)
	}
	return string(data)
}

func (d *realDockerd) options() DockerOptions {
	return DockerOptions{
		Options: Options{Runtime: wrapper(d.t), Config: d.config}, Pidfile: d.dir + "/pid", NoPlugin: true,
	}
}

// busyboxTar is a root filesystem with the busybox that is installed here.
func busyboxTar(t *testing.T) ([]byte, error) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "bin"), 0o755); err != nil {
		return nil, err
	}
	cmd := exec.Command("sh", "-c", "set -e; cp \"$(command -v busybox)\" bin/busybox; for a in sh sleep echo; do ln -s busybox bin/$a; done; tar -c .")
	cmd.Dir = root
	return cmd.Output()
}

func (d *realDockerd) importBusybox() {
	d.t.Helper()
	image, err := busyboxTar(d.t)
	if err != nil {
		d.t.Fatalf("these tests need busybox-static: %v", err)
	}
	load := exec.Command("docker", "-H", d.host, "import", "-", "bb")
	load.Stdin = bytes.NewReader(image)
	if out, err := load.CombinedOutput(); err != nil {
		d.t.Fatalf("%v: %s", err, out)
	}
}

var builtWrapper string

// wrapper builds agentbox-runtime.
func wrapper(t *testing.T) string {
	t.Helper()
	if builtWrapper == "" {
		path := filepath.Join(testDir, "agentbox-runtime")
		if out, err := exec.Command("go", "build", "-o", path,
			"../../cmd/agentbox-runtime").CombinedOutput(); err != nil {
			t.Fatalf("build agentbox-runtime: %v\n%s", err, out)
		}
		builtWrapper = path
	}
	return builtWrapper
}

var testDir string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "setup")
	if err != nil {
		panic(err)
	}
	testDir = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func TestDocker(t *testing.T) {
	ctx := context.Background()
	const before = "{\n    \"debug\": false,\n    \"labels\": [\"a=b\"]\n}"
	d := startDockerd(t, before)
	d.importBusybox()
	d.docker("run", "-d", "--name", "old", "--network", "none", "bb", "sleep", "1000")
	pid := d.docker("inspect", "-f", "{{.State.Pid}}", "old")

	opts := d.options()
	opts.DryRun = true
	r, err := Docker(ctx, opts)
	if err != nil || !r.Changed || !strings.Contains(r.Diff, "+    \"runtimes\": {") || d.read() != before {
		t.Fatalf("dry run: %+v, %v", r, err)
	}

	opts.DryRun = false
	if r, err = Docker(ctx, opts); err != nil || !r.Changed || !r.Reloaded || !r.Verified || r.Backup == "" {
		t.Fatalf("setup: %+v, %v", r, err)
	}
	if got := d.docker("inspect", "-f", "{{.State.Pid}} {{.State.Running}}", "old"); got != pid+" true" {
		t.Errorf("the reload did something to a running container: %s, was %s", got, pid)
	}
	if st, err := os.Stat(d.config); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if st, err := os.Stat(r.Backup); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("backup: mode %v, %v", st.Mode(), err)
	}
	if data, _ := os.ReadFile(r.Backup); string(data) != before {
		t.Errorf("backup: %s", data)
	}
	if got := d.docker("run", "--rm", "--runtime", "agentbox", "--network", "none", "bb", "echo",
		"hello"); got != "hello" {
		t.Errorf("docker run: %s", got)
	}

	if r, err = Docker(ctx, opts); err != nil || r.Changed || r.Reloaded || !r.Verified {
		t.Errorf("a second time: %+v, %v", r, err)
	}

	// In use by a container that does not even run.
	d.docker("create", "--runtime", "agentbox", "--name", "user", "--network", "none", "bb", "sleep", "1000")
	opts.Remove = true
	if _, err = Docker(ctx, opts); !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), "user") {
		t.Errorf("in use: %v", err)
	}
	d.docker("rm", "user")
	if r, err = Docker(ctx, opts); err != nil || !r.Changed || r.Verified ||
		!strings.Contains(strings.Join(r.Notes, "\n"), "when it is next restarted") {
		t.Errorf("remove: %+v, %v", r, err)
	}
	if d.read() != before {
		t.Errorf("not as it was: %s", d.read())
	}
	if r, err = Docker(ctx, opts); err != nil || r.Changed {
		t.Errorf("remove a second time: %+v, %v", r, err)
	}
	d.docker("kill", "old")
	d.stop()
	d.start()
	if names, _ := d.runtimes(); names["agentbox"] != nil {
		t.Errorf("after a restart: %v", names)
	}
}

func TestDockerDefault(t *testing.T) {
	ctx := context.Background()
	runc, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	before := `{"runtimes": {"other": {"path": ` + strconv.Quote(runc) + `}}}`
	d := startDockerd(t, before)
	opts := d.options()
	opts.Default = true
	if r, err := Docker(ctx, opts); err != nil || !r.Verified {
		t.Fatalf("%+v, %v", r, err)
	}
	if names, def := d.runtimes(); names["agentbox"] == nil || def != "agentbox" {
		t.Errorf("%v, default %s", names, def)
	}
	opts.Default, opts.Remove = false, true
	if r, err := Docker(ctx, opts); err != nil || !r.Verified || !r.Reloaded {
		t.Errorf("remove: %+v, %v", r, err)
	}
	if d.read() != before {
		t.Errorf("not as it was: %s", d.read())
	}
	if names, def := d.runtimes(); names["agentbox"] != nil || names["other"] == nil || def != "runc" {
		t.Errorf("%v, default %s", names, def)
	}
}

// A configuration that dockerd rejects does not stay in its file.
func TestDockerRefuses(t *testing.T) {
	ctx := context.Background()
	d := startDockerd(t, "{}")
	defer func(was time.Duration) { reloadTimeout = was }(reloadTimeout)
	reloadTimeout = 2 * time.Second
	bad := `{"no-such-option": true}` // since the daemon's start
	if err := os.WriteFile(d.config, []byte(bad), 0o640); err != nil {
		t.Fatal(err)
	}
	r, err := Docker(ctx, d.options())
	if err == nil || r.Changed || d.read() != bad {
		t.Errorf("%+v, %v: %s", r, err, d.read())
	}

	// An empty list must never reach dockerd 20.10.
	if err := os.WriteFile(d.config, []byte(`{"runtimes": {}}`), 0o640); err != nil {
		t.Fatal(err)
	}
	if r, err := Docker(ctx, d.options()); err != nil || !r.Verified {
		t.Errorf("%+v, %v", r, err)
	}
	opts := d.options()
	opts.Remove = true
	if r, err := Docker(ctx, opts); err != nil || d.read() != `{"runtimes": {}}` {
		t.Errorf("%+v, %v: %s", r, err, d.read())
	}
	if names, _ := d.runtimes(); len(names) == 0 {
		t.Error("dockerd is gone")
	}

	// Another file than the daemon's, and another process than the daemon.
	opts = d.options()
	opts.Config = filepath.Join(d.dir, "other.json")
	if _, err := Docker(ctx, opts); !errors.Is(err, fault.ErrInvalid) ||
		!strings.Contains(strings.Join(fault.Hint(err), ""), d.config) {
		t.Errorf("another file: %v", err)
	}
	if err := os.WriteFile(d.dir+"/pid", []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Docker(ctx, d.options()); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("another process: %v", err)
	}
	// Without the pid file the socket identifies the daemon.
	opts = d.options()
	opts.Pidfile, opts.Host = "", d.host
	if err := os.WriteFile(d.config, []byte(`{"pidfile": "/nonexistent/pid"}`), 0o640); err != nil {
		t.Fatal(err)
	}
	if found, err := findDaemon(ctx, opts, daemonConfig{Pidfile: "/nonexistent/pid"}); err != nil || found == nil ||
		found.pid != d.cmd.Process.Pid {
		t.Errorf("by its socket: %+v, %v", found, err)
	}
}

func TestDockerNoDaemon(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	wrapper := filepath.Join(dir, wrapperName)
	if err := os.WriteFile(wrapper, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "etc", "daemon.json")
	opts := DockerOptions{
		Options: Options{Config: config, Runtime: wrapper},
		Plugin:  "/somewhere/docker-agentbox", Plugins: filepath.Join(dir, "plugins"),
	}
	link := filepath.Join(dir, "plugins", PluginName)
	run := func(want bool) Result {
		t.Helper()
		r, err := Docker(ctx, opts)
		if err != nil || r.Changed != want {
			t.Fatalf("%+v, %v", r, err)
		}
		return r
	}
	run(true)
	if target, _ := os.Readlink(link); target != opts.Plugin {
		t.Errorf("link to %q", target)
	}
	run(false)
	// A newer agentbox elsewhere.
	opts.Plugin = "/elsewhere/docker-agentbox"
	if r := run(false); !r.Plugin.Changed {
		t.Errorf("%+v", r.Plugin)
	}
	opts.Remove = true
	run(true)
	if _, err := os.Lstat(link); !os.IsNotExist(err) {
		t.Errorf("the link: %v", err)
	}
	if data, _ := os.ReadFile(config); string(data) != "{}\n" {
		t.Errorf("%q", data)
	}
	run(false)
	opts.Remove = false

	// A symlink stays one, and its target is what changes.
	target := filepath.Join(dir, "real.json")
	if err := os.WriteFile(target, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	opts.Config = filepath.Join(dir, "link.json")
	if err := os.Symlink("real.json", opts.Config); err != nil {
		t.Fatal(err)
	}
	run(true)
	if st, err := os.Lstat(opts.Config); err != nil || st.Mode()&os.ModeSymlink == 0 {
		t.Errorf("%v, %v", st, err)
	}
	if data, _ := os.ReadFile(target); !strings.Contains(string(data), wrapper) {
		t.Errorf("%s", data)
	}

	// Only the newest backups stay.
	for i := range 2 * keepBackups {
		if err := os.WriteFile(target, []byte(`{"max-concurrent-uploads": `+strconv.Itoa(i+1)+`}`), 0o600); err != nil {
			t.Fatal(err)
		}
		run(true)
	}
	f, err := readFile(target)
	if err != nil || len(f.backups()) != keepBackups {
		t.Errorf("%d backups, %v", len(f.backups()), err)
	}

	// The link's place is taken.
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(link, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(target, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Docker(ctx, opts); !errors.Is(err, fault.ErrExists) {
		t.Errorf("%v", err)
	}
	if data, _ := os.ReadFile(target); string(data) != "{}" {
		t.Errorf("changed all the same: %s", data)
	}
	left, _ := filepath.Glob(filepath.Join(dir, ".agentbox-*"))
	if len(left) > 0 {
		t.Errorf("left behind: %q", left)
	}
}

func TestDockerBadInput(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	wrapper := filepath.Join(dir, wrapperName)
	if err := os.WriteFile(wrapper, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	good := filepath.Join(dir, "good.json")
	for path, text := range map[string]string{good: "{}", filepath.Join(dir, "bad.json"): "{\n oops\n}"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "dangling.json")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo.json"), 0o600); err != nil {
		t.Fatal(err)
	}
	big, err := os.Create(filepath.Join(dir, "big.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(big.Truncate(maxConfig+1), big.Close()); err != nil {
		t.Fatal(err)
	}
	base := Options{Config: good, Runtime: wrapper}
	for want, change := range map[string]func(*DockerOptions){
		"line 2, column 2":      func(o *DockerOptions) { o.Config = filepath.Join(dir, "bad.json") },
		"symlink to nothing":    func(o *DockerOptions) { o.Config = filepath.Join(dir, "dangling.json") },
		"no regular file":       func(o *DockerOptions) { o.Config = filepath.Join(dir, "fifo.json") },
		"larger than":           func(o *DockerOptions) { o.Config = filepath.Join(dir, "big.json") },
		"engines reserve":       func(o *DockerOptions) { o.Name = "runc" },
		"1 to 64 letters":       func(o *DockerOptions) { o.Name = "a b" },
		"is not there":          func(o *DockerOptions) { o.Runtime = filepath.Join(dir, "none") },
		"is no program":         func(o *DockerOptions) { o.Runtime = good },
		"configuration can":     func(o *DockerOptions) { o.Runtime = "a" },
		"through a unix socket": func(o *DockerOptions) { o.Host = "tcp://10.0.0.1:2375" },
	} {
		opts := DockerOptions{Options: base, NoPlugin: true}
		change(&opts)
		if _, err := Docker(ctx, opts); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if data, _ := os.ReadFile(good); string(data) != "{}" {
		t.Errorf("changed: %s", data)
	}

	// A runtime that setup did not put in.
	if err := os.WriteFile(good, []byte(`{"runtimes": {"agentbox": {"path": "/usr/bin/other"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	opts := DockerOptions{Options: base, NoPlugin: true}
	opts.Remove = true
	if _, err := Docker(ctx, opts); !errors.Is(err, fault.ErrState) {
		t.Errorf("%v", err)
	}
	opts.Force = true
	if r, err := Docker(ctx, opts); err != nil || !r.Changed {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestParseFlags(t *testing.T) {
	f := parseFlags(strings.Fields("--config-file /a -H unix:///s --host=tcp://x -Hfd:// --add-runtime x=/y --default-runtime=x"))
	if f.configFile != "/a" || strings.Join(f.hosts, " ") != "unix:///s tcp://x fd://" ||
		!f.addRuntime || !f.defaultRuntime {
		t.Errorf("%+v", f)
	}
	if f := parseFlags([]string{"--debug"}); f.addRuntime || f.defaultRuntime || f.configFile != "" {
		t.Errorf("%+v", f)
	}
	s := dockerSetup{
		daemon: &daemon{pid: 1, flags: daemonFlags{configFile: "/a", addRuntime: true}}, file: file{path: "/a"},
	}
	if err := s.checkDaemon(); !errors.Is(err, fault.ErrState) {
		t.Errorf("--add-runtime: %v", err)
	}
	s.daemon.flags = daemonFlags{configFile: "/a", defaultRuntime: true}
	if err := s.checkDaemon(); err != nil {
		t.Errorf("--default-runtime, which is not touched: %v", err)
	}
	s.Default = true
	if err := s.checkDaemon(); !errors.Is(err, fault.ErrState) {
		t.Errorf("--default-runtime: %v", err)
	}
}

// A dockerd of 23.0 or later judges the draft; an older one does not know how.
func TestValidateDockerd(t *testing.T) {
	ctx := context.Background()
	program := filepath.Join(t.TempDir(), "dockerd")
	for _, tt := range []struct {
		script string
		known  bool
		err    string
	}{
		{`[ "$1 $2" = "--validate --config-file" ] && echo configuration OK`, true, ""},
		{`echo "unable to configure: bad option" >&2; exit 1`, true, "bad option"},
		{`echo "Status: unknown flag: --validate" >&2; exit 125`, false, ""},
	} {
		if err := os.WriteFile(program, []byte("#!/bin/sh\n"+tt.script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		known, err := validate(ctx, program, "/x")
		if known != tt.known || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %v, %v", tt.script, known, err)
		}
	}
	if known, err := validate(ctx, filepath.Join(t.TempDir(), "none"), "/x"); known || err != nil {
		t.Errorf("no dockerd: %v, %v", known, err)
	}
}
