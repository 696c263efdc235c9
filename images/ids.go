package images

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
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
	var largest uint32
	if err := filepath.WalkDir(lower, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		largest = max(largest, st.Uid, st.Gid)
		return nil
	}); err != nil {
		return 0, fmt.Errorf("look at the owners in an image: %w", err)
	}
	return largest, keep(kept, fmt.Sprintln(largest))
}

// keep makes a file that is there whole, or not at all. One that a power loss
// empties is written again.
func keep(path, text string) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".tmp-")
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}
