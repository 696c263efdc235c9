package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Stop ends a container's processes and frees all that it holds while it runs.
// On one that has ended by itself it does what is left to do.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	if err := checkID(id); err != nil {
		return err
	}
	unlock, err := b.lock(ctx, id)
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
	if err := checkID(id); err != nil {
		return nil
	}
	unlock, err := b.lock(ctx, id)
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
func (b *Backend) end(ctx context.Context, v view, opts runtime.StopOptions) (exit exitRecord, err error) {
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
	p, ok := b.first(id, v.run.Number)
	if !ok { // it has just ended
		return b.ended(ctx, v, false)
	}
	defer p.Close()
	killed := false
	if v.status == runtime.Running && opts.Timeout > 0 {
		if err := p.Kill(sig); err != nil {
			return exit, fmt.Errorf("signal container %s: %w", id, err)
		}
		err := p.WaitFor(ctx, opts.Timeout)
		if ctx.Err() != nil {
			return exit, ctx.Err()
		}
		killed = err != nil
	} else {
		killed = true
	}
	if killed {
		if v.status == runtime.Running {
			// The rest of its PID namespace goes with the first process.
			err = p.Kill(unix.SIGKILL)
		} else {
			_, err = b.cgroups.KillAll(cgroupPath(id))
		}
		if err != nil {
			return exit, fmt.Errorf("kill container %s: %w", id, err)
		}
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
func (b *Backend) ended(ctx context.Context, v view, killed bool) (exitRecord, error) {
	id := v.Spec.ID
	soon, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	exit, err := b.awaitExit(soon, id, v.run)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		b.log.Warn("conmon does not finish", "sandbox", id)
		exit, err = exitRecord{Code: unknownExit, Finished: time.Now()}, b.killStrays(ctx, id)
	}
	if exit.Code == unknownExit && killed {
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
	err := b.release(ctx, id, len(v.dirty) > 0)
	if err != nil {
		return err
	}
	for _, n := range v.dirty {
		if err := os.RemoveAll(b.runPath(id, n)); err != nil {
			return err
		}
	}
	if v.status != runtime.Exited {
		return nil
	}
	path := b.runPath(id, v.run.Number, "exit.json")
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	return record.WriteJSON(path, v.exit, true)
}

// release frees all that a container holds while it runs: processes, the
// runtime's state, mounts, the network, cgroups and its bundle. A step that
// fails does not keep the others from being done. Strays are looked for when
// something went wrong before.
func (b *Backend) release(ctx context.Context, id string, strays bool) error {
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
	step("processes", b.cgroups.Empty(ctx, cgroupPath(id)))
	step("delete", b.forget(id))
	step("unmount", b.unmountRoot(ctx, id))
	step("network", b.net.Teardown(ctx, id))
	step("cgroups", b.cgroups.Remove(ctx, cgroupPath(id)))
	step("bundle", b.clearRun(id))
	return errors.Join(errs...)
}

// forget deletes the runtime's state of a container. What the state stands
// for, processes and cgroups, we free ourselves, so a call of `runc delete`
// would add only the time of a program start, and fail on a half-written one.
// A restore that was killed leaves the root filesystem mounted in there, and
// CRIU's view of the cgroups in its working directory: deleting through them
// would delete the sandbox's files.
func (b *Backend) forget(id string) error {
	state := filepath.Join(b.ociRoot(), id)
	if err := kernel.UnmountBelow(state, b.runDir(id, "restore")); err != nil {
		return err
	}
	return os.RemoveAll(state)
}

// unmountRoot unmounts a container's root filesystem.
func (b *Backend) unmountRoot(ctx context.Context, id string) error {
	return b.place(id).Unmount(ctx, b.log.With("sandbox", id))
}

// clearRun removes what runs keep in RUN. What the Engine keeps there stays.
func (b *Backend) clearRun(id string) error {
	entries, err := os.ReadDir(b.runDir(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "bundle.") || e.Name() == "exec" {
			errs = append(errs, os.RemoveAll(b.runDir(id, e.Name())))
		}
	}
	return errors.Join(errs...)
}
