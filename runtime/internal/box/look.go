package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// View is the state of a container at one moment.
type View struct {
	Container
	Status  runtime.Status
	Run     Run // the run that Status speaks of; zero when created
	Exit    Exit
	Started time.Time
	Noted   bool // that it was started; else agentbox was killed before it could
	Pid     int
	Stale   []int           // starts that were cut off half-way: to be cleared away
	First   *kernel.Process // its first process, in a View of Open
	Foreign bool            // it was not made here: it has no network and no record of its own
}

// Live reports whether the container has processes.
func (v View) Live() bool { return v.Status == runtime.Running || v.Status == runtime.Paused }

// Close lets go of the first process.
func (v *View) Close() {
	if v.First != nil {
		v.First.Close()
		v.First = nil
	}
}

// Load reads container.json; a container without one does not exist.
func (l *Lifecycle) Load(id string) (c Container, err error) {
	err = l.ReadRecord(id, &c, &c.Spec.ID)
	return c, err
}

// Look finds out a container's state from its records and the kernel.
func (l *Lifecycle) Look(ctx context.Context, id string) (View, error) {
	v, err := l.Open(ctx, id)
	v.Close()
	return v, err
}

// Open is Look, of a container that lives with its first process, for View.Close.
func (l *Lifecycle) Open(ctx context.Context, id string) (View, error) {
	c, err := l.Load(id)
	if err != nil {
		return View{}, err
	}
	v := View{Container: c, Status: runtime.Created}
	runs, err := l.Starts(id)
	if err != nil {
		return v, err
	}
	for _, n := range runs {
		decided, err := l.lookRun(ctx, id, n, &v)
		if decided || err != nil {
			return v, err
		}
		v.Stale = append(v.Stale, n)
	}
	return v, nil
}

// lookRun fills in what run n says; it decides nothing when it never came to
// run the command.
func (l *Lifecycle) lookRun(ctx context.Context, id string, n int, v *View) (decided bool, err error) {
	var run Run
	// A record that a power failure cut short reads as empty; its run is over anyway.
	if err := l.ReadRun(id, n, &run); err != nil {
		return false, err
	}
	run.Number, run.Bundle = n, l.Bundle(id, n) // whatever a record from elsewhere says
	start, noted := l.started(id, n)
	status, err := l.stateOf(ctx, id, run, noted, v)
	if err != nil || status == runtime.Created {
		return false, err
	}
	if !noted {
		// agentbox was killed between the start and the note of it.
		start = l.created(id, n)
	}
	if end := &v.Exit.Finished; end.Before(start) && !end.IsZero() {
		*end = start // the clock that file times are taken from lags by some ms
	}
	v.Status, v.Run, v.Started, v.Noted = status, run, start, noted
	return true, nil
}

// stateOf returns the state of a run, which it fills in; Created when it never came to run the
// command.
func (l *Lifecycle) stateOf(ctx context.Context, id string, run Run, noted bool, v *View) (runtime.Status, error) {
	n := run.Number
	exit, ok, err := l.RecordedExit(id, n)
	if ok || err != nil {
		v.Exit = exit
		return runtime.Exited, err
	}
	if exit, ok, err = l.hooks.MonitorExit(id, n); err != nil {
		return runtime.Exited, err
	}
	if ok {
		if !noted && !l.ran(id) {
			return runtime.Created, nil
		}
		v.Exit = l.withHits(id, n, exit)
		return runtime.Exited, nil
	}

	p, err := l.First(id, run)
	if err != nil {
		return runtime.Exited, err
	}
	if p != nil {
		status, err := l.aliveState(ctx, id, run, noted)
		if err != nil || status == runtime.Created {
			p.Close()
			return status, err
		}
		v.Pid, v.First = p.Pid, p
		return status, nil
	}
	if !noted {
		v.Exit, err = l.unnoted(ctx, id, run)
		if err != nil || v.Exit.Finished.IsZero() {
			return runtime.Created, err
		}
		return runtime.Exited, nil
	}

	// It has ended, but its monitor may still be draining its output.
	soon, cancel := context.WithTimeout(ctx, Grace)
	defer cancel()
	exit, err = l.AwaitExit(soon, id, run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		exit, err = Exit{Code: UnknownExit}, nil
	}
	if err != nil {
		return runtime.Exited, err
	}
	_, seen, err := l.exited(id, n)
	v.Exit = l.withHits(id, n, exit)
	if err == nil && !seen && !exit.Finished.IsZero() {
		v.Exit = l.recordLateExit(id, n, v.Exit)
	}
	return runtime.Exited, err
}

// aliveState is stateOf for a run whose first process lives.
func (l *Lifecycle) aliveState(ctx context.Context, id string, run Run, noted bool) (runtime.Status, error) {
	frozen, err := l.Cgroups.Frozen(l.Cgroup(id))
	if err != nil {
		return runtime.Created, err
	}
	if l.NotStarted(id) || !noted && frozen {
		// runc has made it, or the wrapper has restored it, but it is not started yet.
		return runtime.Created, nil
	}
	if err := l.hooks.Attend(ctx, id, run); err != nil {
		return runtime.Created, err
	}
	if frozen {
		return runtime.Paused, nil
	}
	return runtime.Running, nil
}

// created returns when the container of start n was created.
func (l *Lifecycle) created(id string, n int) time.Time {
	for _, path := range []string{l.Bundle(id, n, "pid"), l.StartDir(id, n, "run.json")} {
		if st, err := os.Stat(path); err == nil {
			return st.ModTime()
		}
	}
	return time.Now()
}

// ran reports whether the runtime knows a container that was started.
func (l *Lifecycle) ran(id string) bool {
	_, err := os.Lstat(filepath.Join(l.State, id))
	return err == nil && !l.NotStarted(id)
}

// notedSoon bounds the time from the end of a command to its monitor's record,
// and from a start to the note of it.
const notedSoon = time.Second

// unnoted finds out about a run that was not noted as started and whose process
// is not there: it is being started at this moment, or was cut off, or its
// command was faster than the note; then its end is returned.
func (l *Lifecycle) unnoted(ctx context.Context, id string, run Run) (Exit, error) {
	if run.Pid == 0 {
		return Exit{}, nil
	}
	for end := time.Now().Add(notedSoon); time.Now().Before(end); {
		if watched, err := l.hooks.Monitored(run.Bundle); err != nil {
			return Exit{}, err
		} else if !watched {
			break
		}
		if exit, ok, err := l.RecordedExit(id, run.Number); ok || err != nil {
			return exit, err
		}
		select {
		case <-ctx.Done():
			return Exit{}, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
	exit, _, err := l.RecordedExit(id, run.Number)
	return exit, err
}

// First returns the first process of a run, to be closed; nil when it has ended.
func (l *Lifecycle) First(id string, run Run) (*kernel.Process, error) {
	pid := run.Pid
	if pid == 0 {
		var err error
		if pid, err = kernel.PidFile(l.Bundle(id, run.Number, "pid")); pid == 0 {
			return nil, err
		}
	}
	return kernel.OpenMember(pid, l.Cgroup(id))
}

// exited returns how start n ended, if that is known: from the record, else from the monitor.
func (l *Lifecycle) exited(id string, n int) (Exit, bool, error) {
	if exit, ok, err := l.RecordedExit(id, n); ok || err != nil {
		return exit, ok, err
	}
	return l.hooks.MonitorExit(id, n)
}

// withHits adds to the end of start n how often its limits came into force. Until that is on
// record it is the cgroups that know, which stay as they are when the last process has ended.
func (l *Lifecycle) withHits(id string, n int, exit Exit) Exit {
	hits := l.Cgroups.HitsIn(l.Cgroup(id))
	if was, ok, _ := l.RecordedExit(id, n); ok {
		if was.Code == UnknownExit {
			was.Code = exit.Code
		}
		return was
	}
	exit.Hits = hits
	exit.OOM = exit.OOM || hits.OOMKills > 0
	return exit
}

// drainWait is how long a monitor usually takes, at most, from the end of a
// process to its record.
const (
	drainWait = 20 * time.Millisecond
	drainPoll = 300 * time.Microsecond
)

// AwaitExit waits for the end of a run and returns how it ended. The monitor's
// record counts, which is written once all output is in the log and on the
// attached sockets. When AwaitMonitor returns, there is no monitor any more, and
// the end is unknown.
func (l *Lifecycle) AwaitExit(ctx context.Context, id string, run Run) (Exit, error) {
	n := run.Number
	first, err := l.First(id, run)
	if err != nil {
		return Exit{}, err
	}
	if first != nil {
		err := first.Wait(ctx)
		first.Close()
		if err != nil {
			return Exit{}, err
		}
	}
	// The file is there a moment later. It is not watched for at once, because
	// the kernel takes some 10 ms to take an inotify apart.
	for end := time.Now().Add(drainWait); time.Now().Before(end); time.Sleep(drainPoll) {
		if exit, ok, err := l.exited(id, n); ok || err != nil {
			return exit, err
		}
	}
	w, err := kernel.Watch(l.StartDir(id, n))
	if errors.Is(err, fs.ErrNotExist) {
		return l.keptExit(id)
	}
	if err != nil {
		return Exit{}, err
	}
	defer w.Close()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	orphan := guard.Start(func() error { return l.hooks.AwaitMonitor(ctx, id, run) })
	for over := false; ; {
		if exit, ok, err := l.exited(id, n); ok || err != nil {
			return exit, err
		}
		if _, err := os.Stat(l.StartDir(id, n)); errors.Is(err, fs.ErrNotExist) {
			return l.keptExit(id)
		}
		if over {
			return Exit{Code: UnknownExit, Finished: time.Now()}, nil
		}
		select {
		case <-w.Events:
		case err := <-orphan:
			if err != nil {
				return Exit{}, err
			}
			over = true // but it may have reported just before its end
		case <-ctx.Done():
			return Exit{}, ctx.Err()
		}
	}
}

// Runtime is the OCI runtime's view of a container.
func (l *Lifecycle) Runtime(id string) criu.Runtime {
	return criu.Runtime{Binary: l.OCI, Root: l.State, ID: id}
}

// Describe says what a View is to the Engine.
func (l *Lifecycle) Describe(v View) runtime.Container {
	p := l.place(v.Container)
	c := runtime.Container{
		Status:  v.Status,
		Pid:     v.Pid,
		Started: v.Started,
		Upper:   p.Upper,
		Lower:   v.Lower,
		Runtime: runtime.OCIRuntime(l.Runtime(v.Spec.ID)),
		Stage:   stage.Slot{Run: l.Stage, ID: v.Spec.ID},
		Managed: p.Managed(v.Spec),
	}
	if c.Volumes = p.Volumes(v.Spec); len(c.Volumes) > 0 {
		c.Applies = p.Applies()
	}
	if v.Live() {
		c.Address = v.Run.Address
	}
	if v.Status == runtime.Exited {
		c.ExitCode, c.Finished, c.OOMKilled = v.Exit.Code, v.Exit.Finished, v.Exit.OOM
		c.Hits = runtime.LimitHits{OOMKills: v.Exit.Hits.OOMKills, Pids: v.Exit.Hits.PidsMax}
	}
	return c
}

// Wait blocks until the container has exited. It returns ErrState for a container that was
// never started: there is no exit to wait for. One that was removed not long ago still
// answers.
func (l *Lifecycle) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	v, err := l.hooks.Look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		exit, err := l.keptExit(id)
		return exit.Told(), err
	}
	if err != nil {
		return runtime.Exit{}, err
	}
	switch v.Status {
	case runtime.Created:
		return runtime.Exit{}, fmt.Errorf("container %s was never started: %w", id, fault.ErrState)
	case runtime.Exited:
		return v.Exit.Told(), nil
	}
	exit, err := l.AwaitExit(ctx, id, v.Run)
	if err == nil {
		exit.OOM = exit.OOM || l.oomKilled(id, v.Run.Number, exit)
	}
	return exit.Told(), err
}

// oomKilled reports whether the end of start n was for lack of memory. A sandbox that is to go with its
// end may be removed meanwhile, and its cgroups with it: its exit is kept before that.
func (l *Lifecycle) oomKilled(id string, n int, exit Exit) bool {
	if l.withHits(id, n, exit).OOM {
		return true
	}
	kept, err := l.keptExit(id)
	return err == nil && kept.Code == exit.Code && kept.OOM
}
