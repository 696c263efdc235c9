package bundle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// busyWait is how long an unmount waits for a dying process of the host, such
// as a tool that was just killed, to let go.
const busyWait = time.Second

// Unmount unmounts the root filesystem, the workspaces and the secrets. A process on the host
// that still uses them keeps them for itself alone.
func (p Place) Unmount(ctx context.Context, log *slog.Logger) error {
	return errors.Join(p.DropSecrets(), unmount(ctx, log, p.Rootfs), p.unmountWorkspaces(ctx, log))
}

func unmount(ctx context.Context, log *slog.Logger, target string) error {
	deadline := time.Now().Add(busyWait)
	for {
		err := overlay.Unmount(target, overlay.UnmountOptions{})
		if !errors.Is(err, fault.ErrBusy) {
			return err
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			log.Warn("host process found in the sandbox's files", "error", err)
			return overlay.Unmount(target, overlay.UnmountOptions{Lazy: true})
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// LayOut makes a sandbox's directories. The existing upperdir is the inode of / to the sandbox, so
// it takes after the top directory of its image.
func (p Place) LayOut(s runtime.Spec, top, upper string) error {
	for _, name := range []string{"merged", "runs", "etc"} {
		if err := os.Mkdir(filepath.Join(p.Dir, name), 0o700); err != nil {
			return err
		}
	}
	// A sandbox's other users pass through it on their way.
	if err := os.Chmod(filepath.Join(p.Dir, "etc"), 0o755); err != nil {
		return err
	}
	if s.Init {
		if err := p.copyInit(); err != nil {
			return fmt.Errorf("copy the init: %w", err)
		}
	}
	if err := takeAfter(upper, top); err != nil {
		return fmt.Errorf("lower directory %s: %w", top, err)
	}
	return p.layOutWorkspaces(s)
}

// OnStopped mounts the root filesystem of a sandbox that does not run, workspaces included, while
// fn runs on it.
func (p Place) OnStopped(
	ctx context.Context, log *slog.Logger, m overlay.Mount, s runtime.Spec, fn func(root string) error,
) error {
	err := m.Mount()
	if err == nil {
		err = p.MountWorkspaces(s)
	}
	if err == nil {
		err = p.onStopped(s, fn)
	}
	if len(p.Workspaces(s)) > 0 { // they are mounted on it
		err = errors.Join(err, kernel.UnmountBelow(p.Rootfs))
	}
	return errors.Join(err, p.Unmount(context.WithoutCancel(ctx), log))
}

func (p Place) onStopped(s runtime.Spec, fn func(root string) error) error {
	root, err := kernel.OpenRoot(p.Rootfs)
	if err != nil {
		return err
	}
	if err := p.showWorkspaces(root, s); err != nil {
		return errors.Join(err, root.Close())
	}
	return onRoot(root, fn)
}

// OnLive runs fn on the root filesystem that a process sees.
func OnLive(pid int, fn func(root string) error) error {
	p, err := kernel.OpenProcess(pid)
	if err != nil && !kernel.Gone(err) {
		return err
	}
	if err != nil {
		return fmt.Errorf("it has ended: %w", fault.ErrState)
	}
	defer p.Close()
	root, err := p.Root()
	if err != nil {
		return err
	}
	return onRoot(root, fn)
}

// onRoot runs fn on a root filesystem and lets it go.
func onRoot(root *os.File, fn func(root string) error) error {
	// Under our pid, so that programs which fn starts find it as well.
	err := fn(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), root.Fd()))
	return errors.Join(err, root.Close())
}
