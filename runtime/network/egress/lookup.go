package egress

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

const (
	foundFor   = 10 * time.Second // for which an answer counts
	failedFor  = 2 * time.Second  // the same for a failure
	foundLimit = 64               // addresses of a name
	cacheLimit = 4096             // names of all sandboxes
)

var (
	errNowhere = errors.New("the name leads nowhere that is allowed")
	errTooMany = errors.New("too many look-ups")
)

// cache keeps the addresses of names for a while, and looks up each name once at a time.
type cache struct {
	mu    sync.Mutex
	names map[string]*found
}

type found struct {
	done  chan struct{} // closed once the rest is there
	until time.Time
	addrs []netip.Addr
	err   error
}

func (c *cache) get(ctx context.Context, name string, look func() ([]netip.Addr, error)) ([]netip.Addr, error) {
	c.mu.Lock()
	f := c.names[name]
	if f != nil && (f.until.IsZero() || time.Now().Before(f.until)) {
		c.mu.Unlock()
		select {
		case <-f.done:
			return f.addrs, f.err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	f = &found{done: make(chan struct{})}
	if len(c.names) >= cacheLimit {
		c.tidy()
	}
	if len(c.names) < cacheLimit {
		c.names[name] = f
	}
	c.mu.Unlock()

	addrs, err := look()
	c.mu.Lock()
	defer c.mu.Unlock()
	f.addrs, f.err, f.until = addrs[:min(len(addrs), foundLimit)], err, time.Now().Add(foundFor)
	if err != nil {
		f.until = time.Now().Add(failedFor)
	}
	if errors.Is(err, errTooMany) && c.names[name] == f {
		delete(c.names, name) // others may have it looked up
	}
	close(f.done)
	return f.addrs, f.err
}

// tidy makes room of what no longer counts.
func (c *cache) tidy() {
	now := time.Now()
	for name, f := range c.names {
		if !f.until.IsZero() && !now.Before(f.until) {
			delete(c.names, name)
		}
	}
}

// resolve finds the addresses of an allowed name that may be reached on a port;
// with port 0, on any.
func (s *Server) resolve(ctx context.Context, b *box, name string, port uint16) ([]netip.Addr, error) {
	found, err := s.names.get(ctx, name, func() ([]netip.Addr, error) {
		if !b.mayAsk() {
			return nil, fmt.Errorf("%w: %s", errTooMany, name)
		}
		// Others may be waiting for it.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTime)
		defer cancel()
		// The dot at the end keeps the host's search domains out.
		return s.resolver.LookupNetIP(ctx, "ip4", name+".")
	})
	if err != nil {
		return nil, err
	}
	rules := *b.rules.Load()
	var open []netip.Addr
	var closed []netip.Addr
	for _, a := range found {
		if a = a.Unmap(); s.guard.answer(rules, netip.AddrPortFrom(a, port)) {
			open = append(open, a)
		} else {
			closed = append(closed, a)
		}
	}
	if len(open) > answerLimit {
		open = open[:answerLimit]
	}
	if len(open) == 0 && len(closed) > 0 {
		return nil, fmt.Errorf("%w: %s is at %s, which is not public, and no rule allows that address",
			errNowhere, name, closed[0])
	}
	return open, nil
}

// mayAsk counts a look-up.
func (b *box) mayAsk() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lookups.take(queryRate, queryBurst)
}
