package tree

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Dir is how a directory looks.
type Dir struct {
	Mode     uint32
	UID, GID int
	Mtime    unix.Timespec
	xattrs   []xattr
}

// DirState tells what a layer has at the path of a directory.
type DirState struct {
	There bool // a directory
	Hides bool // nothing of the layers below shows there
}

// LookDir looks for a directory in a layer as overlayfs would.
func LookDir(layer *os.File, path string) (d Dir, state DirState, err error) {
	h, err := reopen(layer, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return d, state, err
	}
	for c := range strings.SplitSeq(path, "/") {
		if c == "" {
			continue
		}
		next, err := handle(h, c)
		h.Close()
		if err == unix.ENOENT {
			return d, state, nil
		}
		if err != nil {
			return d, state, wrap("look at", path, err)
		}
		h = next
		st, err := fstat(h)
		if err != nil {
			h.Close()
			return d, state, wrap("look at", path, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			h.Close()
			return d, DirState{Hides: true}, nil
		}
		var b [1]byte
		if n, err := unix.Getxattr(procPath(h), OpaqueXattr, b[:]); err == nil && n == 1 && b[0] == 'y' {
			state.Hides = true
		}
	}
	defer h.Close()
	st, err := fstat(h)
	if err != nil {
		return d, state, wrap("look at", path, err)
	}
	state.There = true
	d = Dir{Mode: st.Mode & 0o7777, UID: int(st.Uid), GID: int(st.Gid), Mtime: st.Mtim}
	d.xattrs, err = xattrs(h, func(name string) bool {
		return !HostXattr(name) && !strings.HasPrefix(name, "trusted.overlay.")
	})
	return d, state, wrap("look at", path, err)
}

// Dress gives the open directory dir the owner, mode, time and attributes of like. Of the attributes those
// alone come and go that keep admits.
func Dress(like, dir *os.File, keep func(name string) bool) error {
	st, err := fstat(like)
	if err != nil {
		return err
	}
	want, err := xattrs(like, keep)
	if err != nil {
		return err
	}
	have, err := xattrs(dir, keep)
	if err != nil {
		return err
	}
	for _, x := range have {
		if slices.ContainsFunc(want, func(w xattr) bool { return w.name == x.name }) {
			continue
		}
		if err := unix.Fremovexattr(int(dir.Fd()), x.name); err != nil && err != unix.ENODATA {
			return fmt.Errorf("remove attribute %q: %w", x.name, err)
		}
	}
	return metaOf(&st, want).applyOpen(dir)
}

// MakeDirs makes directories in the empty one top. Those above each, and "" for
// top itself, have to be among them.
func MakeDirs(top *os.File, dirs map[string]Dir) error {
	paths := slices.Sorted(maps.Keys(dirs))
	for _, p := range paths {
		if p == "" {
			continue
		}
		// No other process is in top, and everything in it is a directory.
		if err := unix.Mkdirat(int(top.Fd()), p, 0o700); err != nil {
			return wrap("make", p, err)
		}
	}
	for _, p := range slices.Backward(paths) {
		h, err := openat(top, "./"+p, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return wrap("make", p, err)
		}
		d := dirs[p]
		err = meta{mode: d.Mode, uid: d.UID, gid: d.GID, mtime: d.Mtime, xattrs: d.xattrs}.applyOpen(h)
		h.Close()
		if err != nil {
			return wrap("make", p, err)
		}
	}
	return nil
}
