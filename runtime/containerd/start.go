package containerd

import (
	"context"
	"errors"
	"fmt"
	"io"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/typeurl/v2"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Start starts a created or exited container; see box.Lifecycle.Start.
func (b *Backend) Start(ctx context.Context, id string, opts runtime.StartOptions) (wait func() error, err error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.start(ctx, opts)
	}
	return b.box.Start(ctx, id, opts)
}

// starting is this backend's part in a start.
type starting struct {
	*box.Start
	b       *Backend
	monitor *watcher
	created bool // the task is ours to delete

	// For an adopted container:
	theirs *theirs
	rootfs []*types.Mount
	keep   *theirStreams // no monitor; the output goes where it went
	input  bool          // it has one, whatever its spec says
}

// orders are the monitor's.
func (s *starting) orders() orders {
	o := s.b.ordersOf(s.View.Spec, s.theirs, s.Run.Number)
	o.Input = o.Input || s.input
	return o
}

// Launch implements box.Hooks.
func (h hooks) Launch(start *box.Start) (box.Launched, error) {
	if err := h.wrap(); err != nil {
		return nil, err
	}
	s := &starting{Start: start, b: h.Backend}
	return s, s.watch()
}

// watch starts the run's monitor, which takes a while to come up.
func (s *starting) watch() (err error) {
	o := s.orders()
	if err := makeFifos(s.Run.Bundle, o.Terminal, o.Input); err != nil {
		return err
	}
	s.monitor, err = s.b.watch(s.Run.Bundle, o, true)
	return err
}

// Create implements box.Launched: it gives containerd the spec and has it create the task.
func (s *starting) Create(ctx context.Context) error {
	spec, err := s.OCISpec(s.View.Spec)
	if err != nil {
		return err
	}
	packed, err := typeurl.MarshalAny(spec)
	if err != nil {
		return err
	}
	made := containers.Container{ID: s.View.Spec.ID, Spec: packed}
	if _, err = s.b.client.ContainerService().Update(in(ctx, s.b.namespace), made, "spec"); err != nil {
		return plain(err)
	}
	if err := failpoint.Hit("containerd.start.after-spec"); err != nil {
		return err
	}
	return s.createTask(ctx)
}

// createTask has containerd create, or restore, the task: its first process then
// waits, or stands still.
func (s *starting) createTask(ctx context.Context) error {
	o := s.orders()
	req := &tasks.CreateTaskRequest{ContainerID: o.Container, Terminal: o.Terminal, Rootfs: s.rootfs}
	if s.keep != nil {
		req.Stdout, req.Stderr = s.keep.Stdout, s.keep.Stderr
	} else {
		if err := s.monitor.await(ctx, s.Run.Bundle); err != nil {
			return err
		}
		req.Stdin, req.Stdout, req.Stderr = fifos(s.Run.Bundle, o.Terminal, o.Input)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// A call that is cancelled goes on in the daemon for a while, and what it
	// makes then would come after our clean-up: so it is waited for.
	resp, err := s.b.client.TaskService().Create(in(context.WithoutCancel(ctx), o.Namespace), req)
	if err = plain(err); errors.Is(err, fault.ErrExists) {
		// Another program, such as containerd's restart plugin, was faster.
		return fmt.Errorf("container %s has just been started: %w: %w", s.View.Spec.ID, fault.ErrState, err)
	}
	s.created = true
	if err != nil {
		return refusal(s.View.Spec.Args, err)
	}
	if err := failpoint.Hit("containerd.start.after-create"); err != nil {
		return err
	}
	s.Run.Pid = int(resp.Pid)
	run := runRecord{Run: s.Run}
	if run.Shim, err = shimOf(s.Run.Pid); err != nil {
		return err
	}
	if err := record.WriteJSON(s.Dir("run.json"), run, false); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return failpoint.Hit("containerd.start.after-run")
}

// Go implements box.Launched.
func (s *starting) Go(ctx context.Context) error {
	o := s.orders()
	req := &tasks.StartRequest{ContainerID: o.Container}
	if _, err := s.b.client.TaskService().Start(in(context.WithoutCancel(ctx), o.Namespace), req); err != nil {
		return refusal(s.View.Spec.Args, plain(err))
	}
	return nil
}

// Started implements box.Launched.
func (s *starting) Started() error {
	if s.keep != nil {
		return nil
	}
	return s.monitor.started()
}

// Close implements box.Launched.
func (s *starting) Close() { s.monitor.close() }

// Abort implements box.Launched.
func (s *starting) Abort() { s.monitor.kill() }

// Attach connects streams to a running container's first process; a paused one is silent.
// Without a terminal, the container's input ends when the caller's input ends or the caller
// leaves after having typed.
func (b *Backend) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	return b.box.Attach(ctx, id, ends)
}

// Logs writes the log. Following ends with the run that is live when Logs is
// called.
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.logs(ctx, opts, stdout, stderr)
	}
	return b.box.Logs(ctx, id, opts, stdout, stderr)
}

// refusal says that a command could not be started, if that is what containerd
// says.
func refusal(args []string, err error) error {
	if err == nil || isDown(err) {
		return err
	}
	if x := bundle.CommandError(args, err.Error()); x != nil {
		return x
	}
	return err
}
