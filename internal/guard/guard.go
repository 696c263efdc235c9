// Package guard confines a panic to the work that it happens in.
//
// A service works for many callers. A panic in a goroutine that one of them started would end the
// whole service; here it is the error of that one piece of work, or continues in the goroutine
// that waits for it. None is silent: each is logged with its stack, and counted. The code of a
// service starts goroutines through this package only, which a test of internal/imports enforces.
//
// Work that returns an error is run by Do, Start or a Group: its panic is that error, and is
// undone like any other. Work that does not is started by a WaitGroup: the panic continues in
// Wait, so that half a result is never taken for a whole one. A verb that ends in a panic leaves
// what a killed one leaves: deferred calls release its locks, its intent stays in the journal,
// and recovery finishes it.
package guard

import (
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

// Panic is the error that a panic has become. It is none of those that callers tell apart,
// whatever it was that was panicked with.
type Panic struct {
	Value any
	Stack []byte // of the goroutine that it was in
}

func (p *Panic) Error() string {
	return fmt.Sprintf("panic: %v (a defect of agentbox: the log has its stack)", p.Value)
}

var count atomic.Int64

// Count returns how many panics there were in this process.
func Count() int64 { return count.Load() }

// Caught makes an error of what recover has returned, which is not nil: it logs and counts
// it, unless it came from another goroutine, which has done so.
func Caught(v any) *Panic {
	if p, ok := v.(*Panic); ok {
		return p
	}
	p := &Panic{v, debug.Stack()}
	count.Add(1)
	slog.Error("panic", "err", fmt.Sprint(v), "stack", string(p.Stack))
	return p
}

// Do calls fn. A panic in it is its error.
func Do(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = Caught(v)
		}
	}()
	return fn()
}

// Go calls fn in a goroutine that a panic ends, and nothing else. Deferred calls must signal what
// others wait for.
func Go(fn func()) {
	go func() {
		_ = Do(func() error { fn(); return nil }) // it is in the log
	}()
}

// Start calls fn in a goroutine. Its error, or its panic, waits in the channel.
func Start(fn func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- Do(fn) }()
	return done
}

// Group is an errgroup.Group in which a panic is an error. The zero value works.
type Group struct {
	own   errgroup.Group
	group *errgroup.Group // nil: own
}

// WithContext is errgroup.WithContext.
func WithContext(ctx context.Context) (*Group, context.Context) {
	group, ctx := errgroup.WithContext(ctx)
	return &Group{group: group}, ctx
}

func (g *Group) of() *errgroup.Group {
	if g.group != nil {
		return g.group
	}
	return &g.own
}

// Go, SetLimit and Wait are those of an errgroup.Group.
func (g *Group) Go(fn func() error) { g.of().Go(func() error { return Do(fn) }) }
func (g *Group) SetLimit(n int)     { g.of().SetLimit(n) }
func (g *Group) Wait() error        { return g.of().Wait() }

// WaitGroup is a sync.WaitGroup for what has no error to return. The zero value works.
type WaitGroup struct {
	group sync.WaitGroup
	first atomic.Pointer[Panic]
}

// Go calls fn in a goroutine.
func (w *WaitGroup) Go(fn func()) {
	w.group.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				w.first.CompareAndSwap(nil, Caught(v))
			}
		}()
		fn()
	})
}

// Wait returns when all have ended. The first panic of one of them goes on here, once.
func (w *WaitGroup) Wait() {
	w.group.Wait()
	if p := w.first.Swap(nil); p != nil {
		panic(p)
	}
}
