package pack

import (
	"cmp"
	"encoding/binary"
	"slices"
)

// blobSet has the chunks of a pack that is being written, each once. A map would
// take more than the chunks themselves: a checkpoint of a million small files
// has as many.
type blobSet struct {
	list  []Blob
	slots []uint32 // by ID, linear probing: 1 + the place in list, 0: free
}

// find returns where in the list a chunk is, or -1.
func (s *blobSet) find(id ID) int {
	if len(s.slots) == 0 {
		return -1
	}
	return int(s.slots[s.slot(id)]) - 1
}

// slot returns the index in slots at which a chunk is, or would be. A digest is as good as
// random even if an attacker chose the data: making many with equal prefixes is infeasible.
func (s *blobSet) slot(id ID) int {
	mask := uint64(len(s.slots) - 1)
	at := binary.LittleEndian.Uint64(id[:]) & mask
	for n := s.slots[at]; n != 0 && s.list[n-1].ID != id; n = s.slots[at] {
		at = (at + 1) & mask
	}
	return int(at)
}

// add appends a chunk that is not there and returns its place.
func (s *blobSet) add(b Blob) int {
	s.list = append(s.list, b)
	if n := len(s.slots); 4*len(s.list) <= 3*n {
		s.slots[s.slot(b.ID)] = uint32(len(s.list))
		return len(s.list) - 1
	}
	s.slots = make([]uint32, max(64, 2*len(s.slots)))
	s.place()
	return len(s.list) - 1
}

func (s *blobSet) place() {
	for i := range s.list {
		s.slots[s.slot(s.list[i].ID)] = uint32(i + 1)
	}
}

// sort brings the list into the order of offsets.
func (s *blobSet) sort() {
	slices.SortFunc(s.list, func(a, b Blob) int { return cmp.Compare(a.Off, b.Off) })
	clear(s.slots)
	s.place()
}
