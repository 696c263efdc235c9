package test

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// A scene is a verb at which agentbox is broken. Every scene leaves the sandbox
// "s" running, at "base" or somewhere after it, so that the next can go on
// from there; "r" is a sandbox that comes and goes.
type scene struct {
	name    string
	prepare func(*sweep)
	verb    func(*sweep) []string
	env     string // failpoints besides the one that is tried
	check   func(*sweep, result)
}

// scenes by the beginnings of the failpoints' names they are for. A failpoint
// is tried in every scene of its longest entry; one that no entry knows is
// tried in all of them, so that a new one cannot be forgotten.
var scenesOf = map[string][]string{
	"create.":           {"run", "recreate"},
	"start.":            {"start", "run"},
	"checkpoint.":       {"checkpoint", "checkpoint --stop"},
	"restore.":          {"restore", "recreate"},
	"remove.":           {"rm", "rm --checkpoints"},
	"stop.":             {"stop"},
	"oci.create.":       {"run", "recreate"},
	"oci.start.":        {"start", "restore", "run attached"},
	"oci.stop.":         {"stop", "restore", "checkpoint --stop", "failing start"},
	"oci.remove.":       {"rm", "rm running"},
	"oci.exec.":         {"exec"},
	"network.setup.":    {"run bridge"},
	"network.teardown.": {"stop bridge"},
	"network.release.":  {"rm bridge"},
	"store.journal.":    {"run", "checkpoint", "restore", "rm"},
	"store.sandbox.":    {"run", "rm"},
	"store.begin.":      {"checkpoint"},
	"store.commit.":     {"checkpoint", "checkpoint --stop"},
	"store.abort.":      {"failing checkpoint"},
	"store.sweep.":      {"recover renamed", "recover discarded"},
	"store.remove.":     {"checkpoint rm", "rm --checkpoints"},
	"image":             {"image import", "image rm"},
}

// elsewhere are the beginnings of the failpoints that no sandbox of the backend
// oci passes, and the tests that break agentbox at each of them.
var elsewhere = map[string]string{
	"apply.":        "../runtime/dockerplugin/volume/dockerd_test.go",
	"containerd.":   "containerd/containerd_test.go",
	"docker.":       "docker/sandbox_test.go",
	"volume.":       "../runtime/volume/failpoint_test.go",
	"volume.pause.": "../runtime/dockerplugin/volume/dockerd_test.go",
}

var scenes = []scene{
	{name: "run", verb: words("run -d --name r --network none busybox sleep 1000"), check: (*sweep).checkComer},
	{name: "run attached", verb: words("run --name r --network none busybox true"), check: (*sweep).checkComer},
	{name: "run bridge", verb: published, check: (*sweep).checkComer},
	{name: "stop bridge", prepare: comer("--network bridge busybox sleep 1000"), verb: words("stop -t 0 r"), check: (*sweep).checkComer},
	{name: "rm bridge", prepare: comer("--network bridge busybox sleep 1000"), verb: words("rm -f r"), check: (*sweep).checkComer},
	{name: "rm running", prepare: comer("--network none busybox sleep 1000"), verb: words("rm -f r"), check: (*sweep).checkComer},
	{name: "failing start", prepare: func(s *sweep) { s.ok("create", "--name", "r", "--network", "none", "busybox", "no-such-command") }, verb: words("start r"), check: (*sweep).checkComer},
	{name: "start", prepare: func(s *sweep) { s.ok("stop", "-t", "0", "s") }, verb: words("start s"), check: (*sweep).checkSame},
	{name: "stop", verb: words("stop -t 0 s"), check: (*sweep).checkSame},
	{name: "exec", verb: words("exec s true"), check: (*sweep).checkSame},
	{name: "checkpoint", verb: words("checkpoint --name new s"), check: (*sweep).checkUnmoved},
	{name: "checkpoint --stop", verb: words("checkpoint --name new --stop s"), check: (*sweep).checkStopped},
	{name: "failing checkpoint", env: "checkpoint.after-capture=error", verb: words("checkpoint --name new s"), check: (*sweep).checkUnmoved},
	{name: "recover renamed", prepare: interrupted("store.commit.after-rename"), verb: words("recover"), check: (*sweep).checkUnmoved},
	{name: "recover discarded", prepare: interrupted("checkpoint.before-commit"), verb: words("recover"), check: (*sweep).checkUnmoved},
	{name: "checkpoint rm", prepare: func(s *sweep) { s.checkpoint("--files-only", "--name", "new", "s") }, verb: words("checkpoint rm s@new"), check: (*sweep).checkUnmoved},
	{name: "restore", verb: words("restore s base"), check: (*sweep).checkRestored},
	{name: "recreate", prepare: func(s *sweep) { s.ok("rm", "-f", "s") }, verb: words("restore s base"), check: (*sweep).checkBack},
	{name: "rm", verb: words("rm -f s"), check: (*sweep).checkBack},
	{name: "rm --checkpoints", verb: words("rm -f --checkpoints s"), check: (*sweep).checkBack},
	{name: "image import", prepare: imported, verb: func(s *sweep) []string { return []string{"image", "import", "i", s.dir} }, check: (*sweep).checkUnmoved},
	{name: "image rm", prepare: func(s *sweep) { imported(s); s.ok("image", "import", "i", s.dir) }, verb: words("image rm i"), check: (*sweep).checkUnmoved},
}

func words(line string) func(*sweep) []string {
	return func(*sweep) []string { return strings.Fields(line) }
}

func comer(line string) func(*sweep) {
	return func(s *sweep) { s.ok(append([]string{"run", "-d", "--name", "r"}, strings.Fields(line)...)...) }
}

// published is a sandbox with a published port that is free just now.
func published(s *sweep) []string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.Fatal(err)
	}
	defer l.Close()
	return []string{"run", "-d", "--name", "r", "-p", l.Addr().String() + ":80", "busybox", "sleep", "1000"}
}

// interrupted leaves a checkpoint that was killed at a point.
func interrupted(point string) func(*sweep) {
	return func(s *sweep) {
		if r := s.try(failpoint(point, "kill"), "checkpoint", "--name", "new", "s"); !r.killed {
			s.Fatalf("the checkpoint was not killed at %s: %s", point, r)
		}
	}
}

func imported(s *sweep) {
	s.try(nil, "image", "rm", "i")
	s.dir = s.T.TempDir()
	if err := os.WriteFile(filepath.Join(s.dir, "f"), []byte("x"), 0o600); err != nil {
		s.Fatal(err)
	}
}

// sweep is one pass over the failpoints.
type sweep struct {
	*box
	action string // "kill" or "error"
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

// TestErrorSweep makes every step fail: the verb says so, and nothing moved.
func TestErrorSweep(t *testing.T) {
	t.Parallel()
	runSweep(t, "error")
}

func runSweep(t *testing.T, action string) {
	names := failpoints(t)
	if len(names) < 25 {
		t.Fatalf("only %d failpoints in the source: %v", len(names), names)
	}
	root := newBox(t)
	s := &sweep{action: action, fired: map[string][]string{}}
	known := map[string]scene{}
	for _, sc := range scenes {
		known[sc.name] = sc
	}
	n := 0
	for _, name := range names {
		if file := elsewhere[longest(elsewhere, name)]; file != "" {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(text), name) {
				t.Errorf("%s tries no %s", file, name)
			}
			continue
		}
		n++
		ok := t.Run(name, func(t *testing.T) {
			s.box = &box{T: t, root: root.root}
			for _, in := range scenesFor(name) {
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
	fired := 0
	for _, in := range s.fired {
		fired += min(len(in), 1)
	}
	t.Logf("%d failpoints fired, of %d", fired, n)
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
	if s.action == "error" {
		fired = strings.Contains(r.err, "failpoint "+point)
		if fired && r.code == 0 {
			s.Errorf("%s: failed and ended with 0: %s", what, r)
		}
	}
	if r.killed && s.action == "error" {
		s.Errorf("%s: killed: %s", what, r)
	}
	if fired {
		s.fired[point] = append(s.fired[point], sc.name)
	}
	// Any later command finds things in order.
	s.ok("ps")
	s.ok("recover")
	if again := decode[struct{ Actions []string }](s.box, s.ok("recover", "--format", "json")); len(again.Actions) > 0 {
		s.Errorf("%s: a second recover still found something to do: %q", what, again.Actions)
	}
	sc.check(s, r)
	for _, ck := range s.checkpoints() {
		switch ck.Status {
		case "ready":
			s.ok("checkpoint", "verify", ck.ID)
		case "pending":
			s.Errorf("%s: left checkpoint %+v", what, ck)
		}
		if ck.ID != s.base {
			s.ok("checkpoint", "rm", ck.ID)
		}
	}
	s.try(nil, "rm", "-f", "--checkpoints", "r")
	if s.action == "kill" && fired {
		s.cycle(what)
	}
	s.clean(what)
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
		s.sh("s", "echo base > /marker")
		s.base = s.checkpoint("--name", "base", "s")
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
func (s *sweep) cycle(what string) {
	s.Helper()
	if now, ok := s.find("s"); !ok || now.Status != "running" {
		return // the scene's check has said so, or ready makes it anew
	}
	s.sh("s", "echo cycle > /marker")
	id := s.checkpoint("s")
	s.sh("s", "echo lost > /marker")
	s.ok("restore", "s")
	equal(s.box, what+": marker after a cycle", s.file("s", "marker"), "cycle")
	s.counts()
	s.ok("checkpoint", "rm", id)
}

// clean checks that only what "s" needs is left.
func (s *sweep) clean(what string) {
	s.Helper()
	now, ok := s.find("s")
	var left string
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if left = s.leftBeside(now.ID, ok); left == "" {
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
func (s *sweep) checkRestored(r result) {
	s.Helper()
	now := s.inspect("s")
	marker := s.file("s", "marker")
	switch {
	case now.Status == "running" && marker == s.token:
		equal(s.box, "pid of s", now.Pid, s.before.Pid)
	case now.Status == "running" && marker == "base":
		if r.code != 0 && s.action == "error" {
			s.Log("the restore failed, and yet it is done")
		}
	case now.Status == "exited" && marker == s.token && s.action == "error":
		// The processes it had are gone for good; its files are as they were.
		if !strings.Contains(r.err, "stopped") {
			s.Errorf("the error does not say that the sandbox is stopped now: %s", r)
		}
		s.ok("start", "s")
	default:
		s.Errorf("s is %s with marker %q, and was running with %q", now.Status, marker, s.token)
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
