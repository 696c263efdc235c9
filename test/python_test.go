package test

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// python runs a program that uses the client for Python.
func (b *box) python(socket string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(b.Context(), "python3", append([]string{"-W", "error::ResourceWarning"}, args...)...)
	cmd.Env = append(os.Environ(), "AGENTBOX_HOST=unix://"+socket, "PYTHONPATH=../clients/python",
		"PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

// The client's own tests, and its example.
func TestPythonClient(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, socket := b.serve()
	if out, err := b.python(socket, "../clients/python/test_agentbox.py").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	out, err := b.python(socket, "../clients/python/example.py").CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "nothing of it is left\n") {
		t.Errorf("%v: %s", err, out)
	}
}

// The service is killed when it has made the checkpoint and has not said so. The
// client asks the next service, and the checkpoint was taken once.
func TestPythonServiceKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cmd, socket := b.serve("AGENTBOX_FAILPOINT=checkpoint.after-commit=kill")
	b.start("c", "--network", "none", "busybox", "sleep", "1000")
	client := b.python(socket, "-c",
		`import agentbox; c = agentbox.Client(retry=120); c.info(); print(c.sandbox("c").checkpoint("turn"))`)
	var stdout, stderr bytes.Buffer
	client.Stdout, client.Stderr = &stdout, &stderr
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the service was not killed")
	}
	b.serve()
	if err := client.Wait(); err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	c := api.Dial(socket)
	defer c.Close()
	list, err := c.Checkpoints(t.Context(), runtime.CheckpointFilter{All: true})
	if err != nil || len(list) != 1 || list[0].ID != strings.TrimSpace(stdout.String()) {
		t.Errorf("the client has %q, the service %+v: %v", &stdout, list, err)
	}
}
