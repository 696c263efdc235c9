package docker

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Exec runs one more process in a container. If ctx ends while the caller is attached, the
// process is killed.
func (b *Backend) Exec(ctx context.Context, id string, p runtime.Process, s runtime.Streams) (int, error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return 0, err
	}
	if c.status != runtime.Running {
		return 0, runtime.Unstarted(fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState))
	}
	made, err := b.api.ContainerExecCreate(ctx, c.ID, container.ExecOptions{
		User: p.User, WorkingDir: p.Workdir, Tty: p.Terminal, Cmd: p.Args, Env: append(startEnv(c), p.Env...),
		AttachStdin: s.Stdin != nil && !p.Detach, AttachStdout: !p.Detach, AttachStderr: !p.Detach,
		DetachKeys: neverTyped,
	})
	if err != nil {
		return 0, runtime.Unstarted(b.explain(ctx, err))
	}
	x := &session{b: b, c: c, id: made.ID, p: p}
	if p.Detach {
		call, cancel := whole(ctx)
		defer cancel()
		if err := b.api.ContainerExecStart(call, x.id, container.ExecStartOptions{
			Detach: true, Tty: p.Terminal,
		}); err != nil {
			return 0, x.refused(call, err.Error(), err)
		}
		return 0, nil
	}
	return x.run(ctx, s)
}

// session is an exec under way.
type session struct {
	b  *Backend
	c  box
	id string
	p  runtime.Process
}

func (x *session) run(ctx context.Context, s runtime.Streams) (int, error) {
	conn, err := x.b.api.ContainerExecAttach(ctx, x.id, container.ExecAttachOptions{Tty: x.p.Terminal})
	if err != nil { // the daemon has started nothing
		return 0, runtime.Unstarted(x.refused(ctx, err.Error(), err))
	}
	gate := &gate{x: x, ctx: context.WithoutCancel(ctx), stdout: orDiscard(s.Stdout)}
	s.Stdout = gate
	a := attachment(ctx, conn, s, x.p.Terminal, func(size container.ResizeOptions) error {
		return x.b.api.ContainerExecResize(context.WithoutCancel(ctx), x.id, size)
	})
	a.AwaitSize()
	a.Serve()
	err = a.Wait()
	if errors.Is(err, runtime.ErrDetached) {
		return 0, err
	}
	if ctx.Err() != nil {
		x.kill()
		return 0, ctx.Err()
	}
	if err != nil && !lost(err) {
		return 0, err
	}
	return x.exit(ctx, gate)
}

// gate holds back output from before the process runs: in place of the output the daemon sends why
// there is none.
type gate struct {
	x      *session
	ctx    context.Context
	stdout io.Writer
	open   bool
	said   bytes.Buffer
}

func (g *gate) Write(p []byte) (int, error) {
	if !g.open {
		if state, err := g.x.state(g.ctx); err == nil && state.Pid == 0 {
			if g.said.Len() < 64<<10 {
				g.said.Write(p)
			}
			return len(p), nil
		}
		g.open = true
	}
	return g.stdout.Write(p)
}

// state waits until the process has begun or has failed to.
func (x *session) state(ctx context.Context) (container.ExecInspect, error) {
	deadline := time.Now().Add(grace)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		state, err := x.b.api.ContainerExecInspect(ctx, x.id)
		if err != nil || state.Pid != 0 || !state.Running && state.ExitCode != 0 || time.Now().After(deadline) {
			return state, err
		}
		time.Sleep(wait)
	}
}

// exit returns the exit code, which the daemon knows a moment after the end of
// the output.
func (x *session) exit(ctx context.Context, g *gate) (int, error) {
	deadline := time.Now().Add(grace)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		state, err := x.b.api.ContainerExecInspect(ctx, x.id)
		if err != nil {
			err = x.b.explain(ctx, err)
			if errors.Is(err, fault.ErrNotFound) {
				err = fmt.Errorf("container %s ended, and the session with it: %w", x.c.ID, fault.ErrState)
			}
			return 0, err
		}
		switch {
		case !state.Running && state.Pid == 0 && state.ExitCode != 0:
			return 0, x.refused(ctx, g.said.String(), nil)
		case !state.Running && state.Pid != 0:
			return state.ExitCode, nil
		case time.Now().After(deadline):
			return 0, fmt.Errorf("%w: the daemon does not say how the process ended", fault.ErrState)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			x.kill()
			return 0, ctx.Err()
		}
	}
}

// refused explains why a process did not start.
func (x *session) refused(ctx context.Context, said string, err error) error {
	if e := commandError(x.p.Args, said); e != nil {
		return e
	}
	if err != nil {
		return x.b.explain(ctx, err)
	}
	now, e := x.b.inspect(ctx, x.c.ID)
	if e != nil || now.status != runtime.Running {
		return fmt.Errorf("container %s: %w: it does not run any more", x.c.ID, fault.ErrState)
	}
	return fmt.Errorf("docker: %s", bytes.TrimSpace([]byte(said)))
}

// kill ends the process.
func (x *session) kill() {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	state, err := x.state(ctx)
	if err != nil || !state.Running || state.Pid == 0 {
		return
	}
	fd, err := unix.PidfdOpen(state.Pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if holds(state.Pid, x.c.ID) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// frames reads the daemon's multiplexed streams, one message each.
func frames(r io.Reader, fn func(stderr bool, message []byte) error) error {
	var head [8]byte
	var buf []byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		n := binary.BigEndian.Uint32(head[4:])
		if n > maxFrame {
			return fmt.Errorf("%w: a message of %d bytes", fault.ErrCorrupt, n)
		}
		if int(n) > cap(buf) {
			buf = make([]byte, n)
		}
		buf = buf[:n]
		if _, err := io.ReadFull(r, buf); err != nil {
			return err
		}
		switch stdcopy.StdType(head[0]) {
		case stdcopy.Stdout, stdcopy.Stdin:
			if err := fn(false, buf); err != nil {
				return err
			}
		case stdcopy.Stderr:
			if err := fn(true, buf); err != nil {
				return err
			}
		default:
			return fmt.Errorf("docker: %s", buf)
		}
	}
}

const maxFrame = 16 << 20
