package pack

import (
	"encoding/binary"
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
)

// Segment is a run of bytes inside a raw chunk.
type Segment struct {
	ID       ID
	Off, Len uint32 // bytes
}

const recipeVersion = 1

// EncodeRecipe writes segments as the package's comment says. Equal segments
// give equal bytes.
func EncodeRecipe(segments []Segment) []byte {
	number := map[ID]int{}
	var ids []ID
	for i := range segments {
		if _, there := number[segments[i].ID]; !there {
			number[segments[i].ID] = len(ids)
			ids = append(ids, segments[i].ID)
		}
	}
	b := make([]byte, 0, 16+len(ids)*32+len(segments)*7)
	b = append(b, recipeVersion)
	b = binary.AppendUvarint(b, uint64(len(ids)))
	for i := range ids {
		b = append(b, ids[i][:]...)
	}
	b = binary.AppendUvarint(b, uint64(len(segments)))
	last := 0
	for i := range segments {
		s := &segments[i]
		n := number[s.ID]
		b = binary.AppendVarint(b, int64(n-last))
		b = binary.AppendUvarint(b, uint64(s.Off))
		b = binary.AppendUvarint(b, uint64(s.Len))
		last = n
	}
	return b
}

// DecodeRecipe reads what EncodeRecipe wrote, and nothing else; size is the number of bytes
// of all segments. It returns ErrCorrupt for any other input. Memory is bounded by some 14
// times len(b).
func DecodeRecipe(b []byte, size int64) ([]Segment, error) {
	d := decode{b: b}
	if v := d.byte(); v != recipeVersion {
		d.fail("version %d", v)
	}
	n := d.uvarint()
	if n > uint64(len(d.b))/32 {
		d.fail("%d pieces", n)
	}
	if d.err != nil {
		return nil, d.err
	}
	ids := d.b[:n*32]
	d.b = d.b[n*32:]
	seen := make(map[ID]struct{}, n)
	for i := 0; i < len(ids); i += 32 {
		seen[ID(ids[i:])] = struct{}{}
	}
	if uint64(len(seen)) != n {
		return nil, d.fail("a piece twice")
	}
	count := d.uvarint()
	if count > uint64(len(d.b))/3 {
		d.fail("%d segments", count)
	}
	if d.err != nil {
		return nil, d.err
	}
	segments := make([]Segment, 0, count)
	var chunk, used uint64 // used: how many chunks had their first use
	for range count {
		chunk += uint64(d.varint())
		off, length := d.uvarint(), d.uvarint()
		switch {
		case d.err != nil:
			return nil, d.err
		case chunk > used || chunk >= n:
			return nil, d.fail("piece %d out of order", chunk)
		case length == 0 || length > MaxChunk || off > MaxChunk-length:
			return nil, d.fail("a segment of %d bytes at %d", length, off)
		}
		if chunk == used {
			used++
		}
		if size -= int64(length); size < 0 {
			return nil, d.fail("more bytes than the image has")
		}
		segments = append(segments, Segment{ID: ID(ids[chunk*32:]), Off: uint32(off), Len: uint32(length)})
	}
	switch {
	case used != n:
		return nil, d.fail("%d pieces are not used", n-used)
	case size != 0:
		return nil, d.fail("%d bytes are missing", size)
	case len(d.b) != 0:
		return nil, d.fail("%d bytes too many", len(d.b))
	}
	return segments, nil
}

// decode takes fields off the front of b until the first error.
type decode struct {
	b   []byte
	err error
}

func (d *decode) fail(format string, args ...any) error {
	if d.err == nil {
		d.err = fmt.Errorf("recipe: "+format+": %w", append(args, fault.ErrCorrupt)...)
	}
	return d.err
}

func (d *decode) byte() byte {
	if d.err != nil || len(d.b) == 0 {
		d.fail("it ends too early")
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decode) uvarint() uint64 {
	if d.err != nil {
		return 0
	}
	v, n := binary.Uvarint(d.b)
	// A last byte of 0 says nothing: there is a shorter form.
	if n <= 0 || n > 1 && d.b[n-1] == 0 {
		d.fail("a number is cut off or not in its shortest form")
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decode) varint() int64 {
	u := d.uvarint()
	return int64(u>>1) ^ -int64(u&1)
}
