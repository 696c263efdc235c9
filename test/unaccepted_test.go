package test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
)

// unacceptedReport is what the connections of testdata/unaccepted hold once they are
// accepted.
var unacceptedReport = strings.Join([]string{
	`/one: "asked before and after" from process true of user 0`, "/one: 1 events 0x1 77 88", `/one: answered "answer"`,
	"/one: nonblocking true, close-on-exec 1, SO_PASSCRED 1, at its end -11",
	`@abstract: "asked before and after" from process true of user 0`, "@abstract: 1 events 0x1 77 88",
	`@abstract: answered "answer"`,
	"@abstract: nonblocking true, close-on-exec 1, SO_PASSCRED 1, at its end -11",
	`several: "data of 0", then -1 resource temporarily unavailable`, `several: "data of 1", then 0 <nil>`,
	`several: "data of 2", then 0 <nil>`,
	`several: "", then 0 <nil>`, `several: "data of 4", then -1 resource temporarily unavailable`,
	`several: "all of 5 true", then -1 resource temporarily unavailable`,
	`empty: "first"`, `empty: "second"`,
	`packets: "one"`, `packets: ""`, `packets: "three"`, `packets: "four"`,
	`passing: "take" <nil>`, `passing: "in the file" <nil>`, `passing: " this"`,
	"full: resource temporarily unavailable", `full: "full 0"`, `full: "full 1"`,
	`shared: "of both"`, `shared: the other process has "answer"`,
	`"datagram"`,
}, "\n")

// TestUnaccepted has connections of unix sockets that wait in a backlog, with data, without,
// closed, shared by processes, and several in order, go on after a checkpoint, after
// restores, in a fork, and after checkpoints that were killed at each step of it.
func TestUnaccepted(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("image", "import", "unaccepted", programRoot(b.T, "unaccepted"))
	b.start("s", "--network", "none", "unaccepted", "/unaccepted")
	b.eventually("the connections wait", func() bool { return b.there("s", "/ready") })
	one := b.checkpoint("s")
	open := ""
	late := "late: none"
	is := func(when, name string) {
		b.Helper()
		b.ok("cp", os.DevNull, name+":/go")
		b.eventually(when+": it reports", func() bool { return b.there(name, "/report") })
		got, after, _ := strings.Cut(strings.TrimSpace(b.file(name, "/report")), "\n\"datagram\"\n")
		lines := strings.Split(got+"\n\"datagram\"", "\n")
		last, descriptors, _ := strings.Cut(after, "\n")
		equal(b, when, last, late)
		if last != "late: none" {
			descriptors = open // and one more
		}
		for i, want := range strings.Split(unacceptedReport, "\n") {
			if i >= len(lines) || lines[i] != want {
				b.Errorf("%s: %q, want %q", when, lines[min(i, len(lines)-1)], want)
			}
		}
		if open == "" {
			open = descriptors
		}
		equal(b, when, descriptors, open)
	}
	is("after the checkpoint", "s")
	for _, when := range []string{"restored", "restored again"} {
		b.ok("restore", "s", one)
		is(when, "s")
	}
	b.ok("restore", "s", one)
	two := b.checkpoint("s", "--strict")
	b.checkpoint("s")
	is("after more checkpoints", "s")
	b.ok("restore", "s", two)
	is("restored from a checkpoint of a restored one", "s")
	b.own("f")
	b.ok("fork", "--name", "f", "s@"+one)
	is("forked", "f")
	for _, point := range []string{
		"unaccepted.carrier", "unaccepted.accepted", "unaccepted.received", "unaccepted.socket", "unaccepted.connect",
		"unaccepted.connected", "unaccepted.sending",
		"unaccepted.sent", "unaccepted.filled", "unaccepted.given", "unaccepted.replaced", "unaccepted.closed",
	} {
		b.ok("restore", "s", one)
		if r := b.try(failpoint(point, "kill"), "checkpoint", "s"); !r.killed {
			t.Fatalf("not killed at %s: %s", point, r)
		}
		b.ok("recover")
		equal(b, "status after "+point, b.inspect("s").Status, "running")
		is("killed at "+point, "s")
	}
	// A paused sandbox stays paused, wherever its checkpoint was killed.
	for _, point := range []string{"unaccepted.received", "unaccepted.filled"} {
		b.ok("restore", "s", one)
		b.ok("pause", "s")
		b.try(failpoint(point, "kill"), "checkpoint", "s")
		b.ok("recover")
		equal(b, "status after "+point, b.inspect("s").Status, "paused")
		b.ok("unpause", "s")
		is("paused, and killed at "+point, "s")
	}

	// Connections that cannot be put back now are reported, and put back before the next
	// checkpoint.
	b.ok("restore", "s", one)
	if r := b.try(failpoint("unaccepted.filled", "error"), "checkpoint", "s"); r.code != 0 ||
		!strings.Contains(r.err, "are not put back") {
		t.Errorf("a checkpoint that puts nothing back: %s", r)
	}
	b.checkpoint("s")
	is("put back later", "s")

	// A process that a signal has stopped makes these calls, too, and stays stopped.
	b.ok("restore", "s", one)
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	stopped := func(when string) {
		b.Helper()
		pid := b.inspect("s").Pid
		b.eventually("it is stopped "+when, func() bool {
			return strings.Contains(b.read(fmt.Sprintf("/proc/%d/status", pid)), "\nState:\tT")
		})
	}
	check(syscall.Kill(b.inspect("s").Pid, syscall.SIGSTOP))
	stopped("before the checkpoint")
	halted := b.checkpoint("s")
	stopped("after the checkpoint")
	b.ok("restore", "s", halted)
	stopped("after the restore")
	check(syscall.Kill(b.inspect("s").Pid, syscall.SIGCONT))
	is("stopped", "s")

	// A client that came by exec goes on, and a restore has what it had sent.
	b.ok("restore", "s", one)
	b.ok("exec", "-d", "s", "/unaccepted", "client")
	b.eventually("the client has sent", func() bool { return b.there("s", "/client") })
	if r := b.try(nil, "checkpoint", "--name", "late", "s"); r.code != 0 ||
		!strings.Contains(r.err, "(/unaccepted client) to /late is closed by a restore") {
		t.Errorf("a checkpoint with a client of an exec: %s", r)
	}
	late = `late: "late", then -1 resource temporarily unavailable`
	is("with a client of an exec", "s")
	b.eventually("the client is answered", func() bool { return b.there("s", "/answered") })
	equal(b, "the client is answered", b.file("s", "/answered"), "answer")
	b.ok("restore", "s", "late")
	late = `late: "late", then 0 <nil>`
	is("restored with a client of an exec", "s")
}

// TestUnacceptedNamed has a client that cannot connect once more: the checkpoint says so,
// and leaves the connection as it is.
func TestUnacceptedNamed(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	b.ok("image", "import", "unaccepted", programRoot(b.T, "unaccepted"))
	b.start("s", "--network", "none", "unaccepted", "/unaccepted", "named")
	b.eventually("the connection waits", func() bool { return b.there("s", "/ready") })
	if r := b.try(nil, "checkpoint", "s"); r.code == 0 ||
		!strings.Contains(r.err, "the client of one has bound its socket to a name") {
		t.Errorf("checkpoint: %s", r)
	}
	equal(b, "status", b.inspect("s").Status, "running")
	b.checkpoint("--files-only", "s")
}
