package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// do takes from one staged entry what only overlayfs understands: a whiteout
// goes, an overlay's attribute goes, an escaped one gets its own name. Called for
// what is in a directory before the directory.
func (f fix) do(staged *root) error {
	d, name, err := staged.parent(f.path)
	if err != nil {
		return err
	}
	defer d.Close()
	if f.whiteout {
		if err := unix.Unlinkat(int(d.Fd()), name, 0); err != nil {
			return &fs.PathError{Op: "unlink", Path: f.path, Err: err}
		}
		return nil
	}
	p := procFD(d) + "/" + name
	for attr, value := range f.xattrs {
		if err := unix.Lremovexattr(p, attr); err != nil && err != unix.ENODATA {
			return &fs.PathError{Op: "remove attribute " + attr + " of", Path: f.path, Err: err}
		}
		if rest, ok := strings.CutPrefix(attr, escapedXattr); ok {
			if err := unix.Lsetxattr(p, overlayXattr+rest, []byte(value), 0); err != nil {
				return &fs.PathError{Op: "set attribute " + overlayXattr + rest + " of", Path: f.path, Err: err}
			}
		}
	}
	if !f.dir {
		return nil
	}
	// Whiteouts that went have changed it.
	return setTime(int(d.Fd()), name, f.mtime.Sec, f.mtime.Nsec)
}

// maxPlan bounds what is read of a plan. It is as long as the list of paths
// that an apply touches.
const maxPlan = 4 << 30

// readPlan reads a plan of ours.
func readPlan(path string, p *plan) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if st, err := f.Stat(); err != nil || st.Size() > maxPlan {
		return errors.Join(err, fmt.Errorf("%s: %w: too large", path, fault.ErrCorrupt))
	}
	if err := json.NewDecoder(f).Decode(p); err != nil {
		return fmt.Errorf("%s: %w: %w", path, fault.ErrCorrupt, err)
	}
	return nil
}
