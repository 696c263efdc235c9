package store

import (
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	maxHeld   = 256 << 10 // bytes of lines that are skipped before a chunk is found to be another
	baseTries = 4         // chunks that may come next
)

// baseTree is a list that the one being written is likely to share most chunks
// with. A chunk is cut where what is in it says so: where a chunk of that list
// comes again, it need only be hashed.
type baseTree struct {
	chunks []overlay.Chunk
	ids    []pack.ID
	at     map[pack.ID]int

	next  int   // the chunk that is likely to come next
	held  []int // ends, from the start of the chunk on, of lines that were not asked whether they end it
	plain bool  // none of the chunks comes here
}

func newBaseTree(list []overlay.Chunk) (*baseTree, error) {
	if len(list) < 2 {
		return nil, nil
	}
	// The last one ends where the list does.
	l := &baseTree{chunks: list[:len(list)-1], at: make(map[pack.ID]int, len(list))}
	for i, p := range l.chunks {
		id, err := pack.ParseID(p.Digest)
		if err != nil {
			return nil, fmt.Errorf("%w: %v", fault.ErrCorrupt, err)
		}
		l.ids, l.at[id] = append(l.ids, id), i
	}
	return l, nil
}

// offer takes the end of a line that was added to the chunk.
func (w *treeWriter) offer(end int) {
	l := w.base
	if l.plain {
		last := l.held[len(l.held)-1]
		l.held = append(l.held[:0], end)
		w.endsAt(last, end)
		return
	}
	l.held = append(l.held, end)
	reach := 0
	for k := l.next; k < min(l.next+baseTries, len(l.chunks)); k++ {
		size := int(l.chunks[k].Len)
		if size <= maxHeld {
			reach = max(reach, size)
		}
		if p := w.buf[w.start : w.start+end]; size == end && pack.Sum(p) == l.ids[k] {
			w.chunk(l.ids[k], end, true)
			l.next, l.held = k+1, l.held[:0]
			return
		}
	}
	if end < reach {
		return
	}
	held, begin, last := l.held, w.start, 0
	l.plain = true
	for i, e := range held {
		l.held = held[i : i+1]
		if w.endsAt(last, e) {
			for _, later := range held[i+1:] {
				w.offer(begin + later - w.start)
			}
			return
		}
		last = e
	}
}

// endsAt ends the chunk behind a line, of which both ends are given, if it is
// one that ends a chunk.
func (w *treeWriter) endsAt(from, end int) bool {
	p := w.buf[w.start : w.start+end]
	if len(p) < minLines || !cutsAfter(p[from:end-1], avgLines-minLines) {
		return false
	}
	id := pack.Sum(p)
	w.chunk(id, end, false)
	l := w.base
	l.held, l.plain = nil, false
	if k, ok := l.at[id]; ok {
		l.next = k + 1
	}
	return true
}

// dropBase goes on without the other list.
func (w *treeWriter) dropBase() {
	l := w.base
	if l == nil {
		return
	}
	l.chunks = nil
	if n := len(l.held); n > 0 && !l.plain {
		last := l.held[n-1]
		l.held = l.held[:n-1]
		w.offer(last)
	}
	w.base = nil
}
