package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

func (b *box) restarts(name string) runtime.Restarts {
	b.Helper()
	list := decode[[]runtime.Sandbox](b, b.ok("inspect", name))
	if len(list) != 1 || list[0].Restarts == nil {
		b.Fatalf("inspect %s: %+v", name, list)
	}
	return *list[0].Restarts
}

func (b *box) crash(name string) {
	b.Helper()
	pid := b.inspect(name).Pid
	if pid == 0 {
		b.Fatalf("%s does not run", name)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		b.Fatal(err)
	}
	b.noProcess(pid)
}

func TestRestartPolicies(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	start := time.Now()
	b.start("fails", "--network", "none", "--restart", "on-failure:3", "busybox", "sh", "-c",
		"echo x >> /starts; exit 7")
	b.start("succeeds", "--network", "none", "--restart", "on-failure", "busybox", "sh", "-c",
		"echo x >> /starts; [ $(wc -l < /starts) -gt 1 ]")
	b.start("always", "--network", "none", "--restart", "always", "busybox", "sh", "-c", counter)
	b.start("never", "--network", "none", "--restart", "no", "busybox", "false")
	b.eventually("it is given up", func() bool { return b.restarts("fails").GivenUp })
	if took := time.Since(start); took < 600*time.Millisecond {
		t.Errorf("three restarts within %v: they were to come after 0.1, 0.2 and 0.4 s", took)
	}
	got := b.restarts("fails")
	if got.Count != 3 || got.LastExit != 7 || got.LastEnd.IsZero() {
		t.Errorf("%+v", got)
	}
	equal(b, "starts", strings.Count(b.file("fails", "starts"), "x"), 4)
	equal(b, "exit code", b.inspect("fails").ExitCode, 7)
	if got := b.ok("events", "fails"); strings.Count(got, "restarted") != 4 || !strings.Contains(got, "given-up") { // three, and that it was so often
		t.Errorf("events: %s", got)
	}
	b.eventually("it has succeeded", func() bool {
		return b.restarts("succeeds").Count == 1 && b.inspect("succeeds").Status == "exited"
	})
	equal(b, "exit code of never", b.inspect("never").ExitCode, 1)

	// Its owner's stop and kill are no crashes, and a start begins to count anew.
	b.crash("always")
	b.eventually("it comes back", func() bool {
		return b.restarts("always").Count == 1 && b.inspect("always").Status == "running"
	})
	for _, verb := range [][]string{{"stop", "-t", "0"}, {"kill"}, {"kill", "-s", "TERM"}, {"checkpoint", "--stop"}} {
		// The first process ignores what it has no handler for.
		if len(verb) == 3 && verb[0] == "kill" {
			b.ok("kill", "-s", "TERM", "always")
			b.crash("always")
		} else {
			b.ok(append(verb, "always")...)
		}
		b.eventually("it has ended", func() bool { return b.inspect("always").Status == "exited" })
		time.Sleep(2 * firstRestarts)
		equal(b, fmt.Sprintf("status after %q", verb), b.inspect("always").Status, "exited")
		equal(b, "stopped", b.restarts("always").Stopped, true)
		b.ok("start", "always")
		equal(b, "restarts after a start", b.restarts("always"), runtime.Restarts{})
	}
	b.ok("update", "--restart", "no", "always")
	b.crash("always")
	time.Sleep(2 * firstRestarts)
	equal(b, "status after update --restart no", b.inspect("always").Status, "exited")
	b.ok("update", "--restart", "always", "always")
	time.Sleep(2 * firstRestarts)
	equal(b, "status after update --restart always", b.inspect("always").Status, "exited")

	for _, args := range [][]string{
		{"run", "-d", "--rm", "--restart", "always", "busybox", "true"},
		{"run", "-d", "--restart", "sometimes", "busybox", "true"},
		{"run", "-d", "--restart", "always:3", "busybox", "true"},
		{"run", "-d", "--restart", "on-failure:0", "busybox", "true"},
		{"run", "-d", "--restart-from", "head", "busybox", "true"},
	} {
		b.fails(125, args...)
	}
}

// firstRestarts is longer than the first restart of a sandbox takes to begin.
const firstRestarts = 200 * time.Millisecond

// TestRestartFromHead has a sandbox come back from the checkpoint that it was last at, files
// and processes, again and again, also where that is not the newest; before there is one
// from its command.
func TestRestartFromHead(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "--restart", "always", "--restart-from", "head", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	b.crash("s")
	b.eventually("it comes back", func() bool {
		return b.restarts("s").Count == 1 && b.inspect("s").Status == "running"
	})
	b.reaches("s", 10)
	b.sh("s", "echo kept > /work")
	b.checkpoint("s")
	at := b.count("s")
	for n := range 2 {
		b.sh("s", "echo lost > /work")
		b.reaches("s", at+20)
		b.crash("s")
		b.eventually("it comes back", func() bool {
			return b.restarts("s").Count == 2+n && b.inspect("s").Status == "running"
		})
		equal(b, "work", strings.TrimSpace(b.file("s", "work")), "kept")
		if now := b.reaches("s", at); now > at+19 {
			t.Errorf("it is at %d, the checkpoint was at %d", now, at)
		}
	}
	b.sh("s", "echo newest > /work")
	b.checkpoint("s")
	b.ok("restore", "s", "HEAD~1")
	n := b.restarts("s").Count
	b.crash("s")
	b.eventually("it comes back", func() bool {
		return b.restarts("s").Count == n+1 && b.inspect("s").Status == "running"
	})
	equal(b, "work of an older head", strings.TrimSpace(b.file("s", "work")), "kept")
}

// TestRestartKilled kills the process that restarts a sandbox, before it does and
// while it does: a later command sees to it.
func TestRestartKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	for _, point := range []string{"restart.after-note", "oci.start.after-conmon"} {
		b.own("s")
		b.ok("create", "--name", "s", "--network", "none", "--restart", "always", "busybox", "sh", "-c", counter)
		b.ok("start", "s")
		pid := b.inspect("s").Pid
		b.killSupervisor()
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.noProcess(pid)
		b.try(failpoint(point, "kill"), "ps")
		b.awaitSupervisor(false) // the one that ps has started was killed
		b.eventually("it was about to come back", func() bool { return b.restarts("s").Count > 0 })
		b.eventually("it comes back", func() bool { return b.inspect("s").Status == "running" })
		b.ok("rm", "-f", "s")
	}
}

// TestRestartWaiting has a sandbox that crashes at once wait for its next restart,
// while its owner stops, restores, checkpoints and removes it: nothing comes back
// that was to stay down, and nothing is left of it.
func TestRestartWaiting(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "--restart", "always", "busybox", "sh", "-c",
		"echo x >> /starts; [ -e /stay ] && sleep 1000; exit 3")
	id := b.inspect("s").ID
	supervised := func() bool { _, err := os.Lstat(filepath.Join(b.root, "supervised", id)); return err == nil }
	waits := func(n int) {
		b.Helper()
		b.eventually("it waits for its next restart", func() bool {
			return b.restarts("s").Count >= n && b.inspect("s").Status == "exited"
		})
	}
	waits(3)
	b.ok("stop", "s")
	b.eventually("nothing waits to start it", func() bool { return !supervised() })
	count := b.restarts("s")
	equal(b, "stopped", count.Stopped, true)
	equal(b, "status", b.inspect("s").Status, "exited")
	equal(b, "starts", strings.Count(b.file("s", "starts"), "x"), count.Count+1)

	// A checkpoint takes nothing from its turn.
	b.ok("start", "s")
	waits(2)
	b.eventually("a checkpoint is taken", func() bool {
		return b.try(nil, "checkpoint", "--files-only", "s").code == 0
	})
	waits(b.restarts("s").Count + 1)
	// Nor does it come back by itself from what a restore and a stop have left.
	b.ok("restore", "s")
	b.ok("stop", "-t", "0", "s")
	b.eventually("nothing waits to start it", func() bool { return !supervised() })
	equal(b, "status", b.inspect("s").Status, "exited")
	equal(b, "stopped", b.restarts("s").Stopped, true)
	b.ok("start", "s")
	waits(1)
	b.ok("rm", "-f", "s")
	b.eventually("nothing waits to start it", func() bool { return !supervised() })
	if _, there := b.find("s"); there {
		t.Error("it is there again")
	}
	for _, dir := range []string{"restarts", "supervised"} {
		if left, _ := filepath.Glob(filepath.Join(b.root, dir, id+"*")); len(left) > 0 {
			t.Errorf("left over: %q", left)
		}
	}
}

// A restart from a checkpoint does not run an undo command that fails again and again.
func TestRestartCalledOff(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "--restart", "always", "--restart-from", "head", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	b.checkpoint("s")
	log := filepath.Join(b.root, "log")
	b.ok("effect", "add", "--label", "mail", "s", "--", "sh", "-c", "echo run >> "+log+"; exit 1")
	b.crash("s")
	b.eventually("it is given up", func() bool {
		return strings.Contains(b.ok("events", "--type", "given-up", "s"), "not restarted: ")
	})
	equal(b, "status", b.inspect("s").Status, "exited")
	b.ok("recover")
	equal(b, "runs of the undo command", b.read(log), "run")
	b.ok("start", "s")
	b.reaches("s", 1)
}
