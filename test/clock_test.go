package test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestOneClock: all processes of a sandbox have one monotonic clock, those that
// came in after a restore too, so that what they leave behind is in checkpoints
// that can be restored.
func TestOneClock(t *testing.T) {
	t.Parallel()
	for _, userns := range []string{"auto", "host"} {
		t.Run(userns, func(t *testing.T) {
			t.Parallel()
			b := newBox(t)
			b.start("c", "--userns", userns, "--network", "none", "busybox", "sh", "-c",
				"while :; do cut -d ' ' -f 1 /proc/uptime > /up.new; mv /up.new /up; sleep 0.02; done")
			b.eventually("it runs", func() bool { return b.file("c", "up") != "" })
			b.oneClock("c", "before")
			id := b.checkpoint("c")
			b.oneClock("c", "after a checkpoint")
			for level := 1; level <= 3; level++ {
				b.ok("restore", "c", id)
				b.oneClock("c", fmt.Sprint("restored, level ", level))
				b.sh("c", "setsid sleep 10000 >/dev/null 2>&1 </dev/null &") // a server that was started by hand
				id = b.checkpoint("c", "--name", fmt.Sprint("level", level))
				b.ok("restore", "c", id)
				equal(b, "what exec left", b.sh("c", "ps | grep -c '[s]leep 10000'"), fmt.Sprint(level))
			}
			b.ok("verify", id)
			b.ok("fork", "c@"+id, "--name", "f")
			b.own("f")
			b.oneClock("f", "a fork")
			equal(b, "what exec left, in the fork", b.sh("f", "ps | grep -c '[s]leep 10000'"), "3")
			if left, _ := os.ReadDir(filepath.Join(b.root, "run/runc")); len(left) != 2 {
				t.Errorf("the runtime's state: %v", left)
			}
		})
	}
}

// oneClock checks that every process of a sandbox is in one time namespace, and that
// what exec brings in has the clock of the process that writes /up.
func (b *box) oneClock(name, when string) {
	b.Helper()
	theirs, own, _ := strings.Cut(b.sh(name, "cat /up; cut -d ' ' -f 1 /proc/uptime"), "\n")
	before, err := strconv.ParseFloat(theirs, 64)
	now, e := strconv.ParseFloat(own, 64)
	// The machine may be busy, but clocks that differ do so by the seconds of a test.
	if err != nil || e != nil || math.Abs(now-before) > 2*float64(patience) {
		b.Errorf("%s: the process says %q, exec says %q", when, theirs, own)
	}
	if got := b.sh(name, "for p in /proc/[0-9]*; do readlink $p/ns/time; done | sort -u | wc -l"); got != "1" {
		b.Errorf("%s: processes are in %s time namespaces", when, got)
	}
}
