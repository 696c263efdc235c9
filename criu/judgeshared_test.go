package criu

import (
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/vma"
	"google.golang.org/protobuf/proto"
)

func TestCheckAttached(t *testing.T) {
	const segment, other, page = 7, 8, 4096
	sizes := map[uint64]uint64{segment: 3*page - 10, other: page}
	area := func(id, start, pages, offset uint64) *vma.VmaEntry {
		return &vma.VmaEntry{
			Start: proto.Uint64(start * page), End: proto.Uint64((start + pages) * page),
			Pgoff: proto.Uint64(offset * page), Shmid: proto.Uint64(id), Status: proto.Uint32(1 << 10),
		}
	}
	private := &vma.VmaEntry{
		Start: proto.Uint64(50 * page), End: proto.Uint64(51 * page), Shmid: proto.Uint64(segment),
		Status: proto.Uint32(1 << 9),
	}
	for name, c := range map[string]struct {
		areas []*vma.VmaEntry
		fails bool
	}{
		"none":                     {nil, false},
		"whole":                    {[]*vma.VmaEntry{area(segment, 10, 3, 0)}, false},
		"in areas of other rights": {[]*vma.VmaEntry{area(segment, 10, 1, 0), area(segment, 11, 2, 1)}, false},
		"twice": {[]*vma.VmaEntry{
			area(segment, 10, 3, 0), area(segment, 20, 1, 0), area(segment, 21, 2, 1),
		}, false},
		"beside another": {[]*vma.VmaEntry{
			area(segment, 10, 3, 0), area(other, 13, 1, 0), private,
		}, false},
		"without its end":       {[]*vma.VmaEntry{area(segment, 10, 2, 0)}, true},
		"without its beginning": {[]*vma.VmaEntry{area(segment, 11, 2, 1)}, true},
		"with a hole":           {[]*vma.VmaEntry{area(segment, 10, 1, 0), area(segment, 12, 1, 2)}, true},
		"moved in part": {[]*vma.VmaEntry{
			area(segment, 10, 1, 0), area(segment, 11, 1, 2), area(segment, 30, 1, 1),
		}, true},
		"without the end of the first": {[]*vma.VmaEntry{area(segment, 10, 1, 0), area(segment, 20, 3, 0)}, true},
	} {
		err := checkAttached(&task{pid: 5, comm: "p"}, c.areas, sizes)
		if (err != nil) != c.fails || err != nil && !strings.Contains(err.Error(),
			"process 5 (p) has only a part of the System V shared memory segment 7") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
