package docker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

// Mount shows a container's root filesystem: what its first process sees or,
// when it is stopped, an overlay over the same directories.
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) (err error) {
	c, err := b.find(ctx, id)
	if err != nil {
		return err
	}
	if c.live() {
		// Held open, or the name could come to mean another process's root.
		root, err := os.Open(fmt.Sprintf("/proc/%d/root", c.State.Pid))
		if errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("container %s has just ended: %w", id, fault.ErrState)
		}
		if err != nil {
			return err
		}
		defer root.Close()
		if !holds(c.State.Pid, c.ID) {
			return fmt.Errorf("container %s has just ended: %w", id, fault.ErrState)
		}
		return fn(fmt.Sprintf("/proc/self/fd/%d", root.Fd()))
	}
	upper, lower, err := b.layers(ctx, c)
	if err != nil {
		return err
	}
	work := c.GraphDriver.Data["WorkDir"]
	if work == "" {
		work = filepath.Join(filepath.Dir(upper), "work")
	}
	if err := os.MkdirAll(filepath.Join(b.run, "mounts"), 0o700); err != nil {
		return err
	}
	target, err := os.MkdirTemp(filepath.Join(b.run, "mounts"), "m")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(target)) }()
	if err := (overlay.Mount{Lower: lower, Upper: upper, Work: work, Target: target}).Mount(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, overlay.Unmount(target, overlay.UnmountOptions{Lazy: true})) }()
	return fn(target)
}
