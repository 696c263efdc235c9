package backendtest

import (
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// still checks that a paused container does nothing.
func (e *bench) still(id string) {
	e.Helper()
	before := len(e.file(id, "ticks"))
	time.Sleep(100 * time.Millisecond)
	equal(e, "ticks while paused", len(e.file(id, "ticks"))-before, 0)
}

// goesOn checks that a running container does something.
func (e *bench) goesOn(id string) {
	e.Helper()
	before := len(e.file(id, "ticks"))
	e.eventually("it goes on", func() bool { return len(e.file(id, "ticks")) > before+2 })
}

func pauseTwice(e *bench) {
	id := e.start(sh(ticking)...)
	e.goesOn(id)
	for range 2 {
		e.pause(id)
		e.is(id, runtime.Paused)
	}
	e.still(id)
	for range 2 {
		e.resume(id)
		e.is(id, runtime.Running)
	}
	e.goesOn(id)
}

func pauseEverything(e *bench) {
	id := e.start(sh("(" + ticking + ") & setsid sh -c 'while :; do echo x >> /others; sleep 0.02; done' & wait")...)
	if _, err := e.b.Exec(e.ctx, id, runtime.Process{
		Args: sh("while :; do echo x >> /execs; sleep 0.02; done"), Detach: true,
	}, runtime.Streams{}); err != nil {
		e.Fatal(err)
	}
	e.eventually("all of them count", func() bool {
		return len(e.file(id, "ticks")) > 4 && len(e.file(id, "others")) > 4 && len(e.file(id, "execs")) > 4
	})
	e.pause(id)
	others, execs := len(e.file(id, "others")), len(e.file(id, "execs"))
	e.still(id)
	equal(e, "what a child in a session of its own did while paused", len(e.file(id, "others"))-others, 0)
	equal(e, "what a detached Exec did while paused", len(e.file(id, "execs"))-execs, 0)
	e.resume(id)
	e.eventually("all of them go on", func() bool {
		return len(e.file(id, "others")) > others && len(e.file(id, "execs")) > execs
	})
}

func pauseStopped(e *bench) {
	both := func(id string, want error) {
		e.Helper()
		e.wantErr("Pause", e.b.Pause(e.ctx, id), want)
		e.wantErr("Unpause", e.b.Unpause(e.ctx, id), want)
	}
	both(newID(), runtime.ErrNotFound)
	id := e.create(e.spec("sleep", "1000"))
	both(id, runtime.ErrState)
	e.is(id, runtime.Created)
	e.restart(id)
	e.stop(id)
	both(id, runtime.ErrState)
	e.is(id, runtime.Exited)
}

func pauseAfterRestart(e *bench) {
	id := e.start(sh(ticking)...)
	e.pause(id)
	e.stop(id)
	e.restart(id)
	e.is(id, runtime.Running)
	e.goesOn(id)
}

const catching = "trap 'echo USR1 >> /caught' USR1; trap 'exit 41' TERM; echo x > /up; while :; do sleep 0.02; done"

func killSignals(e *bench) {
	id := e.start(sh(catching)...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	for i, name := range []string{"USR1", "SIGUSR1", "10"} {
		if err := e.b.Kill(e.ctx, id, name); err != nil {
			e.Fatalf("Kill with %s: %v", name, err)
		}
		e.eventually("it caught "+name, func() bool { return len(e.file(id, "caught")) == (i+1)*len("USR1\n") })
	}
	e.is(id, runtime.Running)
	if err := e.b.Kill(e.ctx, id, "TERM"); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit", e.wait(id), 41)
	id = e.start("sleep", "1000")
	if err := e.b.Kill(e.ctx, id, "KILL"); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit after KILL", e.wait(id), 137)
}

func killPaused(e *bench) {
	id := e.start(sh(catching)...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	e.pause(id)
	if err := e.b.Kill(e.ctx, id, "USR1"); err != nil {
		e.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	e.is(id, runtime.Paused)
	equal(e, "what it did while paused", e.file(id, "caught"), "")
	e.resume(id)
	e.eventually("it caught the signal", func() bool { return e.file(id, "caught") == "USR1\n" })
}

func killStopped(e *bench) {
	e.wantErr("Kill of an unknown id", e.b.Kill(e.ctx, newID(), "TERM"), runtime.ErrNotFound)
	id := e.create(e.spec("sleep", "1000"))
	e.wantErr("Kill of a created one", e.b.Kill(e.ctx, id, "TERM"), runtime.ErrState)
	e.restart(id)
	if err := e.b.Kill(e.ctx, id, "NOSUCH"); err == nil {
		e.Error("Kill with a signal that does not exist succeeded")
	}
	e.is(id, runtime.Running)
	e.stop(id)
	e.wantErr("Kill of an exited one", e.b.Kill(e.ctx, id, "TERM"), runtime.ErrState)
}
