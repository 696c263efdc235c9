package store

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/flock"
)

const (
	// gateLock lets whoever wants the store alone have it: flock knows no queue,
	// and where drafts follow each other there is never a moment without one.
	gateLock = ".gate"
	// gateHold is how long newcomers are kept out at a time. If those who are in
	// stay longer (an export may take minutes), the newcomers are let in again.
	gateHold = 2 * time.Second
	gateOpen = time.Second
)

// pass waits while somebody who wants the store alone keeps newcomers out, but
// not for longer than that is allowed.
func (s *Store) pass(ctx context.Context) error {
	g, err := s.flockAs(ctx, gateLock, "pass", 2*gateHold, flock.Shared)
	if errors.Is(err, fault.ErrBusy) {
		return nil
	}
	if err == nil {
		g.Unlock()
	}
	return err
}

// alone is exclude with a chance of success while drafts follow each other.
// Whoever has the store may take pieces away: what is known of them is forgotten.
func (s *Store) alone(ctx context.Context, verb string, wait time.Duration) (*Lock, error) {
	deadline := time.Now().Add(wait)
	for {
		g, err := s.flock(ctx, gateLock, verb, max(0, time.Until(deadline)))
		if err != nil {
			return nil, err
		}
		l, err := s.exclude(ctx, verb, min(gateHold, max(0, time.Until(deadline))))
		g.Unlock()
		if err == nil {
			if err = s.dropLedgers(); err != nil {
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
