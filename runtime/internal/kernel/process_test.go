package kernel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A process of a container has namespaces of its own; one that has ended shares none.
func TestSharesNamespaces(t *testing.T) {
	begin := func(flags uintptr) int {
		cmd := exec.Command("sleep", "100")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd.Process.Pid
	}
	plain, inPid, inBoth := begin(0), begin(unix.CLONE_NEWPID), begin(unix.CLONE_NEWPID|unix.CLONE_NEWUSER)
	for _, c := range []struct {
		pid   int
		kinds []string
		want  bool
	}{
		{plain, []string{"pid", "user"}, true},
		{inPid, []string{"user"}, true},
		{inPid, []string{"user", "pid"}, false},
		{inBoth, []string{"user"}, false},
		{inBoth, []string{"pid"}, false},
		{inBoth, []string{"net"}, true},
		{0, []string{"pid"}, false},
	} {
		if got := SharesNamespaces(c.pid, c.kinds...); got != c.want {
			t.Errorf("process %d, %q: %v", c.pid, c.kinds, got)
		}
	}
}

// A shell that was forked, and executes something only when it is told to, is like
// the first process of a container that its runtime has made.
func TestExecuted(t *testing.T) {
	wait, tell, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer tell.Close()
	cmd := exec.Command("sh", "-c", "(read what <&3; exec $what) & echo $!; wait")
	cmd.ExtraFiles = []*os.File{wait}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	wait.Close()
	var pid int
	if _, err := fmt.Fscan(bufio.NewReader(out), &pid); err != nil {
		t.Fatal(err)
	}
	p, err := OpenProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	defer p.Kill(9)

	soon, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if err := p.Executed(soon); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("it has executed nothing yet: %v", err)
	}
	if _, err := tell.WriteString("sleep 1000\n"); err != nil {
		t.Fatal(err)
	}
	if err := p.Executed(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil ||
		!strings.HasSuffix(exe, "/sleep") && !strings.HasSuffix(exe, "/coreutils") {
		t.Errorf("waited for until it was %q, %v", exe, err)
	}
	if err := p.Kill(9); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Wait(t.Context()), p.Executed(t.Context())); err != nil {
		t.Errorf("of one that has ended: %v", err)
	}
}
