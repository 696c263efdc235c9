package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// What the first byte of each packet from conmon's attach socket says.
const (
	fromStdout = 2
	fromStderr = 3
)

const (
	outputPacket = 32 << 10 // conmon's are at most 8 KiB and a byte
	inputPacket  = 8 << 10  // conmon cuts off what is beyond 32 KiB
)

// attachment is a connection to the streams of a process that conmon holds.
type attachment struct {
	ctx      context.Context
	conn     *net.UnixConn
	bundle   string
	streams  runtime.Streams
	terminal bool
	endInput bool // without a reader the process's input ends at once

	output chan error // the end of the output
	input  chan error // a detach, or an input that cannot be read
	done   chan struct{}
}

// connect opens a connection to the attach socket in a bundle. Once it
// returns, nothing that the process prints is missed.
func connect(ctx context.Context, bundle string, streams runtime.Streams, terminal bool, size *runtime.Size) (*attachment, error) {
	// By way of a descriptor, because a socket address has no room for a
	// long path.
	fd, err := unix.Open(filepath.Join(bundle, "attach"), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	defer unix.Close(fd)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d", fd), Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	a := &attachment{
		ctx: ctx, conn: conn, bundle: bundle, streams: streams, terminal: terminal,
		output: make(chan error, 1), input: make(chan error, 1), done: make(chan struct{}),
	}
	if terminal && size != nil {
		a.resize(*size)
	}
	return a, nil
}

// serve begins to copy in both directions.
func (a *attachment) serve() {
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
		return err
	case err := <-a.input:
		return err
	case <-a.ctx.Done():
		return a.ctx.Err()
	}
}

func (a *attachment) close() {
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

func (a *attachment) copyOutput() error {
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

func (a *attachment) write(from byte, data []byte) error {
	w := a.streams.Stdout
	if from == fromStderr && !a.terminal {
		w = a.streams.Stderr
	}
	if w == nil || from != fromStdout && from != fromStderr {
		return nil
	}
	_, err := w.Write(data)
	return err
}

// copyInput ends with the input; with the output it ends only when its reader
// next returns, since a read cannot be called off.
func (a *attachment) copyInput() {
	if a.streams.Stdin == nil {
		if a.endInput {
			_ = a.conn.CloseWrite()
		}
		return
	}
	keys := detacher{keys: a.streams.DetachKeys}
	if !a.terminal {
		keys.keys = nil
	}
	buf := make([]byte, inputPacket)
	for {
		n, err := a.streams.Stdin.Read(buf)
		data, detached := keys.filter(buf[:n])
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
			if rest := keys.rest(); len(rest) > 0 {
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

// detacher finds the detach keys in what is typed. A beginning of them is held
// back until it is clear what it is.
type detacher struct {
	keys []byte
	held int // bytes of keys that were typed last
}

// filter returns what is to be passed on.
func (d *detacher) filter(in []byte) (out []byte, detached bool) {
	if len(d.keys) == 0 {
		return in, false
	}
	for _, c := range in {
		for {
			if c == d.keys[d.held] {
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
			for next > 0 && !bytes.Equal(d.keys[:next], d.keys[d.held-next:d.held]) {
				next--
			}
			out = append(out, d.keys[:d.held-next]...)
			d.held = next
		}
		if d.held == len(d.keys) {
			d.held = 0
			return out, true
		}
	}
	return out, false
}

// rest is what is held when no more is typed.
func (d *detacher) rest() []byte {
	held := d.keys[:d.held]
	d.held = 0
	return held
}

// resizeWait bounds how long a resize waits for conmon to take the last one.
const resizeWait = time.Second

// resize tells conmon the size of the terminal. Conmon takes two lines that it
// reads at once for the first one twice, so each must have been read before
// the next is written. For the same reason this is the inner one of its two
// fifos: lines to the outer one, "ctl", are copied into it.
func (a *attachment) resize(size runtime.Size) {
	f, err := os.OpenFile(filepath.Join(a.bundle, "winsz"), os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return // the process has ended
	}
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return
	}
	deadline := time.Now().Add(resizeWait)
	for {
		pending := 0
		_ = conn.Control(func(fd uintptr) { pending, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
		if pending == 0 || time.Now().After(deadline) {
			break
		}
		select {
		case <-a.done:
			return
		case <-time.After(time.Millisecond):
		}
	}
	_, _ = fmt.Fprintf(f, "%d %d\n", size.Height, size.Width)
}

// Attach connects streams to a running container's first process; a paused one
// is silent. Without a terminal, an input that ends, and anyone who leaves,
// ends the container's input: conmon cannot tell the one from the other.
func (b *Backend) Attach(ctx context.Context, id string, streams runtime.Streams) error {
	v, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if !v.live() {
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	var size *runtime.Size
	if v.Spec.Terminal {
		size = firstSize(ctx, streams.Resize)
	}
	a, err := connect(ctx, v.run.Bundle, streams, v.Spec.Terminal, size)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("container %s: %w: its monitor is gone", id, fault.ErrState)
	}
	if err != nil {
		return err
	}
	a.serve()
	return a.wait()
}
