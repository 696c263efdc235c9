package podman

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// crun, by systemd's rules, puts the processes into a cgroup of its own beneath the one that
// Podman reports, and freezes that.
func TestFrozenBeneath(t *testing.T) {
	groups, err := kernel.Hierarchies()
	must(t, err)
	groups = slices.Clone(groups)
	i := slices.IndexFunc(groups, func(m kernel.Hierarchy) bool { return m.V2 })
	if i < 0 {
		t.Fatal("this host has no cgroup v2")
	}
	groups[i].Freezer = true // beside v1 it may be another's

	var c container
	c.State.CgroupPath = fmt.Sprintf("/abpodman-%d.scope", os.Getpid())
	inner := c.State.CgroupPath + "/container"
	at := filepath.Join(groups[i].Path, inner)
	must(t, os.MkdirAll(at, 0o755))
	cgroup, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(cgroup)
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &unix.SysProcAttr{UseCgroupFD: true, CgroupFD: cgroup}
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = c.thaw(groups)
		_ = cmd.Wait()
		must(t, groups[i:i+1].Remove(context.Background(), c.State.CgroupPath))
	})
	c.State.Status, c.State.Pid = string(runtime.Running), cmd.Process.Pid
	is := func(want bool) {
		t.Helper()
		if got, err := c.frozen(groups[i : i+1]); got != want || err != nil {
			t.Errorf("frozen: %v, %v", got, err)
		}
	}
	is(false)
	for _, dir := range []string{at, filepath.Dir(at)} {
		must(t, os.WriteFile(filepath.Join(dir, "cgroup.freeze"), []byte("1"), 0))
		is(true)
		must(t, c.thaw(groups[i:i+1]))
		is(false)
	}
}
