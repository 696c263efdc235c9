package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agentbox/agentbox/overlay"
)

// TestScript runs what needs no sandbox.
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Cmds:                scriptCommands,
		// Not this host's own.
		Setup: func(env *testscript.Env) error {
			env.Setenv("AGENTBOX_ROOT", filepath.Join(env.WorkDir, "root"))
			return nil
		},
	})
}

// TestEngine runs real sandboxes, as root, each script under a root of its own.
// The programs are built, since the monitor of a sandbox starts them again.
func TestEngine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test runs sandboxes: run it as root")
	}
	bin := t.TempDir()
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", bin, "../agentbox", "../agentbox-runtime")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // it is the init of sandboxes, too
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	engine := testscript.Params{
		Dir:                 "testdata/engine",
		RequireExplicitExec: true,
		Cmds:                scriptCommands,
		Condition: func(name string) (bool, error) {
			return name == "quota" && overlay.ProjectQuota(os.TempDir()) == nil, nil
		},
		Setup: func(env *testscript.Env) error {
			// Not below $WORK: its clean-up must never walk into a mount.
			root, err := os.MkdirTemp("", "agentbox")
			if err != nil {
				return err
			}
			// Sandboxes of other tests may run beside ours.
			free, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			env.Setenv("PORT", strconv.Itoa(free.Addr().(*net.TCPAddr).Port))
			if err := free.Close(); err != nil {
				return err
			}
			env.Setenv("AGENTBOX_ROOT", root)
			env.Setenv("PATH", bin+":"+env.Getenv("PATH"))
			if err := registries(env); err != nil {
				return err
			}
			env.Defer(func() { sweep(filepath.Join(bin, "agentbox"), root) })
			return nil
		},
	}
	testscript.Run(t, engine)
	// Through a service the output and the effects are the same.
	t.Run("service", func(t *testing.T) {
		through, setup := engine, engine.Setup
		through.Dir = ""
		through.Condition = func(name string) (bool, error) { return name == "service", nil }
		for _, name := range throughService {
			through.Files = append(through.Files, filepath.Join(engine.Dir, name+".txtar"))
		}
		through.Setup = func(env *testscript.Env) error {
			if err := setup(env); err != nil {
				return err
			}
			return serve(env, filepath.Join(bin, "agentbox"))
		}
		testscript.Run(t, through)
	})
}

// throughService are the scripts that the service runs, too: every kind of stream
// and of error.
var throughService = []string{
	"attach", "audit", "browse", "cp", "errors", "exec", "foreign", "lifecycle", "logs", "portable", "refs",
	"signals",
}

// serve runs the service of a script, and has commands use it.
func serve(env *testscript.Env, agentbox string) error {
	ready, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(env.WorkDir,
		"ready"), Net: "unixgram"})
	if err != nil {
		return err
	}
	defer ready.Close()
	cmd := exec.Command(agentbox, "serve")
	cmd.Env = append(slices.Clone(env.Vars), "NOTIFY_SOCKET="+ready.LocalAddr().String())
	log, err := os.Create(filepath.Join(env.WorkDir, "serve.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stderr = log
	if err := cmd.Start(); err != nil {
		return err
	}
	env.Defer(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			env.T().Fatal("serve: ", err)
		}
	})
	if err := ready.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		return err
	}
	if _, err := ready.Read(make([]byte, 100)); err != nil {
		return fmt.Errorf("the service does not get ready: %w", err)
	}
	env.Setenv("AGENTBOX_HOST", "unix://"+filepath.Join(env.Getenv("AGENTBOX_ROOT"), "run", "agentbox.sock"))
	return nil
}

// registries runs two: $REGISTRY, where names lie that have none, and $CLOSED,
// for the user "me" with the password "secret".
func registries(env *testscript.Env) error {
	open := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	closed := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		open.ServeHTTP(w, r)
	})
	for name, handler := range map[string]http.Handler{"REGISTRY": open, "CLOSED": closed} {
		s := httptest.NewServer(handler)
		env.Defer(s.Close)
		env.Setenv(name, s.Listener.Addr().String())
	}
	env.Setenv("DOCKER_CONFIG", filepath.Join(env.WorkDir, "docker"))
	conf := filepath.Join(env.WorkDir, "registries.toml")
	env.Setenv("AGENTBOX_REGISTRIES_CONF", conf)
	return os.WriteFile(conf, fmt.Appendf(nil, "default = %q\n", env.Getenv("REGISTRY")), 0o600)
}

// sweep takes away what a failed script left.
func sweep(agentbox, root string) {
	run := func(args ...string) string {
		cmd := exec.Command(agentbox, args...)
		cmd.Env = append(os.Environ(), "AGENTBOX_ROOT="+root)
		out, _ := cmd.Output()
		return string(out)
	}
	for _, id := range strings.Fields(run("ps", "-aq", "--no-trunc")) {
		run("rm", "-f", "--checkpoints", id)
	}
	// What they had aside, which would make the root again, ends by itself.
	for deadline := time.Now().Add(time.Minute); len(programsNaming(root)) > 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	if len(mountsBelow(root)) == 0 {
		_ = os.RemoveAll(root)
	}
}

func mountsBelow(root string) (mounts []string) {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	for _, line := range strings.Split(string(data), "\n") {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], root+"/") {
			mounts = append(mounts, f[4])
		}
	}
	return mounts
}

var scriptCommands = map[string]func(*testscript.TestScript, bool, []string){
	"exits":   exitsCommand,
	"json":    jsonCommand,
	"capture": captureCommand,
	"retry":   retryCommand,
	"clean":   cleanCommand,
}

// exits CODE PROGRAM [ARG...] runs a program, which must end with that code.
func exitsCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM [ARG...]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	if err := ts.Exec(args[1], args[2:]...); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// json PATH REGEXP looks at a value in the last stdout: json .0.status running.
// A path that ends with len is the number of a list's elements.
func jsonCommand(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: json PATH REGEXP")
	}
	var v any
	dec := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
	dec.UseNumber()
	ts.Check(dec.Decode(&v))
	for _, key := range strings.Split(strings.TrimPrefix(args[0], "."), ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[key]
		case []any:
			if key == "len" {
				v = len(x)
				continue
			}
			i, err := strconv.Atoi(key)
			ts.Check(err)
			if i >= len(x) {
				ts.Fatalf("%s: there are %d elements", args[0], len(x))
			}
			v = x[i]
		default:
			v = nil
		}
	}
	matched, err := regexp.MatchString("^(?:"+args[1]+")$", fmt.Sprint(v))
	ts.Check(err)
	if matched == neg {
		ts.Fatalf("%s is %v", args[0], v)
	}
}

// capture NAME puts the last stdout into an environment variable.
func captureCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: capture NAME")
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}

// retry PROGRAM [ARG...] runs a program until it succeeds, at most 2 min: what
// goes on inside a sandbox sends the script no event.
func retryCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: retry PROGRAM [ARG...]")
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		err := ts.Exec(args[0], args[1:]...)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("%v: still %v", args, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// clean checks that nothing is left under AGENTBOX_ROOT and on the host.
func cleanCommand(ts *testscript.TestScript, neg bool, args []string) {
	root := ts.Getenv("AGENTBOX_ROOT")
	if neg || len(args) > 0 || root == "" {
		ts.Fatalf("usage: clean, with AGENTBOX_ROOT set")
	}
	for _, list := range [][]string{{"ps", "-aq"}, {"checkpoint", "ls", "--all", "-q"}} {
		ts.Check(ts.Exec("agentbox", list...))
		if out := ts.ReadFile("stdout"); out != "" {
			ts.Fatalf("%v: %s", list, out)
		}
	}
	// The monitor, and with it the clean-up after an exit, ends a moment after
	// the sandbox that it watched; nothing announces it.
	deadline := time.Now().Add(time.Minute)
	for {
		left := leftovers(root)
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("left behind: %q", left)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// leftovers lists what no root without sandboxes and checkpoints may have, in
// its directories and on the host.
func leftovers(root string) (left []string) {
	left = append(mountsBelow(root), programsNaming(root)...)
	for dir, stays := range map[string][]string{
		"sandboxes":          nil,
		"events":             nil,
		"supervised":         nil,
		"checkpoints":        {"failed"},
		"checkpoints/failed": nil,
		"run": {
			"runc", "exits", "tmp", "restore", "paused", "lock", "userns.json", "agentbox.sock",
			"agentbox.sock.lock", "requests",
		},
		"run/lock":    nil,
		"run/paused":  nil,
		"run/restore": nil,
		"run/runc":    nil,
		"run/tmp":     nil,
		"images/tmp":  nil,
	} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil && !os.IsNotExist(err) {
			left = append(left, err.Error())
		}
		for _, e := range entries {
			if !slices.Contains(stays, e.Name()) {
				left = append(left, filepath.Join(dir, e.Name()))
			}
		}
	}
	// Bridges and tables carry a digest of the root, cgroups the sandbox's id,
	// of which the lock file outlives the sandbox.
	sum := sha256.Sum256([]byte(root))
	tag := hex.EncodeToString(sum[:6])
	links, err := net.Interfaces()
	if err != nil {
		left = append(left, err.Error())
	}
	for _, l := range links {
		alias, _ := os.ReadFile(filepath.Join("/sys/class/net", l.Name, "ifalias"))
		if strings.Contains(l.Name, tag[:6]) || strings.Contains(string(alias), tag) {
			left = append(left, "network device "+l.Name)
		}
	}
	tables, err := exec.Command("nft", "list", "tables").CombinedOutput()
	if err != nil || strings.Contains(string(tables), tag) {
		left = append(left, fmt.Sprintf("firewall tables: %s (%v)", tables, err))
	}
	locks, _ := filepath.Glob(filepath.Join(root, "locks", "*"))
	for _, dir := range []string{"/sys/fs/cgroup/agentbox", "/sys/fs/cgroup/*/agentbox"} {
		for _, lock := range locks {
			groups, _ := filepath.Glob(filepath.Join(dir, filepath.Base(lock)+"*"))
			left = append(left, groups...)
		}
	}
	return left
}

// programsNaming lists the command lines that root, or a path below it, is part of.
func programsNaming(root string) (lines []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil && (strings.Contains(string(data), root+"/") || strings.Contains(string(data), root+"\x00")) {
			lines = append(lines, strings.ReplaceAll(string(data), "\x00", " "))
		}
	}
	return lines
}
