package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// outsiders lists the threads of a sandbox that are not in its cgroup that freezes.
func (b *box) outsiders(name string) (list []string) {
	b.Helper()
	pid := b.inspect(name).Pid
	ns := pidns(pid)
	home, ok := freezerOf(b.read(fmt.Sprintf("/proc/%d/cgroup", pid)))
	if !ok {
		return nil // of cgroups of v2, where no thread is ever taken out
	}
	tasks, _ := filepath.Glob("/proc/[0-9]*/task/[0-9]*")
	for _, task := range tasks {
		var p int
		if _, err := fmt.Sscanf(filepath.Base(task), "%d", &p); err != nil || pidns(p) != ns {
			continue
		}
		if at, _ := freezerOf(b.read(task + "/cgroup")); !strings.HasPrefix(at, home) {
			list = append(list, task+" in "+at)
		}
	}
	return list
}

// pidns names the pid namespace of a thread; empty: it has ended.
func pidns(tid int) string {
	link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", tid))
	return link
}

// freezerOf finds the freezer in what /proc/PID/cgroup has.
func freezerOf(groups string) (string, bool) {
	for line := range strings.Lines(groups) {
		if f := strings.SplitN(strings.TrimSpace(line), ":", 3); len(f) == 3 && f[1] == "freezer" {
			return f[2], true
		}
	}
	return "", false
}

// TestStoppedKilled has agentbox killed in a checkpoint of a sandbox with stopped processes,
// while one is outside of the frozen cgroup, and before CRIU, which waits for them, is helped:
// the next command brings all of them back, and the dump to an end.
func TestStoppedKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", `for i in 1 2; do sleep 1000 & kill -STOP $!; done; `+counter)
	stopped := func() bool { return strings.Count(b.sh("s", "cat /proc/[0-9]*/stat 2>/dev/null || true"), ") T ") == 2 }
	b.eventually("they are stopped", stopped)
	if _, v1 := freezerOf(b.read(fmt.Sprintf("/proc/%d/cgroup", b.inspect("s").Pid))); !v1 {
		t.Skip("cgroups of v2")
	}
	for _, point := range []string{"stopped.out", "stopped.unstick"} {
		if r := b.try(failpoint(point, "kill"), "checkpoint", "s"); !r.killed {
			t.Fatalf("not killed at %s: %s", point, r)
		}
		b.ok("recover")
		equal(b, "status after "+point, b.inspect("s").Status, "running")
		equal(b, "outside of the cgroup after "+point, strings.Join(b.outsiders("s"), ", "), "")
		equal(b, "both are stopped after "+point, stopped(), true)
		b.reaches("s", b.count("s")+1)
	}
	one := b.checkpoint("s")
	b.ok("restore", "s", one)
	equal(b, "both are stopped after the restore", stopped(), true)
	b.reaches("s", b.count("s")+1)
}
