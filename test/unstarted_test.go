package test

import (
	"os/exec"
	"strings"
	"testing"
)

// A run is a creation and a start. The sandbox goes when its caller ends between the two: by the
// next command, or by the service. One that was created for its own sake, or was started, stays.
func TestUnstartedGoesWithItsCaller(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	for _, at := range []string{
		"create.after-row", "create.after-backend", "start.before-backend", "oci.start.after-bundle",
	} {
		for _, args := range [][]string{{"run", "--rm"}, {"run", "-d"}, {"run"}} {
			args = append(args, "--name", "half", "--network", "none", "busybox", "sleep", "1000")
			if r := b.try([]string{"AGENTBOX_FAILPOINT=" + at + "=kill"}, args...); !r.killed {
				t.Fatalf("it was not killed: %s", r)
			}
			b.try(nil, "ps") // the next command
			if got := b.ok("ps", "-aq"); got != "" {
				t.Errorf("%s of %q: left: %s", at, args[:2], b.ok("ps", "-a"))
			}
		}
	}
	b.ok("create", "--name", "own", "--network", "none", "busybox", "true")
	b.own("own")
	if r := b.try(nil, "run", "-d", "--name", "failed", "--network", "none", "busybox", "nosuch"); r.code != 127 {
		t.Errorf("%s", r)
	}
	b.own("failed")
	b.start("started", "--network", "none", "busybox", "sleep", "1000")
	b.awaitSandboxes(3)

	_, socket := b.serve()
	// The caller, its process, has ended when this returns.
	create := `
import socket, sys, json
body = json.dumps({"spec": {"name": sys.argv[2], "image": "busybox", "args": ["true"], "network": {"mode": "none"}}, "to_start": True})
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
s.sendall(("POST /v1/sandboxes HTTP/1.1\r\nHost: agentbox\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)).encode())
sys.stdout.write(s.makefile().read())
`
	out, err := exec.Command("python3", "-c", create, socket, "half").CombinedOutput()
	if err != nil || !strings.Contains(string(out), `"name":"half"`) {
		t.Fatalf("%v: %s", err, out)
	}
	b.awaitSandboxes(3)
	b.ok("run", "--rm", "--network", "none", "busybox", "true")
	for _, name := range []string{"own", "failed", "started"} {
		b.inspect(name)
	}
}
