package bundle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// busyWait is how long an unmount waits for a dying process of the host, such
// as a tool that was just killed, to let go.
const busyWait = time.Second

// Unmount unmounts the root filesystem and the secrets. A process on the host that still uses
// them keeps them for itself alone.
func (p Place) Unmount(ctx context.Context, log *slog.Logger) error {
	return errors.Join(p.DropSecrets(), p.unmountRoot(ctx, log))
}

func (p Place) unmountRoot(ctx context.Context, log *slog.Logger) error {
	deadline := time.Now().Add(busyWait)
	for {
		err := overlay.Unmount(p.Rootfs, overlay.UnmountOptions{})
		if !errors.Is(err, fault.ErrBusy) {
			return err
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			log.Warn("host process found in the sandbox's files", "error", err)
			return overlay.Unmount(p.Rootfs, overlay.UnmountOptions{Lazy: true})
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// LayOut makes a sandbox's directories. The existing upperdir is the inode of / to the sandbox, so
// it takes after the top directory of its image.
func (p Place) LayOut(s runtime.Spec, top, upper string) error {
	var st unix.Stat_t
	if err := unix.Stat(top, &st); err != nil {
		return fmt.Errorf("lower directory %s: %w", top, err)
	}
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
	if err := os.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(upper, st.Mode&0o7777); err != nil {
		return err
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return unix.UtimesNanoAt(unix.AT_FDCWD, upper, times, unix.AT_SYMLINK_NOFOLLOW)
}

// OnStopped mounts the root filesystem of a sandbox that does not run while fn
// runs on it.
func (p Place) OnStopped(ctx context.Context, log *slog.Logger, m overlay.Mount, fn func(root string) error) error {
	if err := m.Mount(); err != nil {
		return err
	}
	root, err := kernel.OpenRoot(p.Rootfs)
	if err == nil {
		err = onRoot(root, fn)
	}
	return errors.Join(err, p.Unmount(context.WithoutCancel(ctx), log))
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
