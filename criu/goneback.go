package criu

import (
	"path"
	"strings"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	"google.golang.org/protobuf/proto"
)

// Link is a name that a restore needs for a moment: CRIU opens the file by it, under the
// name that is gone, and removes both. Paths are those of the container.
type Link struct{ New, Old string }

// Remapped tells what of a dump's files CRIU restores under names that it removes again: the
// links that have to be there, and the directories in which it makes names.
func Remapped(dir string) (links []Link, dirs []string, err error) {
	orig, linked := map[uint32]bool{}, map[uint32]bool{}
	err = optionalImage(dir, remapImage, magicRemap, func(data []byte) error {
		var e remap.RemapFilePathEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		switch e.GetRemapType() {
		case remap.RemapType_GHOST:
			orig[e.GetOrigId()] = true
		case remap.RemapType_LINKED:
			orig[e.GetOrigId()], linked[e.GetRemapId()] = true, true
		}
		return nil
	})
	if err != nil || len(orig) == 0 {
		return nil, nil, err
	}
	names, seen := map[uint32]string{}, map[string]bool{}
	err = optionalImage(dir, filesImage, magicFiles, func(data []byte) error {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		if reg := e.GetReg(); reg != nil && (orig[e.GetId()] || linked[e.GetId()] || linked[e.GetId()-1]) {
			names[e.GetId()] = path.Clean("/" + reg.GetName())
		}
		return nil
	})
	for id, name := range names {
		if !orig[id] && !linked[id] {
			continue
		}
		if old := names[id+1]; linked[id] && old != "" && strings.HasPrefix(path.Base(name), linkName) {
			links = append(links, Link{New: name, Old: old})
		}
		// Where one is missing CRIU takes the next above.
		for d := path.Dir(name); !seen[d]; d = path.Dir(d) {
			seen[d] = true
			dirs = append(dirs, d)
		}
	}
	return links, dirs, err
}
