package test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// ownKiB is the memory in KiB that a process has of its own, without the pages of its program.
func ownKiB(t *testing.T, pid int) (n int) {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); strings.HasPrefix(s.Text(), "Anonymous:") && len(fields) > 1 {
			kib, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatal(err)
			}
			n += kib
		}
	}
	return n
}

// beside lists our processes of a root that are no monitors.
func (b *box) beside() (list []string) {
	for _, p := range processesOf(b.root) {
		if !strings.Contains(p, "conmon") {
			list = append(list, p)
		}
	}
	return list
}

// TestOneSupervisor has one process supervise all sandboxes of a root, whatever limits they have.
// The next command starts another if it is killed, and it ends with the last of them.
func TestOneSupervisor(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	const n = 20
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("c%d", i)
		b.start(names[i], "--network", "none", "--stop-signal", "KILL", "--ttl", "10h", "--idle", "10h",
			"--storage-size", "100m", "--restart", "always", "--checkpoint-every", "10h", "busybox", "sleep", "100000")
	}
	only := func() int {
		t.Helper()
		var list []string
		b.eventually("the supervisor is the only process beside the monitors", func() bool {
			list = b.beside()
			return len(list) == 1 && strings.HasSuffix(list[0], " supervise ")
		})
		return b.supervisor()
	}
	pid := only()
	equal(b, "monitors", len(b.monitors()), n)
	t.Logf("%d sandboxes with every limit: the supervisor has %d KiB of its own", n, ownKiB(t, pid))

	crashed := b.inspect("c0").Pid
	for _, pid := range []int{pid, crashed} {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.noProcess(pid)
	}
	b.eventually("nothing is beside the monitors", func() bool { return len(b.beside()) == 0 })
	b.ok("ps")
	only()
	b.eventually("the one that has crashed is back", func() bool {
		return b.restarts("c0").Count == 1 && b.inspect("c0").Status == "running"
	})
	// They are found by what they had recorded: it is as if it had never been killed.
	b.ok("update", "--ttl", "1s", "c1")
	b.awaitGone("supervised", b.inspect("c1").ID)
	equal(b, "status of c1", b.inspect("c1").Status, "exited")

	for _, name := range names[1:] {
		b.ok("rm", "-f", name)
	}
	only()
	b.ok("stop", "-t", "0", "c0")
	b.awaitSupervisor(false)
	if left, _ := filepath.Glob(filepath.Join(b.root, "supervised", "*")); len(left) > 0 {
		t.Errorf("marks are left: %q", left)
	}
	if _, err := os.Lstat(filepath.Join(b.root, "run", "supervisor")); err == nil {
		t.Error("its lock is left")
	}
}

// awaitGone waits until a file below the root is gone, and calls no command for that.
func (b *box) awaitGone(path ...string) {
	b.Helper()
	file := filepath.Join(append([]string{b.root}, path...)...)
	b.eventually(file+" is gone", func() bool { _, err := os.Lstat(file); return os.IsNotExist(err) })
}

// The supervisor outlives the service that has started it: what crashes is started again, leases
// end, and no command has to come for that.
func TestServiceKilledSupervised(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cmd, _ := b.serve()
	b.start("s", "--network", "none", "--restart", "always", "busybox", "sh", "-c",
		"echo x >> /starts; exec sleep 100000")
	who := owner(t)
	b.ok("lease", "create", "--name", "l", "--pid", fmt.Sprint(who.Process.Pid))
	b.start("leased", "--lease", "l", "--network", "none", "busybox", "sleep", "100000")
	sb := b.inspect("s")
	pid := b.supervisor()
	if pid == 0 {
		t.Fatal("there is no supervisor")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	if err := unix.Kill(sb.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.eventually("it is started again", func() bool {
		data, _ := os.ReadFile(filepath.Join(sb.Upperdir, "starts"))
		return string(data) == "x\nx\n"
	})
	killOwner(t, who)
	b.awaitSandboxes(1)
	equal(b, "the supervisor", b.supervisor(), pid)
	var now runtime.Restarts
	b.eventually("that is on record", func() bool { now = b.restarts("s"); return now.Count == 1 })
	equal(b, "its last exit", now.LastExit, 137)
}

// A supervisor whose program is replaced, as by an upgrade, passes its lock on to the new one as
// soon as something changes.
func TestSupervisorReplaced(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := t.TempDir()
	program := filepath.Join(dir, "agentbox")
	install := func() {
		t.Helper()
		for _, name := range []string{"agentbox", "agentbox-runtime"} {
			if out, err := exec.Command("cp", filepath.Join(bin, name),
				filepath.Join(dir, "new")).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	install()
	b.own("c")
	cmd := exec.Command(program, "--root", b.root, "run", "-d", "--name", "c", "--network", "none",
		"--ttl", "10h", "--stop-signal", "KILL", "busybox", "sleep", "100000")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	pid := b.supervisor()
	install()
	b.ok("update", "--ttl", "9h", "c")
	b.eventually("another one is at work", func() bool {
		now := b.supervisor()
		path, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", now))
		return now != pid && path == program
	})
	b.noProcess(pid)
	equal(b, "processes beside the monitor", len(b.beside()), 1)
	b.ok("update", "--ttl", "1s", "c")
	b.awaitSupervisor(false)
	equal(b, "status", b.inspect("c").Status, "exited")
}
