package store

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
)

const (
	// gateLock lets an exclusive holder in: flock has no queue, and a steady stream of
	// drafts never leaves a moment without a shared holder.
	gateLock = ".gate"
	// gateHold is how long newcomers are kept out at a time. If the current holders stay
	// longer (an export may take minutes), newcomers are let in again.
	gateHold = 2 * time.Second
	gateOpen = time.Second
)

// pass waits while a process that wants the store exclusively keeps newcomers out, for
// at most 2*gateHold.
func (k *locks) pass(ctx context.Context) error {
	g, err := k.flockAs(ctx, gateLock, "pass", 2*gateHold, flock.Shared)
	if errors.Is(err, fault.ErrBusy) {
		return nil
	}
	if err == nil {
		g.Unlock()
	}
	return err
}

// alone is exclude with a chance of success while drafts follow each other. The holder
// may remove chunks, so the index caches are dropped.
func (k *locks) alone(ctx context.Context, verb string, wait time.Duration) (*Lock, error) {
	deadline := time.Now().Add(wait)
	for {
		g, err := k.flock(ctx, gateLock, verb, max(0, time.Until(deadline)))
		if err != nil {
			return nil, err
		}
		l, err := k.exclude(ctx, verb, min(gateHold, max(0, time.Until(deadline))))
		g.Unlock()
		if err == nil {
			if err = k.dropIndexCaches(); err != nil {
				l.Unlock()
				return nil, err
			}
		}
		if err == nil || !errors.Is(err, fault.ErrBusy) || time.Until(deadline) <= gateOpen {
			return l, err
		}
		t := time.NewTimer(gateOpen)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, context.Cause(ctx)
		}
	}
}
