package bundle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// busyWait is how long an unmount waits for a dying process of the host, such
// as a tool that was just killed, to let go.
const busyWait = time.Second

// Unmount unmounts the root filesystem. What still uses it on the host keeps it
// for itself alone.
func (p Place) Unmount(ctx context.Context, log *slog.Logger) error {
	deadline := time.Now().Add(busyWait)
	for {
		err := overlay.Unmount(p.Rootfs, overlay.UnmountOptions{})
		if !errors.Is(err, fault.ErrBusy) {
			return err
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			log.Warn("a process of the host is in the sandbox's files", "error", err)
			return overlay.Unmount(p.Rootfs, overlay.UnmountOptions{Lazy: true})
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// OnLive runs fn on the root filesystem that a process sees.
func OnLive(pid int, fn func(root string) error) error {
	p, err := kernel.OpenProcess(pid)
	if err != nil {
		return fmt.Errorf("it has ended: %w", fault.ErrState)
	}
	defer p.Close()
	root, err := p.Root()
	if err != nil {
		return err
	}
	return OnRoot(root, fn)
}

// OnRoot runs fn on a root filesystem and lets it go.
func OnRoot(root *os.File, fn func(root string) error) error {
	// Under our pid, so that programs which fn starts find it as well.
	err := fn(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), root.Fd()))
	return errors.Join(err, root.Close())
}
