package podman

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/signal"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// Stop ends a container through Podman, whose restart policies then leave it.
func (b *Backend) Stop(ctx context.Context, id string, opts runtime.StopOptions) error {
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	name := cmp.Or(opts.Signal, c.stopSignal(), "SIGTERM")
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return fmt.Errorf("stop signal %q: %w", name, fault.ErrInvalid)
	}
	if !c.live() {
		return b.settle(ctx, c)
	}
	if opts.Silent {
		if err := c.isolate(); err != nil {
			return err
		}
	}
	if c.status == runtime.Running && opts.Timeout > 0 {
		if err := b.askToEnd(ctx, c, sig, opts); err != nil {
			return err
		}
	}
	now := c
	for range 3 { // a restart policy may be faster than we
		if now.status == runtime.Paused {
			err = b.killFrozen(ctx, now)
		} else {
			err = b.do(ctx, "stop", "--time", "0", now.id())
		}
		var lerr error
		if now, lerr = b.look(context.WithoutCancel(ctx), id); lerr != nil {
			if errors.Is(lerr, fault.ErrNotFound) {
				return lerr // it was to be removed at its end
			}
			return errors.Join(err, lerr)
		}
		if !now.live() || ctx.Err() != nil {
			break
		}
	}
	if now.live() {
		if err == nil {
			err = fmt.Errorf("container %s is %s after podman stop: %w", c.Name, now.status, fault.ErrState)
		}
		return err
	}
	return b.settle(context.WithoutCancel(ctx), now)
}

// askToEnd sends the stop signal and waits for its effect.
func (b *Backend) askToEnd(ctx context.Context, c container, sig syscall.Signal, opts runtime.StopOptions) error {
	var err error
	if opts.Signal == "" {
		// Only this notes, before it sends the signal, that the end is meant.
		seconds := int((opts.Timeout + time.Second - 1) / time.Second)
		_, err = b.ask(ctx, "stop", "--time", strconv.Itoa(seconds), c.id())
	} else if err = b.do(ctx, "kill", "--signal", strconv.Itoa(int(sig)), c.id()); err == nil {
		err = c.awaitEnd(ctx, opts.Timeout)
	}
	if err != nil && ctx.Err() == nil && errors.Is(err, fault.ErrState) {
		return nil // it has ended by itself
	}
	return err
}

// settle has Podman unmount an ended container, which its monitor does too, but some time
// later. It is no failure if the container is unmounted already.
func (b *Backend) settle(ctx context.Context, c container) error {
	if c.State.Status == "created" || c.State.Status == "configured" {
		return nil
	}
	err := b.do(ctx, "container", "cleanup", c.id())
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	return err
}

// awaitEnd waits for the first process to end.
func (c container) awaitEnd(ctx context.Context, limit time.Duration) error {
	p, err := kernel.OpenProcess(c.State.Pid)
	if kernel.Gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	if err := p.WaitFor(ctx, limit); ctx.Err() != nil {
		return err
	}
	return nil // one that has not ended is killed
}

// killFrozen ends a paused container. It queues SIGKILL for every process before a thaw, so
// that no process does anything else first, even if the OCI runtime thaws them for the
// signal to take effect.
func (b *Backend) killFrozen(ctx context.Context, c container) error {
	pids, err := criu.Members(c.State.Pid)
	if err != nil {
		return fmt.Errorf("container %s: %w", c.Name, err)
	}
	for _, pid := range pids {
		// The first one's end must come by Podman, or it would count as one that
		// a restart policy is for.
		if pid == c.State.Pid {
			continue
		}
		p, err := kernel.OpenMember(pid, c.State.CgroupPath)
		if err != nil {
			return fmt.Errorf("container %s: %w", c.Name, err)
		}
		if p != nil {
			_ = p.Kill(unix.SIGKILL)
			p.Close()
		}
	}
	done := guard.Start(func() error { return b.do(ctx, "kill", "--signal", "KILL", c.id()) })
	// It waits for the end, which under cgroup v1 takes a thaw; most OCI
	// runtimes do it themselves.
	tick := time.NewTicker(20 * time.Millisecond) // a pending signal is not announced
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			if killed(c.State.Pid) {
				if groups, err := kernel.Hierarchies(); err == nil {
					_ = c.thaw(groups)
				}
			}
		}
	}
}

// killed reports whether a process has SIGKILL waiting.
func killed(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(status)) {
		for _, name := range []string{"SigPnd:", "ShdPnd:"} {
			if mask, ok := strings.CutPrefix(line, name); ok {
				n, err := strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
				if err == nil && n&(1<<(unix.SIGKILL-1)) != 0 {
					return true
				}
			}
		}
	}
	return false
}

// isolate takes all links of the container's network namespace down, so that what the kernel
// sends to peers when the processes end goes nowhere. It leaves a shared namespace as it is.
func (c container) isolate() error {
	if c.sharesNetwork() || c.NetworkSettings.SandboxKey == "" || c.HostConfig.NetworkMode == "host" {
		return nil
	}
	p, err := kernel.OpenProcess(c.State.Pid)
	if kernel.Gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	err = func() error {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", c.State.Pid))
		if err != nil {
			return err
		}
		defer f.Close()
		own, err := os.Stat("/proc/self/ns/net")
		if err != nil {
			return err
		}
		if st, err := f.Stat(); err != nil || os.SameFile(own, st) {
			return err
		}
		h, err := netlink.NewHandleAt(netns.NsHandle(int(f.Fd())), unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		links, err := h.LinkList()
		for _, l := range links {
			err = errors.Join(err, h.LinkSetDown(l))
		}
		return err
	}()
	if err != nil && p.Alive() {
		return fmt.Errorf("cut container %s off its network: %w", c.Name, err)
	}
	return nil
}

// Pause freezes a container by Podman.
func (b *Backend) Pause(ctx context.Context, id string) error {
	return b.toggle(ctx, id, "pause", runtime.Paused)
}

// Unpause thaws a container by Podman, or by the kernel if Podman does not know that it is
// paused, because it was restored so or was paused by other means.
func (b *Backend) Unpause(ctx context.Context, id string) error {
	return b.toggle(ctx, id, "unpause", runtime.Running)
}

func (b *Backend) toggle(ctx context.Context, id, verb string, want runtime.Status) error {
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	believed := runtime.Running
	if c.State.Status == "paused" {
		believed = runtime.Paused
	}
	switch {
	case !c.live():
		return fmt.Errorf("container %s is %s: %w", c.Name, c.status, fault.ErrState)
	case c.status == want && (want == runtime.Paused || believed == want):
		return nil
	case c.status == want:
		// Podman has it thawed only once it is frozen.
		program, err := b.program(ctx, c)
		if err != nil {
			return err
		}
		if err := c.runtime(program).Pause(ctx); err != nil {
			return err
		}
	case believed == want: // Podman thinks that it is done
		groups, err := kernel.Hierarchies()
		if err != nil {
			return err
		}
		return c.thaw(groups)
	}
	err = b.do(ctx, verb, c.id())
	if err == nil {
		return nil
	}
	now, lerr := b.look(context.WithoutCancel(ctx), id)
	if lerr == nil && now.status == want {
		return nil // another process was faster
	}
	if lerr == nil && !now.live() {
		return fmt.Errorf("container %s is %s: %w", c.Name, now.status, fault.ErrState)
	}
	if lerr == nil && want == runtime.Running {
		if groups, gerr := kernel.Hierarchies(); gerr == nil && c.thaw(groups) == nil {
			return nil
		}
	}
	return err
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, name string) error {
	sig, err := signal.ParseSignal(name)
	if err != nil {
		return fmt.Errorf("signal %q: %w", name, fault.ErrInvalid)
	}
	c, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if !c.live() {
		return fmt.Errorf("container %s is %s: %w", c.Name, c.status, fault.ErrState)
	}
	if c.status == runtime.Paused && sig == unix.SIGKILL {
		return b.killFrozen(ctx, c)
	}
	return b.do(ctx, "kill", "--signal", strconv.Itoa(int(sig)), c.id())
}

// Wait returns how a container ended.
func (b *Backend) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	for {
		c, err := b.look(ctx, id)
		if err != nil {
			return runtime.Exit{}, err
		}
		switch c.status {
		case runtime.Created:
			return runtime.Exit{}, fmt.Errorf("container %s was never started: %w", c.Name, fault.ErrState)
		case runtime.Exited:
			return runtime.Exit{Code: c.State.ExitCode, OOMKilled: c.State.OOMKilled}, nil
		}
		out, err := b.ask(ctx, "wait", c.id())
		if err == nil {
			code, err := strconv.Atoi(strings.TrimSpace(string(out)))
			if err != nil || code < 0 {
				continue // Podman lost the code; see what it says of the container
			}
			exit := runtime.Exit{Code: code}
			if now, err := b.look(ctx, id); err == nil && now.status == runtime.Exited {
				exit.OOMKilled = now.State.OOMKilled
			}
			return exit, nil
		}
		if !errors.Is(err, fault.ErrNotFound) {
			return runtime.Exit{}, err
		}
	}
}

// Remove removes a container, adopted or not.
func (b *Backend) Remove(ctx context.Context, id string) error {
	c, err := b.look(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return b.forget(id)
	}
	if err != nil {
		return err
	}
	if c.status == runtime.Paused {
		if err := b.killFrozen(ctx, c); err != nil {
			return err
		}
	}
	if err := b.do(ctx, "rm", "--force", "--time", "0", c.id()); err != nil && !errors.Is(err, fault.ErrNotFound) {
		return err
	}
	return errors.Join(stage.At(b.run, c.ID).Clear(), stage.At(b.run, c.ID).Disarm(), b.forget(id))
}
