package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"sync"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// aheadBytes is about how much one goroutine reads ahead in a long stream, and
// what is not longer is read without any.
const aheadBytes = 512 << 10

func workers() int { return min(goruntime.GOMAXPROCS(0), 8) }

// stream puts a run of bytes together from parts of chunks.
type stream struct {
	ctx  context.Context
	stop context.CancelFunc
	p    *chunks
	what string // for messages
	rest []pack.Segment
	// whole says that each segment is a whole chunk, whose length is hereby proven.
	whole bool

	now   []byte             // what is left of the segment that is being read
	queue chan chan [][]byte // nil: no read-ahead
	done  [][]byte
	work  guard.WaitGroup
	mu    sync.Mutex
	fail  error // of reading ahead
	err   error // sticky
}

func newStream(ctx context.Context, p *chunks, what string, segs []pack.Segment, whole bool) *stream {
	s := &stream{p: p, what: what, rest: segs, whole: whole}
	s.ctx, s.stop = context.WithCancel(ctx)
	var n int64
	for i := range segs {
		if n += int64(segs[i].Len); n > 2*aheadBytes {
			s.queue = make(chan chan [][]byte, 2*workers())
			s.work.Go(s.ahead)
			break
		}
	}
	return s
}

// ahead reads groups of segments side by side and hands them on in order.
func (s *stream) ahead() {
	defer close(s.queue)
	s.failed(guard.Do(func() error { s.readAhead(); return nil }))
}

// failed keeps the first error of reading ahead.
func (s *stream) failed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail == nil {
		s.fail = err
	}
}

func (s *stream) readAhead() {
	room := make(chan struct{}, workers())
	for len(s.rest) > 0 {
		n, bytes := 0, uint32(0)
		for n < len(s.rest) && bytes < aheadBytes {
			bytes += s.rest[n].Len
			n++
		}
		group, result := s.rest[:n], make(chan [][]byte, 1)
		s.rest = s.rest[n:]
		select {
		case s.queue <- result:
		case <-s.ctx.Done():
			return
		}
		room <- struct{}{}
		s.work.Go(func() {
			defer func() { <-room }()
			list := make([][]byte, 0, len(group))
			err := guard.Do(func() error {
				for i := range group {
					b, err := s.segment(&group[i])
					if err != nil {
						return err
					}
					list = append(list, b)
				}
				return nil
			})
			if err != nil {
				s.failed(err)
				list = nil
			}
			result <- list
		})
	}
}

func (s *stream) segment(g *pack.Segment) ([]byte, error) {
	b, err := s.p.read(s.ctx, g.ID)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.what, err)
	}
	if int64(g.Off)+int64(g.Len) > int64(len(b)) || s.whole && int(g.Len) != len(b) {
		return nil, fmt.Errorf("%s: piece %s has %d bytes, %d at %d are wanted: %w", s.what, g.ID, len(b), g.Len,
			g.Off, fault.ErrCorrupt)
	}
	return b[g.Off : g.Off+g.Len], nil
}

// next fetches the next segment.
func (s *stream) next() ([]byte, error) {
	if s.queue == nil {
		if len(s.rest) == 0 {
			return nil, io.EOF
		}
		b, err := s.segment(&s.rest[0])
		s.rest = s.rest[1:]
		return b, err
	}
	for len(s.done) == 0 {
		result, ok := <-s.queue
		if !ok {
			if err := s.ctx.Err(); err != nil {
				return nil, context.Cause(s.ctx)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			return nil, cmp.Or(s.fail, io.EOF)
		}
		if s.done = <-result; s.done == nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			return nil, s.fail
		}
	}
	b := s.done[0]
	s.done = s.done[1:]
	return b, nil
}

func (s *stream) Read(b []byte) (n int, err error) {
	if s.err != nil {
		return 0, s.err
	}
	for len(s.now) == 0 {
		if s.now, s.err = s.next(); s.err != nil {
			return 0, s.err
		}
	}
	n = copy(b, s.now)
	s.now = s.now[n:]
	return n, nil
}

// WriteTo spares a copy.
func (s *stream) WriteTo(w io.Writer) (n int64, err error) {
	for s.err == nil {
		if len(s.now) > 0 {
			k, err := w.Write(s.now)
			n += int64(k)
			s.now = s.now[k:]
			if err != nil {
				return n, err
			}
		}
		s.now, s.err = s.next()
	}
	if errors.Is(s.err, io.EOF) {
		return n, nil
	}
	return n, s.err
}

// Close ends what reads ahead.
func (s *stream) Close() error {
	if errors.Is(s.err, os.ErrClosed) {
		return os.ErrClosed
	}
	s.stop()
	if s.queue != nil {
		for result := range s.queue {
			<-result
		}
	}
	s.work.Wait()
	s.err, s.now, s.done = os.ErrClosed, nil, nil
	return nil
}

// proven holds a stream against its digest and length. The end of the stream
// is only reported when both are right.
type proven struct {
	s      *stream
	ctx    context.Context
	digest string
	bytes  int64
	hash   *blake3.Hasher
	n      int64
	err    error // sticky
}

func newProven(
	ctx context.Context, p *chunks, what string, segs []pack.Segment, whole bool, digest string, bytes int64,
) *proven {
	return &proven{s: newStream(ctx, p, what, segs, whole), ctx: ctx, digest: digest, bytes: bytes, hash: blake3.New()}
}

func (r *proven) Read(b []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	n, err := r.s.Read(b)
	_, _ = r.hash.Write(b[:n]) // never fails
	r.n += int64(n)
	if errors.Is(err, io.EOF) {
		err = r.finish()
	}
	r.err = err
	return n, err
}

// WriteTo spares a copy.
func (r *proven) WriteTo(w io.Writer) (int64, error) {
	if r.err != nil {
		if errors.Is(r.err, io.EOF) {
			return 0, nil
		}
		return 0, r.err
	}
	n, err := r.s.WriteTo(io.MultiWriter(w, r.hash))
	if r.n += n; err == nil {
		if r.err = r.finish(); !errors.Is(r.err, io.EOF) {
			err = r.err
		}
		return n, err
	}
	r.err = err
	return n, err
}

func (r *proven) finish() error {
	if r.n != r.bytes {
		return fmt.Errorf("%s has %d bytes, %d expected: %w", r.s.what, r.n, r.bytes, fault.ErrCorrupt)
	}
	if got := sum(r.hash); got != r.digest {
		return fmt.Errorf("%s has digest %s, %s expected: %w", r.s.what, got, r.digest, fault.ErrCorrupt)
	}
	return io.EOF
}

// Close reads to the end what the caller did not want, for only then it is
// known to be right, and returns what was found wrong, earlier or now.
func (r *proven) Close() error {
	if errors.Is(r.err, os.ErrClosed) {
		return os.ErrClosed
	}
	var err error
	if r.err == nil {
		_, err = io.Copy(io.Discard, r)
	} else if !errors.Is(r.err, io.EOF) {
		err = r.err
	}
	_ = r.s.Close() // it has nothing more to say
	r.err = os.ErrClosed
	return err
}
