package oci

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

// Connect implements box.Hooks.
func (h hooks) Connect(
	ctx context.Context, v box.View, s runtime.Streams, size *runtime.Size,
) (*streams.Attachment, error) {
	return h.connect(ctx, v.Run.Bundle, s, v.Spec.Terminal, size)
}

// connect opens a connection to the attach socket in a bundle. Once it
// returns, nothing that the process prints is missed.
func (b *Backend) connect(
	ctx context.Context, bundle string, s runtime.Streams, terminal bool, size *runtime.Size,
) (*streams.Attachment, error) {
	return streams.Connect(ctx, filepath.Join(bundle, "attach"), s, terminal, size, func(size runtime.Size) {
		b.resize(bundle, size)
	})
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
