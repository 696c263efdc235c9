package podman

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
)

// image imports the suite's busybox, once.
func image(t *testing.T) (name, digest string) {
	t.Helper()
	if exec.Command("podman", "image", "exists", "bt").Run() != nil {
		lower := backendtest.BusyboxLower(t)[0]
		tar := filepath.Join(t.TempDir(), "image.tar")
		out, err := exec.Command("tar", "-C", lower, "-cf", tar, ".").CombinedOutput()
		if err != nil {
			t.Fatalf("tar: %v: %s", err, out)
		}
		podman(t, "import", tar, "bt")
	}
	return "bt", podman(t, "image", "inspect", "--format", "{{.Digest}}", "bt")
}

// maker is the backend with what it leaves to Podman: it makes containers, as a
// user would, and finds them by the suite's ids.
type maker struct {
	*Backend
	root string
}

const ownLabel = "backendtest.root"

func (m maker) Create(ctx context.Context, s runtime.Spec, _ []string) error {
	args := []string{
		"create", "--name", name(s.ID), "--label", ownLabel + "=" + m.root, "--label", "id=" + s.ID, "--pull", "never",
	}
	flag := func(name, value string) {
		if value != "" {
			args = append(args, name, value)
		}
	}
	for _, kv := range s.Env {
		flag("--env", kv)
	}
	flag("--workdir", s.Workdir)
	flag("--user", s.User)
	flag("--hostname", s.Hostname)
	flag("--stop-signal", s.StopSignal)
	for name, on := range map[string]bool{
		"--tty": s.Terminal, "--interactive": s.OpenStdin, "--read-only": s.ReadOnly,
	} {
		if on {
			args = append(args, name)
		}
	}
	for _, v := range s.Mounts {
		if v.Type == "tmpfs" {
			flag("--tmpfs", strings.TrimSuffix(v.Target+":"+v.Options, ":"))
			continue
		}
		mode := "rw"
		if v.ReadOnly {
			mode = "ro"
		}
		flag("--volume", v.Source+":"+v.Target+":"+mode)
	}
	if s.Network.Mode != runtime.NetworkBridge {
		flag("--network", s.Network.Mode)
	}
	for _, p := range s.Network.Ports {
		flag("--publish", fmt.Sprintf("%s:%d:%d/%s", p.HostIP, p.Host, p.Sandbox, p.Protocol))
	}
	if s.Resources.Memory > 0 {
		flag("--memory", strconv.FormatInt(s.Resources.Memory, 10))
	}
	if s.Resources.CPUs > 0 {
		flag("--cpus", strconv.FormatFloat(s.Resources.CPUs, 'f', -1, 64))
	}
	if s.Resources.Pids > 0 {
		flag("--pids-limit", strconv.FormatInt(s.Resources.Pids, 10))
	}
	err := m.do(ctx, append(append(args, s.Image), s.Args...)...)
	if err != nil && strings.Contains(err.Error(), "is already in use") {
		return fmt.Errorf("%w: %w", fault.ErrExists, err)
	}
	return err
}

func name(id string) string { return "bt-" + id }

// id is the backend's for one of the suite's.
func (m maker) id(ctx context.Context, id string) string {
	c, err := m.find(ctx, name(id))
	if err != nil {
		return id // no such container
	}
	return c.id()
}

func (m maker) List(ctx context.Context) ([]string, error) {
	out, err := m.ask(ctx, "ps", "--all", "--filter", "label="+ownLabel+"="+m.root, "--format", "{{.Labels.id}}")
	return strings.Fields(string(out)), err
}

func (m maker) Start(ctx context.Context, id string, o runtime.StartOptions) (func() error, error) {
	return m.Backend.Start(ctx, m.id(ctx, id), o)
}
func (m maker) Attach(ctx context.Context, id string, s runtime.Streams) error {
	return m.Backend.Attach(ctx, m.id(ctx, id), s)
}
func (m maker) Stop(ctx context.Context, id string, o runtime.StopOptions) error {
	return m.Backend.Stop(ctx, m.id(ctx, id), o)
}
func (m maker) Pause(ctx context.Context, id string) error {
	return m.Backend.Pause(ctx, m.id(ctx, id))
}
func (m maker) Unpause(ctx context.Context, id string) error {
	return m.Backend.Unpause(ctx, m.id(ctx, id))
}
func (m maker) Kill(ctx context.Context, id, signal string) error {
	return m.Backend.Kill(ctx, m.id(ctx, id), signal)
}
func (m maker) Exec(ctx context.Context, id string, p runtime.Process, s runtime.Streams) (int, error) {
	return m.Backend.Exec(ctx, m.id(ctx, id), p, s)
}
func (m maker) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	return m.Backend.Wait(ctx, m.id(ctx, id))
}
func (m maker) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	return m.Backend.Inspect(ctx, m.id(ctx, id))
}
func (m maker) Logs(ctx context.Context, id string, o runtime.LogOptions, stdout, stderr io.Writer) error {
	return m.Backend.Logs(ctx, m.id(ctx, id), o, stdout, stderr)
}
func (m maker) Remove(ctx context.Context, id string) error {
	return m.Backend.Remove(ctx, m.id(ctx, id))
}
func (m maker) Mount(ctx context.Context, id string, fn func(string) error) error {
	return m.Backend.Mount(ctx, m.id(ctx, id), fn)
}

// Why cases are left out.
const (
	ofTheTest = "the test makes the containers, not the backend"
	shared    = "package streams does it, for the backend oci too"
	later     = "make test-long tries it"
)

var needless = map[string]string{
	"create/": ofTheTest,
	"list/":   ofTheTest,
	"spec/":   ofTheTest,
	"daemon/": "Podman has none",
	"start/a command that cannot be executed is 126": "as with the one that is not there",
	"start/outlives the context it was started with": "conmon's parent is Podman's command, not this process",
	"streams/much output arrives whole":              shared,
	"streams/nil writers drop the output":            shared,
	"streams/stdin ends":                             shared,
	"exec/a command that cannot be executed is 126":  "as with the one that is not there",
	"exec/several at once":                           "each is a Podman of its own",
	"logs/tail":                                      shared,
	"logs/partial lines":                             shared,
	"logs/long lines":                                shared,
	"logs/since":                                     shared,
	"many/":                                          "each is a Podman of its own, and the other cases start and stop enough of them",
	"remove/the id is free again":                    ofTheTest,
	"remove/a cancelled context":                     ofTheTest,
	"kill/signals by name and number":                "Podman reads them; stop/signals sends some",
	"wait/knows what the memory limit ended":         ofTheTest,
	"wait/exit codes":                                "exec/exit codes and wait/after the exit see them",
	"files/the upperdir is visible from the host":    "files/what is put into the upperdir is there looks at the same directory",
	"files/deletions are whiteouts":                  "the kernel makes them, whoever mounted",
	"mount/the function's error":                     "mount/a running one passes the same way",
	"pause/is over with the next start":              "Podman makes a new container then",
	"logs/in order":                                  shared,
	"logs/follow":                                    shared,
	"logs/timestamps":                                shared,
	"logs/follow a cancelled context":                shared,
	"stop/is idempotent":                             "stop/kills at once, and every other case's end, stops a stopped one",
}

// The suite, with containers as a user of Podman makes them.
func TestConformance(t *testing.T) {
	// Each of Podman's commands takes a tenth of a second or more. The remaining cases are about
	// the backend itself, or about what a restore relies on.
	needless := maps.Clone(needless)
	if !thorough.Asked() {
		for _, group := range []string{
			"attach/", "exec/", "files/", "kill/", "logs/", "mount/", "streams/", "terminal/",
		} {
			needless[group] = later
		}
		delete(needless, "wait/exit codes")
	}
	cannot := map[string]string{}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		// There the journal has the logs, which is not package streams' but Podman's.
		maps.DeleteFunc(needless, func(name, _ string) bool { return strings.HasPrefix(name, "logs/") })
		cannot["logs/in order"] = "podman logs writes what is of stdout and of stderr apart"
		cannot["logs/tail"] = "podman logs --tail does not count a last line that has no end"
		cannot["logs/long lines"] = "podman logs --tail counts the pieces that a long line is logged in"
	}
	maps.Copy(cannot, map[string]string{
		"create/a failure leaves nothing":             "its layers are Podman's, and Create is the test's own",
		"spec/an init reaps and passes signals on":    "Podman's own init (catatonit) is up to Podman",
		"spec/user, directory, hostname, environment": "Podman refuses a working directory that the image does not have",
		"spec/what processes may do":                  "Podman's containers have no policy",
		"spec/network bridge":                         "Podman gives a new address at every start; a restore asks for the old one",
	})
	maps.Copy(cannot, backendtest.NoWorkspaces())
	backendtest.Run(t, backendtest.Factory{
		Lower: backendtest.BusyboxLower,
		Image: image,
		New: func(t *testing.T, root string) runtime.Backend {
			b, err := Open(Options{Root: root})
			must(t, err)
			return maker{b, root}
		},
		Cannot:   cannot,
		Needless: needless,
	})
}
