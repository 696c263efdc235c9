package setup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"go.opentelemetry.io/otel/trace/noop"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	defaultPidfile = "/var/run/docker.pid"
	defaultHost    = "unix:///var/run/docker.sock"

	reloadPoll = 50 * time.Millisecond
	apiTimeout = 10 * time.Second
)

// reloadTimeout is how long dockerd may take to act on a reload. A refusal appears only in
// dockerd's log. Tests shorten the timeout.
var reloadTimeout = 10 * time.Second

// A daemon is a running dockerd.
type daemon struct {
	pid     int
	process *os.Process // holds on to the process: the pid cannot become another's
	exe     string
	flags   daemonFlags
	host    string // where its API is
}

// daemonFlags is what dockerd's command line says of what setup touches.
type daemonFlags struct {
	configFile     string
	hosts          []string
	addRuntime     bool
	defaultRuntime bool
}

// parseFlags reads a command line of dockerd.
func parseFlags(args []string) (f daemonFlags) {
	for i := 0; i < len(args); i++ {
		name, value, found := strings.Cut(args[i], "=")
		next := func() string {
			if !found && i+1 < len(args) {
				i++
				return args[i]
			}
			return value
		}
		switch {
		case name == "--config-file":
			f.configFile = next()
		case name == "--add-runtime":
			f.addRuntime = true
			next()
		case name == "--default-runtime":
			f.defaultRuntime = true
			next()
		case name == "--host" || name == "-H":
			f.hosts = append(f.hosts, next())
		case strings.HasPrefix(args[i], "-H"):
			f.hosts = append(f.hosts, strings.TrimPrefix(strings.TrimPrefix(args[i], "-H"), "="))
		}
	}
	return f
}

// dockerd takes hold of the process if it is a dockerd, else returns nil.
func dockerd(pid int) (*daemon, error) {
	if pid <= 1 {
		return nil, nil
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	exe, err := os.Readlink(filepath.Join(dir, "exe"))
	if err != nil && !os.IsPermission(err) {
		return nil, nil // gone
	}
	if err != nil { // only root may look at others' programs
		comm, _ := os.ReadFile(filepath.Join(dir, "comm"))
		exe = strings.TrimSpace(string(comm))
	}
	exe = strings.TrimSuffix(exe, " (deleted)") // an upgrade came after the start
	if filepath.Base(exe) != "dockerd" {
		return nil, nil
	}
	line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
	if err != nil {
		return nil, err
	}
	d := &daemon{pid: pid, process: p, exe: exe}
	if args := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00"); len(args) > 1 {
		d.flags = parseFlags(args[1:])
	}
	if f := d.flags.configFile; f != "" && !filepath.IsAbs(f) {
		if cwd, err := os.Readlink(filepath.Join(dir, "cwd")); err == nil {
			d.flags.configFile = filepath.Join(cwd, f)
		}
	}
	return d, nil
}

// reads reports whether the daemon's configuration is that file.
func (d *daemon) reads(path string) bool {
	own := d.config()
	if own == path {
		return true
	}
	a, err := os.Stat(own)
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

func (d *daemon) config() string {
	if d.flags.configFile == "" {
		return DockerConfig
	}
	return d.flags.configFile
}

// findDaemon looks for the dockerd that the configuration belongs to; nil if none runs. The pid
// file names it; without one it is the process that serves the socket, or that systemd started.
func findDaemon(ctx context.Context, opts DockerOptions, conf daemonConfig) (*daemon, error) {
	pidfile, asked := opts.Pidfile, opts.Pidfile != ""
	if !asked {
		pidfile = conf.Pidfile
	}
	if pidfile == "" {
		pidfile = defaultPidfile
	}
	pid, err := readPid(pidfile)
	if err != nil && (asked || !errors.Is(err, fs.ErrNotExist)) {
		return nil, in(pidfile, err)
	}
	d, err := dockerd(pid)
	if err != nil {
		return nil, err
	}
	if d == nil && asked {
		return nil, fmt.Errorf("%s: process %d is no running dockerd: %w", pidfile, pid, fault.ErrInvalid)
	}
	host, chosen, err := dockerHost(opts.Host)
	if err != nil {
		return nil, err
	}
	if d == nil && (chosen || opts.Config == DockerConfig) {
		if d, err = dockerd(peer(host)); err == nil && d == nil && opts.Config == DockerConfig {
			d, err = dockerd(mainPid(ctx))
		}
		if err != nil {
			return nil, err
		}
	}
	if d == nil {
		return nil, nil
	}
	d.host = host
	if !chosen {
		for _, h := range append(d.flags.hosts, conf.Hosts...) {
			if strings.HasPrefix(h, "unix://") {
				d.host = h
				break
			}
		}
	}
	// Behind a socket of systemd's, process 1 is seen.
	if other := peer(d.host); other > 1 && other != d.pid {
		return nil, &fault.Error{
			Hint: "Name the daemon's socket with --host or its pid file with --pidfile.",
			Err: fmt.Errorf("the dockerd of %s is process %d, but %s is served by process %d: %w", d.config(), d.pid,
				d.host, other, fault.ErrInvalid),
		}
	}
	return d, nil
}

func readPid(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("no process id: %w", fault.ErrInvalid)
	}
	return pid, nil
}

// dockerHost is where the API is, and whether the user said so.
func dockerHost(host string) (string, bool, error) {
	from := "--host"
	if host == "" {
		host, from = os.Getenv("DOCKER_HOST"), "DOCKER_HOST"
	}
	if host == "" {
		return defaultHost, false, nil
	}
	if !strings.HasPrefix(host, "unix://") {
		return "", false, &fault.Error{
			Hint: "Run agentbox on that machine, or name a socket of this one: --host " + defaultHost + ".",
			Err: fmt.Errorf("%s is %q: a daemon is set up on its own machine, through a unix socket: %w", from,
				host, fault.ErrUnsupported),
		}
	}
	return host, true, nil
}

// peer is the process that listens on a unix socket; 0 if none does.
func peer(host string) (pid int) {
	c, err := net.DialTimeout("unix", strings.TrimPrefix(host, "unix://"), apiTimeout)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}

// haveSystemd reports whether systemd runs, as sd_booted(3) does.
func haveSystemd() bool {
	st, err := os.Lstat("/run/systemd/system")
	return err == nil && st.IsDir()
}

// mainPid is the process of docker.service; 0 without one.
func mainPid(ctx context.Context) int {
	if !haveSystemd() {
		return 0
	}
	out, err := command(ctx, "systemctl", "show", "--property", "MainPID", "--value", "docker.service").Output()
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(out)))
	return pid
}

func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.WaitDelay = time.Second
	return cmd
}

// reload makes the daemon read its configuration; containers go on.
func (d *daemon) reload(ctx context.Context) error {
	if d.pid == mainPid(ctx) {
		// A unit may do more on a reload than send the signal.
		if err := command(ctx, "systemctl", "reload", "docker.service").Run(); err == nil {
			return nil
		}
	}
	if err := d.process.Signal(syscall.SIGHUP); err != nil {
		return fmt.Errorf("dockerd (process %d): %w", d.pid, err)
	}
	return nil
}

func (d *daemon) client() (*client.Client, error) {
	return client.NewClientWithOpts(client.WithHost(d.host), client.WithAPIVersionNegotiation(),
		client.WithTraceProvider(noop.NewTracerProvider()))
}

// registered is what the daemon says of its runtimes.
type registered struct {
	paths map[string]string
	def   string
}

func (d *daemon) registered(ctx context.Context) (r registered, err error) {
	cli, err := d.client()
	if err != nil {
		return r, err
	}
	defer cli.Close()
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	info, err := cli.Info(ctx)
	if err != nil {
		return r, err
	}
	r = registered{paths: map[string]string{}, def: info.DefaultRuntime}
	for name, rt := range info.Runtimes {
		r.paths[name] = rt.Path
	}
	return r, nil
}

// await asks the daemon until ok holds.
func (d *daemon) await(caller context.Context, ok func(registered) bool) error {
	ctx, cancel := context.WithTimeout(caller, reloadTimeout)
	defer cancel()
	tick := time.NewTicker(reloadPoll)
	defer tick.Stop()
	for {
		r, err := d.registered(ctx)
		if err == nil && ok(r) {
			return nil
		}
		select {
		case <-ctx.Done():
			if caller.Err() != nil {
				return context.Cause(caller)
			}
			if err == nil || errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("dockerd (process %d) did not take it up within %v", d.pid, reloadTimeout)
			}
			return err
		case <-tick.C:
		}
	}
}

// users lists the containers that were made with a runtime, stopped ones too.
func (d *daemon) users(ctx context.Context, runtime string) (names []string, err error) {
	cli, err := d.client()
	if err != nil {
		return nil, err
	}
	defer cli.Close()
	all, err := cli.ContainerList(ctx, container.ListOptions{All: true})
	if err != nil {
		return nil, err
	}
	for _, c := range all {
		one, err := cli.ContainerInspect(ctx, c.ID)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if one.HostConfig != nil && one.HostConfig.Runtime == runtime {
			names = append(names, strings.TrimPrefix(one.Name, "/"))
		}
	}
	return names, nil
}

// validate has dockerd read a configuration. known is false where it cannot:
// releases before 23.0 have no --validate, and there may be no dockerd.
func validate(ctx context.Context, program, path string) (known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	out, err := command(ctx, program, "--validate", "--config-file", path).CombinedOutput()
	switch {
	case err == nil:
		return true, nil
	case ctx.Err() != nil:
		return false, ctx.Err()
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist), bytes.Contains(out, []byte("unknown flag")):
		return false, nil
	}
	return true, fmt.Errorf("dockerd does not accept it: %s: %w", lastLine(out), fault.ErrInvalid)
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}
