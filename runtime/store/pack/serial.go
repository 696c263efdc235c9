package pack

import (
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/agentbox/agentbox/internal/fault"
)

// Serial writes a pack to a stream, chunk by chunk: the same chunks in the same
// order are the same bytes, which those of a Writer are not. It compresses more
// and takes longer. It is not for concurrent use, and after an error of no more use.
type Serial struct {
	w     io.Writer
	enc   *zstd.Encoder
	room  []byte
	off   int64
	blobs []Blob
}

// NewSerial begins a pack. Finish ends it; an abandoned one needs no cleanup.
func NewSerial(w io.Writer) (*Serial, error) {
	enc, err := newEncoder(zstd.SpeedDefault, 1)
	if err != nil {
		return nil, err
	}
	s := &Serial{w: w, enc: enc}
	return s, s.write([]byte(headMagic))
}

// Add writes a chunk, which must not have been added before. Bytes that are
// not the ID's are ErrCorrupt.
func (s *Serial) Add(id ID, raw []byte) (Blob, error) {
	b := Blob{ID: id, Off: s.off, Raw: uint32(len(raw))}
	if len(raw) == 0 || len(raw) > MaxChunk {
		return b, fmt.Errorf("a piece of %d bytes; 1 to %d are possible: %w", len(raw), MaxChunk, fault.ErrInvalid)
	}
	if err := prove(b, raw); err != nil {
		return b, err
	}
	stored := raw
	if s.room, b.Packed = compress(s.enc, raw, s.room); b.Packed {
		stored = s.room
	}
	b.Stored = uint32(len(stored))
	s.blobs = append(s.blobs, b)
	return b, s.write(stored)
}

// Size returns how many bytes are written.
func (s *Serial) Size() int64 { return s.off }

// Finish writes the footer. A pack has at least one chunk. Temp of the Info is empty.
func (s *Serial) Finish() (Info, error) {
	if len(s.blobs) == 0 {
		return Info{}, fmt.Errorf("a pack without pieces: %w", fault.ErrInvalid)
	}
	name, n, err := writeFooter(s.w, s.blobs)
	s.off += n
	return Info{Name: name, Bytes: s.off, Blobs: s.blobs}, err
}

func (s *Serial) write(p []byte) error {
	n, err := s.w.Write(p)
	s.off += int64(n)
	return err
}
