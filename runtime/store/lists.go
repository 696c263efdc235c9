package store

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// A manifest names at most maxTop chunks of a tree. The chunks of a longer one are a list that
// is stored in chunks itself, and so on. At every level, checkpoints share the chunks that did
// not change.
const (
	maxTop   = 4
	maxDepth = 4

	// listRecord is a chunk in a list: its digest, and its length as a uint32 in little endian.
	listRecord = 32 + 4

	// How lists of chunks are cut, in records. Changing these makes all lists new to all stores.
	minRecords = 8
	avgRecords = 32
	maxRecords = 128

	// maxList bounds the bytes of the lists of one level.
	maxList = 64 << 20
)

// putList stores the list of a tree's chunks, and the list of its chunks, until few
// are left. It returns these, and how many lists there are.
func (d *Draft) putList(ctx context.Context, list []overlay.Chunk) (top []overlay.Chunk, depth int, err error) {
	for ; len(list) > maxTop; depth++ {
		if depth == maxDepth || len(list)*listRecord > maxList {
			return nil, 0, fmt.Errorf("a list of %d pieces is too long: %w", len(list), fault.ErrInvalid)
		}
		if list, err = d.putLevel(ctx, list); err != nil {
			return nil, 0, err
		}
	}
	return list, depth, nil
}

// putLevel stores one list, cut behind records that are chosen by what is in them.
func (d *Draft) putLevel(ctx context.Context, list []overlay.Chunk) (up []overlay.Chunk, err error) {
	var part []byte
	for i, p := range list {
		id, err := pack.ParseID(p.Digest)
		if err != nil {
			return nil, err
		}
		part = binary.LittleEndian.AppendUint32(append(part, id[:]...), uint32(p.Len))
		n := len(part) / listRecord
		chosen := binary.LittleEndian.Uint64(id[:])%(avgRecords-minRecords) == 0
		if i < len(list)-1 && n < maxRecords && (n < minRecords || !chosen) {
			continue
		}
		at, err := d.addNeeded(ctx, part)
		if err != nil {
			return nil, err
		}
		up, part = append(up, overlay.Chunk{Digest: at.String(), Len: int64(len(part))}), part[:0]
	}
	return up, nil
}

// treeList is the chunks of a tree.
type treeList struct {
	lines []overlay.Chunk // of the lines
	lists []overlay.Chunk // of all lists above them
}

// readList finds the chunks of a tree. read returns the bytes of a chunk, which are
// good until it is called again.
func readList(t *Tree, read func(pack.ID) ([]byte, error)) (l treeList, err error) {
	l.lines = t.Chunks
	for range t.Depth {
		var below []overlay.Chunk
		for _, p := range l.lines {
			l.lists = append(l.lists, p)
			more, err := listPart(p, read)
			if err == nil && (len(below)+len(more))*listRecord > maxList {
				err = fmt.Errorf("a list of pieces is longer than %d bytes: %w", maxList, fault.ErrCorrupt)
			}
			if err != nil {
				return l, err
			}
			below = append(below, more...)
		}
		l.lines = below
	}
	if t.Depth == 0 {
		return l, nil // the manifest has been checked
	}
	return l, checkLines(t, l.lines)
}

// checkLines holds the chunks of a tree, which lists say, against the tree.
func checkLines(t *Tree, lines Chunks) error {
	n, err := lines.bytes()
	if err == nil && n != t.Bytes {
		err = fmt.Errorf("%d bytes in pieces of %d", t.Bytes, n)
	}
	if err != nil {
		return fmt.Errorf("list of pieces: %w: %w", err, fault.ErrCorrupt)
	}
	return nil
}

// listPart decodes one chunk of a list.
func listPart(p overlay.Chunk, read func(pack.ID) ([]byte, error)) (list []overlay.Chunk, err error) {
	id, err := pack.ParseID(p.Digest)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", fault.ErrCorrupt, err)
	}
	data, err := read(id)
	if err != nil {
		return nil, err
	}
	if int64(len(data)) != p.Len || len(data) == 0 || len(data)%listRecord != 0 {
		return nil, fmt.Errorf("piece %s has %d bytes, %d of a list expected: %w", id, len(data),
			p.Len, fault.ErrCorrupt)
	}
	for ; len(data) > 0; data = data[listRecord:] {
		below := pack.ID(data[:32])
		list = append(list, overlay.Chunk{Digest: below.String(), Len: int64(binary.LittleEndian.Uint32(data[32:]))})
	}
	return list, nil
}

// list returns the chunks of the n-th list of entries. It reads them once.
func (r *Reader) list(ctx context.Context, n int) (treeList, error) {
	trees := r.manifest.trees()
	if n < 0 || n >= len(trees) {
		return treeList{}, fmt.Errorf("tree %d of %d: %w", n, len(trees), fault.ErrInvalid)
	}
	if trees[n].Depth == 0 {
		return treeList{lines: trees[n].Chunks}, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l, ok := r.lists[n]; ok {
		return l, nil
	}
	l, err := readList(trees[n], func(id pack.ID) ([]byte, error) { return r.chunks.read(ctx, id) })
	if err != nil {
		if errors.Is(err, fault.ErrCorrupt) {
			err = fmt.Errorf("list of files %d: %w", n, err)
		}
		return treeList{}, err
	}
	if r.lists == nil {
		r.lists = map[int]treeList{}
	}
	r.lists[n] = l
	return l, nil
}
