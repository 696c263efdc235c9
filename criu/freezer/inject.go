package freezer

import (
	"context"
	"errors"
	"fmt"
)

// Inject calls fn for some threads of the frozen container, each of which can be made
// to call the kernel meanwhile. All others are stopped, too, and the container is
// frozen when Inject returns; on error it may be thawed. After fn a thread stands
// where it stood. Threads that have ended are left out.
func (c Container) Inject(ctx context.Context, threads []int, fn func(t *Tracee) error) error {
	if len(threads) == 0 {
		return nil
	}
	if is, err := c.Frozen(); err != nil || !is {
		return errors.Join(err, fmt.Errorf("container %s is not frozen", c.ID))
	}
	var err error
	onThread(func() {
		// Under v2, too, a frozen thread runs no call, however it is traced.
		var all []int
		if all, err = c.members("cgroup.threads"); err != nil || len(all) == 0 {
			all, err = c.members("tasks")
		}
		if err == nil {
			err = c.trapV1(ctx, all, threads, func(tid int) error {
				t, err := tracee(tid)
				if err != nil {
					return err
				}
				return errors.Join(fn(t), t.leave())
			})
		}
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}
