package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// view is the state of a container at one moment.
type view struct {
	container
	status runtime.Status
	run    runRecord // the run that status speaks of; zero when created
	exit   home.Exit
	start  time.Time
	noted  bool // that it was started; else agentbox was killed before it could
	pid    int
	dirty  []int           // starts that were cut off half-way: to be cleared away
	first  *kernel.Process // its first process, of what hold returns
}

func (v view) live() bool { return v.status == runtime.Running || v.status == runtime.Paused }

// look finds out a container's state.
func (b *Backend) look(ctx context.Context, id string) (view, error) {
	v, err := b.hold(ctx, id)
	v.letGo()
	return v, err
}

func (v *view) letGo() {
	if v.first != nil {
		v.first.Close()
		v.first = nil
	}
}

// hold is look, of a container that lives with its first process, for letGo.
func (b *Backend) hold(ctx context.Context, id string) (view, error) {
	rec, err := b.load(id)
	if err != nil {
		return view{}, err
	}
	v := view{container: rec, status: runtime.Created}
	runs, err := b.home.Starts(id)
	if err != nil {
		return v, err
	}
	for _, n := range runs {
		decided, err := b.lookRun(ctx, id, n, &v)
		if decided || err != nil {
			return v, err
		}
		v.dirty = append(v.dirty, n)
	}
	return v, nil
}

// lookRun fills in what run n says; it decides nothing when it never came to
// run the command.
func (b *Backend) lookRun(ctx context.Context, id string, n int, v *view) (decided bool, err error) {
	run := runRecord{Number: n, Bundle: b.home.Bundle(id, n)}
	// A record that a power failure cut short reads as empty; its run is over anyway.
	if err := b.home.ReadRun(id, n, &run); err != nil {
		return false, err
	}
	run.Number, run.Bundle = n, b.home.Bundle(id, n) // whatever a record from elsewhere says
	start, started := b.home.Started(id, n)
	done := func(status runtime.Status) (bool, error) {
		if !started {
			// agentbox was killed between the start and the note of it.
			start = time.Now()
			if st, err := os.Stat(b.home.Bundle(id, n, "pid")); err == nil {
				start = st.ModTime()
			}
		}
		if end := &v.exit.Finished; end.Before(start) && !end.IsZero() {
			*end = start // the clock that file times are taken from lags by some ms
		}
		v.status, v.run, v.start, v.noted = status, run, start, started
		return true, nil
	}
	if exit, ok, err := b.exited(id, n); err != nil {
		return false, err
	} else if ok {
		if !started && !b.born(id) {
			return false, nil
		}
		v.exit = exit
		return done(runtime.Exited)
	}
	p, err := b.first(id, n)
	if err != nil {
		return false, err
	}
	if p != nil {
		frozen, err := b.cgroups.Frozen(b.home.Cgroup(id))
		if err != nil {
			p.Close()
			return false, err
		}
		if b.home.Unborn(id) || !started && frozen {
			// runc has made it, or the wrapper has restored it, but it is not started yet.
			p.Close()
			return false, nil
		}
		v.pid, v.first = p.Pid, p
		if frozen {
			return done(runtime.Paused)
		}
		return done(runtime.Running)
	}
	if !started {
		return false, nil
	}
	// It has ended, but conmon may still be draining its output.
	soon, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	v.exit, err = b.awaitExit(soon, id, run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		v.exit, err = home.Exit{Code: home.Unknown}, nil
	}
	if err != nil {
		return false, err
	}
	_, seen, err := b.exited(id, n)
	if err != nil {
		return false, err
	}
	if !seen && !v.exit.Finished.IsZero() {
		v.run = run
		v.exit = b.home.Unseen(id, n, b.withHits(id, *v))
	}
	return done(runtime.Exited)
}

// born reports whether the runtime knows a container that was started.
func (b *Backend) born(id string) bool {
	_, err := os.Lstat(filepath.Join(b.home.State, id))
	return err == nil && !b.home.Unborn(id)
}

// awaitExit waits for the end of a run and returns how it ended. Conmon's exit
// file counts, since conmon writes it once all output is in the log and on the
// attached sockets. If conmon itself is gone, the end of the process counts.
func (b *Backend) awaitExit(ctx context.Context, id string, run runRecord) (home.Exit, error) {
	first, err := b.first(id, run.Number)
	if err != nil {
		return home.Exit{}, err
	}
	exited := func() (home.Exit, bool, error) { return b.exited(id, run.Number) }
	return b.home.Await(ctx, id, run.Number, first, exited, func(ctx context.Context) error { return b.awaitEnd(ctx, id, run) })
}

// awaitEnd returns nil when neither conmon nor the first process of a run is
// left.
func (b *Backend) awaitEnd(ctx context.Context, id string, run runRecord) error {
	p, err := monitor(run.Bundle)
	if err != nil {
		return err
	}
	if p != nil {
		defer p.Close()
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	if p, err = b.first(id, run.Number); p != nil {
		defer p.Close()
		return p.Wait(ctx)
	}
	return err
}

func (b *Backend) runtimeOf(id string) criu.Runtime {
	return criu.Runtime{Binary: b.oci, Root: b.home.State, ID: id}
}

// Inspect describes the current state.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	v, ok := b.glance(id)
	if !ok {
		var err error
		began := time.Now()
		if v, err = b.hold(ctx, id); err != nil {
			v.letGo()
			return runtime.Container{}, err
		}
		if !b.remember(id, v, began) {
			v.letGo()
		}
	}
	c := runtime.Container{
		Status:  v.status,
		Pid:     v.pid,
		Started: v.start,
		Upper:   b.home.Dir(id, "upper"),
		Lower:   v.Lower,
		Runtime: runtime.OCIRuntime(b.runtimeOf(id)),
		Stage:   stage.Slot{Run: b.home.Stage, ID: id},

		EmptyNetwork: v.Spec.IDs != nil,
	}
	c.Managed = b.place(id).Managed(v.Spec)
	if v.live() {
		c.Address = v.run.Address
	}
	if v.status != runtime.Created {
		c.OOMAt = b.oomAt(id, v.run.Number)
	}
	if v.status == runtime.Exited {
		exit := b.withHits(id, v)
		c.ExitCode, c.Finished, c.OOMKilled = exit.Code, exit.Finished, exit.OOM
		c.Hits = runtime.LimitHits{OOMKills: exit.Hits.OOMKills, Pids: exit.Hits.PidsMax}
	}
	return c, nil
}

// Wait blocks until the container has exited. It returns ErrState for a container that was
// never started: there is no exit to wait for. One that was removed not long ago still
// answers.
func (b *Backend) Wait(ctx context.Context, id string) (int, error) {
	v, err := b.look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		exit, err := b.home.Buried(id)
		return exit.Code, err
	}
	if err != nil {
		return 0, err
	}
	switch v.status {
	case runtime.Created:
		return 0, fmt.Errorf("container %s was never started: %w", id, fault.ErrState)
	case runtime.Exited:
		return v.exit.Code, nil
	}
	exit, err := b.awaitExit(ctx, id, v.run)
	return exit.Code, err
}

// List returns every id of which a file, a link or an address of ours exists.
// Cgroups are not asked: they are the host's, and may be another root's.
func (b *Backend) List(ctx context.Context) ([]string, error) {
	ids, err := b.net.List(ctx)
	if err != nil {
		return nil, err
	}
	names, err := b.home.Names()
	if err != nil {
		return nil, err
	}
	ids = slices.DeleteFunc(append(ids, names...), func(id string) bool { return !home.IsID(id) || b.home.Elses(id) })
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
