package api

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// Verbs that make the host work, by programs that they run or files that they
// read, take turns: so many are at work at a time, and the others wait in the order
// in which they came. All of them at once would not be done sooner, and whoever only
// looks would wait for the processors behind all of them.
//
// It cannot come to a standstill. A verb waits for its turn before it has begun
// anything, and never again, so that nobody waits for a turn with a lock in hand.
// While it waits for a program of the host, which may be an agentbox that asks this
// service for something, or for its caller, its turn is another's; and a turn that
// lasts longer than Options.TurnTime, for what waits for a registry or is large, is given to
// the next one while the verb goes on.

// turns are those of one service.
type turns struct {
	sem     *semaphore.Weighted
	time    time.Duration
	room    int // for those that wait
	metrics *Metrics
	ending  <-chan struct{} // closed: who waits is refused

	mu      sync.Mutex
	waiting map[*turn]time.Time // since when
}

// A turn is that of one verb.
type turn struct {
	of    *turns
	lapse *time.Timer

	mu   sync.Mutex
	held bool
	over bool
}

// errCrowded is the error of a verb that has nowhere to wait.
type errCrowded struct {
	error
	after time.Duration // when to try again
}

func (e *errCrowded) Unwrap() error { return e.error }

// take waits for a turn. The verb is to be called with the context that it returns,
// and done, which may be called twice, when it has ended.
func (t *turns) take(ctx context.Context) (_ context.Context, done func(), err error) {
	own, began := &turn{of: t}, time.Now()
	if !t.sem.TryAcquire(1) {
		if err := t.queue(ctx, own); err != nil {
			return nil, nil, err
		}
	}
	t.metrics.taken(time.Since(began))
	own.held = true
	own.lapse = time.AfterFunc(t.time, func() { own.let(true) })
	return runtime.WithAside(ctx, own.aside), sync.OnceFunc(func() {
		own.lapse.Stop()
		own.let(true)
		t.metrics.given()
	}), nil
}

// queue waits behind all who came before.
func (t *turns) queue(ctx context.Context, own *turn) error {
	if err := t.join(own, time.Now()); err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	guard.Go(func() {
		select {
		case <-t.ending:
			stop(errEnding())
		case <-ctx.Done():
		}
	})
	err := t.sem.Acquire(ctx, 1)
	t.mu.Lock()
	delete(t.waiting, own)
	t.mu.Unlock()
	t.metrics.queued(-1)
	if err != nil {
		return context.Cause(ctx)
	}
	return nil
}

func (t *turns) join(own *turn, now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.waiting) >= t.room {
		// Who comes now would wait about as long as the first in the queue has.
		longest := time.Second
		for _, since := range t.waiting {
			longest = max(longest, now.Sub(since))
		}
		t.metrics.refused()
		return &errCrowded{&runtime.Error{Op: "serve", Err: fmt.Errorf("%w: %d requests wait for their turn", runtime.ErrBusy, t.room),
			Hint: fmt.Sprintf("Nothing was done: try again in %s.", longest.Round(time.Second))}, longest}
	}
	t.waiting[own] = now
	t.metrics.queued(1)
	return nil
}

// let gives the turn to the next one.
func (t *turn) let(over bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = t.over || over
	if t.held {
		t.held = false
		t.of.sem.Release(1)
	}
}

// aside gives the turn away while the verb waits for somebody who may need one, until
// back is called. Then the verb goes on at once: with a turn if there is one.
func (t *turn) aside() (back func()) {
	t.let(false)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.held = t.held || !t.over && t.of.sem.TryAcquire(1)
	}
}

// errEnding is the error of what comes when the service is about to end.
func errEnding() error {
	return &runtime.Error{Op: "serve", Err: fmt.Errorf("%w: the service is about to end", runtime.ErrBusy), Hint: "Try again in a moment."}
}

// inTurn is take for a verb that is heavy, and nothing for another one.
func (h *Handler) inTurn(ctx context.Context, heavy bool) (_ context.Context, done func(), err error) {
	if !heavy {
		return ctx, func() {}, nil
	}
	return h.turns.take(ctx)
}

// heavily has the route's verb take turns with others.
func (r route) heavily() route {
	*r.heavy = true
	return r
}

// Streams between a verb and its caller, who may be slow.

type asideReader struct {
	io.Reader
	ctx context.Context
}

func (a asideReader) Read(p []byte) (int, error) {
	defer runtime.Aside(a.ctx)()
	return a.Reader.Read(p)
}

type asideWriter struct {
	io.Writer
	ctx context.Context
}

func (a asideWriter) Write(p []byte) (int, error) {
	defer runtime.Aside(a.ctx)()
	return a.Writer.Write(p)
}
