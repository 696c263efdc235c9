package pack

import (
	"errors"
	"io"
	goruntime "runtime"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/guard"
)

const (
	// PageSize is the size of the pages of process images, in bytes.
	PageSize   = 4096
	chunkPages = 16 // of a chunk that CutPages makes: little is kept for the sake of one page that is still in use
	blockPages = 256
	maxTables  = 64 // parts of a table before it is written anew
)

// PageHash is the first 16 bytes of the BLAKE3 of a page.
type PageHash [16]byte

func hashPage(p []byte) PageHash {
	h := blake3.Sum256(p)
	return PageHash(h[:16])
}

// Pages is the result of CutPages for an image.
type Pages struct {
	Segments []Segment // all of it, front to back
	Size     int64     // bytes read
	// Table is to be added to the table of the earlier image or, with Fresh set, is a table for
	// this image alone. It may be empty.
	Table []byte
	Fresh bool
}

// CutPages reads an image of pages to its end. A page that is in old (nil: no
// earlier image), or was there before in this image, is only referred to; new
// ones go to add in chunks of 16, and what is left in the end that is no whole
// page is a chunk by itself. add returns the chunk's ID; what it is given is
// valid until it returns. Memory is some 90 bytes per new page. Errors of r and
// of add are returned as they are.
func CutPages(r io.Reader, old *PageIndex, add func(raw []byte) (ID, error)) (Pages, error) {
	c := &cutting{old: old, add: add, chunk: make([]byte, 0, chunkPages*PageSize)}
	c.new.find = map[uint64]uint32{}
	if old != nil {
		c.taken = make([]uint32, len(old.ids))
	}
	if err := hashPages(r, c.block); err != nil {
		return Pages{}, err
	}
	return c.finish()
}

// block is a run of pages with their hashes.
type block struct {
	data   []byte
	hashes []PageHash // of the whole pages in data
	err    error      // of the reader, after data
	bad    error      // from hashing
	done   chan struct{}
}

// hashPages reads ahead, hashes with all processors, and calls use in order.
// When it returns, r is not read any more.
func hashPages(r io.Reader, use func(b *block) error) error {
	n := min(goruntime.GOMAXPROCS(0), maxWorkers)
	free := make(chan *block, n+2)
	for range n + 2 {
		free <- &block{data: make([]byte, blockPages*PageSize)}
	}
	todo := make(chan *block, n+2)
	ordered := make(chan *block, n+2)
	stop := make(chan struct{})
	var g guard.WaitGroup
	for range n {
		g.Go(func() {
			for b := range todo {
				err := guard.Do(func() error {
					for p := b.data; len(p) >= PageSize; p = p[PageSize:] {
						b.hashes = append(b.hashes, hashPage(p[:PageSize]))
					}
					return nil
				})
				if err != nil {
					b.bad = err
				}
				close(b.done)
			}
		})
	}
	g.Go(func() {
		defer close(ordered)
		defer close(todo)
		for {
			var b *block
			select {
			case b = <-free:
			case <-stop:
				return
			}
			m := 0
			err := guard.Do(func() (err error) {
				m, err = io.ReadFull(r, b.data[:cap(b.data)])
				return err
			})
			b.data, b.hashes, b.err, b.done = b.data[:m], b.hashes[:0], err, make(chan struct{})
			todo <- b // has room for all blocks, as ordered has
			ordered <- b
			if err != nil {
				return
			}
		}
	})
	defer g.Wait()
	defer close(stop)
	for b := range ordered {
		<-b.done
		if b.bad != nil {
			return b.bad
		}
		if err := use(b); err != nil {
			return err
		}
		if b.err != nil && !errors.Is(b.err, io.EOF) && !errors.Is(b.err, io.ErrUnexpectedEOF) {
			return b.err
		}
		free <- b
	}
	return nil
}

// run is a Segment whose chunk may not have its ID yet: chunk is an index into
// cutting.ids.
type run struct{ chunk, off, len uint32 }

type cutting struct {
	old   *PageIndex
	add   func([]byte) (ID, error)
	ids   []ID     // every chunk that is referred to
	taken []uint32 // old chunk -> 1 + its index in ids; 0: not referred to
	runs  []run
	size  int64

	new   PageIndex // the pages of chunks made here; its chunks are numbered as in mine
	mine  []uint32  // new chunk -> its index in ids
	chunk []byte    // what is gathered for the next one

	last   *PageIndex // where the page before was found, or would be if it had not changed,
	lastAt uint32     // and which of its pages that is
}

func (c *cutting) block(b *block) error {
	c.size += int64(len(b.data))
	for i, h := range b.hashes {
		if c.follow(h) {
			continue
		}
		if c.old != nil {
			if at, there := c.old.lookup(h); there {
				c.refer(c.old, at)
				continue
			}
		}
		if at, there := c.new.lookup(h); there {
			c.refer(&c.new, at)
			continue
		}
		if err := c.fresh(h, b.data[i*PageSize:(i+1)*PageSize]); err != nil {
			return err
		}
	}
	rest := b.data[len(b.hashes)*PageSize:]
	if len(rest) == 0 {
		return nil
	}
	id, err := c.add(rest)
	if err != nil {
		return err
	}
	c.ids = append(c.ids, id)
	c.extend(uint32(len(c.ids)-1), 0, uint32(len(rest)))
	return nil
}

// follow refers to the page after the one referred to last, if it is the same
// page: of many equal ones that is the one that makes no new segment.
func (c *cutting) follow(h PageHash) bool {
	if c.last == nil || !c.last.next(c.lastAt) || c.last.hashes[c.lastAt+1] != h {
		return false
	}
	c.refer(c.last, c.lastAt+1)
	return true
}

func (c *cutting) refer(x *PageIndex, at uint32) {
	p, page := x.place(at)
	var n uint32
	if x == &c.new {
		n = c.mine[p]
	} else {
		if c.taken[p] == 0 {
			c.ids = append(c.ids, x.ids[p])
			c.taken[p] = uint32(len(c.ids))
		}
		n = c.taken[p] - 1
	}
	c.last, c.lastAt = x, at
	c.extend(n, page*PageSize, PageSize)
}

func (c *cutting) extend(chunk, off, n uint32) {
	if i := len(c.runs) - 1; i >= 0 && c.runs[i].chunk == chunk && c.runs[i].off+c.runs[i].len == off {
		c.runs[i].len += n
		return
	}
	c.runs = append(c.runs, run{chunk, off, n})
}

// fresh gathers a page that is nowhere yet.
func (c *cutting) fresh(h PageHash, page []byte) error {
	if len(c.chunk) == 0 {
		c.ids = append(c.ids, ID{}) // flush fills it in
		c.mine = append(c.mine, uint32(len(c.ids)-1))
		c.new.begin(ID{})
	}
	c.new.page(h)
	// In place of a changed page; the one after it is likely to be as it was.
	if c.last == c.old && c.last != nil && c.last.next(c.lastAt) {
		c.lastAt++
	} else {
		c.last = nil
	}
	c.extend(c.mine[len(c.mine)-1], uint32(len(c.chunk)), PageSize)
	c.chunk = append(c.chunk, page...)
	if len(c.chunk) == cap(c.chunk) {
		return c.flush()
	}
	return nil
}

func (c *cutting) flush() error {
	if len(c.chunk) == 0 {
		return nil
	}
	id, err := c.add(c.chunk)
	if err != nil {
		return err
	}
	c.ids[c.mine[len(c.mine)-1]] = id
	c.new.ids[len(c.new.ids)-1] = id
	c.chunk = c.chunk[:0]
	return nil
}

func (c *cutting) finish() (Pages, error) {
	if err := c.flush(); err != nil {
		return Pages{}, err
	}
	p := Pages{Size: c.size, Segments: make([]Segment, len(c.runs)), Fresh: c.old == nil}
	for i, r := range c.runs {
		p.Segments[i] = Segment{ID: c.ids[r.chunk], Off: r.off, Len: r.len}
	}
	if c.old != nil {
		// Useless records may take as much room as useful ones.
		var used int64
		for i := range c.old.ids {
			if c.taken[i] != 0 {
				used += c.old.recordLen(i)
			}
		}
		if p.Fresh = c.old.parts >= maxTables || c.old.bytes > 2*used+64<<10; p.Fresh {
			for i := range c.old.ids {
				if c.taken[i] != 0 {
					p.Table = c.old.record(p.Table, i)
				}
			}
		}
	}
	for i := range c.new.ids {
		p.Table = c.new.record(p.Table, i)
	}
	return p, nil
}
