package containerd

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// A process of a container that stands where an address lies cannot pass for the shim.
func TestShimIsNone(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "address"), []byte("unix:///evil"), 0o600); err != nil {
		t.Fatal(err)
	}
	child := func(flags uintptr) int {
		cmd := exec.Command("sh", "-c", "sleep 100 & echo; wait")
		cmd.Dir, cmd.SysProcAttr = dir, &syscall.SysProcAttr{Cloneflags: flags}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		children := func() []string {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%[1]d/task/%[1]d/children", cmd.Process.Pid))
			return strings.Fields(string(text))
		}
		t.Cleanup(func() {
			for _, pid := range children() {
				_ = exec.Command("kill", "-9", pid).Run()
			}
			_ = cmd.Wait()
		})
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		list := children()
		if len(list) != 1 {
			t.Fatalf("children: %q", list)
		}
		var pid int
		if _, err := fmt.Sscan(list[0], &pid); err != nil {
			t.Fatal(err)
		}
		return pid
	}

	for _, flags := range []uintptr{unix.CLONE_NEWPID, unix.CLONE_NEWUSER, unix.CLONE_NEWPID | unix.CLONE_NEWUSER} {
		if got, err := shimOf(child(flags)); !errors.Is(err, fault.ErrUnsupported) || got.Address != "" {
			t.Errorf("a process in namespaces %#x is taken for the shim: %+v, %v", flags, got, err)
		}
	}
	pid := child(0)
	if got, err := shimOf(pid); err != nil || got.Address != "unix:///evil" {
		parent, _ := kernel.ParentOf(pid)
		t.Errorf("of the host's, process %d: %+v, %v", parent, got, err)
	}
}
