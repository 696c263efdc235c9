package engine

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/runtime"
)

// Processes may hold open files whose names are gone. CRIU recreates such names for a moment
// and removes them. The code here stages what CRIU needs for that, and notes the times of the
// directories concerned, so that the wrapper can put them back.

// beneath opens a directory of the upperdir without following links or mounts.
func beneath(root int, dir string) (int, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	}
	return unix.Openat2(root, "./"+strings.TrimPrefix(dir, "/"), &how)
}

// remapped makes the links that a restore needs in the unused upperdir of a container, and returns
// the times of the directories; remove removes the links.
func remapped(c runtime.Container, images string) (times []stage.DirTime, remove func() error, err error) {
	none := func() error { return nil }
	links, dirs, err := criu.Remapped(images)
	if err != nil || len(dirs) == 0 {
		return nil, none, err
	}
	for _, dir := range dirs {
		upper, t := upperOf(c, dir)
		fd, err := upperDir(upper, t.Path)
		if err != nil {
			continue // the directory is gone, or on another filesystem
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		unix.Close(fd)
		if err != nil {
			return nil, none, fmt.Errorf("stat %s: %w", dir, err)
		}
		t.Sec, t.Nsec = st.Mtim.Sec, st.Mtim.Nsec
		times = append(times, t)
	}
	root, err := unix.Open(c.Upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, none, fmt.Errorf("open %s: %w", c.Upper, err)
	}
	defer unix.Close(root)
	var made []string
	remove = func() error { return unmapped(c, made, times) }
	for _, l := range links {
		if err := link(root, l); err != nil {
			return nil, none, errors.Join(
				fmt.Errorf("link %s to %s for a process that holds it by another name: %w", l.New, l.Old, err),
				remove())
		}
		made = append(made, l.New)
	}
	return times, remove, nil
}

// unmapped removes the links, and puts the times back.
func unmapped(c runtime.Container, links []string, times []stage.DirTime) error {
	root, err := unix.Open(c.Upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	var errs []error
	for _, name := range links {
		fd, err := beneath(root, path.Dir(name))
		if err != nil {
			continue
		}
		if err := unix.Unlinkat(fd, path.Base(name), 0); err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("unlink %s: %w", name, err))
		}
		unix.Close(fd)
	}
	for _, t := range times {
		upper, _ := upperOf(c, path.Join("/", t.Mount, t.Path))
		if fd, err := upperDir(upper, t.Path); err == nil {
			errs = append(errs, unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd),
				[]unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: t.Sec, Nsec: t.Nsec}}, 0))
			unix.Close(fd)
		}
	}
	return errors.Join(errs...)
}

// upperOf returns the upperdir that a directory of a container is in, and where it is in that: the
// container's own, or that of the innermost workspace.
func upperOf(c runtime.Container, dir string) (upper string, t stage.DirTime) {
	upper, t.Path = c.Upper, dir
	for _, v := range c.Volumes {
		if v.Workspace() && len(v.Target) > len(t.Mount) && fsx.Within(v.Target, path.Join("/", dir)) {
			upper, t.Mount = v.Path, v.Target
			t.Path = strings.TrimPrefix(path.Join("/", dir), v.Target)
		}
	}
	return upper, t
}

// upperDir opens a directory of an upperdir.
func upperDir(upper, dir string) (int, error) {
	root, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(root)
	return beneath(root, dir)
}

func link(root int, l criu.Link) error {
	from, err := beneath(root, path.Dir(l.Old))
	if err != nil {
		return err
	}
	defer unix.Close(from)
	to, err := beneath(root, path.Dir(l.New))
	if err != nil {
		return err
	}
	defer unix.Close(to)
	err = unix.Linkat(from, path.Base(l.Old), to, path.Base(l.New), 0)
	if err == unix.EEXIST { // left by a restore that was killed
		if err = unix.Unlinkat(to, path.Base(l.New), 0); err == nil {
			err = unix.Linkat(from, path.Base(l.Old), to, path.Base(l.New), 0)
		}
	}
	return err
}
