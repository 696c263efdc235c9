package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// view is what is so of a container at one moment.
type view struct {
	container
	status runtime.Status
	run    runRecord // the run that status speaks of; zero when created
	exit   exitRecord
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
	runs, err := b.runs(id)
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
	run := runRecord{Number: n, Bundle: b.bundle(id, n)}
	// One that a power loss cut short reads as empty, and is over anyway.
	_ = record.ReadJSON(b.runPath(id, n, "run.json"), &run)
	start, started := b.started(id, n)
	done := func(status runtime.Status) (bool, error) {
		if !started {
			// agentbox was killed between the start and the note of it.
			start = time.Now()
			if st, err := os.Stat(b.runPath(id, n, "run.json")); err == nil {
				start = st.ModTime()
			}
		}
		if end := &v.exit.Finished; end.Before(start) && !end.IsZero() {
			*end = start // the clock that file times are taken from lags by some ms
		}
		v.status, v.run, v.start, v.noted = status, run, start, started
		return true, nil
	}
	if exit, ok := b.exited(id, n); ok {
		v.exit = exit
		return done(runtime.Exited)
	}
	p, ok := b.first(id, run)
	if ok {
		defer p.Close()
		frozen := b.cgroups.Frozen(cgroupPath(id))
		if b.unborn(id) || !started && frozen {
			// runc has made it, or the wrapper has restored it, but no one
			// has started it yet.
			return false, nil
		}
		v.pid = p.Pid
		if !monitored(run.Bundle) {
			if err := b.rewatch(ctx, v.container, n); err != nil {
				b.log.Warn("no monitor", "sandbox", id, "err", err)
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
		v.exit, err = exitRecord{Code: unknownExit}, nil
	}
	if err != nil {
		return false, err
	}
	return done(runtime.Exited)
}

// notedSoon bounds the time from the end of a command to its monitor's record,
// and from a start to the note of it.
const notedSoon = time.Second

// unnoted finds out about a run that was not noted as started and whose process
// is not there: it is being started at this moment, or was cut off, or its
// command was faster than the note; then its end is returned.
func (b *Backend) unnoted(ctx context.Context, id string, run runRecord) (exitRecord, error) {
	if run.Pid == 0 {
		return exitRecord{}, nil
	}
	for end := time.Now().Add(notedSoon); time.Now().Before(end) && monitored(run.Bundle); {
		if exit, ok := b.exited(id, run.Number); ok {
			return exit, nil
		}
		select {
		case <-ctx.Done():
			return exitRecord{}, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	exit, _ := b.exited(id, run.Number)
	return exit, nil
}

// first returns the first process of a run, if it lives; close it.
func (b *Backend) first(id string, run runRecord) (*kernel.Process, bool) {
	if run.Pid == 0 {
		return nil, false
	}
	p, err := kernel.OpenProcess(run.Pid)
	if err != nil {
		return nil, false
	}
	if !p.InCgroup(cgroupPath(id)) {
		p.Close()
		return nil, false
	}
	return p, true
}

// unborn tells whether the runtime has made a container whose command waits
// for its start: the fifo that the start opens is still there.
func (b *Backend) unborn(id string) bool {
	_, err := os.Lstat(filepath.Join(b.ociRoot(), id, "exec.fifo"))
	return err == nil
}

// drainWait is how long a monitor usually takes, at most, from the end of a
// process to its record.
const (
	drainWait = 20 * time.Millisecond
	drainPoll = 300 * time.Microsecond
)

// awaitExit waits for the end of a run and returns how it ended. The monitor's
// record counts, which is written once all output is in the log and on the
// attached sockets. A monitor that is gone is started again.
func (b *Backend) awaitExit(ctx context.Context, c container, run runRecord) (exitRecord, error) {
	id, path := c.Spec.ID, b.runPath(c.Spec.ID, run.Number)
	if p, ok := b.first(id, run); ok {
		err := p.Wait(ctx)
		p.Close()
		if err != nil {
			return exitRecord{}, err
		}
	}
	// The file is there a moment later. It is not watched for at once, because
	// the kernel takes some 10 ms to take an inotify apart.
	for end := time.Now().Add(drainWait); time.Now().Before(end); time.Sleep(drainPoll) {
		if exit, ok := b.exited(id, run.Number); ok {
			return exit, nil
		}
	}
	w, err := kernel.Watch(path)
	if errors.Is(err, fs.ErrNotExist) {
		return b.afterRemoval(id)
	}
	if err != nil {
		return exitRecord{}, err
	}
	defer w.Close()
	again := time.NewTicker(time.Second) // nothing tells of a monitor's death
	defer again.Stop()
	for tries := 0; ; {
		if exit, ok := b.exited(id, run.Number); ok {
			return exit, nil
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return b.afterRemoval(id)
		}
		if !monitored(run.Bundle) {
			if _, ok := b.exited(id, run.Number); ok {
				continue
			}
			if tries++; tries > 3 {
				return exitRecord{Code: unknownExit, Finished: time.Now()}, nil
			}
			if err := b.rewatch(ctx, c, run.Number); err != nil {
				if ctx.Err() != nil {
					return exitRecord{}, ctx.Err()
				}
				if _, err := os.Stat(run.Bundle); errors.Is(err, fs.ErrNotExist) {
					tries = 3 // a reboot took it, and the processes too
				}
				b.log.Warn("no monitor", "sandbox", id, "err", err)
				continue
			}
		}
		select {
		case <-w.Events:
		case <-again.C:
		case <-ctx.Done():
			return exitRecord{}, ctx.Err()
		}
	}
}

// tombstone is where the exit code of a removed container stays for a while:
// an automatic removal follows an exit faster than a waiter may read it.
func (b *Backend) tombstone(id string) string { return filepath.Join(b.stage, "exits", id) }

func (b *Backend) afterRemoval(id string) (exitRecord, error) {
	var exit exitRecord
	if err := record.ReadJSON(b.tombstone(id), &exit); err != nil {
		return exit, fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return exit, nil
}

// tombstoneAge is for how long a removed container's exit code is kept.
const tombstoneAge = 10 * time.Minute

// bury leaves a tombstone and clears old ones away.
func (b *Backend) bury(id string, exit exitRecord) error {
	entries, err := os.ReadDir(filepath.Join(b.stage, "exits"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if st, err := e.Info(); err == nil && time.Since(st.ModTime()) > tombstoneAge {
			_ = os.Remove(b.tombstone(e.Name()))
		}
	}
	return record.WriteJSON(b.tombstone(id), exit, false)
}

func (b *Backend) runtimeOf(id string) criu.Runtime {
	return criu.Runtime{Binary: b.oci, Root: b.ociRoot(), ID: id}
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
		Runtime: b.runtimeOf(id),
		Stage:   stage.Slot{Run: b.stage, ID: id},
		Managed: b.place(id).Managed(v.Spec),
	}
	if b.wrapper == b.oci {
		c.NoRestore, c.Remedy = "agentbox-runtime is not installed beside agentbox", "Install it (make install)."
	}
	if v.live() {
		c.Address = v.run.Address
	}
	if v.status == runtime.Exited {
		c.ExitCode, c.Finished = v.exit.Code, v.exit.Finished
	}
	return c, nil
}

// Wait blocks until the container has exited. A container that was never
// started is ErrState: there is no exit to wait for. One that was removed not
// long ago still answers.
func (b *Backend) Wait(ctx context.Context, id string) (int, error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.wait(ctx)
	}
	v, err := b.look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		exit, err := b.afterRemoval(id)
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
	for _, dir := range []string{filepath.Join(b.root, "sandboxes"), b.run, b.ociRoot()} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, e := range entries {
			ids = append(ids, e.Name())
		}
	}
	ns := in(ctx, b.namespace)
	mine := fmt.Sprintf("labels.%q==%q", rootLabel, b.base)
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
		if !idPattern.MatchString(id) {
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
