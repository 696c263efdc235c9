package store

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/runtime/store/pack"
)

const (
	sketchRows = 4
	sketchCols = 80
	cellSize   = 8 + 2
)

// A sketch is a set of chunks in a few cells, however many they are: an invertible
// Bloom lookup table. Each chunk is in one cell of each row. Combined with the sketch
// of another set it is that of the chunks that one of the two has, and as long as
// these are about 200 at most, it lists them. It may be wrong: a caller proves what
// it makes of the list.
type sketch [sketchRows * sketchCols]cell

// cell is the XOR of the keys in it, and of their checks.
type cell struct {
	key   uint64
	check uint16
}

// keyOf returns what a sketch knows of a chunk: the beginning of its id.
func keyOf(id *pack.ID) uint64 { return binary.BigEndian.Uint64(id[:]) }

// checkOf shows a lone key: of several that are combined, it is not that of their XOR.
func checkOf(key uint64) uint16 { return uint16(key * 0x9e3779b97f4a7c15 >> 48) }

func cellOf(key uint64, row int) int {
	return row*sketchCols + int(uint16(key>>(16*row)))%sketchCols
}

// flip adds a key, or removes an existing one.
func (s *sketch) flip(key uint64) {
	check := checkOf(key)
	for row := range sketchRows {
		c := &s[cellOf(key, row)]
		c.key ^= key
		c.check ^= check
	}
}

func (s *sketch) flipAll(ids []pack.ID) {
	for i := range ids {
		s.flip(keyOf(&ids[i]))
	}
}

// combine makes s the sketch of what either of two sets has and the other has not.
func (s *sketch) combine(o *sketch) {
	for i := range s {
		s[i].key ^= o[i].key
		s[i].check ^= o[i].check
	}
}

// keys empties the sketch and returns what was in it; false: there is too much.
func (s *sketch) keys() (list []uint64, ok bool) {
	for n := -1; n < len(list); {
		n = len(list)
		for i, c := range s {
			if c.key == 0 || c.check != checkOf(c.key) || cellOf(c.key, i/sketchCols) != i {
				continue
			}
			if list = append(list, c.key); len(list) > len(s) {
				return nil, false
			}
			s.flip(c.key)
		}
	}
	slices.Sort(list)
	n := len(list)
	return list, *s == sketch{} && len(slices.Compact(list)) == n
}

// sumOf returns the BLAKE3 of a list of chunks without some of it and with others.
// All three are in order.
func sumOf(ids, without, with []pack.ID) (sum [32]byte) {
	h := blake3.New()
	buf := make([]byte, 0, 64<<10)
	put := func(id *pack.ID) {
		if buf = append(buf, id[:]...); len(buf) == cap(buf) {
			_, _ = h.Write(buf) // never fails
			buf = buf[:0]
		}
	}
	for i := range ids {
		for len(with) > 0 && compareIDs(with[0], ids[i]) < 0 {
			put(&with[0])
			with = with[1:]
		}
		if len(without) > 0 && without[0] == ids[i] {
			without = without[1:]
			continue
		}
		put(&ids[i])
	}
	for i := range with {
		put(&with[i])
	}
	_, _ = h.Write(buf) // never fails
	h.Sum(sum[:0])
	return sum
}
