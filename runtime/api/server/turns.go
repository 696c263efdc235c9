package server

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// Verbs that make the host work, by programs that they run or files that they
// read, take turns: so many are at work at a time, and the others wait. All of them
// at once would not be done sooner, and a list would wait for the processors behind
// all of them. Callers are served in rotation, the verbs of one in the order in which
// they came, so that a caller with many of them delays another one by one verb.
//
// It cannot come to a standstill. A verb waits for its turn before it has begun
// anything, and never again, so that none waits for a turn with a lock in hand.
// While it waits for a program of the host, which may be an agentbox that asks this
// service for something, or for its caller, its turn is another's; and a turn that
// lasts longer than Options.TurnTime, for what waits for a registry or is large, is given to
// the next one while the verb goes on.

// turns are those of one service.
type turns struct {
	time    time.Duration
	room    int // for those that wait
	metrics *Metrics
	ending  <-chan struct{} // closed: what waits is refused

	mu     sync.Mutex
	free   int
	queues []*queue // that are not empty, the next one first
}

// queue has what waits of one caller.
type queue struct {
	of    string
	turns []*turn // the oldest first
}

// A turn is that of one verb.
type turn struct {
	of    *turns
	lapse *time.Timer

	// While it waits, under turns.mu.
	since  time.Time
	queue  *queue
	served chan error // has nil when the turn comes, and an error when it gives up its place

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
	own := &turn{of: t, since: time.Now(), served: make(chan error, 1)}
	caller, _ := runtime.CallerOf(ctx)
	waits, err := t.join(own, identity(caller))
	if waits {
		err = t.wait(ctx, own)
	}
	if err != nil {
		return nil, nil, err
	}
	t.metrics.taken(time.Since(own.since))
	own.held = true
	own.lapse = time.AfterFunc(t.time, func() { own.let(true) })
	return runtime.WithAside(ctx, own.aside), sync.OnceFunc(func() {
		own.lapse.Stop()
		own.let(true)
		t.metrics.given()
	}), nil
}

// try takes a turn if nothing else waits for it.
func (t *turns) try() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tryLocked()
}

func (t *turns) tryLocked() bool {
	if t.free == 0 || len(t.queues) > 0 {
		return false
	}
	t.free--
	return true
}

// give gives a turn to the next one.
func (t *turns) give() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queues) == 0 {
		t.free++
		return
	}
	q := t.queues[0]
	next := q.turns[0]
	t.leave(next)
	if len(q.turns) > 0 { // behind the other callers
		t.queues = append(t.queues[1:], q)
	}
	next.served <- nil
}

// wait waits in the queue of the caller until the turn comes.
func (t *turns) wait(ctx context.Context, own *turn) error {
	defer t.metrics.queued(-1)
	var why error
	select {
	case err := <-own.served:
		return err
	case <-t.ending:
		why = errEnding()
	case <-ctx.Done():
		why = context.Cause(ctx)
	}
	t.mu.Lock()
	waits := t.leave(own)
	t.mu.Unlock()
	if !waits && <-own.served == nil { // it came meanwhile
		t.give()
	}
	return why
}

// join takes a turn, or enters the queue of a caller, and reports whether it has to wait
// there. When there is no room, the verb that came last of the caller with most of them is
// refused: the new one, or one of another caller.
func (t *turns) join(own *turn, caller string) (waits bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tryLocked() {
		return false, nil
	}
	var mine, most *queue
	waiting := 0
	for _, q := range t.queues {
		waiting += len(q.turns)
		if q.of == caller {
			mine = q
		}
		if most == nil || len(q.turns) > len(most.turns) {
			most = q
		}
	}
	if mine == nil {
		mine = &queue{of: caller}
	}
	if waiting >= t.room {
		crowded := t.crowded()
		if most == nil || len(most.turns) <= len(mine.turns)+1 {
			return false, crowded
		}
		last := most.turns[len(most.turns)-1]
		t.leave(last)
		last.served <- crowded
	}
	if len(mine.turns) == 0 {
		t.queues = append(t.queues, mine)
	}
	own.queue = mine
	mine.turns = append(mine.turns, own)
	t.metrics.queued(1)
	return true, nil
}

// crowded is the error of a verb for which there is no room. It would wait about as
// long as the first in the queue has.
func (t *turns) crowded() error {
	longest := time.Second
	for _, q := range t.queues {
		longest = max(longest, time.Since(q.turns[0].since))
	}
	t.metrics.refused()
	return &errCrowded{&runtime.Error{Op: "serve", Err: fmt.Errorf("%w: %d requests wait for their turn",
		runtime.ErrBusy, t.room),
		Hint: fmt.Sprintf("Nothing was done: try again in %s.", longest.Round(time.Second))}, longest}
}

// leave takes a verb out of its queue, and reports whether it was in one.
func (t *turns) leave(own *turn) bool {
	q := own.queue
	if q == nil {
		return false
	}
	own.queue = nil
	q.turns = slices.DeleteFunc(q.turns, func(o *turn) bool { return o == own })
	if len(q.turns) == 0 {
		t.queues = slices.DeleteFunc(t.queues, func(o *queue) bool { return o == q })
	}
	return true
}

// let gives the turn to the next one.
func (t *turn) let(over bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = t.over || over
	if t.held {
		t.held = false
		t.of.give()
	}
}

// aside gives the turn away, until back is called, while the verb waits for a party that may
// need one itself. Then the verb goes on at once: with a turn if one is free.
func (t *turn) aside() (back func()) {
	t.let(false)
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.held = t.held || !t.over && t.of.try()
	}
}

// errEnding is the error of what comes when the service is about to end.
func errEnding() error {
	return &runtime.Error{
		Op: "serve", Err: fmt.Errorf("%w: the service is about to end", runtime.ErrBusy),
		Hint: "Try again in a moment.",
	}
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

// Streams between a verb and its caller, which may be slow.

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
