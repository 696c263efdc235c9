package overlay

import (
	"context"
	"sync"

	"github.com/agentbox/agentbox/internal/guard"
)

// copyBuf is the unit in which larger files are moved.
const copyBuf = 1 << 20

var buffers = sync.Pool{New: func() any { return new([copyBuf]byte) }}

// inBuffers moves size bytes from fill to use, at most copyBuf at a time. More
// than one buffer is filled in a goroutine of its own, a little ahead, so that
// reading overlaps with hashing and writing. fill fills all it is given; when
// inBuffers returns, neither is running any more.
func inBuffers(size int64, fill, use func(p []byte) error) error {
	if size <= copyBuf {
		buf := buffers.Get().(*[copyBuf]byte)
		defer buffers.Put(buf)
		p := buf[:size]
		if err := fill(p); err != nil {
			return err
		}
		return use(p)
	}
	type filled struct {
		buf *[copyBuf]byte
		n   int
		err error
	}
	full := make(chan filled, 2)
	stop := make(chan struct{})
	guard.Go(func() {
		defer close(full)
		for left := size; left > 0; {
			p := filled{buf: buffers.Get().(*[copyBuf]byte), n: int(min(left, copyBuf))}
			p.err = guard.Do(func() error { return fill(p.buf[:p.n]) })
			left -= int64(p.n)
			select {
			case full <- p:
			case <-stop:
				return
			}
			if p.err != nil {
				return
			}
		}
	})
	var err error
	for p := range full {
		if err == nil {
			if err = p.err; err == nil {
				err = use(p.buf[:p.n])
			}
			if err != nil {
				close(stop) // and go on until full is closed
			}
		}
		buffers.Put(p.buf)
	}
	return err
}

// fileReader returns a fill for inBuffers that reads a file's data.
func fileReader(ctx context.Context, fd int, e *Entry) func(p []byte) error {
	spans := e.spans()
	var at int64 // in the first of spans
	return func(p []byte) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		for len(p) > 0 {
			x := spans[0]
			n := min(int64(len(p)), x.Len-at)
			if err := readFull(fd, p[:n], x.Off+at, e.Path); err != nil {
				return err
			}
			p = p[n:]
			if at += n; at == x.Len {
				spans, at = spans[1:], 0
			}
		}
		return nil
	}
}
