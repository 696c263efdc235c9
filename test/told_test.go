package test

import (
	"path/filepath"
	"strings"
	"testing"
)

// A failure of CRIU or the OCI runtime is reported once, in words: what failed, what to do, and
// where the log is, which is there.
func TestFailuresAreToldOnce(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	told := func(r result, code int, lines ...string) {
		t.Helper()
		got := strings.Split(strings.TrimSuffix(r.err, "\n"), "\n")
		if r.code != code || len(got) != len(lines) {
			t.Fatalf("want exit %d and %d lines: %s", code, len(lines), r)
		}
		for i, want := range lines {
			if !strings.HasPrefix(got[i], want) {
				t.Errorf("line %d is %q, want %q", i, got[i], want)
			}
		}
		if log, ok := strings.CutPrefix(got[len(got)-1], "log: "); ok {
			if text := readFile(t, log); !strings.Contains(text, "Error (") {
				t.Errorf("%s: %q", log, text)
			}
		}
	}
	b.start("talks", "--network", "none", "busybox", "sh", "-c",
		"nc -l -p 77 -e sleep 1000 & until nc 127.0.0.1 77 -e sleep 1000; do :; done")
	b.eventually("it is connected", func() bool {
		return strings.Contains(b.ok("exec", "talks", "netstat", "-tn"), "ESTABLISHED")
	})
	told(b.try(nil, "checkpoint", "--tcp", "refuse", "talks"), 1,
		"agentbox: checkpoint talks: a process has an established TCP connection",
		"hint: Use --tcp established", "log: "+filepath.Join(b.root, "checkpoints", "failed"))

	b.start("c", "--network", "host", "busybox", "sh", "-c", "nc -l -p 7791 >/dev/null; sleep 1000")
	b.eventually("it listens", func() bool { return strings.Contains(b.ok("exec", "c", "netstat", "-tln"), ":7791 ") })
	b.ok("checkpoint", "--name", "a", "c")
	b.ok("stop", "-t", "0", "c")
	b.start("other", "--network", "host", "busybox", "sh", "-c", "nc -l -p 7791 >/dev/null; sleep 1000")
	b.eventually("another listens", func() bool {
		return strings.Contains(b.ok("exec", "other", "netstat", "-tln"), ":7791 ")
	})
	taken := "an address that a process listened on is taken by another program"
	told(b.try(nil, "restore", "c", "a"), 1, "agentbox: restore c: "+taken, "hint: Stop the program", "log: "+b.root)
	r := b.try(nil, "restore", "--strategy", "auto", "c", "a")
	told(r, 0, "tried full (3 times): "+taken, "warning: the processes")

	told(b.try(nil, "run", "--rm", "--name", "r", "--network", "none", "busybox", "nosuch"), 127,
		"agentbox: run r: nosuch: not found in the sandbox")
	told(b.try(nil, "exec", "other", "nosuch"), 127, "agentbox: exec other: nosuch: not found in the sandbox")
}
