// Package progress counts what a verb does, and reports it to the caller.
package progress

import (
	"context"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

const (
	stepPause = 100 * time.Millisecond // between two looks at the numbers
	stepWait  = 200 * time.Millisecond // for the receiver, at the end of a verb
)

// countApart is the size above which a file is counted while it is read. Smaller files
// are counted whole, which saves a reader for each of a million files.
const countApart = 1 << 20

// Meter is the progress of one verb. The verb adds to counters, which a separate goroutine
// reads and reports: a frozen sandbox never waits for a progress callback. Nil counts
// nothing.
type Meter struct {
	only runtime.Phase // the one phase to count everything for; empty: each for its own

	mu     sync.Mutex
	now    runtime.Phase
	past   []runtime.Step // finished phases not reported yet
	counts map[runtime.Phase]*stepCount

	quit, gone chan struct{}
	late       atomic.Bool
	ending     sync.Once
}

type stepCount struct{ done, total atomic.Int64 }

// Follow reports a verb's progress to fn until end is called; with a nil fn it returns nil.
func Follow(fn runtime.Steps) *Meter {
	if fn == nil {
		return nil
	}
	s := &Meter{
		counts: make(map[runtime.Phase]*stepCount, len(runtime.Phases)),
		quit:   make(chan struct{}), gone: make(chan struct{}),
	}
	for _, p := range runtime.Phases {
		s.counts[p] = new(stepCount)
	}
	guard.Go(func() { s.tell(fn) })
	return s
}

func (s *Meter) tell(fn runtime.Steps) {
	defer close(s.gone)
	tick := time.NewTicker(stepPause)
	defer tick.Stop()
	var last runtime.Step
	for quit := false; !quit; {
		select {
		case <-tick.C:
		case <-s.quit:
			quit = true
		}
		for _, step := range s.news() {
			if step == last {
				continue
			}
			if s.late.Load() || guard.Do(func() error { fn(step); return nil }) != nil {
				return
			}
			last = step
		}
	}
}

// news returns the phases that have finished since the last call, and the current one.
func (s *Meter) news() []runtime.Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.past
	s.past = nil
	if s.now == "" {
		return list
	}
	return append(list, s.step())
}

func (s *Meter) step() runtime.Step {
	c := s.counts[s.now]
	step := runtime.Step{Phase: s.now, Done: c.done.Load(), Total: c.total.Load()}
	if step.Total > 0 {
		step.Done = min(step.Done, step.Total)
	}
	return step
}

// End reports the last numbers. It is called once the verb holds nothing any more.
func (s *Meter) End() {
	if s == nil {
		return
	}
	s.ending.Do(func() {
		close(s.quit)
		select {
		case <-s.gone:
		case <-time.After(stepWait):
			s.late.Store(true)
		}
	})
}

// Begin enters a phase with nothing done yet.
func (s *Meter) Begin(p runtime.Phase, total int64) {
	s.enter(p, func(c *stepCount) { c.done.Store(0); c.total.Store(total) })
}

// At enters a phase, or continues it.
func (s *Meter) At(p runtime.Phase) { s.enter(p, nil) }

func (s *Meter) enter(p runtime.Phase, do func(*stepCount)) {
	if s == nil || s.only != "" && p != s.only {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == p && do == nil {
		return
	}
	if s.now != "" {
		s.past = append(s.past, s.step())
	}
	if s.now = p; do != nil {
		do(s.counts[p])
	}
}

// Adder returns a function that adds to what is done of a phase; nil: nothing is counted.
func (s *Meter) Adder(p runtime.Phase) func(int64) {
	if s == nil {
		return nil
	}
	if s.only != "" {
		if p != runtime.PhaseImages && p != runtime.PhaseStaging {
			return nil // not part of the total
		}
		p = s.only
	}
	done := &s.counts[p].done
	return func(n int64) { done.Add(n) }
}

// Sink counts the data that to takes.
func (s *Meter) Sink(p runtime.Phase, to overlay.Sink) overlay.Sink {
	if add := s.Adder(p); add != nil {
		return countedSink{to, add}
	}
	return to
}

type countedSink struct {
	to  overlay.Sink
	add func(int64)
}

func (c countedSink) Data(ctx context.Context, size int64, r io.Reader) (string, []overlay.Chunk, error) {
	if size > countApart {
		return c.to.Data(ctx, size, &countedReader{r, c.add})
	}
	digest, pieces, err := c.to.Data(ctx, size, r)
	if err == nil {
		c.add(size)
	}
	return digest, pieces, err
}

// Source counts the data that is read from from.
func (s *Meter) Source(p runtime.Phase, from overlay.Source) overlay.Source {
	if add := s.Adder(p); add != nil {
		return countedSource{from, add}
	}
	return from
}

type countedSource struct {
	from overlay.Source
	add  func(int64)
}

func (c countedSource) Data(ctx context.Context, e overlay.Entry) (io.ReadCloser, error) {
	r, err := c.from.Data(ctx, e)
	if err != nil {
		return r, err
	}
	size := e.Size
	if e.Extents != nil {
		size = 0
		for _, x := range e.Extents {
			size += x.Len
		}
	}
	if size > countApart {
		return &countedCloser{countedReader{r, c.add}, r}, nil
	}
	c.add(size)
	return r, nil
}

type countedReader struct {
	r   io.Reader
	add func(int64)
}

func (c *countedReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.add(int64(n))
	return n, err
}

type countedCloser struct {
	countedReader
	io.Closer
}

// Sizes returns the total size of a directory's files, as far as they can be read.
func (s *Meter) Sizes(dir string) (n int64) {
	if s == nil {
		return 0
	}
	list, _ := os.ReadDir(dir) // the reader of the files will report the error
	for _, f := range list {
		if info, err := f.Info(); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
	}
	return n
}

// All begins the last phase: the work of later phases counts for it.
func (s *Meter) All(p runtime.Phase, total int64) {
	s.Begin(p, total)
	s.only = p
}

// Reading counts data that is only read, for the current phase.
func (s *Meter) Reading() overlay.Sink {
	if s == nil {
		return store.Cutter{}
	}
	s.mu.Lock()
	p := s.now
	s.mu.Unlock()
	if p == "" { // no phase has begun
		return store.Cutter{}
	}
	return s.Sink(p, store.Cutter{})
}
