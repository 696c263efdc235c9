package network

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// tryAll is what a worker does that was taken over.
func tryAll(m *Manager) error {
	for _, path := range []string{
		filepath.Join(m.root, "state.db"), "/usr/bin/env", fmt.Sprintf("/proc/%d/environ", os.Getppid()),
	} {
		if _, err := os.ReadFile(path); !errors.Is(err, unix.EACCES) {
			return fmt.Errorf("read %s: %v", path, err)
		}
	}
	for _, path := range []string{
		filepath.Join(m.root, "new"), filepath.Join(m.root, "state.db"), "/etc/agentbox-test",
	} {
		if err := os.WriteFile(path, nil, 0o600); !errors.Is(err, unix.EACCES) {
			return fmt.Errorf("write %s: %v", path, err)
		}
	}
	if err := os.Remove(filepath.Join(m.root, "state.db")); !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("remove: %v", err)
	}
	if err := unix.Exec("/bin/true", []string{"true"}, nil); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("start a program: %v", err)
	}
	// Services of the host, which Landlock does not guard.
	if c, err := net.Dial("unix", filepath.Join(m.root, "service")); !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("reach a service: %v, %v", c, err)
	}
	if l, err := net.Listen("tcp4", "127.0.0.1:0"); err != nil || l.Close() != nil {
		return err
	}
	if err := unix.Kill(os.Getppid(), 0); !errors.Is(err, unix.EPERM) && abi() >= 6 {
		return fmt.Errorf("send a signal: %v", err)
	}
	// And what it does as ever.
	if _, err := os.ReadFile("/etc/hosts"); err != nil {
		return err
	}
	event := filepath.Join(m.EventsDir(), "a.jsonl")
	return errors.Join(os.WriteFile(event, nil, 0o600), os.Rename(event, event+".1"))
}

// abi is the kernel's version of Landlock; 0: it has none.
func abi() int {
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(n)
}

func TestWorkerIsConfined(t *testing.T) {
	w := filtered(t)
	w.setup("a", egressTo("good.example"))
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", w.workerPid()))
	if err != nil || len(tasks) == 0 {
		t.Fatal(err, tasks)
	}
	for _, path := range tasks { // each thread has its own
		status, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		for _, line := range []string{
			"CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Seccomp:\t2\n",
		} {
			if err != nil || !strings.Contains(string(status), line) {
				t.Errorf("%v, no %q in\n%s", err, line, status)
			}
		}
	}
	if abi() == 0 {
		t.Skip("the kernel has no Landlock")
	}
	if err := os.WriteFile(filepath.Join(w.m.root, "state.db"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	service, err := net.Listen("unix", filepath.Join(w.m.root, "service"))
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=confined "+w.m.root)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
