package runtime

import (
	"context"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// Phase is what a verb of several phases is at.
type Phase string

// The phases of a checkpoint. Host files are read with the others.
const (
	PhaseFiles     Phase = "files"     // file data is read; bytes, the total is not known
	PhaseProcesses Phase = "processes" // CRIU writes the processes out, and files that are left are read; not counted
	PhaseStoring   Phase = "storing"   // lists of files, and images of processes, go into the store; bytes of the images
	PhaseSyncing   Phase = "syncing"   // the disk is waited for; not counted
)

// The phases of a restore. Between PhaseLooking and PhaseStaging are those of the
// checkpoint of what it replaces.
const (
	PhaseImages    Phase = "images"     // process images are laid out; bytes
	PhaseLooking   Phase = "looking"    // the present files are compared with the checkpoint's; bytes that had to be read
	PhaseStaging   Phase = "staging"    // what the files lack is laid out beside them; bytes
	PhaseEffects   Phase = "effects"    // undo commands run; not counted
	PhaseStopping  Phase = "stopping"   // the old processes end; not counted
	PhasePutting   Phase = "putting"    // files are exchanged, or put back after a failure; bytes that had to be read
	PhaseProving   Phase = "proving"    // and compared with the checkpoint; bytes that had to be read
	PhaseStarting  Phase = "starting"   // processes start; not counted. Then PhaseSyncing
	PhaseHostFiles Phase = "host files" // files of the host are put back; not counted
)

// PhaseForking is all that makes forks of a checkpoint: bytes of files and process
// images. Before it are the phases of the checkpoint, if one is taken.
const PhaseForking Phase = "forking"

// Phases are all there are.
var Phases = []Phase{PhaseFiles, PhaseProcesses, PhaseStoring, PhaseSyncing, PhaseImages, PhaseLooking, PhaseStaging, PhaseEffects,
	PhaseStopping, PhasePutting, PhaseProving, PhaseStarting, PhaseHostFiles, PhaseForking}

// Step tells what a verb of several phases is at, and how far that is.
type Step struct {
	Phase Phase `json:"phase"`
	Done  int64 `json:"done"`  // bytes; 0 in phases that are not counted
	Total int64 `json:"total"` // 0: not known
}

// Steps is called now and then during a verb of several phases, by one goroutine at
// a time: for every phase once it is over, with what it came to, and meanwhile where
// its numbers have changed. What is tried again begins again. The verb does not wait
// for it, and has no harm of a panic in it, after which it is not called any more.
// When the verb has returned no call begins; one that takes long may still be under way.
type Steps func(Step)

const (
	stepPause = 100 * time.Millisecond // between two looks at the numbers
	stepWait  = 200 * time.Millisecond // for the receiver, at the end of a verb
)

// countApart is from where on data is counted while it is read. What is smaller is
// counted whole, without a reader of its own for each of a million files.
const countApart = 1 << 20

// steps are the numbers of one verb. What works adds to counters, which a goroutine
// of their own looks at: a frozen sandbox waits for nobody who wants to know how far
// its checkpoint is. Nil counts nothing.
type steps struct {
	only Phase // the phase that all is counted for; empty: its own

	mu     sync.Mutex
	now    Phase
	past   []Step // what is over and was not told yet
	counts map[Phase]*stepCount

	quit, gone chan struct{}
	late       atomic.Bool
	ending     sync.Once
}

type stepCount struct{ done, total atomic.Int64 }

// follow tells fn of a verb until end is called; nil: nobody asks.
func follow(fn Steps) *steps {
	if fn == nil {
		return nil
	}
	s := &steps{counts: make(map[Phase]*stepCount, len(Phases)), quit: make(chan struct{}), gone: make(chan struct{})}
	for _, p := range Phases {
		s.counts[p] = new(stepCount)
	}
	guard.Go(func() { s.tell(fn) })
	return s
}

func (s *steps) tell(fn Steps) {
	defer close(s.gone)
	tick := time.NewTicker(stepPause)
	defer tick.Stop()
	var last Step
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

// news are the phases that are over, and what is done now.
func (s *steps) news() []Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.past
	s.past = nil
	if s.now == "" {
		return list
	}
	return append(list, s.step())
}

func (s *steps) step() Step {
	c := s.counts[s.now]
	step := Step{Phase: s.now, Done: c.done.Load(), Total: c.total.Load()}
	if step.Total > 0 {
		step.Done = min(step.Done, step.Total)
	}
	return step
}

// end tells the last numbers. It is called when the verb holds nothing any more.
func (s *steps) end() {
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

// begin enters a phase, of which nothing is done yet.
func (s *steps) begin(p Phase, total int64) {
	s.enter(p, func(c *stepCount) { c.done.Store(0); c.total.Store(total) })
}

// at enters a phase, or goes on with it.
func (s *steps) at(p Phase) { s.enter(p, nil) }

func (s *steps) enter(p Phase, do func(*stepCount)) {
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

// more is that there is more to do in a phase.
func (s *steps) more(p Phase, n int64) {
	if s != nil && s.only == "" {
		s.counts[p].total.Add(n)
	}
}

// adder adds to what is done of a phase; nil: nobody asks.
func (s *steps) adder(p Phase) func(int64) {
	if s == nil {
		return nil
	}
	if s.only != "" {
		if p != PhaseImages && p != PhaseStaging {
			return nil // it is no part of the total
		}
		p = s.only
	}
	done := &s.counts[p].done
	return func(n int64) { done.Add(n) }
}

// sink counts what to takes.
func (s *steps) sink(p Phase, to overlay.Sink) overlay.Sink {
	if add := s.adder(p); add != nil {
		return countedSink{to, add}
	}
	return to
}

type countedSink struct {
	to  overlay.Sink
	add func(int64)
}

func (c countedSink) Data(ctx context.Context, size int64, r io.Reader) (string, []overlay.Piece, error) {
	if size > countApart {
		return c.to.Data(ctx, size, &countedReader{r, c.add})
	}
	digest, pieces, err := c.to.Data(ctx, size, r)
	if err == nil {
		c.add(size)
	}
	return digest, pieces, err
}

// source counts what is read of from.
func (s *steps) source(p Phase, from overlay.Source) overlay.Source {
	if add := s.adder(p); add != nil {
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

// sizes is how many bytes the files of a directory have, as far as one can tell.
func (s *steps) sizes(dir string) (n int64) {
	if s == nil {
		return 0
	}
	list, _ := os.ReadDir(dir) // whoever reads them will say what is wrong
	for _, f := range list {
		if info, err := f.Info(); err == nil && info.Mode().IsRegular() {
			n += info.Size()
		}
	}
	return n
}

// all begins a phase that is the last: what the others would count counts for it.
func (s *steps) all(p Phase, total int64) {
	s.begin(p, total)
	s.only = p
}

// reading counts what is only read, for the phase that there is now.
func (s *steps) reading() overlay.Sink {
	if s == nil {
		return store.Cutter{}
	}
	s.mu.Lock()
	p := s.now
	s.mu.Unlock()
	return s.sink(p, store.Cutter{})
}
