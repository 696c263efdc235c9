package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// UnmountBelow unmounts everything at or below some directories, inner mounts
// first.
func UnmountBelow(dirs ...string) error {
	// Nothing is mounted below what is not there.
	dirs = slices.DeleteFunc(dirs, func(dir string) bool {
		_, err := os.Lstat(dir)
		return errors.Is(err, fs.ErrNotExist)
	})
	if len(dirs) == 0 {
		return nil
	}
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(dirs, func(dir string) bool {
			rest, ok := strings.CutPrefix(i.Mountpoint, dir)
			return ok && (rest == "" || rest[0] == '/')
		}), false
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, i := range slices.Backward(infos) { // the table is in the order of mounting
		if err := Unmount(i.Mountpoint); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", i.Mountpoint, err))
		}
	}
	return errors.Join(errs...)
}

// BindTo binds a directory to another one, which is open; its path, which may lead anywhere by
// now, is not used.
func BindTo(source string, target *os.File) error {
	at := fmt.Sprintf("/proc/self/fd/%d", target.Fd())
	if err := unix.Mount(source, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", source, err)
	}
	return nil
}

// MountsBelow lists what is mounted below some directories.
func MountsBelow(dirs ...string) (paths []string, err error) {
	infos, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(dirs, func(dir string) bool {
			return strings.HasPrefix(i.Mountpoint, dir+"/")
		}), false
	})
	for _, i := range infos {
		paths = append(paths, i.Mountpoint)
	}
	return paths, err
}

// Unmount detaches a mount that is busy: a process of the host that stands in
// it keeps it alive for itself, but it is out of our way.
func Unmount(path string) error {
	err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, syscall.EBUSY) {
		err = unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
	}
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, fs.ErrNotExist) {
		return nil // not a mount any more
	}
	return err
}
