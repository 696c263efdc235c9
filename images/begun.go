package images

import (
	"context"
	"io"
	"os"

	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/flock"
)

// Smaller blobs are fetched again from their beginning.
const minPartial = 1 << 20

// begun keeps what has come of a blob for the next pull. It is a help, no
// more: whatever goes wrong with it only ends it.
type begun struct {
	f    *os.File      // nil: none
	lock *flock.Handle // of f
	have int64         // bytes that are in it
	at   int64         // bytes of the blob seen
}

func (s *Store) begun(l source.Layer) *begun {
	p := &begun{}
	hex, ok := hexOf(l.Digest)
	if !ok || l.Resume == nil || l.Size < minPartial {
		return p
	}
	lock, err := flock.Try(s.path("tmp", tmpPartial+hex), 0)
	if err != nil {
		return p
	}
	fi, err := lock.File().Stat()
	if err != nil {
		lock.Unlock()
		return p
	}
	p.f, p.lock, p.have = lock.File(), lock, fi.Size()
	if p.have >= l.Size {
		p.have = 0
	}
	return p
}

func (p *begun) open(ctx context.Context, l source.Layer) (io.ReadCloser, error) {
	if p.f == nil || p.have == 0 {
		return l.Open(ctx)
	}
	return l.Resume(ctx, io.NewSectionReader(p.f, 0, p.have))
}

// see is given the blob in order.
func (p *begun) see(b []byte) {
	from := p.at
	p.at += int64(len(b))
	if p.f == nil || p.at <= p.have {
		return
	}
	b = b[max(0, p.have-from):]
	if _, err := p.f.WriteAt(b, p.at-int64(len(b))); err != nil {
		p.forget()
	}
}

func (p *begun) forget() {
	if p.f != nil {
		_ = os.Remove(p.f.Name())
		p.close()
	}
}

func (p *begun) close() {
	if p.f == nil {
		return
	}
	if p.have == 0 && p.at < minPartial { // nothing worth keeping
		_ = os.Remove(p.f.Name())
	} else if p.at > p.have {
		err := p.f.Truncate(p.at)
		if err != nil {
			_ = os.Remove(p.f.Name())
		}
	}
	p.lock.Unlock()
	p.f = nil
}
