package test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// effect is what `agentbox effect ls` documents.
type effect struct {
	ID, Label, Status, Error, Output, Checkpoint string
	Tries                                        int
}

func (b *box) effects(name string) []effect {
	b.Helper()
	return decode[[]effect](b, b.ok("effect", "ls", "--all", "--format", "json", name))
}

// checkEffectAdded: the effect is on record, or it is not.
func (s *sweep) checkEffectAdded(r result) {
	s.Helper()
	ids := strings.Fields(s.ok("effect", "ls", "-q", "s"))
	if r.code == 0 && len(ids) != 1 || len(ids) > 1 {
		s.Errorf("%s: and then there are %d effects", r, len(ids))
	}
	for _, id := range ids {
		s.ok("effect", "rm", "s", id)
	}
	s.checkUnmoved(r)
}

// checkCompensated: "s" is where it was or at base, then with all compensated; no
// undo command was run twice, and none is said to have been run that was not, nor
// the other way round.
func (s *sweep) checkCompensated(r result) {
	s.Helper()
	restored := s.file("s", "marker") == "base"
	unsure := false
	for _, f := range s.effects("s") {
		n := strings.Count(s.read(filepath.Join(s.dir, "log")), f.Label)
		switch {
		case f.Status == "removed" || !strings.Contains("one two", f.Label):
		case f.Status == "outstanding" && n == 0 && !restored, f.Status == "compensated" && n <= 1:
		case f.Status == "unknown" && n <= 1 && !restored:
			unsure = true
		default:
			s.Errorf("effect %+v, restored %v, was compensated %d times", f, restored, n)
		}
	}
	was := s.read(filepath.Join(s.dir, "log"))
	if unsure {
		if said := s.fails(4, "restore", "s", "base"); !strings.Contains(said, "may have run before") ||
			!strings.Contains(said, "agentbox effect rm s") {
			s.Errorf("it says: %s", said)
		}
		equal(s.box, "what has been run", s.read(filepath.Join(s.dir, "log")), was)
	}
	for _, id := range strings.Fields(s.ok("effect", "ls", "-q", "s")) {
		s.ok("effect", "rm", "s", id)
	}
	s.checkRestored(r)
}

// TestEffectsCrash kills agentbox while an undo command runs. The command runs again only where
// it may be repeated, and what it has started ends with it.
func TestEffectsCrash(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	b.sh("s", "echo base > /marker")
	b.checkpoint("--name", "base", "s")
	b.sh("s", "echo now > /marker")
	pid := filepath.Join(b.root, "pid")
	log := filepath.Join(b.root, "log")
	script := "echo run >> " + log + "; [ -e " + pid + " ] || { echo $$ > " + pid + ".new; mv " + pid + ".new " +
		pid + "; sleep 1000; }"
	b.ok("effect", "add", "--label", "once", "--timeout", "5m", "s", "--", "sh", "-c", script)

	interrupted := func() {
		t.Helper()
		cmd := b.command(t.Context(), "restore", "s", "base")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		b.eventually("the undo command runs", func() bool { return b.read(pid) != "" })
		equal(b, "status while it is compensated", b.inspect("s").Status, "paused")
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // it was killed
		n, err := strconv.Atoi(b.read(pid))
		if err != nil {
			t.Fatal(err)
		}
		b.eventually("the undo command is gone", func() bool { return syscall.Kill(n, 0) != nil })
	}
	interrupted()
	r := b.try(nil, "exec", "s", "true") // it goes on
	if r.code != 0 || !strings.Contains(r.err, "took back the half-done restore") ||
		!strings.Contains(r.err, "(once) may have run") {
		t.Errorf("the next command: %s", r)
	}
	equal(b, "marker", b.file("s", "marker"), "now")
	equal(b, "status of the effect", b.effects("s")[0].Status, "unknown")
	b.fails(4, "restore", "s", "base")
	equal(b, "runs", b.read(log), "run")
	equal(b, "marker", b.file("s", "marker"), "now")
	b.ok("effect", "rm", "s", b.effects("s")[0].ID)

	if err := os.Remove(pid); err != nil {
		t.Fatal(err)
	}
	b.ok("effect", "add", "--label", "again", "--on-failure", "retry", "s", "--", "sh", "-c", script)
	interrupted()
	b.ok("restore", "s", "base")
	equal(b, "runs", b.read(log), "run\nrun\nrun")
	equal(b, "marker", b.file("s", "marker"), "base")
	equal(b, "status of the effect", b.effects("s")[0].Status, "compensated")
}
