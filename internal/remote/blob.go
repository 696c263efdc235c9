package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/agentbox/agentbox/internal/fault"
)

// Blob gives the bytes of a blob, without the first from ones. A transfer that
// breaks is continued. It ends after d.Size bytes or fails; whether they are the
// right ones is for the reader to prove.
func (c *Client) Blob(ctx context.Context, d v1.Descriptor, from int64) io.ReadCloser {
	return &blob{c: c, ctx: ctx, d: d, n: from, good: from}
}

type blob struct {
	c    *Client
	ctx  context.Context
	d    v1.Descriptor
	n    int64 // where the next byte to give lies
	err  error
	body io.ReadCloser // nil: to be asked for
	skip int64         // bytes of body that were had already
	// asked is the context of the request for body. timer ends it when it stands still.
	asked context.Context
	stop  context.CancelCauseFunc
	timer *time.Timer

	failures int
	good     int64 // n, when failures was last 0
}

func (b *blob) Read(p []byte) (int, error) {
	for b.err == nil {
		if b.n == b.d.Size {
			b.err = b.last()
			break
		}
		n, err := b.read(p)
		if n > 0 {
			b.n += int64(n)
			return n, nil // err comes again
		}
		if err != nil {
			b.end()
			b.err = b.again(err)
		}
	}
	return 0, b.err
}

// last looks for bytes that are too many. All that were promised are here: it
// is no matter how the transfer ends.
func (b *blob) last() error {
	if b.body == nil {
		return io.EOF
	}
	b.timer.Reset(b.c.opts.Idle)
	n, _ := b.body.Read(make([]byte, 1))
	b.end()
	if n > 0 {
		return fmt.Errorf("%s: %w: the registry sends more than its %d bytes", b.d.Digest, fault.ErrCorrupt, b.d.Size)
	}
	return io.EOF
}

// again decides what becomes of an error, and waits before the next try.
func (b *blob) again(err error) error {
	if b.ctx.Err() != nil {
		return context.Cause(b.ctx)
	}
	if b.n-b.good >= worthwhile {
		b.failures, b.good = 0, b.n
	}
	if b.failures++; b.failures == Tries || !passing(err) {
		return b.c.Explain(fmt.Errorf("%s: %w", b.d.Digest, err))
	}
	return b.c.sleep(b.ctx, b.failures, err)
}

// read reads from the body, after asking for it.
func (b *blob) read(p []byte) (int, error) {
	if b.body == nil {
		if err := b.ask(); err != nil {
			return 0, err
		}
	}
	// The timer runs only while waiting for bytes: the reader may take its time.
	b.timer.Reset(b.c.opts.Idle)
	defer b.timer.Stop()
	if b.skip > 0 {
		n, err := io.CopyN(io.Discard, b.body, min(b.skip, 256<<10))
		b.skip -= n
		return 0, b.cause(err)
	}
	if rest := b.d.Size - b.n; int64(len(p)) > rest {
		p = p[:rest]
	}
	n, err := b.body.Read(p)
	return n, b.cause(err)
}

// cause tells why a body ended.
func (b *blob) cause(err error) error {
	switch {
	case err == io.EOF:
		return errEarly
	case err != nil && errors.Is(context.Cause(b.asked), errStalled):
		return errStalled
	}
	return err
}

// ask sends the request for what is lacking.
func (b *blob) ask() error {
	header := rawBytes()
	if b.n > 0 {
		header["Range"] = fmt.Sprintf("bytes=%d-%d", b.n, b.d.Size-1)
	}
	ctx, stop := context.WithCancelCause(b.ctx)
	resp, err := b.c.Do(ctx, http.MethodGet, "blobs/"+b.d.Digest.String(), header, http.StatusOK,
		http.StatusPartialContent, http.StatusRequestedRangeNotSatisfiable)
	if err == nil && resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && b.n > 0 {
		resp.Body.Close()
		resp, err = b.c.Do(ctx, http.MethodGet, "blobs/"+b.d.Digest.String(), rawBytes(), http.StatusOK)
	}
	if err != nil {
		stop(nil)
		return err
	}
	b.body, b.asked, b.stop, b.skip = resp.Body, ctx, stop, b.n // unless the answer is that from n on
	b.timer = time.AfterFunc(b.c.opts.Idle, func() { stop(errStalled) })
	switch resp.StatusCode {
	case http.StatusRequestedRangeNotSatisfiable:
		return fmt.Errorf("%w: the registry does not have %d bytes of it", fault.ErrCorrupt, b.d.Size)
	case http.StatusPartialContent:
		var from, to, size int64
		if _, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-%d/%d", &from, &to, &size); err != nil ||
			from != b.n || to != b.d.Size-1 || size != b.d.Size || b.n == 0 {
			return fmt.Errorf("%w: the registry sends %.80q in place of the bytes from %d on", fault.ErrCorrupt,
				resp.Header.Get("Content-Range"), b.n)
		}
		b.skip = 0
	}
	if n := resp.ContentLength; n >= 0 && n != b.d.Size-b.n+b.skip {
		return fmt.Errorf("%w: the registry sends %d bytes in place of %d", fault.ErrCorrupt, n, b.d.Size-b.n+b.skip)
	}
	return nil
}

// end lets go of the request.
func (b *blob) end() {
	if b.body != nil {
		b.timer.Stop()
		b.stop(nil)
		b.body.Close()
		b.body = nil
	}
}

// Close ends the transfer.
func (b *blob) Close() error {
	b.end()
	if b.err == nil {
		b.err = errors.New("read after close")
	}
	return nil
}
