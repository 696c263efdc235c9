package test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// undoSteps is what `agentbox undo --list` documents, as far as these tests need it.
type undoSteps struct {
	Changed bool
	Steps   []struct {
		ID, Kind, Trigger, Message string
		Back                       int
		Changes                    map[string]int
	}
}

func (b *box) undoList(name string) (l undoSteps) {
	b.Helper()
	if err := json.Unmarshal([]byte(b.ok("undo", "--list", "--format", "json", name)), &l); err != nil {
		b.Fatal(err)
	}
	return l
}

// ticks counts in its shell's memory and prints every number; it changes no file.
const ticks = `i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done`

// ticked is the last number that a sandbox has printed.
func (b *box) ticked(name string) int {
	b.Helper()
	var numbers []int
	b.eventually("it prints", func() bool { numbers = b.printed(name); return len(numbers) > 0 })
	return numbers[len(numbers)-1]
}

// wentOnFrom checks with which number a process went on after the nth restore: by steps of one from
// there until the next restore.
func (b *box) wentOnFrom(name string, n, low, high int) {
	b.Helper()
	var jumps []int
	b.eventually("the restored process prints", func() bool {
		jumps = nil
		numbers := b.printed(name)
		for i := 1; i < len(numbers); i++ {
			if numbers[i] != numbers[i-1]+1 {
				jumps = append(jumps, numbers[i])
			}
		}
		return len(jumps) >= n
	})
	if at := jumps[n-1]; len(jumps) != n || at < low || at > high+1 {
		b.Errorf("after restore %d it went on with %d (%v), and was between %d and %d then", n, at, jumps, low, high)
	}
}

// TestExecSteps: in a sandbox with a workspace each exec that has changed a file is a step, undo and redo go
// over the steps with files and processes, and a new step ends what redo leads to.
func TestExecSteps(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--workspace", dir+":/work", "busybox", "sh", "-c", ticks)
	began := b.inside("s")
	equal(b, "steps without a change", len(b.undoList("s").Steps), 1)

	low := b.ticked("s")
	b.ok("exec", "--message", "it works", "s", "sh", "-c", works)
	high := b.ticked("s")
	one := b.inside("s")
	b.sh("s", wreck)
	wrecked := b.inside("s")
	left := b.ticked("s")
	l := b.undoList("s")
	if len(l.Steps) != 3 || l.Changed {
		t.Fatalf("the steps: %+v", l)
	}
	equal(b, "the message of a step", l.Steps[1].Message, "it works")
	equal(b, "that of one without", l.Steps[0].Message, "sh")
	equal(b, "the kind of a step", l.Steps[0].Kind, "full")
	equal(b, "files that the second deletes", l.Steps[0].Changes["deleted"] > 5, true)

	b.ok("undo", "s")
	equal(b, "what it sees one step back", b.inside("s"), one)
	b.wentOnFrom("s", 1, low, high)

	b.ok("undo", "s")
	equal(b, "what it sees at the beginning", b.inside("s"), began)
	equal(b, "it runs", b.inspect("s").Status, "running")
	if r := b.try(nil, "undo", "s"); r.code != 4 || !strings.Contains(r.err, "oldest step") {
		t.Errorf("before the beginning: %s", r)
	}

	b.ok("redo", "s", "2")
	equal(b, "what it sees where undo began", b.inside("s"), wrecked)
	b.wentOnFrom("s", 3, left, left+1000)
	if r := b.try(nil, "redo", "s"); r.code != 4 || !strings.Contains(r.err, "nothing to redo") {
		t.Errorf("past the end: %s", r)
	}

	// The owner's changes below are no step of the sandbox, and do not come back by redo either.
	ownerEdits(t, dir)
	b.ok("undo", "s")
	equal(b, "what it sees one step back, over a changed directory", b.inside("s"), one)
	b.sh("s", "echo other > /work/other")
	if r := b.try(nil, "redo", "s"); r.code != 4 {
		t.Errorf("redo after a new step: %s", r)
	}
	b.ok("undo", "--files", "s")
	equal(b, "what it sees, files only", b.inside("s"), one)
	b.checkpoint("-m", "more", "s")
	if n := len(b.undoList("s").Steps); n < 3 {
		t.Errorf("%d steps", n)
	}
	b.ok("verify")
}

// TestStepsOff: without steps an exec takes none, and undo goes to the last checkpoint.
func TestStepsOff(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "--steps=off", "--workspace", project(t)+":/work", "busybox", "sleep", "1000")
	began := b.inside("s")
	b.sh("s", works)
	works := b.inside("s")
	if l := b.undoList("s"); len(l.Steps) != 1 || !l.Changed {
		t.Fatalf("the steps: %+v", l)
	}
	b.ok("undo", "s")
	equal(b, "what it sees", b.inside("s"), began)
	b.ok("redo", "s")
	equal(b, "what it sees where undo began", b.inside("s"), works)
}

// TestUndoKilled kills undo and redo at the failpoints of a restore: afterwards the sandbox is where it was,
// or where it was to go, and from either the other one is a step away.
func TestUndoKilled(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "--workspace", project(t)+":/work", "busybox", "sh", "-c", ticks)
	b.sh("s", works)
	one := b.inside("s")
	b.sh("s", wreck)
	wrecked := b.inside("s")
	for _, point := range []string{
		"restore.before-layout", "restore.after-undo", "restore.after-layout", "restore.after-stop",
		"restore.between-trees", "restore.after-apply", "restore.after-proof", "restore.after-start", "restore.after-head",
	} {
		for _, verb := range []string{"undo", "redo"} {
			b.killedAt(point+"=kill", verb, "s")
			b.ok("recover")
			if b.inspect("s").Status != "running" {
				b.ok("start", "s")
			}
			switch now := b.inside("s"); now {
			case one:
				if verb == "redo" {
					b.ok("redo", "s")
				}
			case wrecked:
				if verb == "undo" {
					b.ok("undo", "s")
				}
			default:
				t.Fatalf("%s killed at %s, it sees\n%s", verb, point, now)
			}
			want := map[string]string{"undo": one, "redo": wrecked}[verb]
			equal(b, "what it sees after "+verb+" and "+point, b.inside("s"), want)
		}
	}
}

// TestUndoPath: paths go back by themselves, under a process that writes to them, and nothing else does. A
// kill leaves them as they were or as they were to be.
func TestUndoPath(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	b.start("s", "--network", "none", "--steps=off", "--workspace", dir+":/work", "busybox", "sh", "-c",
		"cd /work; i=0; while :; do i=$((i+1)); echo $i; echo $i > busy/now; sleep 0.02; done 2>/dev/null")
	had := onHost(t, dir)
	b.sh("s", "mkdir /work/busy; echo then > /work/busy/file; ln /work/busy/file /work/busy/link; chmod 600 /work/busy/file")
	b.checkpoint("--name", "then", "s")
	began := b.inside("s")
	only := func(all, path string) string { // what inside says of a path
		var lines []string
		for line := range strings.Lines(all) {
			if strings.HasPrefix(line, "./"+path) {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "")
	}
	wreckPaths := func() {
		b.sh("s", wreck+"; rm -rf busy/file busy/link build; mkdir busy/file; echo more > busy/more; echo kept > other")
	}
	wreckPaths()
	pid := b.inspect("s").Pid
	head := b.inspect("s").Head
	b.ok("undo", "s", "--path", "/work/src", "--path", "/work/busy/file", "--path", "/work/busy/more", "--path", "/work/wreck")
	now := b.inside("s")
	for _, path := range []string{"src", "busy/file", "busy/more", "wreck"} {
		equal(b, path, only(now, path), only(began, path))
	}
	equal(b, "what was not named", b.sh("s", "cat /work/other /work/README; ls -d /work/.agentbox* 2>/dev/null || echo none"),
		"kept\ngone\nnone")
	equal(b, "its first process", b.inspect("s").Pid, pid)
	equal(b, "the directory", onHost(t, dir), had)
	was := b.ticked("s")
	b.eventually("it goes on", func() bool { return b.ticked("s") > was })
	equal(b, "head", b.inspect("s").Head, head)
	equal(b, "whether files have changed", b.undoList("s").Changed, true)
	b.ok("verify")

	for args, says := range map[string]string{
		"undo s --path /etc": "has the mount /etc/", "undo s --path /proc/1": "is in no checkpoint",
		"undo s --path /none/x": "Its parent directory does not exist", "undo s --path x": "absolute", "redo s --path /x": "unknown flag",
		"undo s --path /work/src --path /work/src/deep": "one contains the other",
	} {
		if r := b.try(nil, strings.Fields(args)...); r.code == 0 || !strings.Contains(r.err, says) {
			t.Errorf("%s: %s", args, r)
		}
	}

	for _, broken := range []string{
		"checkpoint.after-freeze=kill", "undo.paths.after-stage=kill", "undo.paths.between=kill",
		"undo.paths.after-stage=error", "undo.paths.between=error",
	} {
		b.ok("restore", "s", "then")
		wreckPaths()
		before := only(b.inside("s"), "src")
		r := b.try([]string{"AGENTBOX_FAILPOINT=" + broken}, "undo", "s", "--path", "/work/src", "--path", "/work/wreck")
		if r.code == 0 {
			t.Fatalf("%s: %s", broken, r)
		}
		b.ok("recover")
		equal(b, "status", b.inspect("s").Status, "running")
		want := only(began, "src")
		if broken == "checkpoint.after-freeze=kill" || broken == "undo.paths.after-stage=error" {
			want = before
		}
		equal(b, "src after "+broken, only(b.inside("s"), "src"), want)
		equal(b, "what is staged", b.sh("s", "ls -d /work/.agentbox* 2>/dev/null || echo none"), "none")
		was := b.ticked("s")
		b.eventually("it goes on", func() bool { return b.ticked("s") > was })
	}
}

// linked lists the names in a workspace over dir that share an inode, a line for each inode. The inode
// numbers that overlayfs shows do not say it of files that were linked after a copy-up.
func (b *box) linked(name, dir string, in ...string) string {
	b.Helper()
	upper := filepath.Join(b.root, "sandboxes", b.inspect(name).ID, "workspaces", "0", "upper")
	groups := map[uint64][]string{}
	for path := range strings.Lines(b.sh(name, "cd /work; find . -type f | sort")) {
		path = strings.TrimSpace(path)
		if !slices.ContainsFunc(in, func(top string) bool { return strings.HasPrefix(path+"/", "./"+top+"/") }) {
			continue
		}
		var st syscall.Stat_t
		if syscall.Lstat(filepath.Join(upper, path), &st) != nil {
			if err := syscall.Lstat(filepath.Join(dir, path), &st); err != nil {
				b.Fatal(err)
			}
		}
		groups[st.Ino] = append(groups[st.Ino], path)
	}
	var lines []string
	for _, names := range groups {
		if len(names) > 1 {
			lines = append(lines, strings.Join(names, " = "))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// someEdits is a script of random changes of every kind to a few names.
func someEdits(r *rand.Rand, n int) string {
	dirs, leaves := []string{"a", "a/d", "a/d/e", "b", "c"}, []string{"f", "g", "h", "d"}
	name := func() string { return dirs[r.IntN(len(dirs))] + "/" + leaves[r.IntN(len(leaves))] }
	script := []string{"cd /work", "exec 2>/dev/null"}
	for i := range n {
		from, to, dir := name(), name(), dirs[r.IntN(len(dirs))]
		script = append(script, []string{
			fmt.Sprintf("echo %d > %s", i, from), fmt.Sprintf("echo %d >> %s", i, from), "rm -rf " + from, "rm -rf " + dir,
			"mkdir -p " + dir, "mkdir -p " + from, fmt.Sprintf("mv %s %s", from, to), fmt.Sprintf("ln %s %s", from, to),
			fmt.Sprintf("ln %s %s", from, to), fmt.Sprintf("ln -s %s %s", to, from), "chmod 700 " + from, "chmod 711 " + dir,
			fmt.Sprintf("cp %s %s.new && mv %s.new %s", from, from, from, from), "chown 7:8 " + from,
			fmt.Sprintf("touch -d @%d %s", 1e9+i, dir), fmt.Sprintf("touch -d @%d %s", 1e9+i, from),
		}[r.IntN(16)])
	}
	return strings.Join(append(script, "true"), "\n")
}

// TestUndoPathExact: after random changes some directories go back exactly, with times and with which names
// share an inode, and nothing else does.
func TestUndoPathExact(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := project(t)
	for i, name := range []string{"a/f", "a/d/f", "a/d/e/f", "b/f", "b/g", "c/h"} {
		put(t, dir, name, fmt.Sprint(i))
	}
	b.start("s", "--network", "none", "--steps=off", "--workspace", dir+":/work", "busybox", "sleep", "1000")
	only := func(all string, tops ...string) string {
		var lines []string
		for line := range strings.Lines(all) {
			if slices.ContainsFunc(tops, func(top string) bool {
				return strings.HasPrefix(line, "./"+top+"/") || strings.HasPrefix(line, "./"+top+" ")
			}) {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "")
	}
	all := []string{"a", "b", "c"}
	for seed := range uint64(12) {
		r := rand.New(rand.NewPCG(seed, 1))
		b.sh("s", someEdits(r, r.IntN(20)))
		b.checkpoint("s")
		then, linked := b.inside("s"), func(in ...string) string { return b.linked("s", dir, in...) }
		k := r.IntN(3)
		back, rest := []string{all[k], all[(k+1)%3]}, all[(k+2)%3]
		if seed%4 == 3 {
			back, rest = all, "none"
		}
		were := linked(back...)
		b.sh("s", someEdits(r, 20))
		before := b.inside("s")
		restWere := linked(rest)
		args := []string{"undo", "s", "--path", "/work/" + back[0], "--path", "/work/" + back[1]}
		if seed%4 == 3 {
			args = []string{"undo", "s", "--path", "/work"}
		}
		b.ok(args...)
		now := b.inside("s")
		equal(b, fmt.Sprintf("seed %d: what went back", seed), only(now, back...), only(then, back...))
		equal(b, fmt.Sprintf("seed %d: the rest", seed), only(now, rest), only(before, rest))
		if seed%4 == 3 {
			equal(b, fmt.Sprintf("seed %d: all", seed), now, then)
		}
		equal(b, fmt.Sprintf("seed %d: names that share an inode", seed), linked(back...), were)
		equal(b, fmt.Sprintf("seed %d: in the rest", seed), linked(rest), restWere)
	}
	b.ok("verify")
}

// TestExecBetweenFreezes: an exec that checkpoints come in the way of runs once, with all of its input.
func TestExecBetweenFreezes(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("s", "--network", "none", "busybox", "sleep", "1000")
	done := make(chan struct{})
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			select {
			case <-done:
				return
			default:
			}
			if r := b.try(nil, "checkpoint", "s"); r.code != 0 {
				b.Error(r)
				return
			}
		}
	}()
	for i := range 40 {
		text := strings.Repeat("typed\n", 100*i)
		r := b.input([]byte(text), nil, "exec", "-i", "s", "sh", "-c", "echo ran >> /ran; cat")
		if r.code != 0 || r.out != text {
			t.Fatalf("exec %d: %s", i, r)
		}
	}
	close(done)
	<-over
	equal(b, "how often it ran", b.sh("s", "grep -c ran /ran"), "40")
}
