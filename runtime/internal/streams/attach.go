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
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// What the first byte of each packet from a monitor says.
const (
	Greeting   = 1 // ours: nothing follows
	FromStdout = 2
	FromStderr = 3
)

const (
	outputPacket = 32 << 10 // conmon's are at most 8 KiB and a byte
	inputPacket  = 8 << 10  // conmon cuts off what is beyond 32 KiB
)

// Attachment is a connection to the streams of a process that a monitor holds.
type Attachment struct {
	ctx      context.Context
	conn     *net.UnixConn
	streams  runtime.Streams
	terminal bool
	resize   func(runtime.Size)

	EndInput bool // without a reader the process's input ends at once

	output chan error // the end of the output
	input  chan error // a detach, or an input that cannot be read
	done   chan struct{}
}

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

// Connect opens a connection to a monitor's socket. Once it returns, nothing
// that the process prints is missed. With a terminal, resize is called for each
// size that the streams tell, and first for size.
func Connect(ctx context.Context, socket string, streams runtime.Streams, terminal bool, size *runtime.Size, resize func(runtime.Size)) (*Attachment, error) {
	// By way of a descriptor, because a socket address has no room for a
	// long path.
	fd, err := unix.Open(socket, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	defer unix.Close(fd)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d", fd), Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	return New(ctx, conn, streams, terminal, size, resize), nil
}

// New is Connect over a connection that is there.
func New(ctx context.Context, conn *net.UnixConn, streams runtime.Streams, terminal bool, size *runtime.Size, resize func(runtime.Size)) *Attachment {
	a := &Attachment{
		ctx: ctx, conn: conn, streams: streams, terminal: terminal, resize: resize,
		output: make(chan error, 1), input: make(chan error, 1), done: make(chan struct{}),
	}
	if terminal && size != nil {
		resize(*size)
	}
	return a
}

// Greeted waits for the first packet of a monitor that greets: one that accepts
// connections beside its other work, so that output could still pass the caller
// by when the connection is there.
func (a *Attachment) Greeted() error {
	stop := context.AfterFunc(a.ctx, func() { _ = a.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := a.conn.Read(make([]byte, 1))
	if a.ctx.Err() != nil {
		return a.ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return nil
}

// Serve begins to copy in both directions.
func (a *Attachment) Serve() {
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

// Wait returns when the output has ended, the user has detached, or the
// context has.
func (a *Attachment) Wait() error {
	defer a.Close()
	select {
	case err := <-a.output:
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
	select {
	case <-a.done:
	default:
		close(a.done)
	}
	_ = a.conn.Close()
}

func (a *Attachment) copyOutput() error {
	buf := make([]byte, outputPacket)
	reset := false
	for {
		n, err := a.conn.Read(buf)
		if n > 0 {
			if err := a.write(buf[0], buf[1:n]); err != nil {
				return err
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.ECONNRESET) && !reset:
			// Conmon closed with input of ours unread. The kernel tells
			// this before it hands out the last of the output.
			reset = true
		case errors.Is(err, syscall.ECONNRESET):
			return nil
		default:
			return fmt.Errorf("attach: %w", err)
		}
	}
}

func (a *Attachment) write(from byte, data []byte) error {
	w := a.streams.Stdout
	if from == FromStderr && !a.terminal {
		w = a.streams.Stderr
	}
	if w == nil || from != FromStdout && from != FromStderr {
		return nil
	}
	_, err := w.Write(data)
	return err
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
	buf := make([]byte, inputPacket)
	for {
		n, err := a.streams.Stdin.Read(buf)
		data, detached := keys.Filter(buf[:n])
		if len(data) > 0 {
			if _, err := a.conn.Write(data); err != nil {
				return // the output tells why
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

// Rest is what is held when no more is typed.
func (d *Detacher) Rest() []byte {
	held := d.Keys[:d.held]
	d.held = 0
	return held
}
