package pack

import (
	"encoding/binary"
	"testing"
)

// All digests begin alike here, which is the worst that can be.
func TestBlobSet(t *testing.T) {
	const n = 1000
	id := func(i int) (id ID) {
		binary.LittleEndian.PutUint32(id[12:], uint32(i))
		return id
	}
	var s blobSet
	for i := range n {
		if s.find(id(i)) >= 0 {
			t.Fatalf("%d is there before it is added", i)
		}
		if at := s.add(Blob{ID: id(i), Off: int64(n - i)}); at != i || s.find(id(i)) != i || s.find(id(i/2)) != i/2 {
			t.Fatalf("%d lies at %d", i, at)
		}
	}
	s.sort()
	for i := range n {
		if at := s.find(id(i)); at != n-1-i || s.list[at].Off != int64(n-i) {
			t.Fatalf("%d lies at %d in the order of offsets", i, at)
		}
	}
}
