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

// TestSpaceSweep has the disk full at every second step of what writes to the store; at
// every step if all is to be tried.
func TestSpaceSweep(t *testing.T) {
	t.Parallel()
	runSweep(t, "enospc")
}

// ofStore are the beginnings of the failpoints of capture, commit, restore,
// prune and import.
var ofStore = []string{
	"checkpoint.", "restore.", "fork.", "overlay.", "store.begin.", "store.commit.", "store.abort.", "store.pack.",
	"store.remove.", "store.reclaim.", "store.sweep.", "portable.import.",
}

func inStore(point string) bool {
	return slices.ContainsFunc(ofStore, func(prefix string) bool { return strings.HasPrefix(point, prefix) })
}

func runSweep(t *testing.T, action string) {
	names := failpoints(t)
	if len(names) < 130 {
		t.Fatalf("only %d failpoints in the source: %v", len(names), names)
	}
	least := 60
	switch {
	case action == "enospc":
		names = slices.DeleteFunc(names, func(name string) bool { return !inStore(name) })
		if !thorough.Asked() {
			least /= 2
			n := 0
			names = slices.DeleteFunc(names, func(string) bool { n++; return n%2 == 0 })
		}
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
	if whole := flag.Lookup("test.run").Value.String(); fired < least && (action != "error" || thorough.Asked()) &&
		!strings.Contains(whole, "/") {
		t.Errorf("only %d failpoints of capture, commit, restore, prune and import fired", fired)
	}
}

// triedElsewhere reports whether another test breaks agentbox at a point.
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
	root.uppers = map[string]string{}
	s.fired = map[string][]string{}
	known := map[string]scene{}
	for _, sc := range scenes {
		known[sc.name] = sc
	}
	for _, name := range names {
		ok := t.Run(name, func(t *testing.T) {
			s.box = &box{T: t, root: root.root, uppers: root.uppers}
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
	shared := lifecyclePoints(t)
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
			// A row of steps, named where they are taken: in the same file, or in the lifecycle that
			// the backend shares.
			for _, s := range step.FindAllStringSubmatch(string(text), -1) {
				names = append(names, m[1]+s[1])
			}
			if m[1] == "oci." || m[1] == "containerd." {
				for _, point := range shared {
					names = append(names, m[1]+point)
				}
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

// lifecyclePoints lists the points of the lifecycle that backends share.
func lifecyclePoints(t *testing.T) (points []string) {
	t.Helper()
	files, err := filepath.Glob("../runtime/internal/box/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no lifecycle: %v", err)
	}
	point := regexp.MustCompile(`\b(?:hit|step)\(.*"([a-z]+\.after-[a-z]+)"\)`)
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range point.FindAllStringSubmatch(string(text), -1) {
			points = append(points, m[1])
		}
	}
	return points
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
		again := strings.Contains(r.err, "tried recreate: failpoint "+point)
		// What frees space goes on without the audit log, and logs that.
		unaudited := strings.HasPrefix(point, "audit.") && sc.name == "rm" && strings.Contains(r.err, "level=ERROR")
		if lesser := "the undo checkpoint has files only: failpoint " + point; fired && r.code == 0 && !again && !unaudited &&
			!strings.Contains(r.err, lesser) && point != "checkpoint.after-ready" { // which is only logged
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
	// It is slow: once for every tenth point, or for each.
	if s.action == "kill" && fired && len(s.fired[point]) == 1 && (s.n%10 == 0 || thorough.Asked()) {
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
	fresh := ok && now.Status == "running"
	if ok && !fresh {
		s.ok("start", "s")
	}
	if ok && !slices.ContainsFunc(s.checkpoints("s"), func(ck checkpoint) bool { return ck.ID == s.base }) {
		s.ok("rm", "-f", "s")
		ok, fresh = false, false
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
	if s.before = now; !fresh {
		s.before = s.inspect("s")
	}
}

// counts checks that "s" runs, and on.
func (s *sweep) counts() (now sandbox) {
	s.Helper()
	now = s.inspect("s")
	equal(s.box, "status of s", now.Status, "running")
	if now.Status == "running" {
		s.reaches("s", s.count("s")+1)
	}
	return now
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
