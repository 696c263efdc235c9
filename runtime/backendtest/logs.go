package backendtest

import (
	"bytes"
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

var itoa = strconv.Itoa

func logsEmpty(e *bench) {
	id := e.create(e.spec("true"))
	if out, errw := e.logs(id, runtime.LogOptions{Tail: -1}); out != "" || errw != "" {
		e.Errorf("log of one that never ran: %q, %q", out, errw)
	}
}

// printed runs a script to its end.
func printed(e *bench, script string) string {
	e.Helper()
	id := e.start(sh(script)...)
	equal(e, "exit", e.wait(id), 0)
	return id
}

func logsOrder(e *bench) {
	// One after the other: between two pipes there is no order of moments.
	id := e.start(sh("trap 'echo 2 >&2' USR1; trap 'echo 3' USR2; trap 'echo 4 >&2; exit 0' TERM; echo 1; while :; do sleep 0.02; done")...)
	both := func() string {
		e.Helper()
		var both bytes.Buffer
		if err := e.b.Logs(e.ctx, id, runtime.LogOptions{Tail: -1}, &both, &both); err != nil {
			e.Fatal(err)
		}
		return both.String()
	}
	for i, signal := range []string{"USR1", "USR2", "TERM"} {
		e.eventually("the log has the last line", func() bool { return strings.HasSuffix(both(), itoa(i+1)+"\n") })
		if err := e.b.Kill(e.ctx, id, signal); err != nil {
			e.Fatal(err)
		}
	}
	equal(e, "exit", e.wait(id), 0)
	equal(e, "log", both(), lines(1, 4))
	out, errw := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "stdout", out, "1\n3\n")
	equal(e, "stderr", errw, "2\n4\n")
	if err := e.b.Logs(e.ctx, id, runtime.LogOptions{Tail: -1}, nil, nil); err != nil {
		e.Errorf("Logs without writers: %v", err)
	}
}

func logsTail(e *bench) {
	id := printed(e, "echo 1; echo 2; echo 3; echo 4; echo 5; echo -n end")
	for tail, want := range map[int]string{
		-1: lines(1, 5) + "end", 0: "", 1: "end", 2: "5\nend", 3: "4\n5\nend", 6: lines(1, 5) + "end",
		100: lines(1, 5) + "end",
	} {
		out, _ := e.logs(id, runtime.LogOptions{Tail: tail})
		equal(e, "tail "+itoa(tail), out, want)
	}
}

func logsFollow(e *bench) {
	id := e.start(sh("echo 1; sleep 0.3; echo 2; sleep 0.3; echo 3")...)
	var out buffer
	err := e.within("Logs", func() error {
		return e.b.Logs(e.ctx, id, runtime.LogOptions{Follow: true, Tail: -1}, &out, nil)
	})
	if err != nil {
		e.Errorf("Logs: %v", err)
	}
	equal(e, "log", out.String(), lines(1, 3))
	// One that has ended is not waited for.
	out = buffer{}
	err = e.within("Logs", func() error {
		return e.b.Logs(e.ctx, id, runtime.LogOptions{Follow: true, Tail: 1}, &out, nil)
	})
	if err != nil {
		e.Errorf("Logs: %v", err)
	}
	equal(e, "log of an ended one", out.String(), "3\n")
}

func logsFollowCancelled(e *bench) {
	id := e.start(sh("echo 1; sleep 1000")...)
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	var out buffer
	done := make(chan error, 1)
	go func() { done <- e.b.Logs(ctx, id, runtime.LogOptions{Follow: true, Tail: -1}, &out, nil) }()
	e.eventually("the first line arrives", out.has("1\n"))
	cancel()
	if err := e.within("Logs", func() error { return <-done }); err != nil && !errors.Is(err, context.Canceled) {
		e.Errorf("Logs: %v", err)
	}
	e.is(id, runtime.Running)
}

func logsPartial(e *bench) {
	id := printed(e, "echo -n a; sleep 0.1; echo -n b; sleep 0.1; echo c; echo -n d")
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "log", out, "abc\nd")
	out, _ = e.logs(id, runtime.LogOptions{Tail: 2})
	equal(e, "tail 2", out, "abc\nd")
}

func logsLong(e *bench) {
	long := strings.Repeat("0123456789", 7000)
	out, _, _ := e.run(e.spec("cat"), long+"\nshort\n")
	equal(e, "the stream has it all", len(out), len(long)+7)
	id := e.ids[len(e.ids)-1]
	out, _ = e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "the log has it as it was", out == long+"\nshort\n", true)
	out, _ = e.logs(id, runtime.LogOptions{Tail: 2})
	equal(e, "a long line is one line", len(out), len(long)+7)
}

func logsTimestamps(e *bench) {
	before := time.Now().Add(-time.Second)
	id := printed(e, "echo one; sleep 0.1; echo two words; echo three >&2")
	out, errw := e.logs(id, runtime.LogOptions{Tail: -1, Timestamps: true})
	got := strings.SplitAfter(strings.TrimSuffix(out, "\n"), "\n")
	if len(got) != 2 {
		e.Fatalf("log: %q", out)
	}
	last := before
	for i, want := range []string{"one\n", "two words"} {
		stamp, text, _ := strings.Cut(got[i], " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err != nil || at.Before(last) || at.After(time.Now().Add(time.Second)) {
			e.Errorf("timestamp %q of %q after %v: %v", stamp, got[i], last, err)
		}
		equal(e, "text", text, want)
		last = at
	}
	if _, text, _ := strings.Cut(errw, " "); text != "three\n" {
		e.Errorf("stderr: %q", errw)
	}
}

func logsSince(e *bench) {
	id := e.start(sh("trap 'echo late; exit 0' TERM; echo early; while :; do sleep 0.02; done")...)
	e.eventually("it has spoken", func() bool {
		out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		return out == "early\n"
	})
	since := time.Now()
	time.Sleep(50 * time.Millisecond)
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience}); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit", e.wait(id), 0)
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1, Since: since})
	equal(e, "log since", out, "late\n")
	out, _ = e.logs(id, runtime.LogOptions{Tail: -1, Since: time.Now().Add(time.Hour)})
	equal(e, "log since a time to come", out, "")
}

func logsTerminal(e *bench) {
	s := e.spec(sh("echo one; echo two >&2")...)
	s.Terminal = true
	id := e.startSpec(s)
	equal(e, "exit", e.wait(id), 0)
	out, errw := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "stdout", out, "one\r\ntwo\r\n")
	equal(e, "stderr", errw, "")
}

func logsUnknown(e *bench) {
	e.wantErr("Logs", e.b.Logs(e.ctx, newID(), runtime.LogOptions{}, nil, nil), runtime.ErrNotFound)
}
