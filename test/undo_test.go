package test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// undos are the ready undo checkpoints of a sandbox, newest first.
func (b *box) undos(name string) (ids []string) {
	b.Helper()
	var list []checkpoint
	if err := json.Unmarshal([]byte(b.ok("checkpoint", "ls", "-a", "--trigger", "undo", "--format", "json",
		name)), &list); err != nil {
		b.Fatal(err)
	}
	for _, c := range list {
		if c.Status == "ready" {
			ids = append(ids, c.ID)
		}
	}
	return ids
}

// TestUndoOfKilledRetry kills a restore whose undo checkpoint could not have
// processes and was taken of the files alone: taking the restore back takes
// that one back, too, and the undo of the restore before is still there.
func TestUndoOfKilledRetry(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo base > /marker")
	b.ok("checkpoint", "--name", "base", "s")
	b.sh("s", "echo replaced > /marker")
	b.ok("restore", "s", "base")
	before := b.undos("s")
	b.sh("s", "echo now > /marker")
	for _, point := range []string{"restore.after-undo", "store.commit.after-row"} {
		r := b.try([]string{"AGENTBOX_FAILPOINT=checkpoint.after-dump=error," + point + "=kill"},
			"restore", "s", "base")
		if !r.killed {
			t.Fatalf("not killed: %s", r)
		}
		b.ok("recover")
		equal(b, "undo checkpoints after "+point, strings.Join(b.undos("s"), " "), strings.Join(before, " "))
		equal(b, "marker", b.sh("s", "cat /marker"), "now")
	}
	b.ok("restore", "--undo", "s")
	equal(b, "marker after the undo", b.sh("s", "cat /marker"), "replaced")
}

// TestUndoOfRemoved asks for an undo that went with its sandbox.
func TestUndoOfRemoved(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo base > /marker")
	b.ok("checkpoint", "s")
	b.sh("s", "echo discarded > /marker")
	b.ok("restore", "s")
	for _, id := range b.undos("s") {
		b.ok("checkpoint", "pin", id) // so that it outlives the sandbox
	}
	b.ok("rm", "-f", "s")
	if said := b.fails(3, "restore", "--undo", "s"); !strings.Contains(said, "undo checkpoint of s") {
		t.Errorf("it says: %s", said)
	}
	if _, there := b.find("s"); there {
		t.Error("an undo of nothing has made the sandbox again")
	}
	b.ok("restore", "s")
	equal(b, "marker", b.sh("s", "cat /marker"), "base")
}

// TestFrozenAfterReady fails what follows a checkpoint that is ready: a sandbox
// that was to be stopped, or restored, must not stay frozen for that.
func TestFrozenAfterReady(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sh", "-c", counter)
	b.sh("s", "echo base > /marker")
	env := []string{"AGENTBOX_FAILPOINT=checkpoint.after-ready=error"}
	if r := b.try(env, "checkpoint", "--name", "base", "--stop", "s"); r.code != 0 {
		t.Fatalf("%s", r)
	}
	equal(b, "status", b.inspect("s").Status, "exited")
	b.ok("restore", "s", "base")
	b.sh("s", "echo now > /marker")
	if r := b.try(env, "restore", "s", "base"); r.code != 0 {
		t.Fatalf("%s", r)
	}
	equal(b, "marker", b.sh("s", "cat /marker"), "base")
	b.ok("restore", "--undo", "s")
	equal(b, "marker", b.sh("s", "cat /marker"), "now")
}

// TestUndoOfFailed fails a restore before it has touched anything, and one
// --no-undo that cannot put the files back: what only the undo checkpoint has is
// there until Recover is done.
func TestUndoOfFailed(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo base > /marker; echo base > /other")
	b.ok("checkpoint", "--name", "base", "s")
	b.sh("s", "echo replaced > /marker; echo replaced > /other")
	b.ok("restore", "s", "base")
	before := b.undos("s")
	b.sh("s", "echo now > /marker; echo now > /other")
	if r := b.try(failpoint("restore.before-stop", "error"), "restore", "s", "base"); r.code == 0 {
		t.Fatalf("%s", r)
	}
	equal(b, "undo checkpoints of one that changed nothing", strings.Join(b.undos("s"), " "), strings.Join(before, " "))
	equal(b, "status", b.inspect("s").Status, "running")

	if r := b.try(failpoint("overlay.update.end", "error"), "restore", "--no-undo", "s", "base"); r.code == 0 {
		t.Fatalf("%s", r)
	}
	if now := b.undosUnfinished("s"); len(now) != len(before)+1 {
		t.Errorf("undo checkpoints while the files are not back: %q", now)
	}
	b.ok("recover")
	equal(b, "marker", b.sh("s", "cat /marker"), "base")
	equal(b, "undo checkpoints at last", strings.Join(b.undos("s"), " "), strings.Join(before, " "))
}

// undosUnfinished is undos without letting the command finish what is left: the
// failpoint is still there.
func (b *box) undosUnfinished(name string) []string {
	b.Helper()
	r := b.try(failpoint("overlay.update.end", "error"), "checkpoint", "ls", "-a", "-q", "--trigger", "undo", name)
	return strings.Fields(r.out)
}

// TestAsideNotDurable has a power cut keep from the disk what a restore moves
// things aside for, while the journal has it that it may begin: it has not, then.
func TestAsideNotDurable(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo base > /marker")
	b.ok("checkpoint", "--files-only", "--name", "base", "s")
	b.sh("s", "echo now > /marker")
	b.ok("stop", "-t", "0", "s")
	aside := b.upperdir("s") + ".old"
	for what, lose := range map[string]func() error{
		"all":           func() error { return os.RemoveAll(aside) },
		"what was":      func() error { return os.Remove(aside + "/before") },
		"a part of it":  func() error { return os.Truncate(aside+"/before", 50) },
		"what is in it": func() error { return os.Truncate(aside+"/before", 0) },
	} {
		if r := b.try(failpoint("restore.before-stop", "kill"), "restore", "--no-undo", "s", "base"); !r.killed {
			t.Fatalf("%s", r)
		}
		if err := lose(); err != nil {
			t.Fatal(err)
		}
		b.ok("recover")
		equal(b, "marker without "+what, b.file("s", "marker"), "now")
		if _, err := os.Lstat(aside); !os.IsNotExist(err) {
			t.Errorf("without %s: %v", what, err)
		}
	}
	b.ok("restore", "--no-undo", "s", "base")
	equal(b, "marker at last", b.file("s", "marker"), "base")
}
