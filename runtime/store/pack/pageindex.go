package pack

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/internal/fault"
)

// PageIndex knows in which chunk, and where in it, each page of an image is.
type PageIndex struct {
	ids    []ID
	begins []uint32   // chunk -> its first page in hashes
	hashes []PageHash // of all pages, chunk by chunk
	of     []uint32   // page -> its chunk
	// find leads from the first half of a hash to the page. Two pages with
	// the same half are found once: the other is only not shared.
	find map[uint64]uint32

	bytes int64 // of the table it was loaded from
	parts int   // of that table
}

// LoadPageIndex builds the index of an image from its table, which it reads from r to the
// end, and its recipe; chunks that the recipe does not use are skipped. parts is the
// number of parts (Pages.Table) the table was joined from. A malformed table is
// ErrCorrupt. The hashes are trusted: the table must come from the process that cut the
// image, for pages are not read again to prove them.
func LoadPageIndex(r io.Reader, recipe []Segment, parts int) (*PageIndex, error) {
	x := &PageIndex{find: map[uint64]uint32{}, parts: parts}
	uses := map[ID]struct{}{}
	for i := range recipe {
		uses[recipe[i].ID] = struct{}{}
	}
	br := bufio.NewReaderSize(r, 64<<10)
	var rec [33 + chunkPages*16]byte
	for {
		if _, err := io.ReadFull(br, rec[:33]); errors.Is(err, io.EOF) {
			return x, nil
		} else if err != nil {
			return nil, tableError(err)
		}
		n := int(rec[32])
		if n == 0 || n > chunkPages {
			return nil, fmt.Errorf("page table: a piece of %d pages: %w", n, fault.ErrCorrupt)
		}
		hashes := rec[33 : 33+n*16]
		if _, err := io.ReadFull(br, hashes); err != nil {
			return nil, tableError(err)
		}
		x.bytes += int64(33 + len(hashes))
		id := ID(rec[:32])
		if _, used := uses[id]; !used {
			continue
		}
		delete(uses, id) // a second record adds nothing
		x.begin(id)
		for ; len(hashes) > 0; hashes = hashes[16:] {
			x.page(PageHash(hashes))
		}
	}
}

func tableError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("page table: it ends within a record: %w", fault.ErrCorrupt)
	}
	return err
}

// begin begins a chunk.
func (x *PageIndex) begin(id ID) {
	x.ids = append(x.ids, id)
	x.begins = append(x.begins, uint32(len(x.hashes)))
}

// page adds a page to the chunk begun last.
func (x *PageIndex) page(h PageHash) {
	k := binary.LittleEndian.Uint64(h[:])
	if _, there := x.find[k]; !there {
		x.find[k] = uint32(len(x.hashes))
	}
	x.hashes = append(x.hashes, h)
	x.of = append(x.of, uint32(len(x.ids)-1))
}

func (x *PageIndex) lookup(h PageHash) (at uint32, there bool) {
	at, there = x.find[binary.LittleEndian.Uint64(h[:])]
	return at, there && x.hashes[at] == h
}

// next reports whether a page is followed by another one of the same chunk.
func (x *PageIndex) next(at uint32) bool {
	return int(at)+1 < len(x.of) && x.of[at+1] == x.of[at]
}

// place returns the chunk of a page, and the page's number in it.
func (x *PageIndex) place(at uint32) (chunk, page uint32) {
	chunk = x.of[at]
	return chunk, at - x.begins[chunk]
}

// pages returns the hashes of the i-th chunk.
func (x *PageIndex) pages(i int) []PageHash {
	end := len(x.hashes)
	if i+1 < len(x.begins) {
		end = int(x.begins[i+1])
	}
	return x.hashes[x.begins[i]:end]
}

func (x *PageIndex) recordLen(i int) int64 { return int64(33 + 16*len(x.pages(i))) }

// record appends the i-th chunk's record of a table.
func (x *PageIndex) record(b []byte, i int) []byte {
	pages := x.pages(i)
	b = append(b, x.ids[i][:]...)
	b = append(b, byte(len(pages)))
	for j := range pages {
		b = append(b, pages[j][:]...)
	}
	return b
}
