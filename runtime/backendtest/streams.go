package backendtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func streamsFirst(e *bench) {
	// The shorter the command, the likelier its output is lost.
	for range 5 {
		out, _, exit := e.run(e.spec("echo", "first"), "")
		equal(e, "stdout", out, "first\n")
		equal(e, "exit", exit, 0)
	}
}

func streamsStdinEnds(e *bench) {
	out, _, exit := e.run(e.spec("cat"), "one\ntwo\nno newline")
	equal(e, "stdout", out, "one\ntwo\nno newline")
	equal(e, "exit", exit, 0)
}

func streamsNoStdin(e *bench) {
	out, _, exit := e.run(e.spec(sh("cat; echo done")...), "")
	equal(e, "stdout", out, "done\n")
	equal(e, "exit", exit, 0)
	id := e.start(sh("cat; echo done")...)
	equal(e, "exit without streams", e.wait(id), 0)
}

func streamsApart(e *bench) {
	out, errw, exit := e.run(e.spec(sh("echo to stdout; echo to stderr >&2; exit 7")...), "")
	equal(e, "stdout", out, "to stdout\n")
	equal(e, "stderr", errw, "to stderr\n")
	equal(e, "exit", exit, 7)
}

func streamsMuch(e *bench) {
	// Every byte value, and more than any buffer on the way holds.
	var block [4096]byte
	for i := range block {
		block[i] = byte(i * 7)
	}
	in := strings.Repeat(string(block[:]), 512)
	out, _, exit := e.run(e.spec("cat"), in)
	equal(e, "exit", exit, 0)
	if out != in {
		e.Errorf("%d bytes went in and %d came out, equal: false", len(in), len(out))
	}
}

func streamsNil(e *bench) {
	id := e.create(e.spec(sh("echo a; echo b >&2; exit 4")...))
	wait, err := e.b.Start(e.ctx, id, runtime.StartOptions{Streams: &runtime.Streams{}})
	if err != nil {
		e.Fatal(err)
	}
	if err := e.within("wait of Start", wait); err != nil {
		e.Errorf("wait: %v", err)
	}
	equal(e, "exit", e.wait(id), 4)
	if out, errw := e.logs(id, runtime.LogOptions{Tail: -1}); out != "a\n" || errw != "b\n" {
		e.Errorf("log: %q, %q", out, errw)
	}
}

// failingWriter is a caller whose terminal went away.
type failingWriter struct{}

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("the reader is gone") }

func streamsCallerGone(e *bench) {
	id := e.create(e.spec(sh("echo 1; sleep 0.2; echo 2; sleep 0.2; echo 3; exit 6")...))
	wait, err := e.b.Start(e.ctx, id, runtime.StartOptions{Streams: &runtime.Streams{Stdout: failingWriter{}}})
	if err != nil {
		e.Fatal(err)
	}
	_ = e.within("wait of Start", wait) // an error or not: it must not hang
	equal(e, "exit", e.wait(id), 6)
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "log", out, "1\n2\n3\n")
}

// console is a terminal's user: what is typed goes in, the screen is read.
type console struct {
	e      *bench
	screen buffer
	typed  *io.PipeWriter
	resize chan runtime.Size
	done   chan error
}

func (e *bench) console(width, height uint16) (*console, runtime.Streams) {
	r, w := io.Pipe()
	c := &console{e: e, typed: w, resize: make(chan runtime.Size, 4), done: make(chan error, 1)}
	c.resize <- runtime.Size{Width: width, Height: height}
	e.Cleanup(func() { w.Close() })
	return c, runtime.Streams{Stdin: r, Stdout: &c.screen, Resize: c.resize, DetachKeys: []byte{16, 17}}
}

func (c *console) enter(s string) {
	c.e.Helper()
	if _, err := io.WriteString(c.typed, s); err != nil {
		c.e.Fatal(err)
	}
}

// shows waits until the screen has s.
func (c *console) shows(s string) {
	c.e.Helper()
	for deadline := time.Now().Add(patience); !c.screen.has(s)(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.e.Fatalf("the screen never showed %q but %q", s, c.screen.String())
		}
	}
}

// ends waits for the attachment's end.
func (c *console) ends() error {
	c.e.Helper()
	return c.e.within("the attachment", func() error { return <-c.done })
}

// open starts a shell in a terminal.
func (e *bench) open(width, height uint16) (string, *console) {
	e.Helper()
	s := e.spec("sh")
	s.Terminal, s.OpenStdin = true, true
	id := e.create(s)
	c, streams := e.console(width, height)
	wait, err := e.b.Start(e.ctx, id, runtime.StartOptions{Streams: &streams})
	if err != nil {
		e.Fatal(err)
	}
	go func() { c.done <- wait() }()
	return id, c
}

func terminalSize(e *bench) {
	id, c := e.open(100, 30)
	c.enter("echo size: $(stty size)\r")
	c.shows("size: 30 100")
	c.resize <- runtime.Size{Width: 80, Height: 24}
	e.eventually("the terminal has its new size", func() bool {
		c.enter("echo size: $(stty size)\r")
		return c.screen.has("size: 24 80")()
	})
	c.enter("exit 5\r")
	if err := c.ends(); err != nil {
		e.Errorf("the attachment ended with %v", err)
	}
	equal(e, "exit", e.wait(id), 5)
}

func terminalOneStream(e *bench) {
	s := e.spec(sh("test -t 0 && test -t 1 && test -t 2 && echo all; echo err >&2")...)
	s.Terminal = true
	out, errw, exit := e.run(s, "")
	equal(e, "stdout", out, "all\r\nerr\r\n")
	equal(e, "stderr", errw, "")
	equal(e, "exit", exit, 0)
}

func terminalCtrlC(e *bench) {
	id, c := e.open(80, 24)
	c.enter("trap 'echo inter''rupted' INT; echo rea''dy; sleep 1000\r")
	c.shows("ready")
	// A ctrl-c before the shell has begun to sleep is a trap that waits for the end of
	// that sleep; the next one ends it.
	e.eventually("ctrl-c interrupts the sleep", func() bool {
		c.enter("\x03")
		return c.screen.has("interrupted")()
	})
	e.is(id, runtime.Running)
	c.enter("exit\r")
	if err := c.ends(); err != nil {
		e.Errorf("the attachment ended with %v", err)
	}
}

func terminalDetach(e *bench) {
	id, c := e.open(80, 24)
	c.enter("echo rea''dy\r")
	c.shows("ready")
	// The first key alone is typed on.
	c.enter("\x10echo on''ward\r")
	c.shows("onward")
	c.enter("\x10\x11")
	e.wantErr("the attachment", c.ends(), runtime.ErrDetached)
	e.is(id, runtime.Running)

	c2, streams := e.console(90, 20)
	go func() { c2.done <- e.b.Attach(e.ctx, id, streams) }()
	// A shell does not repeat its prompt for the newcomer.
	e.eventually("the second attachment reaches the shell", func() bool {
		c2.enter("echo si''ze $(stty size)\r")
		return c2.screen.has("size 20 90")()
	})
	c2.enter("exit 3\r")
	if err := c2.ends(); err != nil {
		e.Errorf("the second attachment ended with %v", err)
	}
	equal(e, "exit", e.wait(id), 3)
}

func terminalExec(e *bench) {
	id := e.start("sleep", "1000")
	c, streams := e.console(77, 33)
	exits := make(chan int, 1)
	go func() {
		exit, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"sh"}, Terminal: true}, streams)
		exits <- exit
		c.done <- err
	}()
	c.enter("echo size: $(stty size)\r")
	c.shows("size: 33 77")
	c.resize <- runtime.Size{Width: 60, Height: 20}
	e.eventually("the terminal has its new size", func() bool {
		c.enter("echo size: $(stty size)\r")
		return c.screen.has("size: 20 60")()
	})
	c.enter("exit 11\r")
	if err := c.ends(); err != nil {
		e.Errorf("Exec: %v", err)
	}
	equal(e, "exit", <-exits, 11)
	e.is(id, runtime.Running)
}

func terminalExecDetach(e *bench) {
	id := e.start("sleep", "1000")
	c, streams := e.console(80, 24)
	go func() {
		_, err := e.b.Exec(e.ctx, id, runtime.Process{
			Args: sh("echo rea''dy; sleep 1; echo x > /went-on; sleep 1000"), Terminal: true,
		}, streams)
		c.done <- err
	}()
	c.shows("ready")
	c.enter("\x10\x11")
	e.wantErr("Exec", c.ends(), runtime.ErrDetached)
	e.eventually("the process goes on", func() bool { return e.file(id, "went-on") == "x\n" })
}

func attachOutput(e *bench) {
	s := e.spec("cat")
	s.OpenStdin = true
	id := e.startSpec(s)
	var out buffer
	err := e.within("Attach", func() error {
		return e.b.Attach(e.ctx, id, runtime.Streams{Stdin: strings.NewReader("typed\n"), Stdout: &out})
	})
	if err != nil {
		e.Errorf("Attach: %v", err)
	}
	equal(e, "stdout", out.String(), "typed\n")
	equal(e, "exit", e.wait(id), 0)
}

func attachTwo(e *bench) {
	id := e.start(sh("while :; do echo tick; sleep 0.02; done")...)
	var outs [2]buffer
	errs := make(chan error, 2)
	for i := range outs {
		go func() { errs <- e.b.Attach(e.ctx, id, runtime.Streams{Stdout: &outs[i]}) }()
	}
	for i := range outs {
		e.eventually("each attachment has output", func() bool { return strings.Count(outs[i].String(), "tick\n") > 3 })
	}
	e.stop(id)
	for range outs {
		if err := e.within("Attach", func() error { return <-errs }); err != nil {
			e.Errorf("Attach of one that was stopped: %v", err)
		}
	}
}

func attachStopped(e *bench) {
	e.wantErr("Attach of an unknown id", e.b.Attach(e.ctx, newID(), runtime.Streams{}), runtime.ErrNotFound)
	id := e.create(e.spec("true"))
	e.wantErr("Attach of a created one", e.b.Attach(e.ctx, id, runtime.Streams{}), runtime.ErrState)
	e.restart(id)
	e.wait(id)
	e.wantErr("Attach of an exited one", e.b.Attach(e.ctx, id, runtime.Streams{}), runtime.ErrState)
}

func attachCancelled(e *bench) {
	id := e.start("sleep", "1000")
	ctx, cancel := context.WithTimeout(e.ctx, 100*time.Millisecond)
	defer cancel()
	err := e.within("Attach", func() error { return e.b.Attach(ctx, id, runtime.Streams{Stdout: &bytes.Buffer{}}) })
	e.wantErr("Attach", err, context.DeadlineExceeded)
	e.is(id, runtime.Running)
}
