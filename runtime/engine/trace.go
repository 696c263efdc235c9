package engine

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
)

// footprint records what a dump changes in the sandbox's files, so that the changes neither
// get into the checkpoint nor stay in the sandbox.
//
// To read a tmpfs with a mount over a part of it (/dev always has one), CRIU creates and
// removes a directory cr-tmpfs.XXXXXX in the container's /tmp, or in / if there is no /tmp.
// On an overlay this copies /tmp up and changes its time, and the concurrent capture of the
// files may see the directory.
type footprint struct {
	root  string // the sandbox's root as the host sees it
	tmp   string // where its /tmp really is, relative to root
	times map[string]unix.Timespec
	known map[string]overlay.Entry
	added string          // the first directory above or at tmp that the upperdir lacks
	names map[string]bool // files in the two directories that already have names like CRIU's
}

const criuTemp = "cr-tmpfs."

// newFootprint reads what a dump may change. The sandbox is frozen.
func newFootprint(pid int, upper string) (*footprint, error) {
	f := &footprint{
		root: fmt.Sprintf("/proc/%d/root", pid), times: map[string]unix.Timespec{}, known: map[string]overlay.Entry{},
		names: map[string]bool{},
	}
	jail, err := policy.Open(f.root)
	if err != nil {
		return nil, err
	}
	defer jail.Close()
	// A dangling /tmp counts as missing, for CRIU too.
	f.tmp = "."
	if tmp, _, err := jail.Real("/tmp"); err == nil && path.Clean(tmp) != "/" {
		f.tmp = strings.TrimPrefix(path.Clean(tmp), "/")
	}

	for _, dir := range []string{".", f.tmp} {
		h, err := jail.Handle("/"+dir, false)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, fault.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var st unix.Stat_t
		err = unix.Fstat(int(h.Fd()), &st)
		h.Close()
		if err != nil {
			return nil, err
		}
		f.times[dir] = st.Mtim
	}
	dirs := []string{"."}
	for i, c := range f.tmp + "/" {
		if c == '/' {
			dirs = append(dirs, f.tmp[:i])
		}
	}

	for _, dir := range dirs {
		entry, err := overlay.ReadDir(upper, dir)
		if errors.Is(err, fault.ErrNotFound) {
			var st unix.Stat_t
			if unix.Lstat(path.Join(upper, dir), &st) != nil {
				f.added = dir
			}
			break
		}
		if err != nil {
			return nil, err
		}
		f.known[dir] = entry
	}

	for _, dir := range []string{".", f.tmp} {
		if _, ok := f.known[dir]; !ok {
			continue
		}
		list, err := os.ReadDir(path.Join(upper, dir))
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			if strings.HasPrefix(e.Name(), criuTemp) {
				f.names[path.Join(dir, e.Name())] = true
			}
		}
	}
	return f, nil
}

// skip reports whether a capture must leave out a path.
func (f *footprint) skip(name string) bool {
	if name == f.added {
		return true
	}
	dir, base := path.Split(name)
	return strings.HasPrefix(base, criuTemp) && !f.names[name] && (dir == "" || path.Clean(dir) == f.tmp)
}

// erase restores the times of the directories. The sandbox is still frozen.
func (f *footprint) erase() error {
	jail, err := policy.Open(f.root)
	if err != nil {
		return err
	}
	defer jail.Close()
	for dir, mtime := range f.times {
		h, err := jail.Handle("/"+dir, false)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		err = unix.Fstat(int(h.Fd()), &st)
		if err == nil && st.Mtim != mtime {
			err = unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", h.Fd()),
				[]unix.Timespec{st.Atim, mtime}, 0)
		}
		h.Close()
		if err != nil {
			return fmt.Errorf("time of /%s: %w", dir, err)
		}
	}
	return nil
}
