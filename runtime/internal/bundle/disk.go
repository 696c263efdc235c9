package bundle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A Disk is a block device as a whole: the kernel takes limits for no part of
// one.
type Disk struct {
	Major, Minor uint32
	Path         string
}

// DiskOf finds the disk that a directory's files lie on.
func DiskOf(dir string) (Disk, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return Disk{}, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	dev := st.Dev
	if unix.Major(dev) == 0 {
		// btrfs, for one, has numbers of its own; its mount names the device.
		var err error
		if dev, err = mountedFrom(dir); err != nil {
			return Disk{}, err
		}
	}
	link, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(dev), unix.Minor(dev)))
	if errors.Is(err, fs.ErrNotExist) {
		return Disk{}, noDisk(dir)
	}
	if err != nil {
		return Disk{}, err
	}
	if _, err := os.Lstat(filepath.Join(link, "partition")); err == nil {
		link = filepath.Dir(link)
	}
	data, err := os.ReadFile(filepath.Join(link, "dev"))
	if err != nil {
		return Disk{}, err
	}
	// The kernel writes a ! for each slash of a name.
	d := Disk{Path: "/dev/" + strings.ReplaceAll(filepath.Base(link), "!", "/")}
	_, err = fmt.Sscanf(string(data), "%d:%d", &d.Major, &d.Minor)
	return d, err
}

func noDisk(dir string) error {
	return &fault.Error{Err: fmt.Errorf("%w: an I/O limit: the files of %s are on no disk of this host",
		fault.ErrUnsupported, dir),
		Hint: "Leave out --io-bps, or keep the sandboxes on a disk."}
}

// mountedFrom is the device that a directory's filesystem was mounted from.
func mountedFrom(dir string) (uint64, error) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return 0, err
	}
	infos, err := mountinfo.GetMounts(mountinfo.ParentsFilter(real))
	if err != nil {
		return 0, err
	}
	longest, source := "", ""
	for _, m := range infos {
		if len(m.Mountpoint) >= len(longest) { // the later one lies on top
			longest, source = m.Mountpoint, m.Source
		}
	}
	var st unix.Stat_t
	if !filepath.IsAbs(source) || unix.Stat(source, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return 0, noDisk(dir)
	}
	return st.Rdev, nil
}
