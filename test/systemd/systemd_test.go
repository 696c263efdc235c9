//go:build vm

// Package systemd holds the tests of agentbox as a package under systemd: they
// install it, restart and kill its service, and look at what a boot and a power cut
// leave. They change the machine that they run in, and so are only built for the
// one of `make test-vm`, which has the package and drives the boots (test/vm).
package systemd

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	program = "/usr/bin/agentbox"
	root    = "/var/lib/agentbox"
	// counter counts, and says by its nonce which of its lives it is.
	counter = "cat /proc/sys/kernel/random/uuid >/nonce; i=0; while :; do i=$((i+1)); echo $i >/new; mv /new /count; sleep 0.2; done"
)

// patience is for a machine that is emulated on a host with much else to do.
const patience = 10 * time.Minute

// sh runs a script of the machine's and returns its output, trimmed.
func sh(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return strings.TrimSpace(string(out))
}

// agentbox runs a command of the package's program, which has to succeed.
func agentbox(t *testing.T, args ...string) string {
	t.Helper()
	// A monitor that outlives the command must not keep us: output goes to a file.
	f, err := os.CreateTemp("", "out")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = f, os.Stderr
	err = cmd.Run()
	out, _ := os.ReadFile(f.Name())
	if err != nil {
		t.Fatalf("agentbox %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still not so after %v: %s\n%s", patience, what,
				sh(t, "journalctl -b -u agentbox --no-pager | tail -n 30"))
		}
	}
}

func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %#v, want %#v", what, got, want)
	}
}

// sandbox is of what `agentbox inspect` documents.
type sandbox struct {
	ID       string `json:"id"`
	Status   string `json:"status"`
	Pid      int    `json:"pid"`
	Upperdir string `json:"upperdir"`
}

func inspect(t *testing.T, name string) sandbox {
	t.Helper()
	var list []sandbox
	if err := json.Unmarshal([]byte(agentbox(t, "inspect", name)), &list); err != nil || len(list) != 1 {
		t.Fatalf("inspect %s: %v, %v", name, list, err)
	}
	return list[0]
}

// file is a file of a sandbox, without asking agentbox.
func (s sandbox) file(name string) string {
	data, _ := os.ReadFile(filepath.Join(s.Upperdir, name))
	return strings.TrimSpace(string(data))
}

// count is how far the counter of a sandbox is.
func (s sandbox) count() int {
	n, _ := strconv.Atoi(s.file("count"))
	return n
}

// goesOn waits until a sandbox counts further.
func (s sandbox) goesOn(t *testing.T) {
	t.Helper()
	from := s.count()
	eventually(t, "it counts on", func() bool { return s.count() > from })
}

// unit is a property of the service.
func unit(t *testing.T, property string) string {
	t.Helper()
	return sh(t, "systemctl show agentbox.service --value -p "+property)
}

// serves waits for the service to be there as another process than before, and
// returns its process.
func serves(t *testing.T, before string) string {
	t.Helper()
	eventually(t, "the service is there", func() bool {
		return unit(t, "ActiveState") == "active" && unit(t, "MainPID") != before
	})
	return unit(t, "MainPID")
}

// leaks compares what there is of sandboxes in the machine with those that run.
func leaks(t *testing.T) {
	t.Helper()
	equal(t, "what recover still finds", agentbox(t, "recover"), "nothing to recover")
	all := map[string]bool{}
	for _, id := range strings.Fields(agentbox(t, "ps", "-a", "-q", "--no-trunc")) {
		all[id] = true
	}
	running := map[string]bool{}
	for _, id := range strings.Fields(agentbox(t, "ps", "-q", "--no-trunc")) {
		running[id] = true
	}
	check := func(what, pattern string, may map[string]bool) {
		found, _ := filepath.Glob(pattern)
		for _, path := range found {
			name, _, _ := strings.Cut(filepath.Base(path), ".")
			if len(name) == 32 && !may[name] {
				t.Errorf("%s of no sandbox: %s", what, path)
			}
		}
	}
	check("files", root+"/sandboxes/*", all)
	check("files", "/run/agentbox/*", all)
	check("a cgroup", "/sys/fs/cgroup/agentbox/*", running)
	for line := range strings.Lines(sh(t, "cut -d' ' -f5 /proc/self/mountinfo")) {
		if rest, ok := strings.CutPrefix(strings.TrimSpace(line), root+"/sandboxes/"); ok &&
			!running[rest[:min(32, len(rest))]] {
			t.Errorf("a mount of no sandbox that runs: %s", line)
		}
	}
}
