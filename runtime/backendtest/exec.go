package backendtest

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

func execCodes(e *bench) {
	id := e.start("sleep", "1000")
	for _, want := range []int{0, 1, 7, 125, 255} {
		_, exit := e.exec(id, sh(fmt.Sprintf("exit %d", want))...)
		equal(e, "exit", exit, want)
	}
}

func execProcess(e *bench) {
	s := e.spec("sleep", "1000")
	s.Env = append(s.Env, "COLOUR=red", "SHAPE=round")
	s.Workdir = "/tmp"
	s.User = "agent"
	id := e.startSpec(s)
	out, _ := e.exec(id, sh("echo $COLOUR $SHAPE $(pwd) $(id -u):$(id -g)")...)
	equal(e, "the sandbox's own", out, "red round /tmp 1000:1000\n")
	var buf bytes.Buffer
	p := runtime.Process{
		Args: sh("echo $COLOUR $SHAPE $TASTE $(pwd) $(id -u):$(id -g)"),
		Env:  []string{"COLOUR=blue", "TASTE=sweet"}, Workdir: "/etc", User: "0:0",
	}
	if _, err := e.b.Exec(e.ctx, id, p, runtime.Streams{Stdout: &buf}); err != nil {
		e.Fatal(err)
	}
	equal(e, "the process's own", buf.String(), "blue round sweet /etc 0:0\n")
}

func execStreams(e *bench) {
	id := e.start("sleep", "1000")
	var out, errw bytes.Buffer
	exit, err := e.b.Exec(e.ctx, id, runtime.Process{Args: sh("cat; echo err >&2; exit 2")},
		runtime.Streams{Stdin: strings.NewReader("in\n"), Stdout: &out, Stderr: &errw})
	if err != nil {
		e.Fatal(err)
	}
	equal(e, "stdout", out.String(), "in\n")
	equal(e, "stderr", errw.String(), "err\n")
	equal(e, "exit", exit, 2)
	// No stdin is an ended one, and its output is no part of the log.
	if got, _ := e.exec(id, "cat"); got != "" {
		e.Errorf("cat without stdin printed %q", got)
	}
	if out, errw := e.logs(id, runtime.LogOptions{Tail: -1}); out != "" || errw != "" {
		e.Errorf("the log has what Exec printed: %q, %q", out, errw)
	}
}

func execMuch(e *bench) {
	id := e.start("sleep", "1000")
	in := strings.Repeat("0123456789abcde\n", 1<<17) // 2 MiB
	var out bytes.Buffer
	_, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"cat"}},
		runtime.Streams{Stdin: strings.NewReader(in), Stdout: &out})
	if err != nil {
		e.Fatal(err)
	}
	equal(e, "it came out as it went in", out.String() == in, true)
}

func execDetached(e *bench) {
	id := e.start("sleep", "1000")
	begin := time.Now()
	exit, err := e.b.Exec(e.ctx, id, runtime.Process{
		Args: sh("sleep 0.3; echo x > /detached; sleep 1000"), Detach: true,
	}, runtime.Streams{})
	if exit != 0 || err != nil {
		e.Errorf("Exec: %d, %v", exit, err)
	}
	if d := time.Since(begin); d > patience {
		e.Errorf("a detached Exec returned after %v", d)
	}
	e.eventually("the process runs", func() bool { return e.file(id, "detached") == "x\n" })
	_, err = e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"no-such-command"}, Detach: true}, runtime.Streams{})
	e.wantExec([]string{"no-such-command"}, err, 127)
}

func execRefused(e *bench, code int, commands ...string) {
	e.Helper()
	id := e.start("sleep", "1000")
	for _, c := range commands {
		_, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{c}}, runtime.Streams{Stdout: &bytes.Buffer{}})
		e.wantExec([]string{c}, err, code)
	}
	e.is(id, runtime.Running)
	_, exit := e.exec(id, "true")
	equal(e, "exit of the next one", exit, 0)
}

func exec127(e *bench) { execRefused(e, 127, "no-such-command", "/no/such/file") }
func exec126(e *bench) { execRefused(e, 126, "/etc/not-executable", "/etc") }

func execKilled(e *bench) {
	id := e.start("sleep", "1000")
	for signal, want := range map[string]int{"KILL": 137, "TERM": 143} {
		_, exit := e.exec(id, sh("kill -"+signal+" $$; sleep 10")...)
		equal(e, "exit after "+signal, exit, want)
	}
}

func execStopped(e *bench) {
	try := func(id string) error {
		_, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"true"}}, runtime.Streams{})
		return err
	}
	e.wantErr("Exec in an unknown id", try(newID()), runtime.ErrNotFound)
	id := e.create(e.spec("sleep", "1000"))
	e.wantErr("Exec in a created one", try(id), runtime.ErrState)
	e.restart(id)
	e.stop(id)
	e.wantErr("Exec in an exited one", try(id), runtime.ErrState)
}

func execPaused(e *bench) {
	id := e.start("sleep", "1000")
	e.pause(id)
	err := e.within("Exec in a paused one", func() error {
		_, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"true"}}, runtime.Streams{})
		return err
	})
	e.wantErr("Exec in a paused one", err, runtime.ErrState)
	e.is(id, runtime.Paused)
}

func execContainerEnds(e *bench) {
	id := e.start("sleep", "1000")
	var out buffer
	exits := make(chan int, 1)
	done := make(chan error, 1)
	go func() {
		exit, err := e.b.Exec(e.ctx, id, runtime.Process{Args: sh("echo up; sleep 1000")},
			runtime.Streams{Stdout: &out})
		exits <- exit
		done <- err
	}()
	e.eventually("the process runs", out.has("up\n"))
	e.stop(id)
	// Killed with its container, or the session broken off: not a success.
	if err := e.within("Exec", func() error { return <-done }); err == nil {
		equal(e, "exit", <-exits, 137)
	}
}

func execCancelled(e *bench) {
	id := e.start("sleep", "1000")
	ctx, cancel := context.WithTimeout(e.ctx, 300*time.Millisecond)
	defer cancel()
	err := e.within("Exec", func() error {
		_, err := e.b.Exec(ctx, id, runtime.Process{Args: []string{"sleep", "1000"}},
			runtime.Streams{Stdout: &bytes.Buffer{}})
		return err
	})
	e.wantErr("Exec", err, context.DeadlineExceeded)
	_, err = e.b.Exec(cancelled(), id, runtime.Process{Args: sh("echo x > /never")}, runtime.Streams{})
	e.wantErr("Exec", err, context.Canceled)
	_, exit := e.exec(id, "true")
	equal(e, "exit of the next one", exit, 0)
	equal(e, "what a cancelled one wrote", e.file(id, "never"), "")
}

func execSeveral(e *bench) {
	id := e.start("sleep", "1000")
	var all sync.WaitGroup
	for i := range 6 {
		all.Go(func() {
			var out bytes.Buffer
			exit, err := e.b.Exec(e.ctx, id, runtime.Process{Args: sh(fmt.Sprintf("echo %d; exit %d", i, i))},
				runtime.Streams{Stdout: &out})
			if exit != i || err != nil || out.String() != fmt.Sprintf("%d\n", i) {
				e.Errorf("Exec %d: %d, %v, %q", i, exit, err, out.String())
			}
		})
	}
	all.Wait()
}
