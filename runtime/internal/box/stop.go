package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Stop ends a container's processes and frees all that it holds while it runs.
// On one that has ended by itself it does what is left to do.
func (l *Lifecycle) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if err := record.CheckID(id); err != nil {
		return err
	}
	unlock, err := l.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return err
	}
	if v.Live() {
		if v.Exit, err = l.end(ctx, v, opts); err != nil {
			return err
		}
		v.Status = runtime.Exited
	}
	return l.settle(ctx, v)
}

// Reap frees what a container that ended by itself still holds. It does
// nothing to one that runs, or runs again, and waits for a verb in progress.
func (l *Lifecycle) Reap(ctx context.Context, id string) error {
	if err := record.CheckID(id); err != nil {
		return nil
	}
	unlock, err := l.Lock(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	v, err := l.hooks.Look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil || v.Live() {
		return err
	}
	return l.settle(ctx, v)
}

// end ends a live container and returns how it ended.
func (l *Lifecycle) end(ctx context.Context, v View, opts runtime.StopOptions) (exit Exit, err error) {
	id := v.Spec.ID
	sig, err := bundle.StopSignal(v.Spec, opts.Signal)
	if err != nil {
		return exit, err
	}
	if opts.Silent {
		if err := l.Net.Isolate(ctx, id); err != nil {
			return exit, err
		}
	}
	p, err := l.First(id, v.Run)
	if err != nil {
		return exit, err
	}
	if p == nil { // it has just ended
		return l.ended(ctx, v, false)
	}
	defer p.Close()
	killed, err := l.Cgroups.Terminate(ctx, p, l.Cgroup(id), v.Status == runtime.Paused, sig, opts.Timeout)
	if err != nil {
		return exit, fmt.Errorf("end container %s: %w", id, err)
	}
	if err := l.hit("stop.after-kill"); err != nil {
		return exit, err
	}
	if err := p.WaitFor(ctx, Grace); err != nil {
		return exit, fmt.Errorf("container %s does not end: %w", id, err)
	}
	return l.ended(ctx, v, killed)
}

// ended waits for the monitor to have drained the output of a container whose
// processes are gone. A monitor that cannot is ended.
func (l *Lifecycle) ended(ctx context.Context, v View, killed bool) (Exit, error) {
	id := v.Spec.ID
	soon, cancel := context.WithTimeout(ctx, l.drain)
	defer cancel()
	exit, err := l.AwaitExit(soon, id, v.Run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		l.log.Warn("monitor not finished", "sandbox", id)
		exit, err = Exit{Code: UnknownExit, Finished: time.Now()}, l.hooks.KillStrays(ctx, id)
	}
	if exit.Code == UnknownExit && killed {
		exit.Code = 128 + int(unix.SIGKILL)
	}
	if err == nil {
		err = l.hit("stop.after-exit")
	}
	return exit, err
}

// settle makes a container that is not live a stopped one: its end on record
// and nothing held. It costs little when there is nothing to do.
func (l *Lifecycle) settle(ctx context.Context, v View) error {
	id := v.Spec.ID
	if v.Status == runtime.Exited {
		// First: it takes numbers along that go with the cgroups.
		if err := l.recordExit(id, v.Run.Number, l.withHits(id, v.Run.Number, v.Exit)); err != nil {
			return err
		}
	}
	if err := l.release(ctx, id, len(v.Stale) > 0); err != nil {
		return err
	}
	return l.removeStarts(id, v.Stale...)
}

// release frees all that a container holds while it runs: processes, the runtime's state, mounts,
// the network, cgroups and its bundle. A failing step does not keep the others from being done.
// It searches for strays if something went wrong before.
func (l *Lifecycle) release(ctx context.Context, id string, strays bool) error {
	var errs []error
	step := func(err error, point string) {
		if err == nil {
			err = l.hit(point)
		}
		errs = append(errs, err)
	}
	if strays {
		errs = append(errs, l.hooks.KillStrays(ctx, id))
	}
	step(l.Cgroups.Empty(ctx, l.Cgroup(id)), "stop.after-processes")
	errs = append(errs, l.hooks.Free(ctx, id))
	step(l.removeState(id), "stop.after-delete")
	step(l.place(Container{Spec: runtime.Spec{ID: id}}).Unmount(ctx, l.log.With("sandbox", id)), "stop.after-unmount")
	step(l.Net.Teardown(ctx, id), "stop.after-network")
	step(l.Cgroups.Remove(ctx, l.Cgroup(id)), "stop.after-cgroups")
	step(l.ClearRun(id), "stop.after-bundle")
	return errors.Join(errs...)
}

// unattended reports whether a monitor or a runtime call may be at work for a container without
// a verb that waits for it: a verb was cut off half-way, its run was not noted as started, or
// its exec session was not cleared away. To look for them is to read every process's
// arguments, which takes longer than all else that ends a container, so it is done only when
// needed.
func (l *Lifecycle) unattended(v View) bool {
	if len(v.Stale) > 0 || v.Run.Number > 0 && !v.Noted {
		return true
	}
	sessions, err := os.ReadDir(l.RunDir(v.Spec.ID, "exec"))
	return len(sessions) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// Mount makes a container's root filesystem reachable while fn runs: of one
// that runs or is paused the root that its first process sees, volumes
// included; of a stopped one its overlay, with its workspaces and without volumes, and no other
// verb can change it meanwhile.
//
// The path leads through a descriptor of this process. It is good for opening
// and for openat; its text must not be resolved, because the kernel shows such
// a link as "/".
func (l *Lifecycle) Mount(ctx context.Context, id string, fn func(root string) error) error {
	v, err := l.hooks.Look(ctx, id)
	if err != nil {
		return err
	}
	if v.Live() {
		return bundle.OnLive(v.Pid, fn)
	}
	unlock, err := l.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if v, err = l.hooks.Look(ctx, id); err != nil {
		return err
	}
	if v.Live() {
		unlock()
		return bundle.OnLive(v.Pid, fn)
	}
	if !v.Foreign {
		if err := l.settle(ctx, v); err != nil {
			return err
		}
	}
	return l.place(v.Container).OnStopped(ctx, l.log.With("sandbox", id), l.rootfs(v.Container), v.Spec, fn)
}
