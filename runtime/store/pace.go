package store

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// How a Reclaim stays out of others' way.
const (
	yieldPause = 100 * time.Millisecond
	minPace    = 20 * time.Millisecond // less is not worth a sleep
)

// alone has the store for moments, in the way that was asked for.
func (c *reclaim) alone(ctx context.Context) (*Lock, error) {
	if !c.o.Yield {
		return c.s.alone(ctx, "reclaim", c.o.Wait)
	}
	for deadline := time.Now().Add(c.o.Wait); ; {
		l, err := c.s.exclude(ctx, "reclaim", 0)
		if err == nil {
			if err = c.s.dropIndexCaches(); err != nil {
				l.Unlock()
				return nil, err
			}
		}
		if !errors.Is(err, fault.ErrBusy) || time.Until(deadline) <= yieldPause {
			return l, err
		}
		if err := sleep(ctx, yieldPause); err != nil {
			return nil, err
		}
	}
}

// pace waits until so much may have been copied.
func (c *reclaim) pace(ctx context.Context) error {
	if c.o.Rate <= 0 {
		return nil
	}
	due := c.began.Add(time.Duration(float64(c.copied) / float64(c.o.Rate) * float64(time.Second)))
	if wait := time.Until(due); wait > minPace {
		return sleep(ctx, wait)
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
