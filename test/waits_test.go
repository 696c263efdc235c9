package test

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A checkpoint interrupts what processes wait in. They do not see it, neither
// those that go on nor those that are restored or forked: no sleep ends early,
// and none with EINTR but that which a signal's handler interrupts.
func TestWaits(t *testing.T) {
	t.Parallel()
	limit := 8 * time.Second * patience // it is not over before the checkpoint
	b := newBox(t)
	b.ok("image", "import", "waits", programRoot(b.T, "waits"))
	calls := []string{
		"nanosleep", "nanosleep-no-rest", "clock_nanosleep", "clock_nanosleep-until", "select", "poll", "poll-fed",
		"futex-until", "read-fed", "semtimedop-fed", "signal",
	}
	begin := func(name string) {
		b.start(name, append([]string{
			"--network", "none", "waits", "/waits", strconv.Itoa(int(limit / time.Second)),
		}, calls...)...)
	}
	begin("waits")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log:\n%s", b.ok("logs", "waits"))
		}
	})
	says := func(name, line string, times int) {
		b.Helper()
		b.eventually(fmt.Sprintf("%s says %q", name, line), func() bool {
			return strings.Count(b.ok("logs", name), line) == times
		})
	}
	// returned checks what the calls have returned of late.
	returned := func(name string, others map[string]string) {
		b.Helper()
		log := b.ok("logs", name)
		for _, call := range calls {
			for _, who := range []string{"first", "other"} {
				line, found := last(log, call+" "+who+" ")
				result, ms, _ := strings.Cut(line, " ")
				n, err := strconv.Atoi(ms)
				if !found || err != nil {
					b.Errorf("%s: %s of the %s thread: %q", name, call, who, line)
					continue
				}
				want, early := "0", false
				switch {
				case others[call+" "+who] != "":
					want, early = others[call+" "+who], true
				case call == "signal":
					want = "EINTR"
				case call == "futex-until":
					want = "ETIMEDOUT"
				case call == "semtimedop-fed":
				case strings.HasSuffix(call, "-fed"):
					want = "1"
				}
				if took := time.Duration(n) * time.Millisecond; result != want || took < limit-limit/100 && !early {
					b.Errorf("%s: %s of the %s thread returned %s after %v, want %s", name, call,
						who, result, took, want)
				}
			}
		}
	}
	says("waits", "all have begun", 1)
	one := b.checkpoint("waits")
	// Nor where the dump is done, and the command that asked for it is killed.
	begin("killed")
	says("killed", "all have begun", 1)
	if r := b.try([]string{"AGENTBOX_FAILPOINT=checkpoint.before-waits=kill"}, "checkpoint", "killed"); !r.killed {
		b.Errorf("not killed: %s", r)
	}
	b.ok("recover")
	for _, name := range []string{"waits", "killed"} {
		says(name, "all have returned", 1)
		// CRIU leaves nothing to go on by for the first thread of a process.
		returned(name, map[string]string{"poll first": "EINTR"})
	}

	b.ok("restore", "waits", one)
	b.own("forked")
	b.ok("fork", "--name", "forked", "waits@"+one)
	says("waits", "all have returned", 2)
	says("forked", "all have returned", 1)
	for _, name := range []string{"waits", "forked"} {
		returned(name, map[string]string{"poll first": "EINTR", "poll other": "EINTR"})
	}
}

// Processes that an exec has left behind, and that have ended since, are the first process's to
// wait for. CRIU made them through helpers, and waited without end where such a one was slow.
func TestZombiesOfExec(t *testing.T) {
	t.Parallel()
	const many = 200
	b := memoryBox(t)
	b.start("z", "--network", "none", "--pids-limit", "1000", "busybox", "sleep", "1000")
	b.ok("exec", "z", "sh", "-c", fmt.Sprintf("for i in $(seq %d); do sh -c 'exit 3' & done", many))
	zombies := func() int { return strings.Count(b.sh("z", "cat /proc/[0-9]*/stat"), "(sh) Z 1 ") }
	b.eventually("they have ended", func() bool { return zombies() == many })
	one := b.checkpoint("z")
	for range 5 {
		b.ok("restore", "--timeout", "2m", "z", one)
		if n := zombies(); n != many {
			t.Fatalf("%d of %d are there", n, many)
		}
		if log := b.read(filepath.Join(b.root, "run", b.inspect("z").ID, "restore",
			"restore.log")); strings.Contains(log, "for restoring SID") {
			t.Fatal("CRIU has made some through a helper")
		}
	}
}

// A process that has ended but was not reaped comes back as it was.
func TestZombie(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.start("z", "--network", "none", "busybox", "sh", "-c", "sleep 0 & exec sleep 1000")
	zombies := func(name string) bool {
		return strings.Contains(b.sh(name, "cat /proc/[0-9]*/stat"), "(sleep) Z ")
	}
	b.eventually("its child has ended", func() bool { return zombies("z") })
	one := b.checkpoint("z")
	b.ok("restore", "z", one)
	b.own("f")
	b.ok("fork", "--name", "f", "z@"+one)
	for _, name := range []string{"z", "f"} {
		now := b.inspect(name)
		if groups := b.read(fmt.Sprintf("/proc/%d/cgroup", now.Pid)); !strings.Contains(groups, now.ID) {
			t.Errorf("%s is in the cgroup of another: %s", name, groups)
		}
		if !zombies(name) {
			t.Errorf("%s: what has ended is not there: %s", name, b.sh(name, "cat /proc/[0-9]*/stat"))
		}
	}
}

// last returns what the last line that begins with prefix goes on with.
func last(text, prefix string) (line string, found bool) {
	i := strings.LastIndex("\n"+text, "\n"+prefix)
	if i < 0 {
		return "", false
	}
	line, _, _ = strings.Cut(text[i+len(prefix):], "\n")
	return line, true
}
