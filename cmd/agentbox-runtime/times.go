package main

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
)

// putTimes gives directories of a restored container, which is frozen, the times that they
// had before CRIU made names of deleted files in them, and removed these.
func putTimes(c call, times []stage.DirTime) error {
	if len(times) == 0 {
		return nil
	}
	pid, err := c.pid()
	if err != nil {
		return err
	}
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil // its first process has ended already
	}
	if err != nil {
		return fmt.Errorf("open its root: %w", err)
	}
	defer unix.Close(root)
	for _, t := range times {
		fd, err := openDir(root, t)
		if err != nil {
			continue // something is mounted there
		}
		want := unix.Timespec{Sec: t.Sec, Nsec: t.Nsec}
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil && st.Mtim != want {
			err = unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd),
				[]unix.Timespec{{Nsec: unix.UTIME_OMIT}, want}, 0)
		}
		unix.Close(fd)
		if errors.Is(err, unix.EROFS) {
			continue
		}
		if err != nil {
			return fmt.Errorf("time of %s: %w", t.Path, err)
		}
	}
	return nil
}

// openDir opens a directory below a root, on the root's mount or on that of its workspace.
func openDir(root int, t stage.DirTime) (fd int, err error) {
	how := unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	}
	if t.Mount != "" {
		if root, err = unix.Openat2(root, "./"+strings.TrimPrefix(t.Mount, "/"), &how); err != nil {
			return -1, err
		}
		defer unix.Close(root)
	}
	how.Flags, how.Resolve = unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, how.Resolve|unix.RESOLVE_NO_XDEV
	return unix.Openat2(root, "./"+strings.TrimPrefix(t.Path, "/"), &how)
}
