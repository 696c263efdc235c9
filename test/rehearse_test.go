package test

import (
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// A rehearsal restores for real, compares, and leaves nothing: neither when it ends nor
// when it is killed with its fork half-made.
func TestRehearse(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	b.start("c", "busybox", "sh", "-c", counter)
	pid := b.inspect("c").Pid
	b.ok("checkpoint", "--name", "a", "c")
	b.ok("checkpoint", "--name", "files", "--files-only", "c")
	if out := b.ok("verify", "--rehearse", "c@a"); !strings.Contains(out, "rehearsed: ") ||
		strings.Contains(out, "differs") {
		t.Error(out)
	}
	report := decode[runtime.VerifyReport](b, b.ok("verify", "--rehearse", "--format", "json", "c@a"))
	if len(report.Rehearsed) != 1 || len(report.Unrestorable) != 0 {
		t.Fatalf("%+v", report)
	}
	if r := report.Rehearsed[0]; r.Checkpoint.Name != "a" || r.Processes < 1 || r.Threads < 1 || r.Descriptors < 3 ||
		r.Pages < 10 || r.Took <= 0 || len(r.Differs) != 0 {
		t.Errorf("%+v", r)
	}
	b.fails(2, "verify", "--rehearse")
	b.fails(2, "verify", "--rehearse", "c@files")
	for _, point := range []string{"restore.after-stage", "restore.after-proof"} {
		b.killedAt(point+"=kill", "verify", "--rehearse", "c@a")
		b.ok("recover")
		if list := strings.Fields(b.ok("ps", "-a", "-q")); len(list) != 1 {
			t.Errorf("after one that was killed at %s: %q", point, list)
		}
	}
	b.untouched("c", pid)
}
