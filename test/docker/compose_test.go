package docker

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/enginetest"
)

const composeFile = `version: "2.4"
services:
  store:
    image: distro
    runtime: agentbox
    restart: always
    command: ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", "/tmp"]
  worker:
    image: distro
    runtime: agentbox
    restart: unless-stopped
    command: ["python3", "-u", "-c", %PROGRAM%]
`

// worker counts in the store, over one connection that must never break, and
// keeps its own count of what it asked for.
const worker = `
import socket, time
for _ in range(100):
    try:
        s = socket.create_connection(("store", 6379)); break
    except OSError:
        time.sleep(0.1)
s.settimeout(60)
f, n = s.makefile("rb"), 0
while True:
    s.sendall(b"INCR n\r\n")
    got = f.readline().strip().decode()
    n += 1
    if got != ":%d" % n:
        print("BROKEN", n, got)
        break
    open("/n", "w").write(str(n))
    time.sleep(0.01)
`

// TestCompose brings up a store and its worker by a compose file, checkpoints
// both at one instant, lets them go on, breaks both, and restores both: their
// connection and their counts go on from where they were.
func TestCompose(t *testing.T) {
	h := newHost(t, nil)
	b := h.box(t)
	distro(b)
	dir := enginetest.Dir(t)
	text := strings.ReplaceAll(composeFile, "%PROGRAM%", strconv.Quote(worker))
	if err := os.WriteFile(filepath.Join(dir, "docker-compose.yml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	compose := func(args ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "docker-compose", append([]string{"-p", "team"}, args...)...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "DOCKER_HOST="+h.Host, "DOCKER_CONFIG="+h.Dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("docker-compose %q: %v: %s", args, err, out)
		}
	}
	defer compose("down")
	compose("up", "-d")
	names := strings.Fields(h.Docker(t, "ps", "--format", "{{.Names}}", "--filter",
		"label=com.docker.compose.project=team"))
	if len(names) != 2 {
		t.Fatalf("compose made %q", names)
	}
	var store, work string
	for _, n := range names {
		if strings.Contains(n, "store") {
			store = n
		} else {
			work = n
		}
	}
	asked := func() int {
		data, _ := os.ReadFile(b.upper(work, "n"))
		n, _ := strconv.Atoi(string(data))
		return n
	}
	goesOn := func() {
		t.Helper()
		n := asked()
		b.eventually("the worker counts on", func() bool {
			if out := h.Docker(t, "logs", work); strings.Contains(out, "BROKEN") || strings.Contains(out, "Error") {
				t.Fatalf("the worker: %s", out)
			}
			return asked() > n+5
		})
	}
	goesOn()
	compose("pause")
	saved := asked()
	for _, n := range names {
		b.ok("checkpoint", "--name", "both", "docker://"+n)
	}
	compose("unpause")
	goesOn()
	h.Docker(t, "exec", store, "redis-cli", "set", "later", "1")
	h.Docker(t, "exec", work, "rm", "-rf", "/usr/lib/python3", "/etc/passwd")
	compose("pause")
	for _, n := range []string{store, work} {
		b.ok("restore", "docker://"+n, "both")
		b.is(n, "paused")
	}
	if n := asked(); n < saved-1 || n > saved+1 {
		t.Errorf("the worker's file says %d, at the checkpoint it was %d", n, saved)
	}
	compose("unpause")
	goesOn()
	if out := h.Docker(t, "exec", work, "sh", "-c", "ls /etc/passwd && cat /n"); !strings.Contains(out, "/etc/passwd") {
		t.Errorf("the worker's files: %s", out)
	}
	if out := h.Docker(t, "exec", store, "redis-cli", "exists", "later", "n"); !strings.HasSuffix(out, "1") {
		t.Errorf("the store has %s of a key set after the checkpoint and one set before", out)
	}
	for _, n := range names {
		if got := b.state(n, "{{.HostConfig.RestartPolicy.Name}} {{.State.Running}}"); !strings.HasSuffix(got,
			" true") || strings.HasPrefix(got, "no") {
			t.Errorf("%s after its restore: %s", n, got)
		}
	}
}

// distro makes the image of a distribution with redis and python.
func distro(b *box) {
	b.Helper()
	cmd, stderr := enginetest.Outside("../../scripts/debian-image.sh"), &bytes.Buffer{}
	cmd.Stderr = stderr
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("debian-image.sh: %v: %s", err, stderr)
	}
	b.Docker(b.T, "import", strings.TrimSpace(string(out)), "distro")
}
