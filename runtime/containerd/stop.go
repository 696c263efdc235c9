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
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// Stop ends a container's processes and frees all that it holds while it runs.
// On one that has ended by itself it does what is left to do.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.stop(ctx, opts)
	}
	return b.box.Stop(ctx, id, opts)
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, name string) error {
	v, err := hooks{b}.Look(ctx, id)
	if err != nil {
		return err
	}
	if !v.Live() {
		return fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState)
	}
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return fmt.Errorf("%w: signal %q", fault.ErrInvalid, name)
	}
	p, err := kernel.OpenProcess(v.Pid)
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
	v, err := hooks{b}.Look(ctx, id)
	if err != nil {
		return err
	}
	switch v.Status {
	case runtime.Paused:
		return nil
	case runtime.Running:
	default:
		return fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState)
	}
	ns, name := b.nameOf(id)
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
	v, err := hooks{b}.Look(ctx, id)
	if err != nil {
		return err
	}
	switch v.Status {
	case runtime.Running:
		return nil
	case runtime.Paused:
	default:
		return fmt.Errorf("container %s is %s: %w", id, v.Status, fault.ErrState)
	}
	ns, name := b.nameOf(id)
	_, err = b.client.TaskService().Resume(in(ctx, ns), &tasks.ResumeTaskRequest{ContainerID: name})
	if err == nil {
		return nil
	}
	if err = plain(err); isDown(err) {
		run, _ := readRun(b.box.StartDir(id, v.Run.Number))
		if run.Shim.Address == "" {
			run.Shim, _ = shimOf(v.Pid)
		}
		if s, derr := run.Shim.dial(ctx, name); derr == nil {
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

// KillStrays implements box.Hooks: what works for a container here is containerd's, but for the
// monitor, which ends by itself.
func (h hooks) KillStrays(context.Context, string) error { return nil }

// Free implements box.Hooks: it deletes the task, with which the shim ends.
func (h hooks) Free(ctx context.Context, id string) error {
	if err := h.dropTask(ctx, h.namespace, id); err != nil {
		return err
	}
	return failpoint.Hit("containerd.stop.after-task")
}

// dropTask deletes a container's task, whatever its state. The shim ends with
// it.
func (b *Backend) dropTask(ctx context.Context, ns, id string) error {
	ctx = in(ctx, ns)
	svc := b.client.TaskService()
	deadline := time.Now().Add(box.Grace)
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

// Mount makes a container's root filesystem reachable while fn runs.
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	return b.box.Mount(ctx, id, fn)
}
