package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// neverTyped stands for the daemon's own detach keys, ctrl-p ctrl-q unless told
// otherwise: keys are ours to look for, and no sequence is not a choice.
const neverTyped = "ctrl-^,ctrl-_,ctrl-^,ctrl-^,ctrl-_,ctrl-_,ctrl-^"

// hijacked is a connection to a process's streams by way of the daemon.
type hijacked struct {
	*types.HijackedResponse
	terminal bool
}

func (h hijacked) Write(p []byte) (int, error) { return h.Conn.Write(p) }

func (h hijacked) Close() error { return h.Conn.Close() }

// Output implements streams.Conn.
func (h hijacked) Output(stdout, stderr io.Writer) (err error) {
	if h.terminal {
		_, err = io.Copy(orDiscard(stdout), h.Reader)
	} else {
		_, err = stdcopy.StdCopy(orDiscard(stdout), orDiscard(stderr), h.Reader)
	}
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}

// attach opens a connection to a container's first process. Nothing that it
// prints from now on is missed. endInput ends an input that has no reader.
func (b *Backend) attach(ctx context.Context, c box, s runtime.Streams, endInput bool) (*streams.Attachment, error) {
	stdin := c.Config.OpenStdin && (s.Stdin != nil || endInput && c.Config.StdinOnce)
	conn, err := b.api.ContainerAttach(ctx, c.ID, container.AttachOptions{
		Stream: true, Stdin: stdin, Stdout: true, Stderr: true, DetachKeys: neverTyped,
	})
	if err != nil {
		return nil, b.explain(ctx, err)
	}
	if !stdin {
		s.Stdin = nil
	}
	return attachment(ctx, conn, s, c.Config.Tty, func(size container.ResizeOptions) error {
		return b.api.ContainerResize(context.WithoutCancel(ctx), c.ID, size)
	}), nil
}

func attachment(
	ctx context.Context, conn types.HijackedResponse, s runtime.Streams, terminal bool,
	resize func(container.ResizeOptions) error,
) *streams.Attachment {
	a := streams.New(ctx, hijacked{&conn, terminal}, s, terminal, nil, func(size runtime.Size) {
		_ = resize(container.ResizeOptions{Height: uint(size.Height), Width: uint(size.Width)})
	})
	a.EndInput = true
	return a
}

// Attach connects streams to a container's first process.
func (b *Backend) Attach(ctx context.Context, id string, s runtime.Streams) error {
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	if !c.live() {
		return fmt.Errorf("container %s is %s: %w", id, c.status, fault.ErrState)
	}
	a, err := b.attach(ctx, c, s, false)
	if err != nil {
		return err
	}
	a.AwaitSize()
	a.Serve()
	return a.Wait()
}
