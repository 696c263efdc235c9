package test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// The checks of a sweep after a verb that was broken.

// checkSame: "s" has its files, and runs or not.
func (s *sweep) checkSame(r result) {
	s.Helper()
	equal(s.box, "marker", s.file("s", "marker"), s.token)
	n := s.count("s")
	// A process that got a SIGKILL just now takes a moment to die.
	tries := 0
	s.eventually("s runs, or has exited", func() bool {
		tries++
		return s.count("s") > n || tries%20 == 0 && s.inspect("s").Status == "exited"
	})
	switch now := s.inspect("s"); now.Status {
	case "running":
	case "exited":
		s.ok("start", "s")
	default:
		s.Errorf("s is %s", now.Status)
	}
	s.counts()
}

// checkUnmoved: "s" never stopped.
func (s *sweep) checkUnmoved(r result) {
	s.Helper()
	equal(s.box, "marker", s.file("s", "marker"), s.token)
	equal(s.box, "pid of s", s.counts().Pid, s.before.Pid)
}

// checkStopped: "s" never stopped, or is stopped with a whole checkpoint.
func (s *sweep) checkStopped(r result) {
	s.Helper()
	now := s.inspect("s")
	if now.Status == "running" {
		s.checkUnmoved(r)
		return
	}
	equal(s.box, "status of s", now.Status, "exited")
	equal(s.box, "marker", s.file("s", "marker"), s.token)
	if !slices.ContainsFunc(s.checkpoints("s"), func(ck checkpoint) bool {
		return ck.Name == "new" && ck.Status == "ready"
	}) {
		s.Error("s is stopped, and the checkpoint is not there")
		return
	}
	s.ok("restore", "s", "new")
	s.counts()
}

// checkRestored: "s" is where it was, or at base.
func (s *sweep) checkRestored(r result) { s.Helper(); s.checkEither(r, s.token, "base") }

// checkUndone: "s" is at base, or where it was before it was restored.
func (s *sweep) checkUndone(r result) { s.Helper(); s.checkEither(r, "base", s.token) }

// checkAside: "s" is stopped as it was, or runs at base; what a restore has
// moved aside is gone.
func (s *sweep) checkAside(r result) {
	s.Helper()
	equal(s.box, "undo checkpoints", strings.Join(s.undos("s"), " "), "")
	if rest, err := filepath.Glob(filepath.Join(s.root, "sandboxes", "*", "upper.*")); err != nil || len(rest) > 0 {
		s.Errorf("left beside the files: %q, %v", rest, err)
	}
	now, marker := s.inspect("s"), s.file("s", "marker")
	upper := s.upperdir("s")
	has := func(path string, want bool) {
		if _, err := os.Lstat(filepath.Join(upper, path)); (err == nil) != want {
			s.Errorf("with marker %q: %s: %v", marker, path, err)
		}
	}
	has("more/dir/file", marker == s.token)
	has("gone/dir/file", marker == "base")
	switch {
	case now.Status == "exited" && marker == s.token:
		s.ok("start", "s")
	case now.Status == "running" && marker == "base":
	default:
		s.Errorf("s is %s with marker %q, and was exited with %q", now.Status, marker, s.token)
		return
	}
	s.counts()
}

// checkAttached: "s" is where it was, and so are all host files, or it is at the checkpoint
// and so are they, unless the restore has said that they are as they were; nothing lies beside them.
func (s *sweep) checkAttached(r result) {
	s.Helper()
	at := 1
	if s.file("s", "marker") == s.token && !strings.Contains(r.err, "but its host files are as they were") {
		at = 0
	}
	for name, text := range hostFiles {
		got, _ := os.ReadFile(filepath.Join(s.dir, name))
		equal(s.box, "host file "+name, string(got), text[at])
	}
	list, err := os.ReadDir(s.dir)
	if err != nil || len(list) != 2 {
		s.Errorf("left beside the host files: %v, %v", list, err)
	}
	s.checkEither(r, "later", s.token)
}

func (s *sweep) checkEither(r result, from, to string) {
	s.Helper()
	now := s.inspect("s")
	marker := s.file("s", "marker")
	switch {
	case now.Status == "running" && marker == from:
		equal(s.box, "pid of s", now.Pid, s.before.Pid)
	case now.Status == "running" && marker == to:
		if r.code != 0 && s.action != "kill" {
			s.Log("the restore failed, and yet it is done")
		}
	case now.Status == "exited" && marker == from && s.action != "kill":
		// The processes it had are gone for good; its files are as they were.
		if !strings.Contains(r.err, "stopped") {
			s.Errorf("the error does not say that the sandbox is stopped now: %s", r)
		}
		s.ok("start", "s")
	default:
		s.Errorf("s is %s with marker %q, and was running with %q", now.Status, marker, from)
		return
	}
	s.counts()
}

// checkBack: "s" is gone, or as it was, or at base; if its checkpoints are
// there it can be brought back.
func (s *sweep) checkBack(r result) {
	s.Helper()
	if now, ok := s.find("s"); ok {
		marker := s.file("s", "marker")
		if now.Status != "running" || marker != s.token && marker != "base" {
			s.Errorf("s is %s with marker %q", now.Status, marker)
		}
		s.counts()
		return
	}
	if slices.ContainsFunc(s.checkpoints(), func(ck checkpoint) bool { return ck.ID == s.base }) {
		s.ok("restore", "s", "base")
		equal(s.box, "marker", s.file("s", "marker"), "base")
		s.counts()
	}
}

// checkComer: "r" is not there, or it is a sandbox like any other.
func (s *sweep) checkComer(r result) {
	s.Helper()
	if now, ok := s.find("r"); ok {
		switch now.Status {
		case "running", "created", "exited":
		default:
			s.Errorf("r is %s", now.Status)
		}
		s.ok("rm", "-f", "r")
	}
	s.checkUnmoved(r)
}

// checkFreed: the lease has ended, and nothing of it is left. One whose end was not
// begun is ended now.
func (s *sweep) checkFreed(r result) {
	s.Helper()
	state := func() string {
		return decode[[]struct{ State string }](s.box, s.ok("lease", "inspect", "l"))[0].State
	}
	if state() == "active" {
		s.ok("lease", "release", "l")
	}
	equal(s.box, "the lease", state(), "ended")
	if now, ok := s.find("r"); ok {
		s.Errorf("r is left: %+v", now)
	}
	for _, ck := range s.checkpoints() {
		if ck.ID != s.base {
			s.Errorf("a checkpoint is left: %+v", ck)
		}
	}
	s.checkUnmoved(r)
}

// checkUpdated: what "r" may reach is what it was or what it was to be, and the
// network knows the same.
func (s *sweep) checkUpdated(r result) {
	s.Helper()
	if r.code == 0 != strings.Contains(s.ok("inspect", "r"), "evil.invalid") && !r.killed {
		s.Errorf("code %d, and r is %s", r.code, s.ok("inspect", "r"))
	}
	state, err := os.ReadFile(filepath.Join(s.root, "network.json"))
	if err != nil {
		s.Fatal(err)
	}
	equal(s.box, "the network has the new rule", strings.Contains(string(state), "evil.invalid"),
		strings.Contains(s.ok("inspect", "r"), "evil.invalid"))
	s.ok("restart", "-t", "0", "r")
	s.checkComer(r)
}

// checkForks: "s" never stopped, and each fork is not there or runs at base.
func (s *sweep) checkForks(r result) {
	s.Helper()
	for _, name := range []string{"f-1", "f-2"} {
		now, ok := s.find(name)
		if !ok {
			if r.code == 0 {
				s.Errorf("%s is not there", name)
			}
			continue
		}
		equal(s.box, "status of "+name, now.Status, "running")
		equal(s.box, "marker of "+name, s.file(name, "marker"), "base")
		equal(s.box, "hostname of "+name, s.sh(name, "hostname"), now.ID[:12])
		s.reaches(name, s.count(name)+1)
		s.ok("rm", "-f", "--checkpoints", name)
	}
	s.checkUnmoved(r)
}

// checkPruned: what was to stay is there, and the next prune leaves no waste.
func (s *sweep) checkPruned(r result) {
	s.Helper()
	s.ok("verify", "--all", "--read-data")
	s.ok("prune", "-f", "--keep-last", "1")
	list := slices.DeleteFunc(s.checkpoints("s"), func(ck checkpoint) bool { return ck.Trigger == "undo" })
	if len(list) != 2 || list[0].ID != s.inspect("s").Head || list[1].ID != s.base {
		s.Errorf("left after a prune: %+v", list)
	}
	// One of the three files of 256 KiB is needed yet.
	if u := decode[struct{ Stored, Waste int64 }](s.box,
		s.ok("df", "--format", "json")); u.Waste > u.Stored/4 || u.Stored > 500_000 {
		s.Errorf("after a prune: %+v", u)
	}
	s.ok("restore", "--files-only", "--no-undo", "s")
	equal(s.box, "files kept", s.sh("s", "ls /keep /waste 2>/dev/null; wc -c < /keep/2"), "/keep:\n2\n262144")
	s.before = s.inspect("s")
	s.checkUnmoved(r)
}

// checkExported: there is a whole archive or none, and nothing beside it.
func (s *sweep) checkExported(r result) {
	s.Helper()
	s.ok("checkpoint", "export", "s@base", s.dir+"/y.tar.zst")
	want := s.read(s.dir + "/y.tar.zst")
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		s.Fatal(err)
	}
	for _, e := range entries {
		switch {
		case e.Name() == "y.tar.zst":
		case e.Name() == "x.tar.zst":
			equal(s.box, "the archive is whole", s.read(s.dir+"/x.tar.zst") == want, true)
		case s.action != "kill":
			s.Errorf("left beside the archive: %s", e.Name())
		}
	}
	s.checkUnmoved(r)
}

// checkImported: the checkpoint is whole or not there, and can be imported.
func (s *sweep) checkImported(r result) {
	s.Helper()
	s.ok("verify", "--all", "--read-data")
	id := s.ok("checkpoint", "import", s.dir+"/x.tar.zst")
	ck := decode[[]checkpoint](s.box, s.ok("checkpoint", "inspect", id))[0]
	if ck.Status != "ready" || ck.Name != "new" {
		s.Errorf("imported: %+v", ck)
	}
	s.checkUnmoved(r)
	s.sh("s", "rm /big")
	s.ok("restore", "--no-undo", "s", id)
	equal(s.box, "a file of it", s.sh("s", "wc -c < /big"), "262144")
	s.counts()
	s.sh("s", "rm /big")
}
