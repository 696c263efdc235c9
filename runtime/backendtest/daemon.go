package backendtest

import (
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// crash has the engine's daemon die and come back. A backend without a daemon has nothing
// to lose.
func (e *bench) crash() {
	e.Helper()
	if e.f.Restart != nil {
		e.f.Restart(e.T)
	}
}

// down runs fn while there is no daemon.
func (e *bench) down(fn func()) {
	e.Helper()
	if e.f.Down != nil {
		e.f.Down(e.T, fn)
	} else {
		fn()
	}
}

func daemonAnyTwo(e *bench) {
	s := e.spec(sh("trap 'exit 17' TERM; " + counting)...)
	id := ""
	last := 0
	// counts checks that the processes have gone on all the while.
	counts := func() {
		e.Helper()
		e.eventually("it counts on", func() bool { return e.count(id) > last+2 })
		last = e.count(id)
	}
	for _, call := range []struct {
		name string
		do   func()
	}{
		{"Create", func() { id = e.create(s); e.is(id, runtime.Created) }},
		{"Start", func() { e.restart(id); counts() }},
		{"Inspect", func() { e.is(id, runtime.Running); counts() }},
		{"Exec", func() {
			out, exit := e.exec(id, sh("echo hello; exit 3")...)
			equal(e, "exit of Exec", exit, 3)
			equal(e, "output of Exec", out, "hello\n")
			counts()
		}},
		{"Pause", func() { e.pause(id); last = e.count(id) }},
		{"Inspect, paused", func() {
			e.is(id, runtime.Paused)
			equal(e, "it counted while paused", e.count(id)-last, 0)
		}},
		{"Unpause", func() { e.resume(id); counts() }},
		{"Logs", func() {
			e.eventually("the log has what was counted", func() bool {
				out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
				if !strings.HasPrefix(out, lines(1, 3)) {
					e.Fatalf("the log begins %.20q", out)
				}
				return strings.Contains(out, "\n"+itoa(last)+"\n")
			})
			counts()
		}},
		{"Stop", func() {
			if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience}); err != nil {
				e.Fatal(err)
			}
			equal(e, "exit", e.is(id, runtime.Exited).ExitCode, 17)
		}},
		{"Wait", func() { equal(e, "exit by Wait", e.wait(id), 17) }},
		{"Start again", func() { e.restart(id); last = 0; counts() }},
		{"Remove", func() {
			if err := e.b.Remove(e.ctx, id); err != nil {
				e.Fatal(err)
			}
		}},
	} {
		call.do()
		if e.Failed() {
			e.Fatalf("at %s", call.name)
		}
		e.crash()
	}
	e.removed(id)
}

func daemonRestore(e *bench) {
	id := e.start(sh(counting)...)
	e.eventually("it counts", func() bool { return e.count(id) >= 10 })
	images, upper := e.dump(id)
	saved := e.count(id)
	e.crash()
	e.putBack(id, upper)
	before, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	e.stage(id, images)
	e.crash()
	e.restart(id)
	e.goesOnFrom(id, saved, before)
	e.crash()
	e.is(id, runtime.Running)
	n := e.count(id)
	e.eventually("it counts on", func() bool { return e.count(id) > n })
}

func daemonWait(e *bench) {
	id := e.start(sh("trap 'exit 23' USR1; echo x > /up; while :; do sleep 0.02; done")...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	exits := make(chan int, 1)
	errs := make(chan error, 1)
	go func() {
		exit, err := e.b.Wait(e.ctx, id)
		exits <- exit.Code
		errs <- err
	}()
	time.Sleep(100 * time.Millisecond) // it is waiting by then; if not, all the better
	e.crash()
	if err := e.b.Kill(e.ctx, id, "USR1"); err != nil {
		e.Fatal(err)
	}
	if err := e.within("Wait", func() error { return <-errs }); err != nil {
		e.Fatalf("Wait over a restart of the daemon: %v", err)
	}
	equal(e, "exit", <-exits, 23)
}

// daemonEnd: a process that ends while unobserved is found ended, with its exit code.
func daemonEnd(e *bench) {
	id := e.start(sh("trap 'exit 24' USR1; echo x > /up; while :; do sleep 0.02; done")...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	pid := e.is(id, runtime.Running).Pid
	e.down(func() {
		if err := signalProcess(pid, "USR1"); err != nil {
			e.Fatal(err)
		}
		e.eventually("it has ended", func() bool { return !alive(pid) })
	})
	equal(e, "exit by Inspect", e.is(id, runtime.Exited).ExitCode, 24)
	equal(e, "exit by Wait", e.wait(id), 24)
	e.restart(id)
	e.is(id, runtime.Running)
}

func daemonThaw(e *bench) {
	id := e.start(sh(ticking)...)
	e.goesOn(id)
	upper := e.inspect(id).Upper
	e.pause(id)
	e.down(func() {
		if err := e.b.Unpause(e.ctx, id); err != nil {
			e.Fatalf("Unpause without the daemon: %v", err)
		}
		n := size(upper + "/ticks")
		e.eventually("it goes on", func() bool { return size(upper+"/ticks") > n })
	})
	e.is(id, runtime.Running)
	e.goesOn(id)
	e.pause(id)
	e.is(id, runtime.Paused)
	e.still(id)
	e.resume(id)
	e.goesOn(id)
}

// daemonThawOther: another process, that never paused it, thaws it as well.
func daemonThawOther(e *bench) {
	id := e.start(sh(ticking)...)
	e.goesOn(id)
	upper := e.inspect(id).Upper
	e.pause(id)
	other := e.f.New(e.T, e.root)
	e.down(func() {
		if err := other.Unpause(e.ctx, id); err != nil {
			e.Fatalf("Unpause without the daemon: %v", err)
		}
		n := size(upper + "/ticks")
		e.eventually("it goes on", func() bool { return size(upper+"/ticks") > n })
	})
	e.is(id, runtime.Running)
}

func daemonDown(e *bench) {
	if e.f.Down == nil {
		return
	}
	id := e.start("sleep", "1000")
	e.down(func() {
		for what, err := range map[string]error{
			"Create":  e.b.Create(e.ctx, e.spec("true"), e.lower),
			"Stop":    e.b.Stop(e.ctx, id, runtime.StopOptions{}),
			"Pause":   e.b.Pause(e.ctx, id),
			"Kill":    e.b.Kill(e.ctx, id, "TERM"),
			"Remove":  e.b.Remove(e.ctx, id),
			"Inspect": second(e.b.Inspect(e.ctx, id)),
			"List":    second(e.b.List(e.ctx)),
			"Start":   second(e.b.Start(e.ctx, id, runtime.StartOptions{})),
		} {
			e.wantErr(what+" without the daemon", err, runtime.ErrUnsupported)
		}
	})
	e.is(id, runtime.Running)
}

func second[T any](_ T, err error) error { return err }
