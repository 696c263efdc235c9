package backendtest

import (
	"context"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

const ticking = "while :; do echo x >> /ticks; sleep 0.02; done"

func stopIdempotent(e *bench) {
	id := e.create(e.spec("sleep", "1000"))
	e.stop(id)
	e.is(id, runtime.Created)
	e.restart(id)
	e.stop(id)
	first := e.is(id, runtime.Exited)
	e.stop(id)
	if second := e.is(id, runtime.Exited); second.ExitCode != first.ExitCode || !second.Finished.Equal(first.Finished) {
		e.Errorf("the second Stop changed %+v to %+v", first, second)
	}
}

func stopKills(e *bench) {
	id := e.start(sh("trap 'echo x > /trapped' TERM; echo x > /up; while :; do sleep 0.02; done")...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	e.stop(id)
	c := e.is(id, runtime.Exited)
	equal(e, "exit", c.ExitCode, 137)
	equal(e, "pid", c.Pid, 0)
	equal(e, "what the trap wrote", e.file(id, "trapped"), "")
	equal(e, "exit by Wait", e.wait(id), 137)
}

func stopClean(e *bench) {
	id := e.start(sh("trap 'echo x > /trapped; exit 21' TERM; echo x > /up; while :; do sleep 0.02; done")...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	e.stopsAtOnce(id)
	equal(e, "exit", e.is(id, runtime.Exited).ExitCode, 21)
	equal(e, "what the trap wrote", e.file(id, "trapped"), "x\n")
}

// stopsAtOnce checks that Stop waits for the end of a process that ends at its
// stop signal, and not for its timeout.
func (e *bench) stopsAtOnce(id string) {
	e.Helper()
	begin := time.Now()
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience}); err != nil {
		e.Fatal(err)
	}
	if d := time.Since(begin); d >= patience {
		e.Errorf("Stop took %v for a process that ends at once", d)
	}
}

func stopTimeout(e *bench) {
	id := e.start(sh("trap 'echo x > /trapped' TERM; echo x > /up; while :; do sleep 0.02; done")...)
	e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
	begin := time.Now()
	if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: 500 * time.Millisecond}); err != nil {
		e.Fatal(err)
	}
	if d := time.Since(begin); d < 500*time.Millisecond || d > patience {
		e.Errorf("Stop with a timeout of 500 ms took %v", d)
	}
	equal(e, "exit", e.is(id, runtime.Exited).ExitCode, 137)
	equal(e, "what the trap wrote", e.file(id, "trapped"), "x\n")
}

func stopSignals(e *bench) {
	script := "trap 'exit 31' INT; trap 'exit 32' USR1; trap 'exit 33' TERM; echo x >> /up; while :; do sleep 0.02; done"
	for i, try := range []struct {
		own, asked string
		want       int
	}{{"SIGINT", "", 31}, {"SIGINT", "SIGUSR1", 32}, {"", "USR1", 32}} { // {"", ""} is stop/waits for a clean end
		s := e.spec(sh(script)...)
		s.StopSignal = try.own
		id := e.startSpec(s)
		e.eventually("it is up", func() bool { return e.file(id, "up") != "" })
		if i == 0 {
			e.wantErr("Stop with an unknown signal", e.b.Stop(e.ctx, id,
				runtime.StopOptions{Timeout: time.Second, Signal: "SIGNONE"}), runtime.ErrInvalid)
			e.is(id, runtime.Running)
		}
		if err := e.b.Stop(e.ctx, id, runtime.StopOptions{Timeout: patience, Signal: try.asked}); err != nil {
			e.Fatalf("try %d: %v", i, err)
		}
		equal(e, "exit with stop signal "+try.own+" and Signal "+try.asked, e.is(id, runtime.Exited).ExitCode, try.want)
	}
}

func stopPaused(e *bench) {
	for _, opts := range []runtime.StopOptions{{}, {Timeout: 5 * time.Second}, {Silent: true}} {
		id := e.start(sh("trap 'echo x >> /ticks; exit 1' TERM; " + ticking)...)
		e.eventually("it counts", func() bool { return len(e.file(id, "ticks")) > 10 })
		e.pause(id)
		before := e.file(id, "ticks")
		if err := e.within("Stop of a paused one", func() error { return e.b.Stop(e.ctx, id, opts) }); err != nil {
			e.Fatalf("Stop of a paused one with %+v: %v", opts, err)
		}
		equal(e, "exit", e.is(id, runtime.Exited).ExitCode, 137)
		equal(e, "ticks written while paused and stopped", len(e.file(id, "ticks"))-len(before), 0)
	}
}

func stopSilent(e *bench) {
	// reply is what a peer's read ends with once the container is stopped.
	reply := func(opts runtime.StopOptions) error {
		s := e.spec(sh("while :; do sleep 1000 | nc -l -p 5000; done")...)
		s.Network.Mode = runtime.NetworkBridge
		id := e.startSpec(s)
		address := e.inspect(id).Address
		var conn net.Conn
		e.eventually("the container takes a connection", func() (ok bool) {
			var err error
			conn, err = net.DialTimeout("tcp", net.JoinHostPort(address, "5000"), 10*time.Second)
			return err == nil
		})
		defer conn.Close()
		if err := e.b.Stop(e.ctx, id, opts); err != nil {
			e.Fatal(err)
		}
		limit := patience
		if opts.Silent {
			limit = 500 * time.Millisecond // of silence
		}
		_ = conn.SetReadDeadline(time.Now().Add(limit))
		_, err := conn.Read(make([]byte, 1))
		return err
	}
	if err := reply(runtime.StopOptions{Silent: true}); err == io.EOF || !os.IsTimeout(err) {
		e.Errorf("a peer learned of a silent end: %v", err)
	}
	if err := reply(runtime.StopOptions{}); os.IsTimeout(err) {
		e.Errorf("a peer did not learn of an ordinary end: %v", err)
	}
}

func stopEverything(e *bench) {
	id := e.start(sh("sleep 1000 & setsid sleep 1000 & (trap '' TERM; " + ticking + ") & sleep 1000")...)
	e.eventually("it counts", func() bool { return len(e.file(id, "ticks")) > 10 })
	if _, err := e.b.Exec(e.ctx, id, runtime.Process{Args: []string{"sleep", "1000"}, Detach: true},
		runtime.Streams{}); err != nil {
		e.Fatal(err)
	}
	upper := e.inspect(id).Upper
	if len(overlaysOn(upper)) == 0 && (e.f.IDs == nil || len(mountsUnder(e.root)) == 0) { // a mapped one does not show the path of its upperdir
		e.Errorf("no mount is on the upperdir of a running container: this case proves nothing")
	}
	e.stop(id)
	before := e.file(id, "ticks")
	if left := e.processes(); len(left) > 0 {
		// The monitor may take a moment longer; the container's own may not.
		for _, p := range left {
			e.Logf("after Stop: %s", p)
		}
	}
	for _, m := range append(mountsUnder(e.root), overlaysOn(upper)...) {
		e.Errorf("after Stop: %s", m)
	}
	time.Sleep(200 * time.Millisecond)
	equal(e, "ticks after Stop", len(e.file(id, "ticks"))-len(before), 0)
	e.eventually("every process is gone", func() bool { return len(e.processes()) == 0 })
}

func stopUnknown(e *bench) {
	e.wantErr("Stop", e.b.Stop(e.ctx, newID(), runtime.StopOptions{}), runtime.ErrNotFound)
}

func stopCancelled(e *bench) {
	id := e.start("sleep", "1000")
	err := e.b.Stop(cancelled(), id, runtime.StopOptions{})
	switch c := e.inspect(id); {
	case err == nil && c.Status != runtime.Exited:
		e.Errorf("Stop with a cancelled context succeeded and left it %s", c.Status)
	case err != nil && c.Status != runtime.Running:
		e.wantErr("Stop", err, context.Canceled)
	}
	// A process that will not end, and a caller that gives up.
	id = e.start(sh("trap '' TERM; while :; do sleep 0.02; done")...)
	ctx, cancel := context.WithTimeout(e.ctx, 200*time.Millisecond)
	defer cancel()
	if err := e.within("Stop", func() error {
		return e.b.Stop(ctx, id, runtime.StopOptions{Timeout: caseTimeout})
	}); err == nil {
		e.is(id, runtime.Exited)
	}
	e.stop(id)
	e.is(id, runtime.Exited)
}

func waitCodes(e *bench) {
	// Others are 0 in start/runs the command, 3 in wait/after the exit.
	id := e.start(sh("exit 255")...)
	equal(e, "exit by Wait", e.wait(id), 255)
	equal(e, "exit by Inspect", e.is(id, runtime.Exited).ExitCode, 255)
}

func waitSeveral(e *bench) {
	id := e.start("sleep", "1000")
	exits := make(chan int, 4)
	for range 4 {
		go func() {
			exit, err := e.b.Wait(e.ctx, id)
			if err != nil {
				e.Errorf("Wait: %v", err)
			}
			exits <- exit.Code
		}()
	}
	e.stop(id)
	for range 4 {
		equal(e, "exit", <-exits, 137)
	}
}

func waitAfter(e *bench) {
	id := e.start(sh("exit 3")...)
	for range 3 {
		equal(e, "exit", e.wait(id), 3)
	}
	e.restart(id)
	equal(e, "exit of the second run", e.wait(id), 3)
}

func waitCancelled(e *bench) {
	id := e.start("sleep", "1000")
	ctx, cancel := context.WithTimeout(e.ctx, 100*time.Millisecond)
	defer cancel()
	err := e.within("Wait", func() error { _, err := e.b.Wait(ctx, id); return err })
	e.wantErr("Wait", err, context.DeadlineExceeded)
	e.is(id, runtime.Running)
}

func waitUnknown(e *bench) {
	_, err := e.b.Wait(e.ctx, newID())
	e.wantErr("Wait", err, runtime.ErrNotFound)
}

func waitRemoved(e *bench) {
	id := e.start("sleep", "1000")
	done := make(chan error, 1)
	go func() {
		exit, err := e.b.Wait(e.ctx, id)
		if err == nil && exit.Code != 137 {
			e.Errorf("Wait of one that was removed: %+v", exit)
		}
		done <- err
	}()
	if err := e.b.Remove(e.ctx, id); err != nil {
		e.Fatal(err)
	}
	if err := e.within("Wait", func() error { return <-done }); err != nil {
		e.wantErr("Wait", err, runtime.ErrNotFound)
	}
}

// waitMemory: also when the container is removed as soon as it has ended.
func waitMemory(e *bench) {
	for _, remove := range []bool{false, true} {
		s := e.spec(sh("until [ -e /go ]; do sleep 0.02; done; exec tail /dev/zero")...)
		s.Resources.Memory = 32 << 20
		e.startSpec(s)
		exits := make(chan runtime.Exit, 1)
		go func() {
			exit, err := e.b.Wait(e.ctx, s.ID)
			if err != nil {
				e.Errorf("Wait: %v", err)
			}
			exits <- exit
		}()
		e.exec(s.ID, "touch", "/go")
		if remove {
			e.eventually("it ends", func() bool { return e.inspect(s.ID).Status == runtime.Exited })
			if err := e.b.Remove(e.ctx, s.ID); err != nil {
				e.Fatal(err)
			}
		}
		equal(e, "exit", <-exits, runtime.Exit{Code: 137, OOMKilled: true})
	}
}

func inspectRunning(e *bench) {
	before := time.Now()
	id := e.start("sleep", "1000")
	c := e.is(id, runtime.Running)
	if c.Pid <= 0 || syscall.Kill(c.Pid, 0) != nil {
		e.Errorf("pid %d does not live", c.Pid)
	}
	if c.Started.Before(before.Add(-time.Second)) || c.Started.After(time.Now().Add(time.Second)) {
		e.Errorf("started at %v, asked to at %v", c.Started, before)
	}
	// The runtime's own init becomes the command a moment after Start.
	e.eventually("the pid is the command's", func() bool {
		b, err := os.ReadFile("/proc/" + itoa(c.Pid) + "/cmdline")
		return err == nil && string(b) == "sleep\x001000\x00"
	})
	if c.Runtime.Binary == "" || c.Runtime.ID == "" {
		e.Errorf("runtime: %+v", c.Runtime)
	}
}

func inspectPaused(e *bench) {
	id := e.start(sh(ticking)...)
	e.pause(id)
	c := e.is(id, runtime.Paused)
	if c.Pid <= 0 {
		e.Errorf("pid of a paused one is %d", c.Pid)
	}
	before := e.file(id, "ticks")
	time.Sleep(100 * time.Millisecond)
	equal(e, "ticks while paused", len(e.file(id, "ticks"))-len(before), 0)
	e.resume(id)
	e.is(id, runtime.Running)
	e.eventually("it goes on", func() bool { return len(e.file(id, "ticks")) > len(before) })
}

func inspectExited(e *bench) {
	id := e.start(sh("exit 12")...)
	e.eventually("it exits by itself", func() bool { return e.inspect(id).Status == runtime.Exited })
	c := e.inspect(id)
	equal(e, "exit", c.ExitCode, 12)
	equal(e, "pid", c.Pid, 0)
	if c.Finished.Before(c.Started) || c.Started.IsZero() {
		e.Errorf("started %v, finished %v", c.Started, c.Finished)
	}
}

func inspectKilled(e *bench) {
	id := e.start("sleep", "1000")
	if err := syscall.Kill(e.is(id, runtime.Running).Pid, syscall.SIGKILL); err != nil {
		e.Fatal(err)
	}
	equal(e, "exit by Wait", e.wait(id), 137)
	equal(e, "exit by Inspect", e.is(id, runtime.Exited).ExitCode, 137)
	e.restart(id)
	e.is(id, runtime.Running)
}

func inspectUnknown(e *bench) {
	_, err := e.b.Inspect(e.ctx, newID())
	e.wantErr("Inspect", err, runtime.ErrNotFound)
}
