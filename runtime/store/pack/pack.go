package pack

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
)

// MaxChunk is how many raw bytes a chunk can have.
const MaxChunk = 8 << 20

// ID names a chunk: the BLAKE3 hash of its raw bytes.
type ID [32]byte

const idPrefix = "blake3:"

// Sum returns the ID of a chunk.
func Sum(p []byte) ID { return blake3.Sum256(p) }

// String returns "blake3:" and 64 hex digits.
func (id ID) String() string { return idPrefix + hex.EncodeToString(id[:]) }

// ParseID takes exactly what String returns; all else is ErrInvalid.
func ParseID(s string) (ID, error) {
	var id ID
	if len(s) != len(idPrefix)+2*len(id) || s[:len(idPrefix)] != idPrefix {
		return ID{}, fmt.Errorf("digest %.80q: %w", s, fault.ErrInvalid)
	}
	digits, wrong := s[len(idPrefix):], byte(0)
	for i := range id {
		high, low := hexDigits[digits[2*i]], hexDigits[digits[2*i+1]]
		wrong |= high | low
		id[i] = high<<4 | low
	}
	if wrong > 15 {
		return ID{}, fmt.Errorf("digest %.80q: %w", s, fault.ErrInvalid)
	}
	return id, nil
}

// hexDigits has the values of the lower case hex digits, and 255.
var hexDigits = func() (t [256]byte) {
	for c := range t {
		t[c] = 255
	}
	for v, c := range []byte("0123456789abcdef") {
		t[c] = byte(v)
	}
	return t
}()

// Blob says where in a pack a chunk is.
type Blob struct {
	ID     ID
	Off    int64  // bytes from the beginning of the file
	Stored uint32 // bytes in the pack
	Raw    uint32 // bytes of the chunk
	Packed bool   // a zstd frame; else as it is
}

// The size of a pack beside the stored bytes of its chunks.
const (
	Overhead      = int64(len(headMagic)) + tailLen // once
	ChunkOverhead = recordLen                       // for each chunk
)

const (
	headMagic = "agbxpk1\n"
	tailMagic = "agbxend\n"
	recordLen = 32 + 4 + 4 + 1
	tailLen   = 8 + 32 + 8
	crcLen    = 4 // after a frame
)

// check holds what a chunk found anywhere has to fulfil before memory is
// given to it.
func (b *Blob) check() error {
	switch {
	case b.Raw == 0 || b.Raw > MaxChunk:
	case b.Packed && (b.Stored <= crcLen || b.Stored >= b.Raw):
	case !b.Packed && b.Stored != b.Raw:
	case b.Off < int64(len(headMagic)) || b.Off > 1<<62:
	default:
		return nil
	}
	return fmt.Errorf("piece %s: impossible lengths (%d stored, %d raw, at %d): %w", b.ID, b.Stored, b.Raw,
		b.Off, fault.ErrCorrupt)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// decoder is for DecodeAll only, which any number of goroutines may call. With
// the limit it never writes, nor allocates, beyond the room it is given.
var decoder = sync.OnceValues(func() (*zstd.Decoder, error) {
	return zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecodeAllCapLimit(true),
		zstd.WithDecoderMaxMemory(MaxChunk), zstd.WithDecoderMaxWindow(MaxChunk), zstd.WithDecoderLowmem(true))
})

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// borrow returns a buffer of n bytes from the pool.
func borrow(n int) *[]byte {
	b := buffers.Get().(*[]byte)
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	*b = (*b)[:n]
	return b
}

// ReadBlob reads one chunk and proves it against its ID, or returns ErrCorrupt. It uses the
// room of dst if that is enough. b may be hostile.
func ReadBlob(r io.ReaderAt, b Blob, dst []byte) ([]byte, error) {
	if err := b.check(); err != nil {
		return nil, err
	}
	raw := dst[:0]
	if cap(raw) < int(b.Raw) {
		raw = make([]byte, 0, b.Raw)
	}
	raw = raw[:0:b.Raw]
	if !b.Packed {
		raw = raw[:b.Raw]
		if err := readAt(r, b, raw); err != nil {
			return nil, err
		}
		return raw, prove(b, raw)
	}
	stored := borrow(int(b.Stored))
	defer buffers.Put(stored)
	if err := readAt(r, b, *stored); err != nil {
		return nil, err
	}
	return unpack(b, *stored, raw)
}

// unpack decompresses into the capacity of raw, which is b.Raw.
func unpack(b Blob, stored, raw []byte) ([]byte, error) {
	frame, sum := stored[:len(stored)-crcLen], stored[len(stored)-crcLen:]
	if crc32.Checksum(frame, castagnoli) != binary.LittleEndian.Uint32(sum) {
		return nil, fmt.Errorf("piece %s: its frame is not what it was: %w", b.ID, fault.ErrCorrupt)
	}
	dec, err := decoder()
	if err != nil {
		return nil, err
	}
	raw, err = dec.DecodeAll(frame, raw)
	if err != nil {
		return nil, fmt.Errorf("piece %s: %w: %w", b.ID, fault.ErrCorrupt, err)
	}
	if len(raw) != int(b.Raw) {
		return nil, fmt.Errorf("piece %s: %d bytes in place of %d: %w", b.ID, len(raw), b.Raw, fault.ErrCorrupt)
	}
	return raw, prove(b, raw)
}

// readAt fills p. A pack that ends too early is damaged; other errors are the disk's.
func readAt(r io.ReaderAt, b Blob, p []byte) error {
	n, err := r.ReadAt(p, b.Off)
	switch {
	case n == len(p):
		return nil
	case err == io.EOF:
		return fmt.Errorf("piece %s: the pack ends within it: %w", b.ID, fault.ErrCorrupt)
	case err == nil:
		err = io.ErrNoProgress
	}
	return fmt.Errorf("piece %s: %w", b.ID, err)
}

func prove(b Blob, raw []byte) error {
	if got := Sum(raw); got != b.ID {
		return fmt.Errorf("piece %s: its bytes are those of %s: %w", b.ID, got, fault.ErrCorrupt)
	}
	return nil
}
