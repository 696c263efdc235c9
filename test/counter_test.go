package test

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// counter counts in its shell's memory, prints every number, and keeps the
// last one in a file.
const counter = `i=0; while :; do i=$((i+1)); echo $i > /count.new; mv /count.new /count; echo $i; sleep 0.05; done`

func (b *box) count(name string) int {
	b.Helper()
	n, _ := strconv.Atoi(b.file(name, "count"))
	return n
}

// reaches waits until a sandbox's counter is at n, and returns what it is at.
func (b *box) reaches(name string, n int) (now int) {
	b.Helper()
	path := filepath.Join(b.upperdir(name), "count")
	b.eventually(fmt.Sprintf("the counter of %s is at %d", name, n), func() bool {
		now, _ = strconv.Atoi(b.read(path))
		return now >= n
	})
	return now
}

// printed is every number the sandbox ever printed, over restores.
func (b *box) printed(name string) (numbers []int) {
	b.Helper()
	for _, line := range strings.Fields(b.ok("logs", name)) {
		n, err := strconv.Atoi(line)
		if err != nil {
			b.Fatalf("the log of %s has a line %q", name, line)
		}
		numbers = append(numbers, n)
	}
	return numbers
}

// wentOn checks that the process's numbers since the log had `before` lines
// continue one that it had at the checkpoint, between low and high, by steps of one.
func (b *box) wentOn(name string, before, low, high int) {
	b.Helper()
	b.eventually("the restored process prints", func() bool { return len(b.printed(name)) > before+2 })
	numbers := b.printed(name)[before:]
	if numbers[0] < low || numbers[0] > high+1 {
		b.Errorf("after the restore the counter went on with %d, and was between %d and %d at the checkpoint",
			numbers[0], low, high)
	}
	for i := 1; i < len(numbers); i++ {
		if numbers[i] != numbers[i-1]+1 {
			b.Errorf("after the restore the counter went from %d to %d", numbers[i-1], numbers[i])
		}
	}
}

func TestCounter(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "busybox", "sh", "-c", counter)
	low1 := b.reaches("c", 10)
	one := b.checkpoint("c")
	high1 := b.count("c")
	low2 := b.reaches("c", high1+10) // apart, however slow the machine is
	two := b.checkpoint("--name", "second", "c")
	high2 := b.count("c")
	pid := b.inspect("c").Pid
	b.reaches("c", high2+10)

	equal(b, "head", b.inspect("c").Head, two)
	lines := func() int { return len(b.printed("c")) }
	b.pauseAndCheck("c")

	// Where it was last, unnamed; then the older one; the newer one by its name; and
	// the older one by a prefix of its id.
	for _, try := range []struct {
		args      []string
		low, high int
		head      string
	}{
		{[]string{"restore", "c"}, low2, high2, two},
		{[]string{"restore", "--verify", "c", one}, low1, high1, one},
		{[]string{"restore", "c", "second"}, low2, high2, two},
		{[]string{"restore", "c", one[:8]}, low1, high1, one},
	} {
		b.ok("pause", "c") // so that nothing is printed between the count of lines and the restore
		before := lines()
		b.ok(try.args...)
		b.wentOn("c", before, try.low, try.high)
		equal(b, fmt.Sprint(try.args, ": head"), b.inspect("c").Head, try.head)
		equal(b, fmt.Sprint(try.args, ": status"), b.inspect("c").Status, "running")
	}
	b.noProcess(pid)
}

// pauseAndCheck pauses a sandbox, sees that it stands still, and unpauses it.
func (b *box) pauseAndCheck(name string) {
	b.Helper()
	b.ok("pause", name)
	equal(b, "status", b.inspect(name).Status, "paused")
	before := b.count(name)
	time.Sleep(200 * time.Millisecond)
	equal(b, "count of a paused sandbox", b.count(name), before)
	b.ok("unpause", name)
	b.reaches(name, before+1)
}

func TestFilesOnly(t *testing.T) {
	b := newBox(t)
	b.start("f", "--network", "none", "busybox", "sh", "-c", "echo start >> /starts; "+counter)
	id := b.inspect("f").ID
	write := func(text string) { b.sh("f", "echo "+text+" > /marker; echo "+text+" > /.hidden-"+text) }
	marker := func() string { return b.file("f", "marker") }

	write("one")
	one := b.checkpoint("--files-only", "--name", "one", "f")
	write("two")
	two := b.checkpoint("--files-only", "--label", "k=v", "--trigger", "tool:x", "f")
	write("three")
	info := decode[[]checkpoint](b, b.ok("checkpoint", "inspect", two))[0]
	equal(b, "kind", info.Kind, "files")
	equal(b, "status", info.Status, "ready")
	equal(b, "parent", info.Parent, one)
	equal(b, "trigger", info.Trigger, "tool:x")
	equal(b, "processes", info.Processes, 0)
	equal(b, "sandbox", info.Sandbox, id)

	// In any order, any number of times. The command starts afresh.
	for range 5 {
		for _, try := range []struct{ ref, want, gone string }{{"one", "one", "two"}, {two, "two", "three"}} {
			pid := b.inspect("f").Pid
			b.ok("restore", "f", try.ref)
			equal(b, "marker", marker(), try.want)
			equal(b, "a file made after the checkpoint", b.file("f", ".hidden-"+try.gone), "")
			s := b.inspect("f")
			equal(b, "status", s.Status, "running")
			if s.Pid == pid {
				t.Error("the command did not start afresh")
			}
			b.reaches("f", 1)
		}
	}

	// From a stopped one, onto a stopped one: it stays stopped.
	b.ok("stop", "-t", "0", "f")
	stopped := b.checkpoint("f")
	equal(b, "kind of a stopped one's", decode[[]checkpoint](b,
		b.ok("checkpoint", "inspect", stopped))[0].Kind, "files")
	b.ok("start", "f")
	write("four")
	b.ok("restore", "f", stopped)
	equal(b, "marker", marker(), "two")
	equal(b, "status", b.inspect("f").Status, "exited")
	// Onto a stopped one, of a running one: it runs.
	b.ok("restore", "f", one)
	equal(b, "status", b.inspect("f").Status, "running")
	equal(b, "marker", marker(), "one")
}

func TestStopAndRecreate(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "--label", "a=b", "-e", "COLOUR=red", "busybox", "sh", "-c", counter)
	low := b.reaches("c", 10)
	ck := b.checkpoint("--stop", "c")
	s := b.inspect("c")
	equal(b, "status after --stop", s.Status, "exited")
	equal(b, "pid after --stop", s.Pid, 0)
	high := b.count("c")
	before := len(b.printed("c"))

	// With the sandbox stopped.
	b.ok("restore", "c")
	b.wentOn("c", before, low, high)

	// Removed, its checkpoints stay, and it comes back under its old id.
	b.ok("rm", "-f", "c")
	b.fails(3, "inspect", "c")
	if list := b.checkpoints("c"); len(list) != 1 || list[0].ID != ck || list[0].Status != "ready" {
		t.Fatalf("checkpoints of a removed sandbox: %+v", list)
	}
	for range 2 {
		b.ok("restore", "c")
		again := b.inspect("c")
		equal(b, "id", again.ID, s.ID)
		equal(b, "label", again.Labels["a"], "b")
		b.wentOn("c", 0, low, high)
		equal(b, "environment", b.sh("c", "echo $COLOUR $AGENTBOX_SANDBOX_NAME"), "red c")
		b.ok("rm", "-f", "c")
	}
	b.ok("rm", "-f", "--checkpoints", b.ok("restore", "c", ck))
	b.fails(3, "restore", "c")
}
