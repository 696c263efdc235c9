package test

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// TestHead takes a running sandbox through its history by HEAD, steps and ages, with its
// files and its process: restore without a name goes to where it was last. Then the same
// through a service.
func TestHead(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	state := func(want string) {
		b.Helper()
		equal(b, "state", strings.TrimSpace(b.file("c", "state")), want)
	}
	b.reaches("c", 3)
	b.sh("c", "echo a > /state")
	a := b.checkpoint("--name", "a", "c")
	atA := b.count("c")
	b.reaches("c", atA+10)
	b.sh("c", "echo b > /state")
	ckB := b.checkpoint("--name", "b", "c")
	atB := b.count("c")

	b.ok("restore", "c", "a")
	b.sh("c", "echo work > /state; echo more > /other")
	b.reaches("c", atB+5)
	b.ok("pause", "c") // so that nothing is printed between the count of lines and the restore
	before := len(b.printed("c"))
	b.ok("restore", "--verify", "c")
	b.wentOn("c", before, 3, atA)
	equal(b, "head", b.inspect("c").Head, a)
	state("a")
	b.sh("c", "test ! -e /other")

	b.ok("restore", "c", "@{0s}") // the newest
	equal(b, "head", b.inspect("c").Head, ckB)
	state("b")
	b.ok("restore", "c", "HEAD~1")
	equal(b, "head", b.inspect("c").Head, a)
	state("a")

	// It has gone on from a: b is on another branch now.
	b.sh("c", "echo d > /state")
	d := b.checkpoint("--name", "d", "c")
	for ref, want := range map[string]string{"c@HEAD": d, "c@HEAD~1": a, "c@d~": a, "c@b~1": a, "c@{0s}": d} {
		equal(b, ref, decode[[]checkpoint](b, b.ok("checkpoint", "inspect", ref))[0].ID, want)
	}
	said := b.fails(3, "restore", "c", "HEAD~2")
	if !strings.Contains(said, "c@HEAD~2: the history of c has 2 checkpoints") {
		t.Error(said)
	}
	equal(b, "diff", strings.TrimSpace(b.ok("diff", "--name-only", "c@HEAD~1", "@HEAD")), "/count\n/state")
	b.own("f")
	b.ok("fork", "--name", "f", "c@HEAD~1")
	equal(b, "state of the fork", strings.TrimSpace(b.sh("f", "cat /state")), "a")

	_, socket := b.serve()
	c := api.Dial(socket)
	defer c.Close()
	info, err := c.CheckpointInfo(t.Context(), "c@HEAD~1")
	if err != nil || info.ID != a {
		t.Errorf("%+v, %v", info, err)
	}
	out, err := c.Restore(t.Context(), "c", runtime.RestoreOptions{Checkpoint: "{0s}~1"})
	if err != nil || out.Checkpoint.ID != a {
		t.Fatalf("%+v, %v", out.Checkpoint, err)
	}
	b.sh("c", "echo work > /state")
	if out, err = c.Restore(t.Context(), "c", runtime.RestoreOptions{}); err != nil || out.Checkpoint.ID != a {
		t.Fatalf("%+v, %v", out.Checkpoint, err)
	}
	state("a")
	if err := c.RemoveCheckpoint(t.Context(), "c@HEAD"); err != nil {
		t.Fatal(err)
	}
	_, err = c.Restore(t.Context(), "c", runtime.RestoreOptions{})
	if !errors.Is(err, runtime.ErrNotFound) || !strings.Contains(err.Error(), "c is at no checkpoint") {
		t.Errorf("its head was removed: %v", err)
	}
	b.ok("restore", "c", "b")
	state("b")
}
