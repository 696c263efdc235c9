package backendtest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// cancelled is a context that is over.
func cancelled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

func createStopped(e *bench) {
	id := e.create(e.spec("sleep", "1000"))
	c := e.is(id, runtime.Created)
	equal(e, "pid", c.Pid, 0)
	fi, err := os.Stat(c.Upper)
	if err != nil {
		e.Fatalf("the upperdir: %v", err)
	}
	equal(e, "upperdir is a directory", fi.IsDir(), true)
	if entries, _ := os.ReadDir(c.Upper); len(entries) > 0 {
		e.Errorf("the upperdir of a new container is not empty: %v", entries)
	}
	equal(e, "started", c.Started.IsZero(), true)
}

func createUpperWritable(e *bench) {
	id := e.create(e.spec(sh("cat /given > /copy")...))
	if err := os.WriteFile(e.upper(id, "given"), []byte("ours\n"), 0o644); err != nil {
		e.Fatal(err)
	}
	e.restart(id)
	equal(e, "exit", e.wait(id), 0)
	equal(e, "what the container read", e.file(id, "copy"), "ours\n")
}

func createExists(e *bench) {
	s := e.spec("sleep", "1000")
	id := e.startSpec(s)
	pid := e.is(id, runtime.Running).Pid
	e.wantErr("Create of an id that exists", e.b.Create(e.ctx, s, e.lower), runtime.ErrExists)
	equal(e, "pid after the refused Create", e.is(id, runtime.Running).Pid, pid)
}

// A checkpoint that is carried to another root of the same machine brings its sandbox's id
// along. Whatever happens to it there, the sandbox here goes on.
func createElsewhere(e *bench) {
	s := e.spec("sleep", "1000")
	id := e.startSpec(s)
	pid := e.is(id, runtime.Running).Pid
	root, err := os.MkdirTemp("", "bt")
	if err != nil {
		e.Fatal(err)
	}
	defer func() {
		if err := os.RemoveAll(root); err != nil {
			e.Error(err)
		}
	}()
	other := e.f.New(e.T, root)
	_, err = other.Inspect(e.ctx, id)
	e.wantErr("Inspect of what another root has", err, runtime.ErrNotFound)
	if err := other.Remove(e.ctx, id); err != nil {
		e.Errorf("Remove of what another root has: %v", err)
	}
	for _, name := range []string{s.Name, s.Name + "-2"} {
		s.Name = name
		if err := other.Create(e.ctx, s, e.lower); err == nil {
			if _, err := other.Start(e.ctx, id, runtime.StartOptions{}); err != nil {
				e.Errorf("Start: %v", err)
			}
		} else {
			e.wantErr("Create of what another root has", err, runtime.ErrExists)
		}
		if err := other.Remove(e.ctx, id); err != nil {
			e.Errorf("Remove: %v", err)
		}
	}
	equal(e, "pid after all that", e.is(id, runtime.Running).Pid, pid)
	if _, exit := e.exec(id, "true"); exit != 0 {
		e.Errorf("it does not answer: %d", exit)
	}
	e.stop(id)
}

// gone checks that nothing of an id is there, and that the id can be used.
func (e *bench) gone(s runtime.Spec) {
	e.Helper()
	_, err := e.b.Inspect(e.ctx, s.ID)
	e.wantErr("Inspect after a failed Create", err, runtime.ErrNotFound)
	ids, err := e.b.List(e.ctx)
	if err != nil || len(ids) > 0 {
		e.Errorf("List after a failed Create = %v, %v", ids, err)
	}
	e.own(s.ID)
	for _, f := range e.search(snapshot()) {
		e.Errorf("left behind by a failed Create: %s", f)
	}
	id := e.startSpec(s)
	e.is(id, runtime.Running)
}

func createFails(e *bench) {
	s := e.spec("sleep", "1000")
	if err := e.b.Create(e.ctx, s, []string{filepath.Join(e.root, "no-such-directory")}); err == nil {
		e.Error("Create over a lower directory that does not exist succeeded")
	}
	e.gone(s)
}

func createCancelled(e *bench) {
	s := e.spec("sleep", "1000")
	e.wantErr("Create with a cancelled context", e.b.Create(cancelled(), s, e.lower), context.Canceled)
	e.gone(s)
}

func createCancelledMidway(e *bench) {
	for _, after := range []time.Duration{
		100 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond,
	} {
		s := e.spec("sleep", "1000")
		ctx, cancel := context.WithTimeout(e.ctx, after)
		err := e.b.Create(ctx, s, e.lower)
		cancel()
		if err == nil {
			e.own(s.ID)
			e.is(s.ID, runtime.Created)
			continue
		}
		e.wantErr("Create", err, context.DeadlineExceeded)
		if _, err := e.b.Inspect(e.ctx, s.ID); !errors.Is(err, runtime.ErrNotFound) {
			e.Errorf("Inspect after a Create cancelled after %v: %v", after, err)
		}
	}
}

func startRuns(e *bench) {
	before := time.Now()
	id := e.start(sh("echo $AGENT > /result")...)
	equal(e, "exit", e.wait(id), 0)
	c := e.is(id, runtime.Exited)
	equal(e, "what it wrote", e.file(id, "result"), "\n")
	equal(e, "pid of an exited one", c.Pid, 0)
	if c.Started.Before(before.Add(-time.Second)) || c.Finished.Before(c.Started) ||
		c.Finished.After(time.Now().Add(time.Second)) {
		e.Errorf("started %v, finished %v, between %v and now", c.Started, c.Finished, before)
	}
}

func startRunning(e *bench) {
	id := e.start("sleep", "1000")
	pid := e.is(id, runtime.Running).Pid
	_, err := e.b.Start(e.ctx, id, runtime.StartOptions{})
	e.wantErr("Start of a running one", err, runtime.ErrState)
	_, err = e.b.Start(e.ctx, id, runtime.StartOptions{Streams: &runtime.Streams{}})
	e.wantErr("Start with streams of a running one", err, runtime.ErrState)
	equal(e, "pid", e.is(id, runtime.Running).Pid, pid)
}

func startUnknown(e *bench) {
	_, err := e.b.Start(e.ctx, newID(), runtime.StartOptions{})
	e.wantErr("Start", err, runtime.ErrNotFound)
}

// startRefused checks that a command cannot be started and that the container is
// as before then.
func startRefused(e *bench, code int, streams *runtime.Streams, args ...string) {
	e.Helper()
	id := e.create(e.spec(args...))
	_, err := e.b.Start(e.ctx, id, runtime.StartOptions{Streams: streams})
	e.wantExec(args, err, code)
	e.is(id, runtime.Created)
	_, err = e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"true"}}, runtime.Streams{})
	e.wantErr("Exec after a failed Start", err, runtime.ErrState)
}

func (e *bench) wantExec(args []string, err error, code int) {
	e.Helper()
	var x *runtime.ExecError
	if !errors.As(err, &x) {
		e.Errorf("%q: error %v, want an ExecError", args, err)
		return
	}
	equal(e, args[0]+": code", x.Code, code)
	equal(e, args[0]+": command", x.Command, args[0])
	if !strings.Contains(err.Error(), args[0]) {
		e.Errorf("%q: the error does not name the command: %v", args, err)
	}
}

func start127(e *bench) {
	startRefused(e, 127, nil, "no-such-command", "x")
	startRefused(e, 127, &runtime.Streams{Stdout: &bytes.Buffer{}}, "/no/such/file")
}

func start126(e *bench) {
	startRefused(e, 126, &runtime.Streams{Stdout: &bytes.Buffer{}}, "/etc/not-executable")
	startRefused(e, 126, nil, "/etc")
}

func startUnknownUser(e *bench) {
	s := e.spec("sleep", "1000")
	s.User = "no-such-user"
	id := e.create(s)
	_, err := e.b.Start(e.ctx, id, runtime.StartOptions{})
	if err == nil || !strings.Contains(err.Error(), "no-such-user") {
		e.Errorf("Start as an unknown user: %v, want an error that names the user", err)
	}
	e.is(id, runtime.Created)
}

func startCancelled(e *bench) {
	id := e.create(e.spec("sleep", "1000"))
	_, err := e.b.Start(cancelled(), id, runtime.StartOptions{})
	e.wantErr("Start", err, context.Canceled)
	e.is(id, runtime.Created)
	e.restart(id)
	e.is(id, runtime.Running)
}

func startCancelledMidway(e *bench) {
	id := e.create(e.spec("sleep", "1000"))
	for _, after := range []time.Duration{
		time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond, 60 * time.Millisecond, 100 * time.Millisecond,
	} {
		ctx, cancel := context.WithTimeout(e.ctx, after)
		_, err := e.b.Start(ctx, id, runtime.StartOptions{})
		cancel()
		if err == nil {
			e.is(id, runtime.Running)
			e.stop(id)
			continue
		}
		e.wantErr("Start", err, context.DeadlineExceeded)
		if c := e.inspect(id); c.Status == runtime.Running || c.Status == runtime.Paused {
			e.Fatalf("Start cancelled after %v failed and left it %s", after, c.Status)
		}
		if c := e.inspect(id); len(e.processes()) > 0 && c.Pid != 0 {
			e.Errorf("Start cancelled after %v left processes: %v", after, e.processes())
		}
	}
	e.restart(id)
	e.is(id, runtime.Running)
}

func startOutlivesContext(e *bench) {
	for _, streams := range []*runtime.Streams{nil, {Stdout: &buffer{}}} {
		ctx, cancel := context.WithCancel(e.ctx)
		id := e.create(e.spec(sh("while :; do echo x >> /ticks; sleep 0.02; done")...))
		if _, err := e.b.Start(ctx, id, runtime.StartOptions{Streams: streams}); err != nil {
			e.Fatal(err)
		}
		cancel()
		n := len(e.file(id, "ticks"))
		e.eventually("it goes on after its starter's context was cancelled", func() bool {
			return len(e.file(id, "ticks")) > n+10
		})
		e.is(id, runtime.Running)
	}
}

func startEnv(e *bench) {
	id := e.create(e.spec(sh("echo $AGENTBOX_ATTEMPT > /attempt; sleep 1000")...))
	for _, attempt := range []string{"1", "2"} {
		if _, err := e.b.Start(e.ctx, id, runtime.StartOptions{Env: []string{"AGENTBOX_ATTEMPT=" +
			attempt}}); err != nil {
			e.Fatal(err)
		}
		e.eventually("the first process has the variable", func() bool { return e.file(id, "attempt") == attempt+"\n" })
		out, _ := e.exec(id, sh("echo $AGENTBOX_ATTEMPT")...)
		equal(e, "the variable in Exec", out, attempt+"\n")
		e.stop(id)
	}
	e.restart(id)
	e.eventually("the variable is gone with a start without it", func() bool { return e.file(id, "attempt") == "\n" })
	out, _ := e.exec(id, sh("echo $AGENTBOX_ATTEMPT")...)
	equal(e, "the variable in Exec", out, "\n")
}

func startAgain(e *bench) {
	id := e.start(sh("echo run; echo run >> /runs")...)
	equal(e, "first exit", e.wait(id), 0)
	e.restart(id)
	equal(e, "second exit", e.wait(id), 0)
	e.stop(id)
	e.restart(id)
	equal(e, "third exit", e.wait(id), 0)
	equal(e, "the file", e.file(id, "runs"), "run\nrun\nrun\n")
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "the log", out, "run\nrun\nrun\n")
}

func startAfterFailure(e *bench) {
	id := e.create(e.spec("/late"))
	_, err := e.b.Start(e.ctx, id, runtime.StartOptions{})
	e.wantExec([]string{"/late"}, err, 127)
	if err := os.WriteFile(e.upper(id, "late"), []byte("#!/bin/sh\nexit 3\n"), 0o755); err != nil {
		e.Fatal(err)
	}
	e.restart(id)
	equal(e, "exit", e.wait(id), 3)
}

// secondProcess: nothing may live only in the memory of the process that started the
// container.
func secondProcess(e *bench) {
	id := e.start(sh("echo hello; trap 'exit 9' TERM; while :; do sleep 0.02; done")...)
	other := e.f.New(e.T, e.root)
	c, err := other.Inspect(e.ctx, id)
	if err != nil || c.Status != runtime.Running {
		e.Fatalf("Inspect by a second process: %+v, %v", c, err)
	}
	equal(e, "pid", c.Pid, e.inspect(id).Pid)
	var out bytes.Buffer
	if exit, err := other.Exec(e.ctx, id, runtime.Process{Args: []string{"echo", "hi"}},
		runtime.Streams{Stdout: &out}); exit != 0 || err != nil || out.String() != "hi\n" {
		e.Errorf("Exec by a second process: %d, %v, %q", exit, err, out.String())
	}
	exits := make(chan int, 1)
	go func() {
		exit, _ := other.Wait(e.ctx, id)
		exits <- exit.Code
	}()
	e.eventually("it has its trap and its output", func() bool {
		o, _ := e.logs(id, runtime.LogOptions{Tail: -1})
		return o == "hello\n"
	})
	if err := other.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience}); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit seen by the second", <-exits, 9)
	equal(e, "exit seen by the first", e.wait(id), 9)
}
