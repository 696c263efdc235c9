package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestPausedExactly restores a sandbox that was checkpointed while paused: not
// one instruction may have run.
func TestPausedExactly(t *testing.T) {
	b := newBox(t)
	b.start("p", "--network", "none", "busybox", "sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >> /log; done")
	log := filepath.Join(b.inspect("p").Upperdir, "log")
	b.eventually("it counts", func() bool { return strings.Count(b.read(log), "\n") > 100 })
	b.ok("pause", "p")
	want := b.read(log)
	ck := b.checkpoint("p")
	b.ok("unpause", "p")
	b.eventually("it goes on", func() bool { return len(b.read(log)) > len(want) })
	for range 3 {
		b.ok("restore", "p", ck)
		equal(b, "status", b.inspect("p").Status, "paused")
		equal(b, "log", b.read(log), want)
	}
	b.ok("unpause", "p")
	b.eventually("it goes on", func() bool { return len(b.read(log)) > len(want) })
	if got := b.read(log); !strings.HasPrefix(got, want) {
		t.Error("the restored process did not go on from its log")
	}
}

// TestRestoreTriedOnce has a killed restore that recovery cannot finish: it is
// tried once, then the sandbox is left to its owner.
func TestRestoreTriedOnce(t *testing.T) {
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	ck := b.checkpoint("s")
	r := b.try(failpoint("restore.after-apply", "kill"), "restore", "s", ck)
	equal(b, "restore was killed", r.killed, true)
	// A restore that recovery stages cannot be started.
	r = b.try(failpoint("restore.after-stage", "error"), "ps")
	if !strings.Contains(r.err, "could not finish the restore") {
		t.Errorf("the recovery does not tell of its failure: %s", r)
	}
	equal(b, "status", b.inspect("s").Status, "exited")
	b.ok("start", "s")
	pid := b.inspect("s").Pid
	b.ok("ps")
	b.ok("recover")
	equal(b, "pid after more commands", b.inspect("s").Pid, pid)
	b.ok("restore", "s", ck)
	b.ok("rm", "-f", "s")
	equal(b, "what recover finds", strings.TrimSpace(b.ok("recover")), "nothing to recover")
}

// TestFailedRestoreKeeps has the restore of an --rm sandbox fail: what it put
// back must not go with the exit of the old processes.
func TestFailedRestoreKeeps(t *testing.T) {
	b := newBox(t)
	b.start("s", "--rm", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 3)
	ck := b.checkpoint("s")
	b.sh("s", "echo precious > /work")
	r := b.try(failpoint("restore.after-apply", "error"), "restore", "s", ck)
	if r.code == 0 || !strings.Contains(r.err, "agentbox start s") {
		t.Fatalf("restore: %s", r)
	}
	sb := b.inspect("s")
	equal(b, "status", sb.Status, "exited")
	equal(b, "work", strings.TrimSpace(b.read(filepath.Join(sb.Upperdir, "work"))), "precious")
	b.ok("start", "s")
	b.ok("kill", "s")
	b.eventually("it is removed once it exits", func() bool { _, there := b.find("s"); return !there })
	b.ok("checkpoint", "rm", ck)
}

// TestNamesakes restores the checkpoints of several removed sandboxes that had
// one name.
func TestNamesakes(t *testing.T) {
	b := newBox(t)
	var ids, cks []string
	for _, word := range []string{"first", "second"} {
		b.start("n", "--network", "none", "busybox", "sh", "-c", "echo "+word+" > /word; "+counter)
		ids = append(ids, b.inspect("n").ID)
		b.reaches("n", 2)
		cks = append(cks, b.checkpoint("n", "--name", word))
		b.ok("rm", "-f", "n")
	}
	for _, try := range []struct {
		args []string
		box  int
	}{
		{[]string{"n"}, 1}, {[]string{"n", "first"}, 0}, {[]string{"n", cks[0]}, 0}, {[]string{ids[0]}, 0},
		{[]string{"n", "second"}, 1},
	} {
		b.ok(append([]string{"restore"}, try.args...)...)
		sb := b.inspect("n")
		equal(b, strings.Join(try.args, " "), sb.ID, ids[try.box])
		equal(b, "word", strings.TrimSpace(b.file("n", "word")), []string{"first", "second"}[try.box])
		b.ok("rm", "-f", "n")
	}
	equal(b, "checkpoints by the id of a removed sandbox", len(b.checkpoints(ids[0])), 1)
	for _, ck := range cks {
		b.ok("checkpoint", "rm", ck)
	}
}

// TestWorkAfterRestoreIsKept has a restore killed right after its start, and the sandbox end by
// itself before any command looks: the restore is done, and what the sandbox did since is its
// owner's.
func TestWorkAfterRestoreIsKept(t *testing.T) {
	for _, kind := range []string{"processes", "files"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			b.start("s", "--network", "none", "busybox", "sh", "-c",
				"trap go=1 USR1; echo run >> /work; until [ $go ]; do sleep 0.05; done; echo result >> /work")
			work := filepath.Join(b.inspect("s").Upperdir, "work")
			b.eventually("it runs", func() bool { return b.file("s", "work") == "run" })
			flags := []string{"s"}
			if kind == "files" {
				flags = append(flags, "--files-only")
			}
			b.checkpoint(flags...)
			r := b.try(failpoint("restore.after-start", "kill"), "restore", "s")
			equal(b, "restore was killed", r.killed, true)
			begun := "run"
			if kind == "files" {
				begun = "run\nrun" // it was started afresh
			}
			// Without a command of ours, which would recover it.
			b.eventually("it has begun", func() bool { return b.read(work) == begun && len(b.monitors()) == 1 })
			monitor := b.monitors()[0]
			first, err := strconv.Atoi(b.read("/proc/" + monitor + "/task/" + monitor + "/children"))
			if err := errors.Join(err, syscall.Kill(first, syscall.SIGUSR1)); err != nil {
				t.Fatal(err)
			}
			b.eventually("it does its work", func() bool { return b.read(work) != begun })
			b.eventually("it ends", func() bool { return len(b.monitors()) == 0 })
			sb := b.inspect("s")
			equal(b, "status", sb.Status, "exited")
			equal(b, "exit code", sb.ExitCode, 0)
			equal(b, "what it did", b.read(work), begun+"\nresult")
			// Its monitor left to us what it held, for it may have been the restore's.
			report := decode[runtime.ReconcileReport](b, b.ok("recover", "--format", "json"))
			equal(b, "what else is to be freed", fmt.Sprint(report.Counts), "map[ended:1]")
			equal(b, "what else is to be recovered", b.ok("recover"), "nothing to recover")
			b.ok("restore", "s")
			equal(b, "there is a result after another restore", strings.Contains(b.read(work), "result"), false)
		})
	}
}

// monitors are the pids of those of a root's sandboxes.
func (b *box) monitors() (pids []string) {
	for _, p := range processesOf(b.root) {
		if strings.Contains(p, "conmon") {
			pids = append(pids, strings.TrimSuffix(strings.Fields(p)[1], ":"))
		}
	}
	return pids
}

// TestOldState puts back a state.db of long ago: a sandbox that it does not know is left alone,
// not taken for an orphan.
func TestOldState(t *testing.T) {
	b := newBox(t)
	b.start("old", "--network", "none", "busybox", "sleep", "infinity")
	names := []string{"state.db", "state.db-wal", "state.db-shm"}
	copied := t.TempDir()
	copyAll := func(from, to string) {
		t.Helper()
		for _, name := range names {
			data, err := os.ReadFile(filepath.Join(from, name))
			if errors.Is(err, os.ErrNotExist) {
				err = os.RemoveAll(filepath.Join(to, name))
			} else if err == nil {
				err = os.WriteFile(filepath.Join(to, name), data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	copyAll(b.root, copied)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.reaches("s", 2)
	known := b.inspect("s")
	now := t.TempDir()
	copyAll(b.root, now)

	copyAll(copied, b.root)
	said := b.ok("recover")
	if !strings.Contains(said, "left sandbox "+known.ID[:12]+" alone") ||
		!strings.Contains(said, "agentbox rm -f "+known.ID) {
		t.Errorf("recover: %s", said)
	}
	b.fails(4, "rm", known.ID)
	copyAll(now, b.root)
	equal(b, "pid, with the newer state back", b.inspect("s").Pid, known.Pid)
	b.reaches("s", b.count("s")+1)

	copyAll(copied, b.root)
	b.ok("rm", "-f", known.ID)
	b.noProcess(known.Pid)
	equal(b, "what recover finds then", b.ok("recover"), "nothing to recover")
	b.fails(3, "rm", "-f", known.ID)
}
