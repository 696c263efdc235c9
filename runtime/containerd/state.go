package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"

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
	dirty  []int // starts that were cut off half-way: to be cleared away
}

func (v view) live() bool { return v.status == runtime.Running || v.status == runtime.Paused }

// look finds out a sandbox's state. Whether it is there at all is for
// containerd to say, as long as that answers.
func (b *Backend) look(ctx context.Context, id string) (view, error) {
	c, err := b.load(id)
	if err != nil {
		return view{}, err
	}
	if err := b.present(ctx, c); err != nil && !isDown(err) {
		return view{}, err
	}
	v := view{container: c, status: runtime.Created}
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

// present asks containerd for the container.
func (b *Backend) present(ctx context.Context, c container) error {
	ns, id := b.nameOf(c)
	_, err := b.client.ContainerService().Get(in(ctx, ns), id)
	if err = plain(err); errors.Is(err, fault.ErrNotFound) {
		return fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return err
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
			if st, err := os.Stat(b.home.Start(id, n, "run.json")); err == nil {
				start = st.ModTime()
			}
		}
		if end := &v.exit.Finished; end.Before(start) && !end.IsZero() {
			*end = start // the clock that file times are taken from lags by some ms
		}
		v.status, v.run, v.start, v.noted = status, run, start, started
		return true, nil
	}
	if exit, ok, err := b.home.Exited(id, n); err != nil {
		return false, err
	} else if ok {
		v.exit = exit
		return done(runtime.Exited)
	}
	p, err := b.first(id, run)
	if err != nil {
		return false, err
	}
	if p != nil {
		defer p.Close()
		frozen, err := b.cgroups.Frozen(b.home.Cgroup(id))
		if err != nil {
			return false, err
		}
		if b.home.Unborn(id) || !started && frozen {
			// runc has made it, or the wrapper has restored it, but it is not started yet.
			return false, nil
		}
		v.pid = p.Pid
		watched, err := monitored(run.Bundle)
		if err != nil {
			return false, err
		}
		if !watched {
			if err := b.rewatch(ctx, v.container, n); err != nil {
				b.log.Warn("monitor missing", "sandbox", id, "err", err)
			}
		}
		if frozen {
			return done(runtime.Paused)
		}
		return done(runtime.Running)
	}
	if !started {
		over, err := b.unnoted(ctx, id, run)
		if v.exit = over; err != nil || over.Finished.IsZero() {
			return false, err
		}
		return done(runtime.Exited)
	}
	// It has ended, but the monitor may still be draining its output.
	soon, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	v.exit, err = b.awaitExit(soon, v.container, run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		v.exit, err = home.Exit{Code: home.Unknown}, nil
	}
	if err != nil {
		return false, err
	}
	_, seen, err := b.home.Exited(id, n)
	if err != nil {
		return false, err
	}
	if !seen && !v.exit.Finished.IsZero() {
		v.exit = b.home.Unseen(id, n, v.exit)
	}
	return done(runtime.Exited)
}

// notedSoon bounds the time from the end of a command to its monitor's record,
// and from a start to the note of it.
const notedSoon = time.Second

// unnoted finds out about a run that was not noted as started and whose process
// is not there: it is being started at this moment, or was cut off, or its
// command was faster than the note; then its end is returned.
func (b *Backend) unnoted(ctx context.Context, id string, run runRecord) (home.Exit, error) {
	if run.Pid == 0 {
		return home.Exit{}, nil
	}
	for end := time.Now().Add(notedSoon); time.Now().Before(end); {
		if watched, err := monitored(run.Bundle); err != nil {
			return home.Exit{}, err
		} else if !watched {
			break
		}
		if exit, ok, err := b.home.Exited(id, run.Number); ok || err != nil {
			return exit, err
		}
		select {
		case <-ctx.Done():
			return home.Exit{}, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	exit, _, err := b.home.Exited(id, run.Number)
	return exit, err
}

// first returns the first process of a run, to be closed; nil when it has ended.
func (b *Backend) first(id string, run runRecord) (*kernel.Process, error) {
	if run.Pid == 0 {
		return nil, nil
	}
	return kernel.OpenMember(run.Pid, b.home.Cgroup(id))
}

// awaitExit waits for the end of a run and returns how it ended. The monitor's
// record counts, which is written once all output is in the log and on the
// attached sockets. A monitor that is gone is started again.
func (b *Backend) awaitExit(ctx context.Context, c container, run runRecord) (home.Exit, error) {
	id := c.Spec.ID
	first, err := b.first(id, run)
	if err != nil {
		return home.Exit{}, err
	}
	exited := func() (home.Exit, bool, error) { return b.home.Exited(id, run.Number) }
	return b.home.Await(ctx, id, run.Number, first, exited, func(ctx context.Context) error { return b.keepWatched(ctx, c, run) })
}

// keepWatched starts a run's monitor again when it is gone, and returns when that
// is of no use.
func (b *Backend) keepWatched(ctx context.Context, c container, run runRecord) error {
	id := c.Spec.ID
	again := time.NewTicker(time.Second) // nothing tells of a monitor's death
	defer again.Stop()
	for tries := 0; ; {
		watched, err := monitored(run.Bundle)
		if err != nil {
			return err
		}
		if watched {
			select {
			case <-again.C:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if _, ok, err := b.home.Exited(id, run.Number); ok || err != nil {
			return err
		}
		if _, err := os.Stat(b.home.Start(id, run.Number)); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if tries++; tries > 3 {
			return nil
		}
		err = b.rewatch(ctx, c, run.Number)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		b.log.Warn("monitor missing", "sandbox", id, "err", err)
		if _, err := os.Stat(run.Bundle); errors.Is(err, fs.ErrNotExist) {
			return nil // a reboot took it, and the processes too
		}
	}
}

func (b *Backend) runtimeOf(id string) criu.Runtime {
	return criu.Runtime{Binary: b.oci, Root: b.home.State, ID: id}
}

// Inspect tells what is so now. While containerd does not answer it tells what
// the kernel and our own records say.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.inspect(ctx)
	}
	v, err := b.look(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	c := runtime.Container{
		Status:  v.status,
		Pid:     v.pid,
		Started: v.start,
		Upper:   v.Upper,
		Lower:   v.Lower,
		Runtime: runtime.OCIRuntime(b.runtimeOf(id)),
		Stage:   stage.Slot{Run: b.home.Stage, ID: id},
		Managed: b.place(id).Managed(v.Spec),
	}
	if b.wrapper == b.oci {
		c.NoRestore, c.Remedy = "agentbox-runtime is not installed beside agentbox", "Install it (make install)."
	}
	if v.live() {
		c.Address = v.run.Address
	}
	if v.status == runtime.Exited {
		c.ExitCode, c.Finished, c.OOMKilled = v.exit.Code, v.exit.Finished, v.exit.OOM
		c.Hits = runtime.LimitHits{OOMKills: v.exit.Hits.OOMKills, Pids: v.exit.Hits.PidsMax}
	}
	return c, nil
}

// Wait blocks until the container has exited. It returns ErrState for a container that was never
// started: there is no exit to wait for. One that was removed not long ago still answers.
func (b *Backend) Wait(ctx context.Context, id string) (int, error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.wait(ctx)
	}
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
	exit, err := b.awaitExit(ctx, v.container, v.run)
	return exit.Code, err
}

// rootLabel names, on everything that we make in containerd, the root that it
// belongs to.
const (
	rootLabel = "agentbox.root"
	nameLabel = "agentbox.name"
)

// List returns every id of which a file, a link, an address, a container or a
// snapshot of ours exists.
func (b *Backend) List(ctx context.Context) ([]string, error) {
	ids, err := b.net.List(ctx)
	if err != nil {
		return nil, err
	}
	names, err := b.home.Names()
	if err != nil {
		return nil, err
	}
	ids = append(ids, names...)
	ns := in(ctx, b.namespace)
	mine := fmt.Sprintf("labels.%q==%q", rootLabel, b.home.Base)
	list, err := b.client.ContainerService().List(ns, mine)
	if err == nil {
		for _, c := range list {
			ids = append(ids, c.ID)
		}
		err = b.snapshots().Walk(ns, func(_ context.Context, s snapshotInfo) error {
			ids = append(ids, s.Name)
			return nil
		}, mine)
	}
	if err = plain(err); err != nil && !errors.Is(err, fault.ErrNotFound) && !isDown(err) {
		return nil, err
	}
	ids = slices.DeleteFunc(ids, func(id string) bool {
		if !home.IsID(id) || b.home.Elses(id) {
			return true
		}
		c, err := b.load(id)
		return err == nil && c.Theirs != nil
	})
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// task returns what containerd knows of a container's task; ErrNotFound when it
// has none.
func (b *Backend) task(ctx context.Context, c container) (*taskInfo, error) {
	ns, id := b.nameOf(c)
	resp, err := b.client.TaskService().Get(in(ctx, ns), &tasks.GetRequest{ContainerID: id})
	if err != nil {
		return nil, plain(err)
	}
	return resp.Process, nil
}
