package criu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/checkpoint-restore/go-criu/v7/crit/images/fdinfo"
	remap "github.com/checkpoint-restore/go-criu/v7/crit/images/remap-file-path"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/internal/fault"
)

// OpenFile is a path that a restore opens again: that of an open file, a mapped one, a program,
// or a working directory. CRIU refuses a file whose size or mode has changed since, where it has
// recorded them.
type OpenFile struct {
	Path    string // absolute, as the processes saw it
	Size    int64
	HasSize bool
	Mode    uint32 // st_mode, the type included
	HasMode bool
}

// Bounds for the images of open files, which are kept in memory.
const (
	maxFiles     = 1 << 20
	maxFileBytes = 256 << 20
)

const (
	magicFiles = 0x56303138
	magicRemap = 0x59133954
)

// OpenFileImages are all of a dump's images that OpenFiles reads.
var OpenFileImages = []string{filesImage, remapImage}

const (
	filesImage = "files.img"
	remapImage = "remap-fpath.img"
)

// OpenFiles lists the files of a dump that have to be there when it is
// restored. Those that were deleted are not among them: CRIU brings its own
// copy, and names them in the image of remapped paths.
func OpenFiles(dir string) ([]OpenFile, error) {
	remapped := map[uint32]bool{}
	err := optionalImage(dir, remapImage, magicRemap, func(data []byte) error {
		var e remap.RemapFilePathEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		remapped[e.GetOrigId()] = true
		return nil
	})
	if err != nil {
		return nil, err
	}
	var list []OpenFile
	err = optionalImage(dir, filesImage, magicFiles, func(data []byte) error {
		var e fdinfo.FileEntry
		if err := proto.Unmarshal(data, &e); err != nil {
			return err
		}
		reg := e.GetReg()
		if reg == nil || remapped[e.GetId()] || reg.GetExt() {
			return nil
		}
		f := OpenFile{
			Path: path.Clean("/" + reg.GetName()),
			Size: int64(reg.GetSize()), HasSize: reg.Size != nil,
			Mode: reg.GetMode(), HasMode: reg.Mode != nil,
		}
		if f.Size < 0 {
			return errors.New("size makes no sense")
		}
		list = append(list, f)
		return nil
	})
	return list, err
}

// optionalImage is readImage for an image that a dump has only if it needs it.
func optionalImage(dir, name string, magic uint32, fn func([]byte) error) error {
	file := filepath.Join(dir, name)
	st, err := os.Lstat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if st.Size() > maxFileBytes {
		return fmt.Errorf("image %s of %d bytes is past all bounds: %w", name, st.Size(), fault.ErrCorrupt)
	}
	return readImage(file, magic, maxFiles, fn)
}
