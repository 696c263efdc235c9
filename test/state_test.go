package test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestState has what the kernel keeps of a process come back, in a restore, in a second
// one and in a fork: locks of mapped files, timers that tick, what waits in sockets, and
// what CRIU gets wrong and is set after it.
func TestState(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("image", "import", "state", programRoot(b.T, "state"))
	b.start("s", "state", "/state")
	b.eventually("it holds all", func() bool {
		return b.try(nil, "exec", "s", "/state", "locks").code == 0 && b.there("s", "/ready")
	})
	locks := strings.Join([]string{
		"plain write 100 28", "mapped-read read 7 0", "mapped-write write 100 28", "two-descriptors write 100 28",
		"flock true", "ofd write 100 28",
	}, "\n")
	want := strings.Join([]string{
		"TCP_USER_TIMEOUT 12345 <nil>", "TCP_NOTSENT_LOWAT 4096 <nil>", "IP_TOS 16 <nil>", "SO_PRIORITY 3 <nil>",
		"TCP_DEFER_ACCEPT 7 <nil>", "TCP_FASTOPEN 5 <nil>",
		"IP option 33 9 <nil>", "IP option 34 0 <nil>", "IP option 11 1 <nil>", "IP option 10 3 <nil>",
		`TCP_CONGESTION "reno" <nil>`,
		"joined: address already in use", "joined: address already in use",
		"from its source: cannot assign requested address", "pending 0000008000000200",
		"eventfd read 1", "eventfd read 1", `message "one" <nil>`, `message "" <nil>`,
		`message "three" <nil>`, "pipe of 1000:1000",
		`accepted "asked before" <nil>`, `answered "answer" <nil>`, `accepted "and ended" <nil>`, "then EOF",
		`datagram "one" from 127.0.0.1:7003 <nil>`, `datagram "" from 127.0.0.1:7003 <nil>`,
		`datagram "three" from 127.0.0.1:7003 <nil>`,
		`datagram "one" from [::1]:7003 <nil>`, `datagram "" from [::1]:7003 <nil>`,
		`datagram "three" from [::1]:7003 <nil>`,
	}, "\n")
	proc := regexp.MustCompile(`(?m)^(Cpus_allowed|Umask|SigIgn|SigCgt):.*$`)
	kernel := func(name string) string {
		dir := fmt.Sprintf("/proc/%d/", b.inspect(name).Pid)
		return strings.Join(proc.FindAllString(b.read(dir+"status"), -1), "; ") + "; slack " +
			b.read(dir+"timerslack_ns") + "; oom " + b.read(dir+"oom_score_adj")
	}
	before := kernel("s")
	one := b.checkpoint("s")
	is := func(when, name string, network bool) {
		b.Helper()
		equal(b, when+": locks", b.ok("exec", name, "/state", "locks"), locks)
		equal(b, when+": what the kernel says of it", kernel(name), before)
		b.ok("cp", os.DevNull, name+":/go")
		b.eventually(when+": it reports", func() bool { return b.there(name, "/report") })
		got := b.file(name, "/report")
		if !network { // its connections are closed
			got, _, _ = strings.Cut(got, "accept")
			want, _, _ := strings.Cut(want, "accept")
			equal(b, when, got, want)
			return
		}
		equal(b, when, got, want)
	}
	is("after the checkpoint", "s", true)
	for _, when := range []string{"restored", "restored again"} {
		b.ok("restore", "s", one)
		is(when, "s", true)
	}
	b.own("f")
	b.ok("fork", "--name", "f", "s@"+one)
	is("forked", "f", false)
}

// there reports whether a sandbox has a file.
func (b *box) there(name, path string) bool {
	_, err := os.Stat(filepath.Join(b.upperdir(name), path))
	return err == nil
}
