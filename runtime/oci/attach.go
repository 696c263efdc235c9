package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// connect opens a connection to the attach socket in a bundle. Once it
// returns, nothing that the process prints is missed.
func (b *Backend) connect(ctx context.Context, bundle string, s runtime.Streams, terminal bool, size *runtime.Size) (*streams.Attachment, error) {
	return streams.Connect(ctx, filepath.Join(bundle, "attach"), s, terminal, size, func(size runtime.Size) { b.resize(bundle, size) })
}

// resizeWait bounds how long a resize waits for conmon to take the last one.
const resizeWait = time.Second

// resize sends conmon the size of the terminal. Conmon takes two lines that it reads at once
// for the first one twice, so each must have been read before the next is written. For the
// same reason this is the inner one of its two fifos: lines to the outer one, "ctl", are
// copied into it.
func (b *Backend) resize(bundle string, size runtime.Size) {
	f, err := os.OpenFile(filepath.Join(bundle, "winsz"), os.O_RDWR|unix.O_NONBLOCK, 0)
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
		time.Sleep(time.Millisecond) // a fifo does not show that it was read
	}
	_, _ = fmt.Fprintf(f, "%d %d\n", size.Height, size.Width)
}

// Attach connects streams to a running container's first process; a paused one is silent.
// Without a terminal, a caller's end of input, or its leaving, ends the container's input:
// conmon cannot tell the one from the other.
func (b *Backend) Attach(ctx context.Context, id string, ends runtime.Streams) error {
	v, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if !v.live() {
		return fmt.Errorf("container %s is %s: %w", id, v.status, fault.ErrState)
	}
	var size *runtime.Size
	if v.Spec.Terminal {
		size = streams.FirstSize(ctx, ends.Resize)
	}
	a, err := b.connect(ctx, v.run.Bundle, ends, v.Spec.Terminal, size)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("container %s: %w: its monitor is gone", id, fault.ErrState)
	}
	if err != nil {
		return err
	}
	a.Serve()
	return a.Wait()
}

// Logs writes the log. Following ends with the run that is live when Logs is
// called.
func (b *Backend) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	v, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if !opts.Follow || !v.live() {
		return streams.Print(ctx, b.home.Dir(id, "log"), opts, stdout, stderr)
	}
	return streams.Follow(ctx, b.home.Dir(id, "log"), opts, stdout, stderr, func(ctx context.Context) error {
		_, err := b.awaitExit(ctx, id, v.run)
		return err
	})
}
