package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	goruntime "runtime"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	// chunkSize is what one goroutine compresses into one zstd frame. Larger
	// compresses a little better, smaller spreads a stream over more cores.
	chunkSize = 1 << 20
	// flushEvery is how much is written before the kernel is asked to begin
	// writing it to the disk.
	flushEvery = 8 << 20
	// maxWindow bounds the memory that a frame of a foreign archive may ask for.
	maxWindow = 64 << 20
)

// blobWriter compresses a stream into a file. zstd's own concurrency keeps
// two cores busy at most, so the stream is cut into independent frames that
// are compressed side by side and written in order: by the format, frames
// one after another are one stream.
type blobWriter struct {
	name string
	f    *os.File
	enc  *zstd.Encoder

	in     sync.Mutex // guards the next five: Abort may come while somebody writes
	buf    []byte
	raw    int64
	queue  chan chan []byte // frames in order; each arrives when it is compressed
	closed bool
	result error // of Close

	ended chan struct{} // closed when the last frame is on its way to the disk

	mu  sync.Mutex
	err error // the first write error

	// The writing goroutine's until ended is closed.
	hash    *blake3.Hasher
	written int64
	flushed int64

	synced chan error // what fsync and close said
}

var (
	errClosed    = errors.New("stream is closed")
	errAbandoned = errors.New("checkpoint was abandoned")
)

func newEncoder() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(workers()),
		zstd.WithWindowSize(chunkSize), zstd.WithZeroFrames(true))
}

func workers() int { return min(goruntime.GOMAXPROCS(0), 16) }

func newBlobWriter(dir, name string, enc *zstd.Encoder) (*blobWriter, error) {
	f, err := os.OpenFile(dir+"/"+name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	w := &blobWriter{
		name: name, f: f, enc: enc, hash: blake3.New(),
		queue: make(chan chan []byte, workers()), ended: make(chan struct{}), synced: make(chan error, 1),
	}
	go w.drain()
	return w, nil
}

func (w *blobWriter) Write(p []byte) (n int, err error) {
	w.in.Lock()
	defer w.in.Unlock()
	if w.closed {
		return 0, fmt.Errorf("%s: %w", w.name, errClosed)
	}
	for len(p) > 0 {
		if err := w.failed(); err != nil {
			return n, err
		}
		if w.buf == nil {
			w.buf = (*buffers.Get().(*[]byte))[:0]
		}
		k := min(chunkSize-len(w.buf), len(p))
		w.buf = append(w.buf, p[:k]...)
		p, n = p[k:], n+k
		w.raw += int64(k)
		if len(w.buf) == chunkSize {
			w.submit()
		}
	}
	return n, nil
}

func (w *blobWriter) submit() {
	frame := make(chan []byte, 1)
	w.queue <- frame
	go func(buf []byte) {
		frame <- w.enc.EncodeAll(buf, make([]byte, 0, len(buf)/2+1024))
		if buf = buf[:cap(buf)]; len(buf) == chunkSize { // an empty stream has none
			buffers.Put(&buf)
		}
	}(w.buf)
	w.buf = nil
}

// drain writes the frames in order. After an error it only takes them away,
// so that nobody waits for it.
func (w *blobWriter) drain() {
	defer close(w.ended)
	for frame := range w.queue {
		b := <-frame
		if w.failed() != nil {
			continue
		}
		if _, err := w.f.Write(b); err != nil {
			w.fail(err)
			continue
		}
		_, _ = w.hash.Write(b) // never fails
		w.written += int64(len(b))
		if w.written-w.flushed >= flushEvery {
			startWriteback(w.f, w.flushed, w.written-w.flushed)
			w.flushed = w.written
		}
	}
}

func (w *blobWriter) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *blobWriter) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

// Close writes what is left. Its error counts: without nil from Close the
// stream is not complete. The fsync goes on behind it; Commit waits for it.
func (w *blobWriter) Close() error {
	w.in.Lock()
	defer w.in.Unlock()
	if w.closed {
		return w.result
	}
	w.closed = true
	if w.failed() == nil && (len(w.buf) > 0 || w.raw == 0) {
		w.submit()
	}
	close(w.queue)
	<-w.ended
	w.result = w.failed()
	go func() {
		var err error
		if w.result == nil {
			err = w.f.Sync()
		}
		w.synced <- errors.Join(err, w.f.Close())
	}()
	return w.result
}

// abandon ends the stream without finishing it.
func (w *blobWriter) abandon() {
	w.fail(errAbandoned)
	_ = w.Close()          // the stream is thrown away
	w.synced <- <-w.synced // but its file must be closed before it is removed
}

// wait returns what the file has become, once it is durable.
func (w *blobWriter) wait() (Blob, error) {
	w.in.Lock()
	defer w.in.Unlock()
	if !w.closed {
		return Blob{}, fmt.Errorf("%s was not closed: %w", w.name, fault.ErrInvalid)
	}
	if w.result != nil {
		return Blob{}, w.result
	}
	err := <-w.synced
	w.synced <- err
	if err != nil {
		return Blob{}, err
	}
	return Blob{Name: w.name, Digest: sum(w.hash), Bytes: w.written, Raw: w.raw}, nil
}

// blobReader decompresses a stored file and holds it against its digest and
// its lengths. The end of the stream is only reported when all are right.
type blobReader struct {
	ctx  context.Context
	want Blob
	f    *os.File
	src  *hashingReader
	dec  *zstd.Decoder
	raw  int64
	err  error // sticky
}

// hashingReader hashes what passes, and remembers an error of the disk so
// that it is not mistaken for damage.
type hashingReader struct {
	f    *os.File
	hash *blake3.Hasher
	n    int64
	err  error
}

func (r *hashingReader) Read(p []byte) (int, error) {
	n, err := r.f.Read(p)
	_, _ = r.hash.Write(p[:n]) // never fails
	r.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

func newBlobReader(ctx context.Context, dir *os.File, want Blob) (*blobReader, error) {
	f, info, err := openPlain(dir, want.Name)
	if err != nil {
		return nil, missing(want.Name, err)
	}
	r := &blobReader{ctx: ctx, want: want, f: f, src: &hashingReader{f: f, hash: blake3.New()}}
	if info.Size() != want.Bytes {
		_ = f.Close()
		return nil, fmt.Errorf("%s has %d bytes, %d expected: %w", want.Name, info.Size(), want.Bytes, fault.ErrCorrupt)
	}
	r.dec, err = zstd.NewReader(r.src, zstd.WithDecoderConcurrency(min(workers(), 4)), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return r, nil
}

func (r *blobReader) Read(p []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	if err := r.ctx.Err(); err != nil {
		r.err = context.Cause(r.ctx)
		return 0, r.err
	}
	n, err := r.dec.Read(p)
	r.raw += int64(n)
	switch {
	case r.raw > r.want.Raw:
		r.err = fmt.Errorf("%s unpacks to more than %d bytes: %w", r.want.Name, r.want.Raw, fault.ErrCorrupt)
		return 0, r.err
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF):
		r.err = r.finish()
	case r.src.err != nil:
		r.err = r.src.err
	default:
		r.err = fmt.Errorf("%s: %w: %w", r.want.Name, fault.ErrCorrupt, err)
	}
	return n, r.err
}

// finish runs when the decoder has seen the end of the file.
func (r *blobReader) finish() error {
	switch got := sum(r.src.hash); {
	case r.raw != r.want.Raw:
		return fmt.Errorf("%s unpacks to %d bytes, %d expected: %w", r.want.Name, r.raw, r.want.Raw, fault.ErrCorrupt)
	case r.src.n != r.want.Bytes:
		return fmt.Errorf("%s has %d bytes, %d expected: %w", r.want.Name, r.src.n, r.want.Bytes, fault.ErrCorrupt)
	case got != r.want.Digest:
		return fmt.Errorf("%s has digest %s, %s expected: %w", r.want.Name, got, r.want.Digest, fault.ErrCorrupt)
	}
	return io.EOF
}

// Close reads to the end what the caller did not want, for only then it is
// known to be right, and returns what was found wrong, earlier or now.
func (r *blobReader) Close() error {
	if r.f == nil {
		return os.ErrClosed
	}
	var err error
	if r.err == nil {
		_, err = io.Copy(io.Discard, r)
	} else if !errors.Is(r.err, io.EOF) {
		err = r.err
	}
	r.dec.Close()
	err = errors.Join(err, r.f.Close())
	r.f, r.err = nil, os.ErrClosed
	return err
}

// missing turns "no such file" inside a published checkpoint into what it is.
func missing(name string, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s is missing: %w", name, fault.ErrCorrupt)
	}
	return err
}
