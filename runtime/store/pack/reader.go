package pack

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
)

// Reader reads a pack.
type Reader struct {
	f      io.ReaderAt
	size   int64
	footer int64 // where it begins
	count  int64
	sum    [32]byte
}

// Open reads the footer of a pack through once, proves it, and proves that the
// file is exactly what it describes; what is not is ErrCorrupt. The file stays
// the caller's, and has to stay open. Memory does not grow with the pack.
func Open(f *os.File) (*Reader, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("pack %s is not a plain file: %w", f.Name(), fault.ErrCorrupt)
	}
	r, err := open(f, info.Size())
	if err != nil {
		return nil, fmt.Errorf("pack %s: %w", f.Name(), err)
	}
	return r, nil
}

func open(f io.ReaderAt, size int64) (*Reader, error) {
	bad := func(format string, args ...any) error {
		return fmt.Errorf(format+": %w", append(args, fault.ErrCorrupt)...)
	}
	if size < int64(len(headMagic))+1+recordLen+tailLen {
		return nil, bad("%d bytes are too few", size)
	}
	var head [len(headMagic)]byte
	if err := fill(f, 0, head[:]); err != nil {
		return nil, err
	}
	var tail [tailLen]byte
	if err := fill(f, size-tailLen, tail[:]); err != nil {
		return nil, err
	}
	if string(head[:]) != headMagic || string(tail[40:]) != tailMagic {
		return nil, bad("not a pack, or not a whole one")
	}
	count := binary.LittleEndian.Uint64(tail[:8])
	// Each chunk has a record and at least one byte.
	if room := size - int64(len(headMagic)) - tailLen; count == 0 || count > uint64(room)/(recordLen+1) {
		return nil, bad("%d pieces are not possible in %d bytes", count, size)
	}
	r := &Reader{f: f, size: size, count: int64(count), sum: [32]byte(tail[8:40])}
	r.footer = size - tailLen - r.count*recordLen
	return r, r.Each(func(Blob) error { return nil })
}

func fill(f io.ReaderAt, off int64, p []byte) error {
	n, err := f.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == io.EOF {
		return fmt.Errorf("it ends too early: %w", fault.ErrCorrupt)
	}
	return err
}

// Name returns the name of the pack: 64 hex digits.
func (r *Reader) Name() string { return hex.EncodeToString(r.sum[:]) }

// Bytes is the size of the file.
func (r *Reader) Bytes() int64 { return r.size }

// Count returns the number of chunks.
func (r *Reader) Count() int64 { return r.count }

// Each calls fn for every chunk, in the order of offsets. It reads and proves
// the footer again as it goes: until it has returned nil, what fn was given may
// be wrong, though never out of bounds.
func (r *Reader) Each(fn func(Blob) error) error {
	br := bufio.NewReaderSize(io.NewSectionReader(r.f, r.footer, r.count*recordLen+8), 64<<10)
	h := blake3.New()
	off := int64(len(headMagic))
	for range r.count {
		rec, err := br.Peek(recordLen)
		if err != nil {
			return early(err)
		}
		_, _ = h.Write(rec) // a hash does not fail
		b := Blob{
			ID: ID(rec[:32]), Off: off, Stored: binary.LittleEndian.Uint32(rec[32:]),
			Raw: binary.LittleEndian.Uint32(rec[36:]), Packed: rec[40] == 1,
		}
		if rec[40] > 1 {
			return fmt.Errorf("piece %s is stored in an unknown way (%d): %w", b.ID, rec[40], fault.ErrCorrupt)
		}
		if err := b.check(); err != nil {
			return err
		}
		off += int64(b.Stored)
		if off > r.footer {
			return fmt.Errorf("piece %s reaches into the footer: %w", b.ID, fault.ErrCorrupt)
		}
		if err := fn(b); err != nil {
			return err
		}
		_, _ = br.Discard(recordLen) // peeked
	}
	n, err := br.Peek(8)
	if err != nil {
		return early(err)
	}
	_, _ = h.Write(n)
	if off != r.footer {
		return fmt.Errorf("%d bytes belong to no piece: %w", r.footer-off, fault.ErrCorrupt)
	}
	if [32]byte(h.Sum(nil)) != r.sum {
		return fmt.Errorf("the footer is not what it was: %w", fault.ErrCorrupt)
	}
	return nil
}

func early(err error) error {
	if err == io.EOF {
		return fmt.Errorf("it ends too early: %w", fault.ErrCorrupt)
	}
	return err
}

// Blobs lists the chunks, in the order of offsets. It needs 56 bytes for each;
// see Each.
func (r *Reader) Blobs() ([]Blob, error) {
	var list []Blob
	err := r.Each(func(b Blob) error { list = append(list, b); return nil })
	if err != nil {
		return nil, err
	}
	return list, nil
}

// Read is ReadBlob on this pack.
func (r *Reader) Read(b Blob, dst []byte) ([]byte, error) { return ReadBlob(r.f, b, dst) }
