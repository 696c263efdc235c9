package layer

import (
	"bytes"
	"io"
	"runtime"
	"sync"

	"github.com/klauspost/compress/gzip"

	"github.com/agentbox/agentbox/internal/guard"
)

// Compression names how Compress does it: as long as it is the same, equal
// streams are compressed to equal bytes, on any machine.
const Compression = "gzip-6 1MiB klauspost-1.20"

const member = 1 << 20

// Compress gives r as gzip, in members of a mebibyte that are made side by side.
func Compress(r io.Reader) io.ReadCloser {
	pr, pw := io.Pipe()
	done := make(chan struct{})
	guard.Go(func() {
		defer close(done)
		_ = pw.CloseWithError(guard.Do(func() error { return compress(r, pw) })) // never fails
	})
	return &compressor{pr, done}
}

type compressor struct {
	*io.PipeReader
	done chan struct{}
}

func (c *compressor) Close() error {
	err := c.PipeReader.Close()
	<-c.done
	return err
}

var gzips = sync.Pool{New: func() any {
	z, err := gzip.NewWriterLevel(io.Discard, 6)
	if err != nil {
		panic(err) // a level that there is
	}
	return z
}}

func compress(r io.Reader, w io.Writer) error {
	type piece struct {
		data []byte
		err  error
	}
	type job chan piece
	queue := make(chan job, runtime.GOMAXPROCS(0))
	stop := make(chan struct{})
	written := guard.Start(func() error {
		var err error
		for j := range queue {
			p := <-j
			if err != nil {
				continue
			}
			if err = p.err; err == nil {
				err = guard.Do(func() error { _, err := w.Write(p.data); return err })
			}
			if err != nil {
				close(stop)
			}
		}
		return err
	})
	var err error
	for n := 0; err == nil; n++ {
		buf := make([]byte, member)
		var k int
		if k, err = io.ReadFull(r, buf); k == 0 && n > 0 {
			break
		}
		j := make(job, 1)
		select {
		case queue <- j:
		case <-stop:
			err = io.ErrClosedPipe
			continue
		}
		guard.Go(func() {
			var out bytes.Buffer
			err := guard.Do(func() error {
				z := gzips.Get().(*gzip.Writer)
				defer gzips.Put(z)
				z.Reset(&out)
				_, _ = z.Write(buf[:k]) // to memory
				return z.Close()
			})
			j <- piece{out.Bytes(), err}
		})
	}
	close(queue)
	if werr := <-written; werr != nil {
		return werr
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil
	}
	return err
}
