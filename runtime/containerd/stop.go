package containerd

import (
	"context"
	"errors"
	"fmt"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// Stop ends a container's processes and frees all that it holds while it runs.
// On one that has ended by itself it does what is left to do.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if err := home.Check(id); err != nil {
		return err
	}
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.stop(ctx, opts)
	}
	unlock, err := b.home.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if v.live() {
		if v.exit, err = b.end(ctx, v, opts); err != nil {
			return err
		}
		v.status = runtime.Exited
	}
	return b.settle(ctx, v)
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, name string) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	if !v.live() {
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return fmt.Errorf("%w: signal %q", fault.ErrInvalid, name)
	}
	p, err := kernel.OpenProcess(v.pid)
	if err != nil && !kernel.Gone(err) {
		return err
	}
	if err != nil {
		return fmt.Errorf("container %s has ended: %w", id, fault.ErrState)
	}
	defer p.Close()
	return p.Kill(sig)
}

// Pause freezes every process of a running container.
func (b *Backend) Pause(ctx context.Context, id string) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	switch v.status {
	case runtime.Paused:
		return nil
	case runtime.Running:
	default:
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	ns, name := b.nameOf(v.container)
	_, err = b.client.TaskService().Pause(in(ctx, ns), &tasks.PauseTaskRequest{ContainerID: name})
	if err = plain(err); err == nil || isDown(err) || ctx.Err() != nil {
		return err
	}
	// The shim believes it to be paused: it was thawed behind its back.
	c, ierr := b.Inspect(ctx, id)
	if ierr != nil || c.Status != runtime.Running {
		return errors.Join(err, ierr)
	}
	return criu.Runtime(c.Runtime).Pause(ctx)
}

// Unpause thaws a paused container: by way of the daemon, or, where that does
// not answer or does not know, of the shim, or of the OCI runtime.
func (b *Backend) Unpause(ctx context.Context, id string) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	switch v.status {
	case runtime.Running:
		return nil
	case runtime.Paused:
	default:
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	ns, name := b.nameOf(v.container)
	_, err = b.client.TaskService().Resume(in(ctx, ns), &tasks.ResumeTaskRequest{ContainerID: name})
	if err == nil {
		return nil
	}
	if err = plain(err); isDown(err) {
		if v.run.Shim.Address == "" {
			v.run.Shim, _ = shimOf(v.pid)
		}
		if s, derr := v.run.Shim.dial(ctx, name); derr == nil {
			defer s.close()
			if s.resume(ctx) == nil {
				return nil
			}
		}
	}
	// The shim takes a container that a restore left paused for running.
	c, ierr := b.Inspect(ctx, id)
	if ierr != nil {
		return errors.Join(err, ierr)
	}
	if c.Status == runtime.Running {
		return nil
	}
	return criu.Runtime(c.Runtime).Resume(ctx)
}

// end ends a live container and returns how it ended.
func (b *Backend) end(ctx context.Context, v view, opts runtime.StopOptions) (exit home.Exit, err error) {
	id := v.Spec.ID
	sig, err := bundle.StopSignal(v.Spec, opts.Signal)
	if err != nil {
		return exit, err
	}
	if opts.Silent && v.Theirs == nil {
		if err := b.net.Isolate(ctx, id); err != nil {
			return exit, err
		}
	}
	p, err := kernel.OpenProcess(v.pid)
	if err != nil && !kernel.Gone(err) {
		return exit, err
	}
	if err != nil { // it has just ended
		return b.ended(ctx, v, false)
	}
	defer p.Close()
	killed, err := b.cgroups.End(ctx, p, b.home.Cgroup(id), v.status == runtime.Paused, sig, opts.Timeout)
	if err != nil {
		return exit, fmt.Errorf("end container %s: %w", id, err)
	}
	if err := failpoint.Hit("containerd.stop.after-kill"); err != nil {
		return exit, err
	}
	if err := p.WaitFor(ctx, grace); err != nil {
		return exit, fmt.Errorf("container %s does not end: %w", id, err)
	}
	return b.ended(ctx, v, killed)
}

// ended waits for the monitor to have drained the output of a container whose
// processes are gone.
func (b *Backend) ended(ctx context.Context, v view, killed bool) (home.Exit, error) {
	soon, cancel := context.WithTimeout(ctx, 2*grace)
	defer cancel()
	exit, err := b.awaitExit(soon, v.container, v.run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		b.log.Warn("monitor not finished", "sandbox", v.Spec.ID)
		exit, err = home.Exit{Code: home.Unknown, Finished: time.Now()}, nil
	}
	if exit.Code == home.Unknown && killed {
		exit.Code = 128 + int(unix.SIGKILL)
	}
	if err == nil {
		err = failpoint.Hit("containerd.stop.after-exit")
	}
	return exit, err
}

// settle makes a container that is not live a stopped one: its end on record
// and nothing held. It costs little when there is nothing to do.
func (b *Backend) settle(ctx context.Context, v view) error {
	id := v.Spec.ID
	if err := b.release(ctx, id); err != nil {
		return err
	}
	if err := b.home.Undo(id, v.dirty...); err != nil {
		return err
	}
	if v.status != runtime.Exited {
		return nil
	}
	return b.home.Settle(id, v.run.Number, v.exit)
}

// release frees all that a sandbox holds while it runs: the task, with it
// the shim, processes, the runtime's state, mounts, the network, cgroups and its
// bundle. A step that fails does not keep the others from being done.
func (b *Backend) release(ctx context.Context, id string) error {
	var errs []error
	step := func(name string, err error) {
		if err == nil {
			err = failpoint.Hit("containerd.stop.after-" + name)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	step("processes", b.cgroups.Empty(ctx, b.home.Cgroup(id)))
	step("task", b.dropTask(ctx, b.namespace, id))
	step("delete", b.home.Forget(id))
	step("unmount", b.place(id).Unmount(ctx, b.log.With("sandbox", id)))
	step("network", b.net.Teardown(ctx, id))
	step("cgroups", b.cgroups.Remove(ctx, b.home.Cgroup(id)))
	step("bundle", b.home.Clear(id))
	return errors.Join(errs...)
}

// dropTask deletes a container's task, whatever its state. The shim ends with
// it.
func (b *Backend) dropTask(ctx context.Context, ns, id string) error {
	ctx = in(ctx, ns)
	svc := b.client.TaskService()
	deadline := time.Now().Add(grace)
	for {
		resp, err := svc.Get(ctx, &tasks.GetRequest{ContainerID: id})
		if err = plain(err); errors.Is(err, fault.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if s := resp.Process.Status; s != task.Status_STOPPED && s != task.Status_UNKNOWN {
			_, err := svc.Kill(ctx, &tasks.KillRequest{ContainerID: id, Signal: uint32(unix.SIGKILL), All: true})
			if err = plain(err); err != nil && !errors.Is(err, fault.ErrNotFound) && !errors.Is(err, fault.ErrState) {
				return err
			}
		}
		_, err = svc.Delete(ctx, &tasks.DeleteTaskRequest{ContainerID: id})
		if err = plain(err); err == nil || errors.Is(err, fault.ErrNotFound) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("delete the task of %s: %w", id, err)
		}
		select { // the shim hears of an end a moment after it
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// Mount makes a container's root filesystem reachable while fn runs: of one
// that runs or is paused the root that its first process sees, volumes
// included; of a stopped one its overlay, without volumes, and no other verb
// can change it meanwhile. The path leads through a descriptor of this process:
// it is good for opening and for openat; its text must not be resolved.
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	v, err := b.lookAny(ctx, id)
	if err != nil {
		return err
	}
	if v.live() {
		return bundle.OnLive(v.pid, fn)
	}
	unlock, err := b.home.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if v, err = b.lookAny(ctx, id); err != nil {
		return err
	}
	if v.live() {
		unlock()
		return bundle.OnLive(v.pid, fn)
	}
	if v.Theirs == nil {
		if err := b.settle(ctx, v); err != nil {
			return err
		}
	}
	return b.place(id).OnStopped(ctx, b.log.With("sandbox", id), b.root(v.container), fn)
}
