package streams

import (
	"io"
	"sync"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// againMax bounds the input, in bytes, that an Again keeps for the next attempt.
const againMax = 1 << 20

// Again gives a caller's streams to one attempt at a process after another: what an attempt
// that was refused has read of them is there for the next.
type Again struct {
	streams runtime.Streams

	mu      sync.Mutex
	read    *sync.Cond // a read of the caller's input has returned
	reading bool
	input   []byte        // all that was read so far, unless lost
	lost    bool          // more was read than is kept
	err     error         // of the caller's input
	size    *runtime.Size // the last of the terminal
	now     *attempt
	closed  chan struct{}
}

// attempt is the input of one attempt.
type attempt struct {
	of    *Again
	at    int               // how much of what is kept it has read
	sizes chan runtime.Size // holds one, the latest
}

// NewAgain returns an Again of a caller's streams, which nothing else may use before Close.
func NewAgain(streams runtime.Streams) *Again {
	a := &Again{streams: streams, closed: make(chan struct{})}
	a.read = sync.NewCond(&a.mu)
	if streams.Resize != nil {
		guard.Go(a.pass)
	}
	return a
}

// Next ends the attempt before and returns the streams of a new one. It reports whether these
// begin where the first's did.
func (a *Again) Next() (runtime.Streams, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now = nil
	a.read.Broadcast()
	if a.lost {
		return runtime.Streams{}, false
	}
	a.now = &attempt{of: a, sizes: make(chan runtime.Size, 1)}
	a.now.resize(a.size)
	s := a.streams
	if s.Stdin != nil {
		s.Stdin = a.now
	}
	if s.Resize != nil {
		s.Resize = a.now.sizes
	}
	return s, true
}

// Close ends the last attempt.
func (a *Again) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now = nil
	a.read.Broadcast()
	close(a.closed)
}

// Read reads what is kept, then the caller's input. It returns io.EOF once the attempt is over.
func (t *attempt) Read(p []byte) (int, error) {
	a := t.of
	a.mu.Lock()
	defer a.mu.Unlock()
	for {
		switch {
		case a.now != t:
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		case !a.lost && t.at < len(a.input):
			n := copy(p, a.input[t.at:])
			t.at += n
			return n, nil
		case a.err != nil:
			return 0, a.err
		case a.reading: // by the attempt before
			a.read.Wait()
			continue
		}
		n, err := t.source(p)
		if a.err == nil {
			a.err = err
		}
		if a.now == t {
			t.at += n
			if n == 0 && err == nil {
				continue
			}
			return n, err
		}
	}
}

// source reads the caller's input, without the lock, and keeps what it has read.
func (t *attempt) source(p []byte) (n int, err error) {
	a := t.of
	a.reading = true
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		a.reading = false
		// What an attempt that is over still has read is kept: the next one has not read it.
		if a.lost = a.lost || a.now == t && len(a.input)+n > againMax; a.lost {
			a.input = nil
		} else {
			a.input = append(a.input, p[:n]...)
		}
		a.read.Broadcast()
	}()
	return a.streams.Stdin.Read(p)
}

// pass gives the attempts the sizes of the terminal as they come.
func (a *Again) pass() {
	for {
		select {
		case size, ok := <-a.streams.Resize:
			if !ok {
				return
			}
			a.mu.Lock()
			a.size = &size
			a.now.resize(&size)
			a.mu.Unlock()
		case <-a.closed:
			return
		}
	}
}

// resize gives an attempt a size in place of one that it has not taken yet.
func (t *attempt) resize(size *runtime.Size) {
	if t == nil || size == nil {
		return
	}
	select {
	case <-t.sizes:
	default:
	}
	t.sizes <- *size
}
