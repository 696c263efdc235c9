package oci

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// A command on a file that does not answer: the start ends in time, says why and what to
// do, and leaves nothing. Once the file answers it can be started.
func TestCommandNotExecuted(t *testing.T) {
	x := newBox(t)
	x.execution = 500 * time.Millisecond
	dir := t.TempDir()
	busybox, err := exec.LookPath("busybox")
	must(t, err)
	data, err := os.ReadFile(busybox)
	must(t, err)
	program := filepath.Join(dir, "sleep")
	write(t, program, string(data), 0o755)
	id := x.create(with(spec("/slow/sleep", "1000"), func(s *runtime.Spec) {
		s.Mounts = []runtime.Mount{{Type: "bind", Source: dir, Target: "/slow"}}
	}))
	// An open of it blocks until the lease is given up, or for /proc/sys/fs/lease-break-time.
	f, err := os.OpenFile(program, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_, err = x.Start(t.Context(), id, runtime.StartOptions{})
	if !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), "not executed within 500ms") ||
		len(fault.Hint(err)) == 0 {
		t.Errorf("%v; hints %q", err, fault.Hint(err))
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
	if c := x.inspect(id); c.Status == runtime.Running || c.Pid != 0 {
		t.Errorf("%+v", c)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK); err != nil {
		t.Fatal(err)
	}
	must(t, f.Close())
	x.execution = executionTime
	x.start(id)
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
}

// A first process that dies before it is the command says why in the runtime's log
// only; what that says is told, once, and nothing that a terminal would obey.
func TestStartExplained(t *testing.T) {
	x := newBox(t)
	id := x.create(spec("true"))
	real := x.box.Wrapper
	x.box.Wrapper = filepath.Join(t.TempDir(), "runtime")
	write(t, x.box.Wrapper, `#!/bin/sh
case " $* " in *" create "*) ;; *) exec `+real+` "$@";; esac
while [ "$1" != --log ]; do shift; done
cat >>"$2" <<'EOF'
{"level":"warning","msg":"no matter"}
{"level":"fatal","msg":"nsexec-1[7]: cannot\u001b[31m seal: Device or resource busy"}
{"level":"error","msg":"runc create failed: read init-p:\nconnection reset by peer"}
EOF
printf 'runc create failed: read init-p:\nconnection reset by peer\n' >&2
exit 1
`, 0o755)
	_, err := x.Start(t.Context(), id, runtime.StartOptions{})
	want := "the OCI runtime could not start it: read init-p:\nconnection reset by peer; nsexec-1[7]: cannot [31m seal: Device or resource busy"
	if err == nil || err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	x.box.Wrapper = real
	x.start(id)
	if exit, err := x.Wait(t.Context(), id); err != nil || exit.Code != 0 {
		t.Errorf("with the real one: %+v, %v", exit, err)
	}
}
