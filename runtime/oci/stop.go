package oci

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
)

// Stop ends a container's processes and frees all that it holds while it runs.
// On one that has ended by itself it does what is left to do.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if err := home.Check(id); err != nil {
		return err
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

// Reap frees what a container that ended by itself still holds. It does
// nothing to one that runs, or runs again, and waits for a verb in progress.
func (b *Backend) Reap(ctx context.Context, id string) error {
	if err := home.Check(id); err != nil {
		return nil
	}
	unlock, err := b.home.Lock(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	v, err := b.look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil || v.live() {
		return err
	}
	return b.settle(ctx, v)
}

// Pause freezes every process of a running container.
func (b *Backend) Pause(ctx context.Context, id string) error {
	v, err := b.look(ctx, id)
	switch {
	case err != nil:
		return err
	case !v.live():
		return fmt.Errorf("%w: it is %s", fault.ErrState, v.status)
	case !v.noted:
		// Frozen, it would look like one that waits for its start.
		if err := b.note(id, v.run.Number, v.start); err != nil {
			return err
		}
	}
	return b.runtimeOf(id).Pause(ctx)
}

// Unpause thaws a paused container.
func (b *Backend) Unpause(ctx context.Context, id string) error {
	v, err := b.look(ctx, id)
	switch {
	case err != nil:
		return err
	case !v.live():
		return fmt.Errorf("%w: it is %s", fault.ErrState, v.status)
	}
	return b.runtimeOf(id).Resume(ctx)
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, signal string) error {
	v, err := b.look(ctx, id)
	switch {
	case err != nil:
		return err
	case !v.live():
		return fmt.Errorf("%w: it is %s", fault.ErrState, v.status)
	}
	return b.runtimeOf(id).Kill(ctx, signal, false)
}

// Adopt finds nothing: whatever this backend runs, it made.
func (b *Backend) Adopt(_ context.Context, ref string) (runtime.Spec, error) {
	return runtime.Spec{}, fmt.Errorf("container %s: the oci backend has only sandboxes of its own: %w", ref, fault.ErrUnsupported)
}

// end ends a live container and returns how it ended.
func (b *Backend) end(ctx context.Context, v view, opts runtime.StopOptions) (exit home.Exit, err error) {
	id := v.Spec.ID
	sig, err := bundle.StopSignal(v.Spec, opts.Signal)
	if err != nil {
		return exit, err
	}
	if opts.Silent {
		if err := b.net.Isolate(ctx, id); err != nil {
			return exit, err
		}
	}
	p, err := b.first(id, v.run.Number)
	if err != nil {
		return exit, err
	}
	if p == nil { // it has just ended
		return b.ended(ctx, v, false)
	}
	defer p.Close()
	killed, err := b.cgroups.End(ctx, p, b.home.Cgroup(id), v.status == runtime.Paused, sig, opts.Timeout)
	if err != nil {
		return exit, fmt.Errorf("end container %s: %w", id, err)
	}
	if err := failpoint.Hit("oci.stop.after-kill"); err != nil {
		return exit, err
	}
	if err := p.WaitFor(ctx, grace); err != nil {
		return exit, fmt.Errorf("container %s does not end: %w", id, err)
	}
	return b.ended(ctx, v, killed)
}

// ended waits for conmon to have drained the output of a container whose
// processes are gone. A conmon that cannot is ended.
func (b *Backend) ended(ctx context.Context, v view, killed bool) (home.Exit, error) {
	id := v.Spec.ID
	soon, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	exit, err := b.awaitExit(soon, id, v.run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		b.log.Warn("conmon not finished", "sandbox", id)
		exit, err = home.Exit{Code: home.Unknown, Finished: time.Now()}, b.killStrays(ctx, id)
	}
	if exit.Code == home.Unknown && killed {
		exit.Code = 128 + int(unix.SIGKILL)
	}
	if err == nil {
		err = failpoint.Hit("oci.stop.after-exit")
	}
	return exit, err
}

// settle makes a container that is not live a stopped one: its end on record
// and nothing held. It costs little when there is nothing to do.
func (b *Backend) settle(ctx context.Context, v view) error {
	id := v.Spec.ID
	if v.status == runtime.Exited {
		// First: it takes numbers along that go with the cgroups.
		if err := b.home.Settle(id, v.run.Number, b.withHits(id, v)); err != nil {
			return err
		}
	}
	if err := b.release(ctx, id, len(v.dirty) > 0); err != nil {
		return err
	}
	return b.home.Undo(id, v.dirty...)
}

// release frees all that a container holds while it runs: processes, the runtime's state, mounts,
// the network, cgroups and its bundle. A failing step does not keep the others from being done.
// It searches for strays if something went wrong before.
func (b *Backend) release(ctx context.Context, id string, strays bool) error {
	b.forget(id)
	var errs []error
	step := func(name string, err error) {
		if err == nil {
			err = failpoint.Hit("oci.stop.after-" + name)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	if strays {
		step("strays", b.killStrays(ctx, id))
	}
	step("processes", b.cgroups.Empty(ctx, b.home.Cgroup(id)))
	step("delete", b.home.Forget(id))
	step("unmount", errors.Join(b.place(id).Unmount(ctx, b.log.With("sandbox", id)), b.unmapBinds(id)))
	step("network", b.net.Teardown(ctx, id))
	step("cgroups", b.cgroups.Remove(ctx, b.home.Cgroup(id)))
	step("bundle", b.home.Clear(id))
	return errors.Join(errs...)
}
