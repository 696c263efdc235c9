package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	catalogBatch = 16384 // rows that are read while other queries wait
	noPack       = 1<<32 - 1
	packedBit    = 1 << 31
	maxCarry     = 256 << 20 // bytes of a line that is cut over several chunks
)

// catalog is the index in memory, 60 bytes for each chunk. A chunk is spoken of
// by its number, its place in the order of ids.
type catalog struct {
	ids   []pack.ID
	slots []slot
	packs []packRow
}

type slot struct {
	off    int64
	stored uint32
	raw    uint32 // with packedBit
	pack   uint32 // in catalog.packs, or noPack
}

func (c *catalog) blob(i uint32) pack.Blob {
	s := &c.slots[i]
	return pack.Blob{ID: c.ids[i], Off: s.off, Stored: s.stored, Raw: s.raw &^ packedBit, Packed: s.raw&packedBit != 0}
}

func (c *catalog) find(id pack.ID) (uint32, bool) {
	i, ok := slices.BinarySearchFunc(c.ids, id, compareIDs)
	return uint32(i), ok
}

// loadCatalog reads the index. The caller holds the store's lock, so that no
// row goes away meanwhile; what is added meanwhile may be in it or not.
func (s *Store) loadCatalog(ctx context.Context) (*catalog, error) {
	c := &catalog{}
	var n int
	err := s.read.QueryRowContext(ctx, "SELECT count(*) FROM blobs").Scan(&n)
	if err != nil {
		return nil, cancelled(ctx, dbError("read the index", err))
	}
	c.ids, c.slots = make([]pack.ID, 0, n), make([]slot, 0, n)
	place := map[int64]uint32{}
	// Chunks first: by the time that packs are read, each has its own.
	var last []byte
	for more := true; more; {
		first := len(c.ids)
		err := s.query(ctx, "SELECT id, pack, off, stored, raw, packed FROM blobs WHERE id > ? ORDER BY id LIMIT ?",
			[]any{append([]byte{}, last...), catalogBatch}, func(row *sql.Rows) error {
				var id sql.RawBytes
				var x slot
				var num int64
				var packed bool
				if err := row.Scan(&id, &num, &x.off, &x.stored, &x.raw, &packed); err != nil {
					return err
				}
				if len(id) != len(pack.ID{}) || x.raw&packedBit != 0 {
					return fmt.Errorf("index: impossible piece %x: %w", []byte(id), fault.ErrCorrupt)
				}
				if packed {
					x.raw |= packedBit
				}
				if len(c.ids) == 1<<31 {
					return fmt.Errorf("too many pieces: %w", fault.ErrUnsupported)
				}
				p, ok := place[num]
				if !ok {
					p = uint32(len(c.packs))
					c.packs = append(c.packs, packRow{num: num})
					place[num] = p
				}
				x.pack = p
				c.ids, c.slots = append(c.ids, pack.ID(id)), append(c.slots, x)
				return nil
			})
		if err != nil {
			return nil, err
		}
		if more = len(c.ids) > first; more {
			last = c.ids[len(c.ids)-1][:]
		}
	}
	err = s.query(ctx, "SELECT num, name, bytes FROM packs ORDER BY num", nil, func(row *sql.Rows) error {
		var p packRow
		if err := row.Scan(&p.num, &p.name, &p.bytes); err != nil {
			return err
		}
		if !validPackName(p.name) {
			return fmt.Errorf("index: pack %.80q: %w", p.name, fault.ErrCorrupt)
		}
		if i, ok := place[p.num]; ok {
			c.packs[i] = p
		} else {
			c.packs = append(c.packs, p)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range c.slots {
		if c.packs[c.slots[i].pack].name == "" {
			c.slots[i].pack = noPack
		}
	}
	c.packs = slices.Clip(c.packs)
	return c, nil
}

// bitset is a set of numbers.
type bitset []uint64

func newBitset(n int) bitset               { return make(bitset, (n+63)/64) }
func (b bitset) has(i uint32) bool         { return b[i/64]&(1<<(i%64)) != 0 }
func (b bitset) add(i uint32)              { b[i/64] |= 1 << (i % 64) }
func (b bitset) addNew(i uint32) (ok bool) { ok = !b.has(i); b.add(i); return ok }
func (b bitset) count() (n int) {
	for _, w := range b {
		n += bits.OnesCount64(w)
	}
	return n
}

// survey finds out what checkpoints need. Most of their lists of files they have in
// common, and each part of one is read once.
type survey struct {
	cat *catalog
	// absent are the chunks that are needed and are not in the index, or are
	// there with another length; they have the numbers after those of the catalog.
	absent  map[wanted]uint32
	absents []pack.ID

	known  map[pack.ID]uint32 // a part of a list, by its chunk, or a recipe, by its digest -> its group
	groups [][]uint32         // the chunks that a part names
	room   []byte             // of read
}

type wanted struct {
	id  pack.ID
	len int64
}

func newSurvey(cat *catalog) *survey {
	return &survey{cat: cat, absent: map[wanted]uint32{}, known: map[pack.ID]uint32{}}
}

// needed lists the needs of one checkpoint; a chunk may be in it several times.
type needed struct {
	groups []uint32
	chunks []uint32
}

// number returns the chunk's number; raw 0: its length is not known.
func (v *survey) number(id pack.ID, raw int64) uint32 {
	i, ok := v.cat.find(id)
	if ok && (raw == 0 || raw == int64(v.cat.slots[i].raw&^packedBit)) {
		return i
	}
	if ok {
		// The same digest, another length: the list is wrong, whatever the chunk is.
		raw = -raw
	}
	w := wanted{id, raw}
	n, ok := v.absent[w]
	if !ok {
		n = uint32(len(v.cat.ids) + len(v.absents))
		v.absent[w] = n
		v.absents = append(v.absents, id)
	}
	return n
}

func (v *survey) list(to []uint32, list []overlay.Chunk) ([]uint32, error) {
	for _, x := range list {
		id, err := pack.ParseID(x.Digest)
		if err != nil {
			return to, fmt.Errorf("%w: %v", fault.ErrCorrupt, err)
		}
		to = append(to, v.number(id, x.Len))
	}
	return to, nil
}

// checkpoint finds out what one checkpoint needs. It returns damaged parts of lists, whose
// needs are unknown, in damage; err is of the work itself.
func (v *survey) checkpoint(ctx context.Context, r *Reader) (n needed, damage []error, err error) {
	hurt := func(what string, err error) error {
		if err != nil && (errors.Is(err, fault.ErrCorrupt) || unreadable(err)) {
			if what != "" {
				err = fmt.Errorf("%s: %w", what, err)
			}
			damage = append(damage, err)
			return nil
		}
		return err
	}
	for i, t := range r.manifest.trees() {
		if err := v.tree(ctx, r, t, &n, func(err error) error {
			return hurt(fmt.Sprintf("list of files %d", i), err)
		}); err != nil {
			return n, damage, err
		}
	}
	list, err := r.listed(ctx)
	if err := hurt("", err); err != nil {
		return n, damage, err
	}
	for _, part := range [][]overlay.Chunk{list.chunks.lists, list.chunks.lines} {
		if n.chunks, err = v.list(n.chunks, part); err != nil {
			return n, damage, err
		}
	}
	for i := range list.images {
		im := &list.images[i]
		err := hurt("process image "+im.Name, v.image(ctx, r, im, &n))
		if err != nil {
			return n, damage, err
		}
	}
	return n, damage, nil
}

func (v *survey) image(ctx context.Context, r *Reader, im *Image, n *needed) (err error) {
	for _, list := range []Chunks{im.Chunks, im.Recipe, im.Pages} {
		if n.chunks, err = v.list(n.chunks, list); err != nil {
			return err
		}
	}
	if im.Recipe == nil {
		return nil
	}
	var key []byte
	for _, x := range im.Recipe {
		key = append(key, x.Digest...)
	}
	g, ok := v.known[pack.Sum(key)]
	if !ok {
		segs, err := r.recipe(ctx, im)
		if err != nil {
			return err
		}
		var set idSet
		addSegments(&set, segs)
		var group []uint32
		for _, id := range set.list() {
			group = append(group, v.number(id, 0))
		}
		g = v.group(pack.Sum(key), group)
	}
	n.groups = append(n.groups, g)
	return nil
}

func (v *survey) group(key pack.ID, members []uint32) uint32 {
	slices.Sort(members)
	g := uint32(len(v.groups))
	v.groups = append(v.groups, slices.Clone(slices.Compact(members)))
	v.known[key] = g
	return g
}

// tree goes through a list of files part by part. A part that begins a line and
// ends one says the same in every list that it is in.
func (v *survey) tree(ctx context.Context, r *Reader, t *Tree, n *needed, hurt func(error) error) (err error) {
	list, err := readList(t, func(id pack.ID) ([]byte, error) { return v.read(ctx, r, id) })
	if err != nil {
		return hurt(err)
	}
	for _, part := range [][]overlay.Chunk{list.lists, list.lines} {
		if n.chunks, err = v.list(n.chunks, part); err != nil {
			return hurt(err)
		}
	}
	var carry []byte
	torn := false // the part before could not be read: where this one begins is not known
	for _, x := range list.lines {
		id, _ := pack.ParseID(x.Digest) // list did
		if g, ok := v.known[id]; ok && len(carry) == 0 {
			n.groups, torn = append(n.groups, g), false
			continue
		}
		data, err := v.read(ctx, r, id)
		if err == nil && int64(len(data)) != x.Len {
			err = fmt.Errorf("piece %s has %d bytes, %d expected: %w", id, len(data), x.Len, fault.ErrCorrupt)
		}
		if err == nil && len(carry)+len(data) > maxCarry {
			err = fmt.Errorf("a line is too long: %w", fault.ErrCorrupt)
		}
		if err != nil {
			if err := hurt(err); err != nil {
				return err
			}
			carry, torn = nil, true
			continue
		}
		end := bytes.LastIndexByte(data, '\n') + 1
		whole := len(carry) == 0 && !torn && end == len(data)
		if end == 0 {
			carry = append(carry, data...)
			continue
		}
		lines := data[:end]
		if len(carry) > 0 {
			lines = append(carry, lines...)
		}
		members, err := v.lines(lines, torn)
		if err != nil {
			if err := hurt(fmt.Errorf("piece %s: %w", id, err)); err != nil {
				return err
			}
		}
		if carry, torn = slices.Clone(data[end:]), false; whole && err == nil {
			n.groups = append(n.groups, v.group(id, members))
		} else {
			n.chunks = append(n.chunks, members...)
		}
	}
	if len(carry) > 0 {
		return hurt(fmt.Errorf("it ends within a line: %w", fault.ErrCorrupt))
	}
	return nil
}

// read reads a part of a list past the cache of decoded chunks: it is read once. The returned
// slice is valid until the next read.
func (v *survey) read(ctx context.Context, r *Reader, id pack.ID) ([]byte, error) {
	i, ok := v.cat.find(id)
	if !ok || v.cat.slots[i].pack == noPack {
		return r.chunks.read(ctx, id)
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	name := v.cat.packs[v.cat.slots[i].pack].name
	data, err := r.chunks.loadBlob(pack.Path(r.s.packsDir(), name), v.cat.blob(i), v.room)
	if err != nil {
		return nil, fmt.Errorf("pack %s: %w", name, err)
	}
	v.room = data
	return data, nil
}

// lines returns what the entries need. torn: the first one may lack its beginning.
func (v *survey) lines(data []byte, torn bool) (members []uint32, err error) {
	for len(data) > 0 {
		line := data[:bytes.IndexByte(data, '\n')]
		data = data[len(line)+1:]
		e, err := overlay.ParseEntry(line)
		if err != nil {
			if torn {
				torn = false
				continue
			}
			return members, err
		}
		torn = false
		size := dataBytes(&e)
		if size == 0 {
			continue
		}
		list := e.Chunks
		if list == nil {
			list = []overlay.Chunk{{Digest: e.Digest, Len: size}}
		}
		if members, err = v.list(members, list); err != nil {
			return members, fmt.Errorf("%q: %w", e.Path, err)
		}
	}
	return members, nil
}

// each calls fn once for every chunk that a checkpoint needs and that is not in
// seen yet, and adds it there. seen has room for all of size.
func (v *survey) each(n needed, seen bitset, fn func(i uint32)) {
	for _, i := range n.chunks {
		if seen.addNew(i) {
			fn(i)
		}
	}
	for _, g := range n.groups {
		for _, i := range v.groups[g] {
			if seen.addNew(i) {
				fn(i)
			}
		}
	}
}

// size returns how many numbers there are.
func (v *survey) size() int { return len(v.cat.ids) + len(v.absents) }
