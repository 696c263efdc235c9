// Package streams connects callers to the processes of a sandbox and keeps what
// these print.
//
// A monitor, which lives as long as the process, holds the process's pipes or
// its terminal. It serves a SOCK_SEQPACKET socket, by conmon's protocol: each
// packet from it is output behind one byte that names the stream, each packet to
// it is input, and the end of what a caller sends is the end of the input. And
// it writes the log, in conmon's format.
package streams

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// Conn is a connection to the streams of a process. Writes to it are input.
type Conn interface {
	io.Writer
	CloseWrite() error // ends the input
	Close() error
	// Output copies what the process prints until there is no more. Output for a nil writer
	// is dropped.
	Output(stdout, stderr io.Writer) error
}

// Attachment connects a caller's streams to those of a process.
type Attachment struct {
	ctx      context.Context
	conn     Conn
	streams  runtime.Streams
	terminal bool
	resize   func(runtime.Size)

	EndInput bool // without a reader the process's input ends at once

	output chan error // the end of the output
	input  chan error // a detach, or an input that cannot be read
	done   chan struct{}
	once   sync.Once
}

// inputPart is how much input is passed on at once: conmon cuts off input beyond 32 KiB.
const inputPart = 8 << 10

// sizeWait is how long a start waits for the terminal's initial size, which
// its caller is about to send.
const sizeWait = 200 * time.Millisecond

// FirstSize receives the initial size of a terminal.
func FirstSize(ctx context.Context, sizes <-chan runtime.Size) *runtime.Size {
	if sizes == nil {
		return nil
	}
	timer := time.NewTimer(sizeWait)
	defer timer.Stop()
	select {
	case size, ok := <-sizes:
		if ok {
			return &size
		}
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// New attaches streams by a connection. With a terminal, resize is called first for size, and
// then for each size from the streams.
func New(
	ctx context.Context, conn Conn, streams runtime.Streams, terminal bool, size *runtime.Size,
	resize func(runtime.Size),
) *Attachment {
	if terminal {
		streams.Stderr = streams.Stdout
		if size != nil {
			resize(*size)
		}
	}
	return &Attachment{
		ctx: ctx, conn: conn, streams: streams, terminal: terminal, resize: resize,
		output: make(chan error, 1), input: make(chan error, 1), done: make(chan struct{}),
	}
}

// AwaitSize gives a terminal the initial size that its caller is about to send:
// before anything is typed, or that would be answered in the size of before.
func (a *Attachment) AwaitSize() {
	if !a.terminal {
		return
	}
	if size := FirstSize(a.ctx, a.streams.Resize); size != nil {
		a.resize(*size)
	}
}

// Serve begins to copy in both directions.
func (a *Attachment) Serve() {
	guard.Go(func() {
		a.output <- guard.Do(func() error { return a.conn.Output(a.streams.Stdout, a.streams.Stderr) })
	})
	guard.Go(func() {
		if err := guard.Do(func() error { a.copyInput(); return nil }); err != nil {
			a.input <- err
		}
	})
	if a.terminal && a.streams.Resize != nil {
		guard.Go(func() {
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
		})
	}
}

// Wait returns when the output has ended, the user has detached, or the
// context has.
func (a *Attachment) Wait() error {
	defer a.Close()
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

// Close leaves; the process goes on. A nil Attachment has left.
func (a *Attachment) Close() {
	if a == nil {
		return
	}
	a.once.Do(func() {
		close(a.done)
		_ = a.conn.Close()
	})
}

// copyInput ends with the input; with the output it ends only when its reader
// next returns, since a read cannot be called off.
func (a *Attachment) copyInput() {
	if a.streams.Stdin == nil {
		if a.EndInput {
			_ = a.conn.CloseWrite()
		}
		return
	}
	keys := Detacher{Keys: a.streams.DetachKeys}
	if !a.terminal {
		keys.Keys = nil
	}
	buf := make([]byte, inputPart)
	for {
		n, err := a.streams.Stdin.Read(buf)
		data, detached := keys.Filter(buf[:n])
		if len(data) > 0 {
			if _, err := a.conn.Write(data); err != nil {
				return // the output has the reason
			}
		}
		if detached {
			a.input <- runtime.ErrDetached
			return
		}
		if err != nil {
			if rest := keys.Rest(); len(rest) > 0 {
				_, _ = a.conn.Write(rest)
			}
			_ = a.conn.CloseWrite()
			if !errors.Is(err, io.EOF) && !errors.Is(err, fs.ErrClosed) && !errors.Is(err, net.ErrClosed) {
				a.input <- fmt.Errorf("read input: %w", err)
			}
			return
		}
	}
}

// Detacher finds the detach keys in what is typed. A beginning of them is held
// back until it is clear what it is.
type Detacher struct {
	Keys []byte
	held int // bytes of keys that were typed last
}

// Filter returns what is to be passed on.
func (d *Detacher) Filter(in []byte) (out []byte, detached bool) {
	if len(d.Keys) == 0 {
		return in, false
	}
	for _, c := range in {
		for {
			if c == d.Keys[d.held] {
				d.held++
				break
			}
			if d.held == 0 {
				out = append(out, c)
				break
			}
			// The longest end of what is held that begins the keys again
			// stays held.
			next := d.held - 1
			for next > 0 && !bytes.Equal(d.Keys[:next], d.Keys[d.held-next:d.held]) {
				next--
			}
			out = append(out, d.Keys[:d.held-next]...)
			d.held = next
		}
		if d.held == len(d.Keys) {
			d.held = 0
			return out, true
		}
	}
	return out, false
}

// Rest returns the held keys when no more is typed.
func (d *Detacher) Rest() []byte {
	held := d.Keys[:d.held]
	d.held = 0
	return held
}
