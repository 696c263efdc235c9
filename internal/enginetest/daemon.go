package enginetest

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// daemon is the process of an engine of the test's own.
type daemon struct {
	Dir string // everything of it

	name    string
	command func(t testing.TB) *exec.Cmd
	answers func() bool
	cmd     *exec.Cmd
	ended   chan struct{} // closed when it has ended and was waited for
}

// Start starts the daemon and returns when it answers.
func (d *daemon) Start(t testing.TB) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(d.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	d.cmd = d.command(t)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// Not ended by what the terminal sends to the test.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cmd, ended := d.cmd, make(chan struct{})
	d.ended = ended
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	for deadline := time.Now().Add(patience); !d.answers(); {
		select {
		case <-ended:
			t.Fatalf("%s ended: %v\n%s", d.name, cmd.ProcessState, d.Log())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not answer\n%s", d.name, d.Log())
		}
	}
}

// Pid is the daemon's.
func (d *daemon) Pid() int { return d.cmd.Process.Pid }

// Kill ends the daemon as a crash would.
func (d *daemon) Kill(t testing.TB) {
	t.Helper()
	if err := d.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	// Not before it was waited for: for the next one's look at the pid file a
	// zombie is alive.
	select {
	case <-d.ended:
	case <-time.After(patience):
		t.Fatalf("%s, killed, does not end", d.name)
	}
}

// Restart kills the daemon and starts it again.
func (d *daemon) Restart(t testing.TB) {
	t.Helper()
	d.Kill(t)
	d.Start(t)
}

// Log is the end of what the daemon has logged.
func (d *daemon) Log() string {
	data, _ := os.ReadFile(filepath.Join(d.Dir, "log"))
	return string(data[max(0, len(data)-8<<10):])
}

// close ends the daemon, once clear has removed its containers, and fails the
// test when anything is left.
func (d *daemon) close(t testing.TB, clear func()) {
	if d.cmd == nil || d.cmd.Process == nil {
		return
	}
	if t.Failed() {
		t.Logf("%s:\n%s", d.name, d.Log())
	}
	clear()
	_ = d.cmd.Process.Signal(unix.SIGTERM)
	// By its own end: its process id may be another's by now.
	select {
	case <-d.ended:
	case <-time.After(patience):
		t.Errorf("%s does not end\n%s", d.name, d.Log())
		_ = d.cmd.Process.Kill()
	}
	left := func() map[int]string {
		found := processes(d.Dir)
		maps.DeleteFunc(found, func(pid int, cmdline string) bool { return pid == os.Getppid() || isTest(cmdline) })
		return found
	}
	wait(patience, func() bool { return len(left()) == 0 })
	for pid, cmdline := range left() {
		t.Errorf("left behind by %s: process %d: %s", d.name, pid, cmdline)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	unmountBelow(d.Dir)
}
