package streams

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// The first byte of each packet from a monitor.
const (
	Greeting   = 1 // ours: nothing follows
	FromStdout = 2
	FromStderr = 3
)

// outputPacket is more than conmon's are: at most 8 KiB and a byte.
const outputPacket = 32 << 10

// Packets is a connection to a monitor.
type Packets struct{ *net.UnixConn }

// Connect attaches streams by a monitor's socket; see New. Once it returns,
// nothing that the process prints is missed.
func Connect(
	ctx context.Context, socket string, streams runtime.Streams, terminal bool, size *runtime.Size,
	resize func(runtime.Size),
) (*Attachment, error) {
	conn, err := Dial(socket)
	if err != nil {
		return nil, err
	}
	return New(ctx, conn, streams, terminal, size, resize), nil
}

// Dial opens a connection to a monitor's socket.
func Dial(socket string) (p Packets, err error) {
	// By way of a descriptor, because a socket address has no room for a
	// long path.
	fd, err := unix.Open(socket, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return p, fmt.Errorf("attach: %w", err)
	}
	defer unix.Close(fd)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d",
		fd), Net: "unixpacket"})
	if err != nil {
		return p, fmt.Errorf("attach: %w", err)
	}
	return Packets{conn}, nil
}

// Greeted waits for the first packet of a monitor that greets: one that accepts
// connections beside its other work, so that output could still pass the caller
// by when the connection is there.
func (p Packets) Greeted(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = p.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err := p.Read(make([]byte, 1))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	return nil
}

// Output implements Conn.
func (p Packets) Output(stdout, stderr io.Writer) error {
	buf := make([]byte, outputPacket)
	reset := false
	for {
		n, err := p.Read(buf)
		if n > 0 {
			to := stdout
			if buf[0] == FromStderr {
				to = stderr
			}
			if to != nil && (buf[0] == FromStdout || buf[0] == FromStderr) {
				if _, err := to.Write(buf[1:n]); err != nil {
					return err
				}
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
			return nil
		case errors.Is(err, syscall.ECONNRESET) && !reset:
			// Conmon closed with input of ours unread. The kernel reports this before it hands
			// out the last of the output.
			reset = true
		case errors.Is(err, syscall.ECONNRESET):
			return nil
		default:
			return fmt.Errorf("attach: %w", err)
		}
	}
}
