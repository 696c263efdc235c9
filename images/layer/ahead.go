package layer

import (
	"io"
	"sync"

	"github.com/agentbox/agentbox/internal/guard"
)

const (
	blockSize = 256 << 10
	blocks    = 8
)

// Ahead reads in a goroutine of its own what another will want.
type Ahead struct {
	full chan block
	free chan []byte
	stop chan struct{}
	done chan struct{}
	once sync.Once

	now  block
	left []byte // of now
}

type block struct {
	buf []byte
	n   int
	err error
}

// ReadAhead reads r up to 2 MiB ahead. The function see, if any, is given all
// bytes in order, by the goroutine that reads.
func ReadAhead(r io.Reader, see func([]byte)) *Ahead {
	a := &Ahead{
		full: make(chan block, blocks), free: make(chan []byte, blocks), stop: make(chan struct{}),
		done: make(chan struct{}),
	}
	for range blocks {
		a.free <- nil // made when first used: most layers are small
	}
	guard.Go(func() { a.run(r, see) })
	return a
}

func (a *Ahead) run(r io.Reader, see func([]byte)) {
	defer close(a.done)
	defer close(a.full)
	for {
		var buf []byte
		select {
		case buf = <-a.free:
		case <-a.stop:
			return
		}
		if buf == nil {
			buf = make([]byte, blockSize)
		}
		n := 0
		err := guard.Do(func() (err error) {
			for n < len(buf) && err == nil {
				var m int
				m, err = r.Read(buf[n:])
				n += m
			}
			if see != nil {
				see(buf[:n])
			}
			return err
		})
		select {
		case a.full <- block{buf, n, err}:
		case <-a.stop:
			return
		}
		if err != nil {
			return
		}
	}
}

// Read is for one goroutine at a time.
func (a *Ahead) Read(p []byte) (int, error) {
	for len(a.left) == 0 {
		if a.now.err != nil {
			return 0, a.now.err
		}
		if a.now.buf != nil {
			a.free <- a.now.buf
		}
		var ok bool
		if a.now, ok = <-a.full; !ok {
			a.now.err = io.ErrClosedPipe
		}
		a.left = a.now.buf[:a.now.n]
	}
	n := copy(p, a.left)
	a.left = a.left[n:]
	return n, nil
}

// Close ends the goroutine, and waits for a Read that it is in.
func (a *Ahead) Close() error {
	a.once.Do(func() { close(a.stop) })
	<-a.done
	return nil
}
