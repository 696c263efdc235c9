package source

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// proof is a blob that is proven when it has been read to its end.
type proof struct {
	r      io.Reader
	closer io.Closer
	done   context.CancelFunc // nil: none
	digest string
	size   int64
	n      int64
	sum    hash.Hash
	err    error
}

func prove(r io.Reader, closer io.Closer, digest string, size int64) *proof {
	return &proof{r: r, closer: closer, digest: digest, size: size, sum: sha256.New()}
}

func (p *proof) Read(b []byte) (int, error) {
	if p.err != nil {
		return 0, p.err
	}
	n, err := p.r.Read(b)
	p.n += int64(n)
	p.sum.Write(b[:n])
	switch {
	case p.n > p.size:
		err = fmt.Errorf("%s: %w: it has more than its %d bytes", p.digest, fault.ErrCorrupt, p.size)
	case err == io.EOF && p.n < p.size:
		err = fmt.Errorf("%s: %w: it ends after %d of %d bytes", p.digest, fault.ErrCorrupt, p.n, p.size)
	case err == io.EOF:
		if got := "sha256:" + hex.EncodeToString(p.sum.Sum(nil)); got != p.digest {
			err = fmt.Errorf("%s: %w: its bytes are those of %s", p.digest, fault.ErrCorrupt, got)
		}
	}
	p.err = err
	return n, err
}

func (p *proof) Close() error {
	err := p.closer.Close()
	if p.done != nil {
		p.done()
	}
	return err
}

// whole reads all of a proven blob into memory.
func (p *proof) whole() ([]byte, error) {
	defer p.Close()
	return io.ReadAll(p)
}

// bounded gives ctx the timeout of the options; 0: none.
func bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	if timeout > 0 {
		return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w: it took longer than %s",
			context.DeadlineExceeded, timeout))
	}
	return context.WithCancel(ctx)
}
