package pack

import (
	"errors"
	"io"
	"sync"

	chunkers "github.com/PlakarKorp/go-cdc-chunkers"
	_ "github.com/PlakarKorp/go-cdc-chunkers/chunkers/fastcdc" // registers cutter

	"github.com/agentbox/agentbox/internal/fault"
)

// The rules of Cut. They are part of the format and never change.
const (
	cutter  = "fastcdc-v1.0.0"
	wholeTo = 256 << 10 // up to here data is one chunk
	minCut  = 64 << 10
	avgCut  = 256 << 10
	maxCut  = 1 << 20
)

var windows = sync.Pool{New: func() any { b := make([]byte, 2*maxCut); return &b }}

// Cut reads size bytes and gives them to emit in chunks, front to back: up to 256 KiB in one,
// more in chunks of 64 KiB to 1 MiB (256 KiB on average, the last may be shorter) that end
// where the content says, so that equal runs in different places become equal chunks. No data,
// no chunk. The slice given to emit is valid until emit returns. Errors of r and of emit are
// returned as they are; a reader that ends before size bytes is io.ErrUnexpectedEOF.
func Cut(size int64, r io.Reader, emit func(raw []byte) error) error {
	switch {
	case size < 0:
		return fault.ErrInvalid
	case size == 0:
		return nil
	case size <= wholeTo:
		buf := borrow(int(size))
		defer buffers.Put(buf)
		if _, err := io.ReadFull(r, *buf); err != nil {
			return short(err)
		}
		return emit(*buf)
	}
	window := windows.Get().(*[]byte)
	defer windows.Put(window)
	c, err := chunkers.NewChunkerBuffer(cutter, io.LimitReader(r, size),
		&chunkers.ChunkerOpts{MinSize: minCut, NormalSize: avgCut, MaxSize: maxCut}, *window)
	if err != nil {
		return err
	}
	for {
		// With its last chunk Next may return io.EOF or not, and then nothing.
		p, err := c.Next()
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if size -= int64(len(p)); len(p) > 0 {
			if err := emit(p); err != nil {
				return err
			}
		}
		if err != nil || size == 0 {
			if size != 0 {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
	}
}

func short(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
