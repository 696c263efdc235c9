package test

import (
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/thorough"
)

// sweep is one pass over the failpoints.
type sweep struct {
	*box
	action string // "kill", "error" or "enospc"
	what   string // is tried now
	n      int
	token  string // what /marker says before the verb
	base   string
	before sandbox
	dir    string
	fired  map[string][]string // failpoint -> scenes
}

// TestKillSweep kills agentbox at every failpoint there is; what any later
// command then finds is the sandbox as before or as after the verb.
func TestKillSweep(t *testing.T) {
	t.Parallel()
	runSweep(t, "kill")
}

// TestErrorSweep makes every step fail: the verb says so, and nothing moved. A
// full disk is an error, too: where TestSpaceSweep goes, this one goes only if
// all is to be tried.
func TestErrorSweep(t *testing.T) {
	t.Parallel()
	runSweep(t, "error")
}

// TestSpaceSweep has the disk full at every step of what writes to the store.
func TestSpaceSweep(t *testing.T) {
	t.Parallel()
	runSweep(t, "enospc")
}

// ofStore are the beginnings of the failpoints of capture, commit, restore,
// prune and import.
var ofStore = []string{"checkpoint.", "restore.", "fork.", "overlay.", "store.begin.", "store.commit.", "store.abort.", "store.pack.", "store.remove.", "store.reclaim.", "store.sweep.", "portable.import."}

func inStore(point string) bool {
	return slices.ContainsFunc(ofStore, func(prefix string) bool { return strings.HasPrefix(point, prefix) })
}

func runSweep(t *testing.T, action string) {
	names := failpoints(t)
	if len(names) < 130 {
		t.Fatalf("only %d failpoints in the source: %v", len(names), names)
	}
	switch {
	case action == "enospc":
		names = slices.DeleteFunc(names, func(name string) bool { return !inStore(name) })
	case action == "error" && !thorough.Asked():
		names = slices.DeleteFunc(names, inStore)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return triedElsewhere(t, name) })
	// In two halves, with a root each, as this is what takes longest of all.
	halves := []*sweep{{action: action}, {action: action}}
	t.Run("half", func(t *testing.T) {
		for i, s := range halves {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				var own []string
				for n := i; n < len(names); n += len(halves) {
					own = append(own, names[n])
				}
				s.over(t, own)
			})
		}
	})
	total, fired := 0, 0
	for _, s := range halves {
		for point := range s.fired {
			total++
			if inStore(point) {
				fired++
			}
		}
	}
	t.Logf("%d failpoints fired, of %d; %d of capture, commit, restore, prune and import", total, len(names), fired)
	if whole := flag.Lookup("test.run").Value.String(); fired < 60 && (action != "error" || thorough.Asked()) && !strings.Contains(whole, "/") {
		t.Errorf("only %d failpoints of capture, commit, restore, prune and import fired", fired)
	}
}

// triedElsewhere tells whether another test breaks agentbox at a point.
func triedElsewhere(t *testing.T, name string) bool {
	t.Helper()
	file := elsewhere[longest(elsewhere, name)]
	if file == "" {
		return false
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), name) {
		t.Errorf("%s tries no %s", file, name)
	}
	return true
}

// over tries points on a root of its own, one after the other: each in the first
// scene that comes by it, or in all if all is to be tried.
func (s *sweep) over(t *testing.T, names []string) {
	root := memoryBox(t)
	s.fired = map[string][]string{}
	known := map[string]scene{}
	for _, sc := range scenes {
		known[sc.name] = sc
	}
	for _, name := range names {
		ok := t.Run(name, func(t *testing.T) {
			s.box = &box{T: t, root: root.root}
			for _, in := range scenesFor(name) {
				if len(s.fired[name]) > 0 && !thorough.Asked() {
					break
				}
				sc, ok := known[in]
				if !ok {
					t.Fatalf("no scene %q", in)
				}
				s.perform(name, sc)
			}
			if len(s.fired[name]) == 0 {
				t.Errorf("never fired in %q", scenesFor(name))
			}
			t.Logf("fired in %s", strings.Join(s.fired[name], ", "))
		})
		if !ok {
			root.empty() // the next point begins anew
		}
	}
}

// longest is the longest key that a failpoint begins with.
func longest[T any](of map[string]T, point string) (found string) {
	for prefix := range of {
		if strings.HasPrefix(point, prefix) && len(prefix) > len(found) {
			found = prefix
		}
	}
	return found
}

func scenesFor(point string) (names []string) {
	if prefix := longest(scenesOf, point); prefix != "" {
		return scenesOf[prefix]
	}
	for _, sc := range scenes {
		names = append(names, sc.name)
	}
	return names
}

// failpoints finds the names in the source.
func failpoints(t *testing.T) []string {
	t.Helper()
	hit := regexp.MustCompile(`failpoint\.Hit\("([^"]+)"( *\+ *[a-zA-Z]+)?\)`)
	step := regexp.MustCompile(`\bstep\("([^"]+)"`)
	var names []string
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(text), "failpoint.Hit("); n != len(hit.FindAllString(string(text), -1)) {
			t.Errorf("%s has a failpoint whose name this test cannot read", path)
		}
		for _, m := range hit.FindAllStringSubmatch(string(text), -1) {
			if m[2] == "" {
				names = append(names, m[1])
				continue
			}
			// A row of steps, named where they are taken.
			for _, s := range step.FindAllStringSubmatch(string(text), -1) {
				names = append(names, m[1]+s[1])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// perform breaks one verb at one point and puts everything in order again.
func (s *sweep) perform(point string, sc scene) {
	s.Helper()
	failed := s.Failed()
	s.ready()
	if sc.prepare != nil {
		sc.prepare(s)
	}
	env := failpoint(point, s.action)
	if sc.env != "" {
		env[0] += "," + sc.env
	}
	r := s.try(env, sc.verb(s)...)
	what := fmt.Sprintf("%s=%s in %q", point, s.action, sc.name)
	s.what = what
	fired := r.killed
	if s.action != "kill" {
		fired = strings.Contains(r.err, "failpoint "+point)
		// A restore goes on where only the processes cannot be kept for its undo.
		// So does one that may be tried again.
		again := strings.Contains(r.err, "tried recreate (1): failpoint "+point)
		if lesser := "the undo checkpoint has files only: failpoint " + point; fired && r.code == 0 && !again && !strings.Contains(r.err, lesser) && point != "checkpoint.after-ready" { // which is only logged
			s.Errorf("%s: failed and ended with 0: %s", what, r)
		}
	}
	if r.killed && s.action != "kill" {
		s.Errorf("%s: killed: %s", what, r)
	}
	if !fired {
		s.Logf("%s did not fire: %s", what, r)
	} else {
		s.fired[point] = append(s.fired[point], sc.name)
	}
	// Any later command finds things in order.
	s.ok("ps")
	s.ok("recover")
	if again := decode[struct{ Actions []string }](s.box, s.ok("recover", "--format", "json")); len(again.Actions) > 0 {
		s.Errorf("%s: a second recover still found something to do: %q", what, again.Actions)
	}
	sc.check(s, r)
	s.ok("verify", "--all", "--read-data")
	s.ok("audit", "verify")
	var rest []string
	for _, ck := range s.checkpoints() {
		if ck.Status == "pending" {
			s.Errorf("%s: left checkpoint %+v", what, ck)
		}
		if ck.ID != s.base {
			rest = append(rest, ck.ID)
		}
	}
	if len(rest) > 0 {
		s.ok(append([]string{"checkpoint", "rm"}, rest...)...)
	}
	var now *sandbox // "s", if it is there
	for _, b := range decode[[]sandbox](s.box, s.ok("ps", "-a", "--format", "json")) {
		switch b.Name {
		case "s":
			now = &b
		case "r":
			s.ok("rm", "-f", "--checkpoints", "r")
		}
	}
	// It is slow: once for every sixth point, or for each.
	if s.action == "kill" && fired && len(s.fired[point]) == 1 && (s.n%6 == 0 || thorough.Asked()) {
		s.cycle(what, now)
	}
	s.clean(what, now)
	if s.Failed() && !failed {
		s.Logf("%s ended so: %s", what, r)
	}
}

// ready brings "s" to where a scene begins.
func (s *sweep) ready() {
	s.Helper()
	now, ok := s.find("s")
	if ok && now.Status != "running" {
		s.ok("start", "s")
	}
	if ok && !slices.ContainsFunc(s.checkpoints("s"), func(ck checkpoint) bool { return ck.ID == s.base }) {
		s.ok("rm", "-f", "s")
		ok = false
	}
	if !ok {
		s.start("s", "--network", "none", "busybox", "sh", "-c", counter)
		s.sh("s", "echo base > /marker; mkdir -p /gone/dir; echo 1 > /gone/dir/file")
		s.base = s.checkpoint("--name", "base", "s")
		s.ok("checkpoint", "pin", s.base)
	}
	s.n++
	s.token = fmt.Sprintf("token-%d", s.n)
	s.sh("s", "echo "+s.token+" > /marker")
	s.before = s.inspect("s")
}

// counts checks that "s" runs, and on.
func (s *sweep) counts() {
	s.Helper()
	now := s.inspect("s")
	equal(s.box, "status of s", now.Status, "running")
	if now.Status == "running" {
		s.reaches("s", s.count("s")+1)
	}
}

// cycle checks that a checkpoint and a restore still work.
func (s *sweep) cycle(what string, now *sandbox) {
	s.Helper()
	if now == nil || now.Status != "running" {
		return // the scene's check has said so, or ready makes it anew
	}
	s.sh("s", "echo cycle > /marker")
	id := s.checkpoint("s")
	s.sh("s", "echo lost > /marker")
	s.ok("restore", "--no-undo", "s")
	equal(s.box, what+": marker after a cycle", s.file("s", "marker"), "cycle")
	s.counts()
	s.ok("checkpoint", "rm", id)
}

// clean checks that only what "s" needs is left.
func (s *sweep) clean(what string, now *sandbox) {
	s.Helper()
	id := ""
	if now != nil {
		id = now.ID
	}
	var left string
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if left = s.leftBeside(id, now != nil); left == "" {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: left behind: %s", what, left)
		}
	}
}

// leftBeside returns something that no running sandbox but id accounts for.
func (s *sweep) leftBeside(id string, runs bool) string {
	for _, p := range processesOf(s.root) {
		if !runs || !strings.Contains(p, "conmon") || !strings.Contains(p, id) {
			return p
		}
	}
	for _, m := range mountsUnder(s.root) {
		if !runs || !strings.Contains(m, id) {
			return m
		}
	}
	for _, other := range s.ids() {
		if (!runs || other != id) && len(insiders(other)) > 0 {
			return "a process of sandbox " + other
		}
	}
	return ""
}

// checkSame: "s" has its files, and runs or not.
func (s *sweep) checkSame(r result) {
	s.Helper()
	equal(s.box, "marker", s.file("s", "marker"), s.token)
	n := s.count("s")
	// What got a SIGKILL just now takes a moment to die.
	s.eventually("s runs, or has exited", func() bool { return s.inspect("s").Status == "exited" || s.count("s") > n })
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
	equal(s.box, "pid of s", s.inspect("s").Pid, s.before.Pid)
	s.counts()
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
	if !slices.ContainsFunc(s.checkpoints("s"), func(ck checkpoint) bool { return ck.Name == "new" && ck.Status == "ready" }) {
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
	equal(s.box, "the network has the new rule", strings.Contains(string(state), "evil.invalid"), strings.Contains(s.ok("inspect", "r"), "evil.invalid"))
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
	if u := decode[struct{ Stored, Waste int64 }](s.box, s.ok("df", "--format", "json")); u.Waste > u.Stored/4 || u.Stored > 500_000 {
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
