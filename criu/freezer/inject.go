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
	return c.inject(ctx, threads, func(held []int) error {
		for _, tid := range held {
			t, err := tracee(tid)
			if err == nil {
				err = errors.Join(fn(t), t.leave())
			}
			if err != nil && !gone(tid) {
				return fmt.Errorf("thread %d: %w", tid, err)
			}
		}
		return nil
	})
}

// InjectTogether is Inject with all threads at once, by their ids, for calls that have
// an order among them.
//
// A caller that dies between two calls leaves the threads as they stood before, and the
// container thawed.
func (c Container) InjectTogether(ctx context.Context, threads []int, fn func(ts map[int]*Tracee) error) error {
	return c.inject(ctx, threads, func(held []int) (err error) {
		ts := map[int]*Tracee{}
		for _, tid := range held {
			if ts[tid], err = tracee(tid); err != nil {
				return fmt.Errorf("thread %d: %w", tid, err)
			}
		}
		err = fn(ts)
		for tid, t := range ts {
			if e := t.leave(); e != nil && !gone(tid) {
				err = errors.Join(err, fmt.Errorf("thread %d: %w", tid, e))
			}
		}
		return err
	})
}

// inject calls fn with those of some threads that have stopped.
func (c Container) inject(ctx context.Context, threads []int, fn func(held []int) error) error {
	if len(threads) == 0 {
		return nil
	}
	if is, err := c.Frozen(); err != nil || !is {
		return errors.Join(err, fmt.Errorf("container %s is not frozen", c.ID))
	}
	var err error
	onThread(func() {
		end := c.assist()
		// Under v2, too, a frozen thread runs no call, however it is traced.
		var all []int
		if all, err = c.members("cgroup.threads"); err != nil || len(all) == 0 {
			all, err = c.members("tasks")
		}
		if err == nil {
			err = c.stopAll(ctx, all, threads, fn)
		}
		err = errors.Join(err, end())
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}
