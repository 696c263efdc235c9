package oci

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

const counting = "i=0; while :; do i=$((i+1)); echo $i > /count; done"

// size is that of a file in the upperdir; -1 when there is none.
func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return -1
	}
	return st.Size()
}

// A paused container, with a child and an exec session in it, ends without one
// more instruction.
func TestStopPaused(t *testing.T) {
	x := newBox(t)
	for range 5 {
		id := x.up(sh("(while :; do echo a >> /child; done) & while :; do echo b >> /first; done"))
		upper := x.inspect(id).Upper
		_, err := x.Exec(t.Context(), id, runtime.Process{Args: []string{
			"sh", "-c", "while :; do echo c >> /session; done",
		}, Detach: true}, runtime.Streams{})
		must(t, err)
		files := []string{filepath.Join(upper, "child"), filepath.Join(upper, "first"), filepath.Join(upper, "session")}
		for _, f := range files {
			eventually(t, f, func() bool { return size(f) > 0 })
		}
		x.pause(id)
		var before [3]int64
		for i, f := range files {
			before[i] = size(f)
		}
		must(t, x.Stop(t.Context(), id, runtime.StopOptions{Timeout: time.Minute}))
		for i, f := range files {
			if after := size(f); after != before[i] {
				t.Errorf("%s grew from %d to %d", f, before[i], after)
			}
		}
		if c := x.inspect(id); c.ExitCode != 137 {
			t.Errorf("%+v", c)
		}
	}
}

// Conmon killed: the container runs on, is seen, and can be stopped.
func TestMonitorKilled(t *testing.T) {
	x := newBox(t)
	id := x.up(sh(counting))
	v, err := x.box.Look(t.Context(), id)
	must(t, err)
	m, err := monitor(v.Run.Bundle)
	if m == nil {
		t.Fatal("no conmon", err)
	}
	waited := make(chan int, 1)
	go func() {
		exit, err := x.Wait(t.Context(), id)
		if err != nil {
			t.Error(err)
		}
		waited <- exit.Code
	}()
	must(t, m.Kill(unix.SIGKILL))
	must(t, m.Wait(t.Context()))
	m.Close()
	if got := x.inspect(id).Status; got != runtime.Running {
		t.Errorf("status %s", got)
	}
	if err := x.Attach(t.Context(), id, runtime.Streams{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("attach: %v", err)
	}
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
	if c := x.inspect(id); c.Status != runtime.Exited || c.ExitCode != 137 {
		t.Errorf("%+v", c)
	}
	<-waited
}

// reaper builds a stand-in for `agentbox --root ROOT reap ID` that notes its
// arguments.
func reaper(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "agentbox")
	write(t, path, "#!/bin/sh\necho \"$@\" > \"$2/reaped\"\n", 0o755)
	return path
}

func TestReap(t *testing.T) {
	self := reaper(t)
	x := newBox(t, func(o *Options) { o.Self, o.Wrapper = self, "/usr/sbin/runc" })
	id := x.up(sh("exit 6"))
	want := "--root " + x.box.Base + " reap " + id + "\n"
	eventually(t, "the exit command ran", func() bool {
		data, err := os.ReadFile(filepath.Join(x.box.Base, "reaped"))
		return err == nil && string(data) == want
	})
	exit, err := x.Wait(t.Context(), id)
	if exit.Code != 6 || err != nil {
		t.Errorf("exit %+v, %v", exit, err)
	}
	// Nothing was freed yet: that is what Reap is for.
	if _, err := os.Lstat(filepath.Join(x.box.State, id)); err != nil {
		t.Error(err)
	}
	for range 2 {
		must(t, x.Reap(t.Context(), id))
	}
	x.gone(id)
	for _, left := range x.leftovers("mount", "process", x.box.State) {
		t.Error(left)
	}
	// The transient directory lost, as by a reboot: the exit stays known.
	must(t, os.RemoveAll(x.box.RunDir(id)))
	if c := x.inspect(id); c.Status != runtime.Exited || c.ExitCode != 6 || c.Finished.IsZero() {
		t.Errorf("%+v", c)
	}
	x.start(id)
	_, err = x.Wait(t.Context(), id)
	must(t, err)

	// A running one is left alone.
	id = x.up(spec("sleep", "1000"))
	must(t, x.Reap(t.Context(), id))
	if got := x.inspect(id).Status; got != runtime.Running {
		t.Errorf("status %s", got)
	}
	must(t, x.Reap(t.Context(), newID()))
}

// A power loss leaves a container that was running, and nothing in RUN.
func TestLostRun(t *testing.T) {
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	must(t, hooks{x.Backend}.KillStrays(t.Context(), id))
	must(t, x.box.Cgroups.Empty(t.Context(), x.box.Cgroup(id)))
	must(t, x.box.Net.Teardown(t.Context(), id))
	must(t, os.RemoveAll(filepath.Join(x.box.State, id)))
	must(t, os.RemoveAll(x.box.RunDir(id)))
	_ = os.Remove(x.box.StartDir(id, 1, "exit")) // there if conmon was faster than its end
	write(t, x.box.StartDir(id, 1, "run.json"), "", 0o600)
	if c := x.inspect(id); c.Status != runtime.Exited || c.ExitCode != box.UnknownExit {
		t.Errorf("%+v", c)
	}
	x.start(id)
	if got := x.inspect(id).Status; got != runtime.Running {
		t.Errorf("status %s", got)
	}
}

// Many verbs on one container and many containers at once.
func TestConcurrent(t *testing.T) {
	x := newBox(t)
	one := x.create(spec("sleep", "1000"))
	var wg sync.WaitGroup
	var started sync.Map
	for i := range 6 {
		wg.Go(func() {
			_, err := x.Start(t.Context(), one, runtime.StartOptions{})
			switch {
			case err == nil:
				started.Store(i, true)
			case !errors.Is(err, fault.ErrState):
				t.Error(err)
			}
		})
		wg.Go(func() {
			s := sh("exit 3")
			if err := x.Create(t.Context(), s, []string{x.lower}); err != nil {
				t.Error(err)
				return
			}
			if _, err := x.Start(t.Context(), s.ID, runtime.StartOptions{}); err != nil {
				t.Error(err)
				return
			}
			if exit, err := x.Wait(t.Context(), s.ID); exit.Code != 3 || err != nil {
				t.Errorf("exit %+v, %v", exit, err)
			}
			if err := x.Remove(t.Context(), s.ID); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n := 0
	started.Range(func(any, any) bool { n++; return true })
	if n != 1 {
		t.Errorf("%d starts of one container succeeded", n)
	}
	for range 4 {
		wg.Go(func() {
			if err := x.Stop(t.Context(), one, runtime.StopOptions{Timeout: 50 * time.Millisecond}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for range 3 {
		wg.Go(func() {
			if err := x.Remove(t.Context(), one); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// Restarting in a loop: an old monitor's last actions must not hit the next run.
func TestRestarts(t *testing.T) {
	x := newBox(t)
	id := x.create(sh("echo hello; sleep 1000"))
	for range 12 {
		var out buffer
		wait, err := x.Start(t.Context(), id, runtime.StartOptions{Streams: &runtime.Streams{Stdout: &out}})
		must(t, err)
		eventually(t, "output", out.has("hello\n"))
		done := make(chan error, 1)
		go func() { done <- wait() }()
		var second buffer
		ctx, cancel := context.WithCancel(t.Context())
		late := make(chan error, 1)
		go func() { late <- x.Attach(ctx, id, runtime.Streams{Stdout: &second}) }()
		must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
		must(t, <-done)
		if err := <-late; err != nil && !errors.Is(err, fault.ErrState) {
			t.Error(err)
		}
		cancel()
	}
	runs, err := x.box.Starts(id)
	if err != nil || len(runs) > 3 || runs[0] != 12 {
		t.Errorf("runs %v, %v", runs, err)
	}
}

// A process of the host that stands in the sandbox's files does not keep it
// from being stopped, started or removed.
func TestBusyMount(t *testing.T) {
	x := newBox(t)
	id := x.up(spec("sleep", "1000"))
	stand := exec.Command("sleep", "1000")
	stand.Dir = x.box.Dir(id, "merged", "tmp")
	must(t, stand.Start())
	defer func() { _ = stand.Wait() }()
	defer func() { _ = stand.Process.Kill() }()
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
	x.start(id)
	must(t, x.Remove(t.Context(), id))
}

func TestRemoveHalfMade(t *testing.T) {
	x := newBox(t)
	ctx := t.Context()
	// A Create that was killed.
	a := newID()
	must(t, os.MkdirAll(x.box.Dir(a, "upper", "x"), 0o700))
	// A container that lost its directory, running.
	s := spec("sleep", "1000")
	b := x.up(s)
	v, err := x.box.Look(ctx, b)
	must(t, err)
	must(t, os.Remove(x.box.Dir(b, "container.json")))
	if _, err := x.Inspect(ctx, a); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
	ids, err := x.List(ctx)
	if err != nil || len(ids) != 2 {
		t.Errorf("%v, %v", ids, err)
	}
	must(t, x.Remove(ctx, a))
	must(t, x.Remove(ctx, b))
	if m, err := monitor(v.Run.Bundle); m != nil || err != nil {
		t.Error("conmon is left", err)
	}
	x.gone(b)
	// The id is free again, also for a Create over a killed one's remains.
	must(t, os.MkdirAll(x.box.Dir(s.ID, "upper", "x"), 0o700))
	x.create(s)
	if _, err := os.Lstat(x.box.Dir(s.ID, "upper", "x")); err == nil {
		t.Error("what a killed Create left is in the upperdir")
	}
}
