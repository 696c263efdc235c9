package images

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentbox/agentbox/internal/fsx"
)

// LargestID is the largest id of a user or a group that owns something in a
// layer, which is one of an image's Lower. A layer never changes, so that what
// was found out is kept beside it.
func LargestID(lower string) (uint32, error) {
	kept := lower + ".largest-id"
	text, err := os.ReadFile(kept)
	if err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32); err == nil {
			return uint32(n), nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	root, err := os.OpenRoot(lower)
	if err != nil {
		return 0, fmt.Errorf("look at the owners in an image: %w", err)
	}
	defer root.Close()
	var largest uint32
	add := func(fi fs.FileInfo) {
		st := fi.Sys().(*syscall.Stat_t)
		largest = max(largest, st.Uid, st.Gid)
	}
	// Beneath a root: paths may be longer than the kernel takes in one piece.
	for dirs := []string{"."}; len(dirs) > 0; {
		dir := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		f, err := root.Open(dir)
		if err != nil {
			return 0, fmt.Errorf("look at the owners in an image: %w", err)
		}
		self, err := f.Stat()
		var list []fs.FileInfo
		if err == nil {
			add(self)
			list, err = f.Readdir(-1)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return 0, fmt.Errorf("look at the owners in an image: %w", err)
		}
		for _, fi := range list {
			if add(fi); fi.IsDir() {
				dirs = append(dirs, dir+"/"+fi.Name())
			}
		}
	}
	// one that a power loss empties is written again
	return largest, fsx.Write(kept, []byte(fmt.Sprintln(largest)), fsx.Options{Volatile: true})
}
