package store

import (
	"context"
	"fmt"
	"io"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// How lists of entries are cut. Changing these makes all lists new to all stores.
const (
	minLines = 4 << 10
	avgLines = 16 << 10
	maxLines = 1 << 20
)

// flushLines is how many bytes of chunks are looked up in the index at once.
const flushLines = 256 << 10

// add stores a chunk, unless an existing pack has it, or this draft's own. A chunk of another draft
// does not count before it is committed.
func (d *Draft) add(ctx context.Context, id pack.ID, raw []byte) error {
	if d.pack.Has(id) {
		return nil
	}
	there, err := d.x.has(ctx, id)
	if err != nil || there {
		return err
	}
	return d.pack.Add(id, raw)
}

// addNeeded is add for a chunk that the manifest itself will name, or its recipes.
func (d *Draft) addNeeded(ctx context.Context, raw []byte) (pack.ID, error) {
	if err := ctx.Err(); err != nil {
		return pack.ID{}, context.Cause(ctx)
	}
	id := pack.Sum(raw)
	if err := d.add(ctx, id, raw); err != nil {
		return pack.ID{}, err
	}
	d.mu.Lock()
	d.need.add(id)
	d.mu.Unlock()
	return id, nil
}

// Sink takes the data of files in: it cuts it, and stores what no pack has. Data that is in
// no list of PutTree does not become part of the checkpoint.
func (d *Draft) Sink() overlay.Sink { return sink{d} }

type sink struct{ d *Draft }

// Data: see overlay.Sink.
func (s sink) Data(ctx context.Context, size int64, r io.Reader) (string, []overlay.Chunk, error) {
	if size == 0 {
		return digestOf(nil), nil, nil
	}
	digest, list, err := cut(ctx, size, r, func(raw []byte) (pack.ID, error) {
		id := pack.Sum(raw)
		return id, s.d.add(ctx, id, raw)
	})
	if err != nil {
		return "", nil, err
	}
	if len(list) == 1 {
		list = nil
	}
	return digest, list, nil
}

// cut gives a stream to add in chunks.
func cut(
	ctx context.Context, size int64, r io.Reader, add func([]byte) (pack.ID, error),
) (digest string, list []overlay.Chunk, err error) {
	var h *blake3.Hasher // of all chunks but a lonely one, whose digest is the stream's
	var n int64
	var one []byte
	err = pack.Cut(size, r, func(raw []byte) error {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n += int64(len(raw))
		if h == nil && n < size {
			h = blake3.New()
		}
		if h != nil {
			_, _ = h.Write(raw) // never fails
		}
		id, err := add(raw)
		if err != nil {
			return err
		}
		one = id[:]
		list = append(list, overlay.Chunk{Digest: id.String(), Len: int64(len(raw))})
		return nil
	})
	switch {
	case err != nil:
		return "", nil, err
	case n != size:
		return "", nil, fmt.Errorf("%d bytes came, %d were announced: %w", n, size, io.ErrUnexpectedEOF)
	case h != nil:
		return sum(h), list, nil
	case one == nil:
		return digestOf(nil), nil, nil
	}
	return list[0].Digest, list, nil
}

// PutChunk stores a chunk by itself. Bytes that are not the digest's are
// ErrCorrupt. It is part of the checkpoint if something else of it names it.
func (d *Draft) PutChunk(ctx context.Context, digest string, raw []byte) error {
	id, err := pack.ParseID(digest)
	if err != nil {
		return err
	}
	if len(raw) == 0 || len(raw) > pack.MaxChunk {
		return fmt.Errorf("a piece of %d bytes: %w", len(raw), fault.ErrInvalid)
	}
	if got := pack.Sum(raw); got != id {
		return fmt.Errorf("piece %s: its bytes are those of %s: %w", id, got, fault.ErrCorrupt)
	}
	return d.add(ctx, id, raw)
}

// PutTree stores the n-th list of entries: 0 is that of the upperdir, 1+i that of the i-th volume,
// the last that of Manifest.Attached. each calls its argument for every entry, in the order of
// overlay.ComparePaths. The data of each file must have been given to Sink, or be in the store
// already; Commit proves it. A list is put once.
func (d *Draft) PutTree(ctx context.Context, n int, each func(fn func(overlay.Entry) error) error) error {
	return d.putTree(ctx, n, func(w *treeWriter) error { return each(w.entry) })
}

// PutCollection is PutTree with what overlay.Collect has just written to path.
// base has the chunks of a list which that is likely to share most lines with,
// of a checkpoint that is ready and of which the caller has a Reader: what is the
// same is not looked up again. It returns the chunks of the new list.
func (d *Draft) PutCollection(ctx context.Context, n int, path string, base []overlay.Chunk) ([]overlay.Chunk, error) {
	err := d.putTree(ctx, n, func(w *treeWriter) (err error) {
		if w.base, err = newBaseTree(base); err != nil {
			return err
		}
		return overlay.CollectionLines(path, w.collected)
	})
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lines[n], nil
}

func (d *Draft) putTree(ctx context.Context, n int, write func(*treeWriter) error) error {
	if n < 0 || n > 1+maxVolumes {
		return fmt.Errorf("tree %d: %w", n, fault.ErrInvalid)
	}
	d.mu.Lock()
	_, twice := d.trees[n]
	ended := d.ended
	d.mu.Unlock()
	if twice || ended {
		return fmt.Errorf("tree %d is put only once: %w", n, fault.ErrInvalid)
	}
	w := &treeWriter{d: d, ctx: ctx, hash: blake3.New(), buf: make([]byte, 0, 2*flushLines)}
	if err := write(w); err != nil {
		return err
	}
	w.dropBase()
	w.cut()
	if err := w.flush(); err != nil {
		return err
	}
	if w.t.Entries == 0 {
		return fmt.Errorf("tree %d has no entries: %w", n, fault.ErrInvalid)
	}
	w.t.Digest = sum(w.hash)
	lines, err := w.t.Chunks, error(nil)
	if w.t.Chunks, w.t.Depth, err = d.putList(ctx, lines); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.need.merge(&w.need)
	d.trees[n], d.lines[n] = w.t, lines
	return nil
}

// treeWriter cuts a list behind lines that are chosen by what is in them: a
// change of one line changes the chunk it is in and, rarely, a neighbour.
type treeWriter struct {
	d    *Draft
	ctx  context.Context
	t    Tree
	last string
	need idSet
	line []byte
	hash *blake3.Hasher

	buf   []byte // chunks that were cut, and the one that is growing
	start int    // where in buf that one begins
	ids   []pack.ID
	ends  []int     // of the chunks in buf
	there []bool    // those that need not be looked up
	base  *baseTree // nil: none
}

func (w *treeWriter) entry(e overlay.Entry) error {
	if w.t.Entries > 0 && overlay.ComparePaths(w.last, e.Path) >= 0 {
		return fmt.Errorf("list of files: %q after %q: %w", e.Path, w.last, fault.ErrInvalid)
	}
	if err := addEntry(&w.need, &e); err != nil {
		return err
	}
	w.last = e.Path
	w.line = e.AppendJSON(w.line[:0])
	return w.add(w.line, dataBytes(&e))
}

func (w *treeWriter) collected(l overlay.Line) error {
	if digest := l.Digest(); l.Data > 0 && digest != "" {
		id, err := pack.ParseID(digest)
		if err != nil {
			return err
		}
		w.need.add(id)
	} else if l.Data > 0 {
		e, err := overlay.ParseEntry(l.JSON)
		if err == nil {
			err = addEntry(&w.need, &e)
		}
		if err != nil {
			return err
		}
	}
	return w.add(l.JSON, l.Data)
}

// add adds a line and its end.
func (w *treeWriter) add(line []byte, data int64) error {
	w.t.Entries++
	w.t.Data += data
	size := len(line) + 1
	if size > maxHeld || len(w.buf)-w.start+size > maxLines {
		w.dropBase()
	}
	if len(w.buf)-w.start+size > maxLines {
		w.cut()
	}
	ends := w.base == nil && cutsAfter(line, avgLines-minLines)
	for len(line) >= maxLines {
		w.buf = append(w.buf, line[:maxLines]...)
		line = line[maxLines:]
		w.cut()
		if err := w.flush(); err != nil {
			return err
		}
	}
	w.buf = append(append(w.buf, line...), '\n')
	if w.base != nil {
		w.offer(len(w.buf) - w.start)
	} else if len(w.buf)-w.start >= minLines && ends {
		w.cut()
	}
	if w.start >= flushLines {
		return w.flush()
	}
	return nil
}

// cutsAfter chooses lines so that a chunk ends, on average, spread bytes after it
// could have, however long the lines are.
func cutsAfter(line []byte, spread uint64) bool {
	x := uint64(14695981039346656037) // FNV-1a, of the line and its end
	for _, c := range line {
		x = (x ^ uint64(c)) * 1099511628211
	}
	x = (x ^ '\n') * 1099511628211
	// FNV mixes the last bytes little into the high bits.
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return x%spread < uint64(len(line)+1)
}

// cut ends a chunk.
func (w *treeWriter) cut() {
	if p := w.buf[w.start:]; len(p) > 0 {
		w.chunk(pack.Sum(p), len(p), false)
	}
}

// chunk ends a chunk of n bytes. there: the store has it.
func (w *treeWriter) chunk(id pack.ID, n int, there bool) {
	w.need.add(id)
	w.start += n
	w.ids, w.ends, w.there = append(w.ids, id), append(w.ends, w.start), append(w.there, there)
	w.t.Bytes += int64(n)
	w.t.Chunks = append(w.t.Chunks, overlay.Chunk{Digest: id.String(), Len: int64(n)})
}

// flush stores what was cut; most of a list is there already.
func (w *treeWriter) flush() error {
	if err := w.ctx.Err(); err != nil {
		return context.Cause(w.ctx)
	}
	var ask []pack.ID
	for i, id := range w.ids {
		if !w.there[i] {
			ask = append(ask, id)
		}
	}
	there, err := w.d.x.hasAll(w.ctx, ask)
	if err != nil {
		return err
	}
	at := 0
	for i, id := range w.ids {
		if !w.there[i] && !there[id] {
			if err := w.d.pack.Add(id, w.buf[at:w.ends[i]]); err != nil {
				return err
			}
		}
		at = w.ends[i]
	}
	_, _ = w.hash.Write(w.buf[:w.start]) // never fails
	w.buf = w.buf[:copy(w.buf, w.buf[w.start:])]
	w.ids, w.ends, w.there, w.start = w.ids[:0], w.ends[:0], w.there[:0], 0
	return nil
}
