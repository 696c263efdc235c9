package registry

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/runtime/store/pack"
)

// maxNew is the size at which a new pack ends: large enough that there are few, small enough that a
// push that breaks has not lost much and that every registry takes it.
const maxNew = 512 << 20

// built is a pack that is ready to be pushed.
type built struct {
	path    string
	desc    v1.Descriptor
	entries []entry
	raw     int64
}

// build writes a pack of the first chunks of ids, which are sorted, to the
// new file path: as many as fit. The same chunks are the same bytes, so that a
// registry has them once.
func build(
	ctx context.Context, path string, ids []pack.ID, chunk func(context.Context, string) ([]byte, error), limit int64,
) (b *built, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			os.Remove(path)
		}
	}()
	sum := sha256.New()
	w := bufio.NewWriterSize(io.MultiWriter(f, sum), 256<<10)
	p, err := pack.NewSerial(w)
	if err != nil {
		return nil, err
	}
	b = &built{path: path}
	for _, id := range ids {
		if p.Size() >= limit || len(b.entries) == maxPackChunks {
			break
		}
		raw, err := chunk(ctx, id.String())
		if err != nil {
			return nil, err
		}
		at, err := p.Add(id, raw)
		if err != nil {
			return nil, err
		}
		b.entries = append(b.entries, entry{id, at.Stored})
		b.raw += int64(len(raw))
	}
	info, err := p.Finish()
	if err != nil {
		return nil, err
	}
	if err := w.Flush(); err != nil {
		return nil, err
	}
	b.desc = v1.Descriptor{
		MediaType: PackType, Size: info.Bytes, Digest: v1.Hash{
			Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil)),
		},
	}
	return b, nil
}

// blob is a v1.Layer that knows what it is.
type blob struct {
	desc v1.Descriptor
	open func() (io.ReadCloser, error)
	// sent is called with what was read of it in all, each time anew when the
	// library starts over.
	sent func(n int64)
}

var _ v1.Layer = (*blob)(nil)

func (b *blob) Digest() (v1.Hash, error)             { return b.desc.Digest, nil }
func (b *blob) DiffID() (v1.Hash, error)             { return b.desc.Digest, nil }
func (b *blob) Size() (int64, error)                 { return b.desc.Size, nil }
func (b *blob) MediaType() (types.MediaType, error)  { return b.desc.MediaType, nil }
func (b *blob) Uncompressed() (io.ReadCloser, error) { return b.Compressed() }
func (b *blob) Compressed() (io.ReadCloser, error) {
	r, err := b.open()
	if err != nil || b.sent == nil {
		return r, err
	}
	return &counted{ReadCloser: r, sent: b.sent}, nil
}

type counted struct {
	io.ReadCloser
	n    int64
	sent func(int64)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.ReadCloser.Read(p)
	c.n += int64(n)
	c.sent(c.n)
	return n, err
}
