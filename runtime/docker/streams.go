package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"sync"

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

// attachment is a connection to a process's streams by way of the daemon.
type attachment struct {
	ctx      context.Context
	conn     types.HijackedResponse
	streams  runtime.Streams
	terminal bool
	resize   func(runtime.Size)

	output chan error // the end of the output
	input  chan error // a detach, or an input that cannot be read
	done   chan struct{}
	once   sync.Once
}

// attach opens a connection to a container's first process. Nothing that it
// prints from now on is missed. endInput ends an input that has no reader.
func (b *Backend) attach(ctx context.Context, c box, s runtime.Streams, endInput bool) (*attachment, error) {
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
	a := newAttachment(ctx, conn, s, c.Config.Tty)
	a.resize = func(size runtime.Size) {
		_ = b.api.ContainerResize(context.WithoutCancel(ctx), c.ID, container.ResizeOptions{Height: uint(size.Height), Width: uint(size.Width)})
	}
	return a, nil
}

func newAttachment(ctx context.Context, conn types.HijackedResponse, s runtime.Streams, terminal bool) *attachment {
	return &attachment{
		ctx: ctx, conn: conn, streams: s, terminal: terminal,
		output: make(chan error, 1), input: make(chan error, 1), done: make(chan struct{}),
	}
}

// serve begins to copy in both directions; the process runs.
func (a *attachment) serve() {
	if a.terminal {
		// Before anything is typed, or that would be answered in the size of before.
		if size := streams.FirstSize(a.ctx, a.streams.Resize); size != nil {
			a.resize(*size)
		}
	}
	go func() { a.output <- a.copyOutput() }()
	go a.copyInput()
	if a.terminal && a.streams.Resize != nil {
		go func() {
			for {
				select {
				case size, ok := <-a.streams.Resize:
					if !ok {
						return
					}
					a.resize(size)
				case <-a.done:
					return
				}
			}
		}()
	}
}

// wait returns when the output has ended, the user has detached, or the
// context has.
func (a *attachment) wait() error {
	defer a.close()
	select {
	case err := <-a.output:
		if a.ctx.Err() != nil {
			return a.ctx.Err()
		}
		return err
	case err := <-a.input:
		return err
	case <-a.ctx.Done():
		return a.ctx.Err()
	}
}

func (a *attachment) close() {
	a.once.Do(func() {
		close(a.done)
		a.conn.Close()
	})
}

func (a *attachment) copyOutput() error {
	stdout, stderr := orDiscard(a.streams.Stdout), orDiscard(a.streams.Stderr)
	var err error
	if a.terminal {
		_, err = io.Copy(stdout, a.conn.Reader)
	} else {
		_, err = stdcopy.StdCopy(stdout, stderr, a.conn.Reader)
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

// copyInput ends with the input; with the output it ends only when its reader
// next returns, since a read cannot be called off.
func (a *attachment) copyInput() {
	if a.streams.Stdin == nil {
		_ = a.conn.CloseWrite()
		return
	}
	keys := streams.Detacher{Keys: a.streams.DetachKeys}
	if !a.terminal {
		keys.Keys = nil
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := a.streams.Stdin.Read(buf)
		data, detached := keys.Filter(buf[:n])
		if len(data) > 0 {
			if _, err := a.conn.Conn.Write(data); err != nil {
				return // the output tells why
			}
		}
		if detached {
			a.input <- runtime.ErrDetached
			return
		}
		if err != nil {
			if rest := keys.Rest(); len(rest) > 0 {
				_, _ = a.conn.Conn.Write(rest)
			}
			_ = a.conn.CloseWrite()
			if !errors.Is(err, io.EOF) && !errors.Is(err, fs.ErrClosed) && !errors.Is(err, net.ErrClosed) {
				a.input <- fmt.Errorf("read input: %w", err)
			}
			return
		}
	}
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
	a.serve()
	return a.wait()
}
