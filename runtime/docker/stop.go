package docker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Stop ends a container so that the daemon knows it was asked for, and does not
// start it again whatever its restart policy.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := b.end(ctx, c, opts); err != nil {
		return err
	}
	return b.place(id).DropSecrets()
}

func (b *Backend) end(ctx context.Context, c box, opts runtime.StopOptions) (failed error) {
	name := cmp.Or(opts.Signal, c.Config.StopSignal, "SIGTERM")
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return fmt.Errorf("%w: stop signal: %w", fault.ErrInvalid, err)
	}
	if !c.live() {
		return b.calm(ctx, c)
	}
	if opts.Silent {
		back, err := b.isolate(c)
		if err != nil {
			return err
		}
		defer func() {
			if failed != nil && holds(c.State.Pid, c.ID) {
				failed = errors.Join(failed, back())
			}
		}()
	}
	if err := failpoint.Hit("docker.stop.after-isolate"); err != nil {
		return err
	}
	if c.status == runtime.Running && opts.Timeout > 0 {
		// Its stop signal is the daemon's word for "and stay down".
		if err := b.signal(ctx, c, fmt.Sprint(int(sig))); err != nil {
			return err
		}
		ended, err := b.awaitEnd(ctx, c, opts.Timeout)
		if ended || err != nil {
			if err == nil {
				err = b.calm(ctx, c)
			}
			return err
		}
	}
	if c.status == runtime.Paused {
		// A container that the daemon cannot stop is to stay as it was.
		if _, err := b.api.Ping(ctx); err != nil {
			return b.explain(ctx, err)
		}
		// All of them, before the daemon thaws what it kills: a process takes
		// SIGKILL before it does anything else.
		if err := killFrozen(c); err != nil {
			return err
		}
	}
	call, cancel := whole(ctx)
	defer cancel()
	err = b.signal(call, c, "KILL")
	if c.status == runtime.Paused {
		err = errors.Join(err, b.thaw(call, c)) // they are as good as dead
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit("docker.stop.after-kill"); err != nil {
		return err
	}
	if ended, err := b.awaitEnd(ctx, c, 3*grace); err != nil {
		return err
	} else if !ended {
		return fmt.Errorf("container %s does not end: %w", c.ID, fault.ErrBusy)
	}
	return b.calm(ctx, c)
}

// signal sends one by way of the daemon. A container that has ended needs none.
func (b *Backend) signal(ctx context.Context, c box, sig string) error {
	err := b.api.ContainerKill(ctx, c.ID, sig)
	if err == nil {
		return nil
	}
	err = b.explain(ctx, err)
	if errors.Is(err, fault.ErrState) || errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	return err
}

// awaitEnd waits until the daemon has seen a container's end.
func (b *Backend) awaitEnd(ctx context.Context, c box, limit time.Duration) (bool, error) {
	soon, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, err := b.await(soon, c.ID)
	switch {
	case err == nil, errors.Is(err, fault.ErrNotFound):
		return true, nil
	case ctx.Err() != nil:
		return false, ctx.Err()
	case soon.Err() != nil:
		return false, nil
	}
	return false, err
}

// calm keeps the daemon from starting again what has ended: one that it is
// about to restart counts as running for it.
func (b *Backend) calm(ctx context.Context, c box) error {
	call, cancel := whole(ctx)
	defer cancel()
	if err := b.dropHandle(c.ID); err != nil {
		return err
	}
	deadline := time.Now().Add(grace)
	for {
		now, err := b.inspect(call, c.ID)
		if errors.Is(err, fault.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if !now.live() && !now.State.Restarting {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("container %s: %w: the daemon starts it again and again", c.ID, fault.ErrBusy)
		}
		zero := 0
		if err := b.api.ContainerStop(call, c.ID, container.StopOptions{Timeout: &zero}); err != nil {
			return b.explain(call, err)
		}
	}
}

// killFrozen sends SIGKILL to every process of a frozen container.
func killFrozen(c box) error {
	pids, err := criu.Members(c.State.Pid)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if kernel.Gone(err) {
			continue
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("kill process %d: %w", pid, err))
			continue
		}
		// The pid may have become another's before it was opened.
		if holds(pid, c.ID) {
			if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
				errs = append(errs, fmt.Errorf("kill process %d: %w", pid, err))
			}
		}
		_ = unix.Close(fd)
	}
	return errors.Join(errs...)
}

// thaw lets go of what is still frozen after a kill: the daemon thaws only what
// it froze itself.
func (b *Backend) thaw(ctx context.Context, c box) error {
	if is, _ := frozen(c.State.Pid); !is || !holds(c.State.Pid, c.ID) {
		return nil
	}
	err := b.handleOf(c).thaw(ctx)
	if errors.Is(err, fault.ErrNotFound) || errors.Is(err, fault.ErrState) || !holds(c.State.Pid, c.ID) {
		return nil
	}
	return err
}

func (b *Backend) handlePath(theirs string) string { return filepath.Join(b.run, "docker", theirs) }

func (b *Backend) dropHandle(theirs string) error {
	err := os.Remove(b.handlePath(theirs))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Pause has the daemon freeze a container, so that it leaves its health checks
// be meanwhile.
func (b *Backend) Pause(ctx context.Context, id string) error {
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	switch c.status {
	case runtime.Paused:
		return nil
	case runtime.Running:
	default:
		return fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState)
	}
	h := b.handleOf(c)
	h.ID = id
	if err := os.MkdirAll(filepath.Dir(b.handlePath(c.ID)), 0o700); err != nil {
		return err
	}
	if err := record.WriteJSON(b.handlePath(c.ID), h, true); err != nil {
		return err
	}
	call, cancel := whole(ctx)
	defer cancel()
	err = b.api.ContainerPause(call, c.ID)
	if err == nil {
		// The daemon starts nothing more in it, but may have begun to.
		if err := h.Runtime.LetIn(call, c.State.Pid); err != nil {
			return errors.Join(err, b.Unpause(call, id))
		}
		return ctx.Err()
	}
	now, e := b.inspect(call, c.ID)
	switch {
	case e != nil:
		return b.explain(call, err)
	case now.status == runtime.Paused:
		return nil
	case !now.live():
		return fmt.Errorf("container %s is %s: %w", id, now.status, fault.ErrState)
	case now.State.Paused:
		// For the daemon it is paused, but it was thawed behind its back.
		return h.Runtime.Pause(call)
	}
	return b.explain(call, err)
}

// daemonWait is how long a frozen container waits for a daemon that does not
// answer.
const daemonWait = 15 * time.Second

// Unpause has the daemon thaw a container or, when it cannot, the OCI runtime.
func (b *Backend) Unpause(ctx context.Context, id string) error {
	ctx, cancel := whole(ctx)
	defer cancel()
	soon, done := context.WithTimeout(ctx, daemonWait)
	defer done()
	c, err := b.find(soon, id)
	if errors.Is(err, fault.ErrNotFound) {
		if h, ok := b.noted(id); ok { // it was removed while it was paused
			err = errors.Join(err, b.dropHandle(h.Runtime.ID))
		}
		return err
	}
	if err != nil {
		return b.thawAlone(ctx, id, err)
	}
	switch c.status {
	case runtime.Running:
		return b.dropHandle(c.ID)
	case runtime.Paused:
	default:
		return errors.Join(fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState), b.dropHandle(c.ID))
	}
	err = b.api.ContainerUnpause(soon, c.ID)
	if is, _ := frozen(c.State.Pid); err != nil || is {
		if e := b.handleOf(c).thaw(ctx); e != nil {
			return errors.Join(b.explain(ctx, err), e)
		}
	}
	return b.dropHandle(c.ID)
}

// thawAlone thaws a container by what Pause has noted of it.
func (b *Backend) thawAlone(ctx context.Context, id string, why error) error {
	h, ok := b.noted(id)
	if !ok {
		return why
	}
	b.log.Warn("container thawed without the Docker daemon", "sandbox", id, "err", why)
	if err := h.thaw(ctx); err != nil && !errors.Is(err, fault.ErrNotFound) {
		return errors.Join(why, err)
	}
	return b.dropHandle(h.Runtime.ID)
}

// noted finds what Pause has noted of a container.
func (b *Backend) noted(id string) (h handle, ok bool) {
	entries, err := os.ReadDir(filepath.Join(b.run, "docker"))
	if err != nil {
		return h, false
	}
	for _, e := range entries {
		if record.ReadJSON(filepath.Join(b.run, "docker", e.Name()), &h) == nil && h.ID == id {
			return h, true
		}
	}
	return h, false
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, name string) error {
	sig, err := signal.ParseSignal(cmp.Or(name, "KILL"))
	if err != nil {
		return fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	if !c.live() {
		return fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState)
	}
	if c.status == runtime.Paused {
		// The daemon would thaw it.
		rt, _ := b.ociRuntime(c)
		return rt.Kill(ctx, fmt.Sprint(int(sig)), false)
	}
	return b.explain(ctx, b.api.ContainerKill(ctx, c.ID, fmt.Sprint(int(sig))))
}

// Wait blocks until a container has exited.
func (b *Backend) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return runtime.Exit{}, err
	}
	return b.await(ctx, c.ID)
}

// await waits for the end of a container, over a restart of the daemon too.
func (b *Backend) await(ctx context.Context, theirs string) (runtime.Exit, error) {
	var silent time.Time // since when the daemon does not answer
	for {
		one, cancel := context.WithCancel(ctx)
		// Asked for first, so that no end is missed between the two.
		exits, errs := b.api.ContainerWait(one, theirs, container.WaitConditionNextExit)
		c, err := b.inspect(ctx, theirs)
		if err == nil && c.status == runtime.Exited && !c.State.Restarting {
			cancel()
			return exitOf(c), nil
		}
		if err == nil {
			silent = time.Time{}
			select {
			case r := <-exits:
				cancel()
				if r.Error != nil && r.Error.Message != "" {
					return runtime.Exit{}, fmt.Errorf("docker: %s", r.Error.Message)
				}
				return b.ended(ctx, theirs, int(r.StatusCode)), nil
			case e := <-errs:
				err = b.explain(ctx, e)
				if lost(e) {
					err = fmt.Errorf("%w: %w", errLost, err)
				}
			}
		}
		cancel()
		if ctx.Err() != nil {
			return runtime.Exit{}, ctx.Err()
		}
		if !errors.Is(err, errLost) && !errors.Is(err, fault.ErrUnsupported) {
			return runtime.Exit{}, err
		}
		if silent.IsZero() {
			silent = time.Now()
		} else if time.Since(silent) > grace {
			return runtime.Exit{}, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return runtime.Exit{}, ctx.Err()
		}
	}
}

// exitOf is how a container ended that has.
func exitOf(c box) runtime.Exit {
	return runtime.Exit{Code: c.State.ExitCode, OOMKilled: c.State.OOMKilled}
}

// ended is how a container ended with a code. Of one that is removed already the daemon does not
// know why.
func (b *Backend) ended(ctx context.Context, theirs string, code int) runtime.Exit {
	if c, err := b.inspect(ctx, theirs); err == nil && c.status == runtime.Exited && c.State.ExitCode == code {
		return exitOf(c)
	}
	return runtime.Exit{Code: code}
}

var errLost = errors.New("the connection to the daemon broke")
