package criu

import (
	"errors"
	"fmt"
	"os"

	ipcshm "github.com/checkpoint-restore/go-criu/v7/crit/images/ipc-shm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v7/crit/images/vma"
	"google.golang.org/protobuf/proto"
)

// attached is a System V shared memory segment in the memory of a process, as far as its
// areas have been read.
type attached struct{ start, end uint64 }

// checkShared proves that each process has System V shared memory segments attached as a
// whole: CRIU attaches a segment by one shmat, and refuses one of which the process has
// unmapped, moved or mapped over a part.
func (j *judge) checkShared() error {
	sizes, err := j.segments()
	if err != nil || len(sizes) == 0 {
		return err
	}
	for _, t := range j.order {
		if t.dead {
			continue
		}
		var bad error
		err := j.read(fmt.Sprintf("mm-%d.img", t.pid), magicMm, 1, func(data []byte) error {
			var e mm.MmEntry
			if err := proto.Unmarshal(data, &e); err != nil {
				return err
			}
			bad = checkAttached(t, e.GetVmas(), sizes)
			return nil
		})
		if err := errors.Join(bad, err); err != nil {
			return err
		}
	}
	return nil
}

// segments returns the sizes in bytes of the System V shared memory segments, by their ids.
func (j *judge) segments() (map[uint64]uint64, error) {
	sizes := map[uint64]uint64{}
	if j.root.ids == nil {
		return sizes, nil
	}
	name := fmt.Sprintf("ipcns-shm-%d.img", j.root.ids.GetIpcNsId())
	err := optionalImage(j.dir, name, magicShm, func(data []byte) error {
		var e ipcshm.IpcShmEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if !e.GetInPagemaps() {
			return errors.New("it has the data of a segment, as those of CRIU before 3.0")
		}
		sizes[uint64(e.GetDesc().GetId())] = e.GetSize()
		return nil
	})
	return sizes, err
}

func checkAttached(t *task, areas []*vma.VmaEntry, sizes map[uint64]uint64) error {
	const sysV = 1 << 10
	page := uint64(os.Getpagesize())
	parts := map[uint64]*attached{} // by the segment's id
	partly := func(id uint64) error {
		return &Unrestorable{fmt.Sprintf("%v has only a part of the System V shared memory segment %d attached, which CRIU cannot restore", t, id), stopIt}
	}
	whole := func(id uint64) bool {
		at := parts[id]
		return at == nil || at.end-at.start == (sizes[id]+page-1)/page*page
	}
	for _, v := range areas {
		if v.GetStatus()&sysV == 0 {
			continue
		}
		id := v.GetShmid()
		at := parts[id]
		switch {
		case v.GetPgoff() == 0:
			if !whole(id) {
				return partly(id)
			}
			parts[id] = &attached{v.GetStart(), v.GetEnd()}
		case at == nil || at.end != v.GetStart() || v.GetPgoff() != at.end-at.start:
			return partly(id)
		default:
			at.end = v.GetEnd()
		}
	}
	for id := range parts {
		if !whole(id) {
			return partly(id)
		}
	}
	return nil
}
