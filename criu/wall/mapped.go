package wall

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// noMount reports whether what a link of /proc names is on no mount.
func noMount(target string) bool {
	switch target {
	case "/dev/zero (deleted)", "/anon_hugepage (deleted)", "/[aio] (deleted)":
		return true
	}
	return !strings.HasPrefix(target, "/") || strings.HasPrefix(target, "/memfd:") || strings.HasPrefix(target, "/SYSV")
}

// mapped proves that the files in a process's memory are on mounts of the container, and are no
// device that the container has not.
func (l *look) mapped(pid int, dir string) error {
	v, err := l.view(pid, dir)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(dir + "maps")
	if err != nil {
		return err
	}
	seen := map[string]bool{}
	for line := range bytes.Lines(data) {
		// BEGIN-END PERMISSIONS OFFSET MAJOR:MINOR INODE [PATH]
		f := strings.SplitN(string(bytes.TrimRight(line, "\n")), " ", 6)
		if len(f) < 6 || f[4] == "0" {
			continue
		}
		path := strings.TrimLeft(f[5], " ")
		if noMount(path) {
			continue
		}
		// Another part of a file is as the first, but for one through which it can be written.
		key := f[3] + " " + f[4] + " " + path
		if written := strings.HasPrefix(f[1], "rws") || strings.HasPrefix(f[1], "-ws"); seen[key] && !written {
			continue
		}
		seen[key] = true
		if err := l.mapping(pid, v, dir+"map_files/"+mapName(f[0]), path); err != nil {
			return err
		}
	}
	return nil
}

// mapName is the name in map_files of a part of memory: without the zeros that its numbers begin with.
func mapName(part string) string {
	begin, end, _ := strings.Cut(part, "-")
	return strings.TrimLeft(begin, "0") + "-" + strings.TrimLeft(end, "0")
}

func (l *look) mapping(pid int, v *view, link, path string) error {
	what := "memory at " + filepath.Base(link)
	if l.under(path) {
		return refuseOf(pid, what, "%s is hidden in the container, or read-only", quoted(path))
	}
	id, st, err := placeOf(link)
	if err != nil {
		return err
	}
	if !v.ids[id] && !l.anywhere(id) {
		return refuseOf(pid, what, "%s is outside of the container's mounts", quoted(path))
	}
	return l.device(pid, what, path, st)
}

// placeOf returns the mount that a file is on, and the file's kind and device, by a link of /proc.
func placeOf(link string) (uint32, *unix.Stat_t, error) {
	var x unix.Statx_t
	// One call, for there may be tens of thousands. It asks no server, which may be frozen.
	err := unix.Statx(unix.AT_FDCWD, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT,
		unix.STATX_TYPE|unix.STATX_MNT_ID, &x)
	if err == nil && x.Mask&unix.STATX_MNT_ID != 0 {
		return uint32(x.Mnt_id), &unix.Stat_t{Mode: uint32(x.Mode), Rdev: unix.Mkdev(x.Rdev_major, x.Rdev_minor)}, nil
	}
	fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0) // Linux before 5.8
	if err != nil {
		return 0, nil, fmt.Errorf("%s: %w", link, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, nil, fmt.Errorf("%s: %w", link, err)
	}
	id, err := mountID(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	return id, &st, err
}

// watches proves that what a process watches by a descriptor is on mounts of the container: inotify
// and fanotify tell names of directories, and the latter opens files.
func (l *look) watches(pid int, dir, fd string) error {
	v, err := l.view(pid, dir)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(dir + "fdinfo/" + fd)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "inotify" && f[0] != "fanotify" {
			continue
		}
		w := map[string]string{}
		for _, word := range f[1:] {
			k, text, _ := strings.Cut(word, ":")
			w[k] = text
		}
		if n, is := w["mnt_id"]; is {
			id, err := strconv.ParseUint(n, 16, 32)
			if err != nil {
				return fmt.Errorf("process %d: %q makes no sense", pid, line)
			}
			if !v.ids[uint32(id)] && !l.anywhere(uint32(id)) {
				return refuseOf(pid, "file descriptor "+fd, "it watches a mount outside of the container's")
			}
			continue
		}
		if _, is := w["sdev"]; !is {
			continue // what fanotify is set to
		}
		in, err := l.watched(v, dir, w)
		if err != nil {
			return err
		}
		if !in && !l.spec.mounter() { // which may have unmounted it
			return refuseOf(pid, "file descriptor "+fd,
				"it watches file %s of device %s outside of the container's mounts", w["ino"], w["sdev"])
		}
	}
	return nil
}

// watched reports whether a mount of the container shows a file that is watched.
func (l *look) watched(v *view, dir string, w map[string]string) (bool, error) {
	number, err := strconv.ParseUint(w["sdev"], 16, 32)
	if err != nil {
		return false, fmt.Errorf("a watch of device %q makes no sense", w["sdev"])
	}
	dev := unix.Mkdev(uint32(number>>20), uint32(number&(1<<20-1)))
	var parts []mount
	for _, m := range v.mounts {
		if m.dev == dev {
			if m.root == "/" {
				return true, nil // it shows all of the filesystem
			}
			parts = append(parts, m)
		}
	}
	text, is := w["f_handle"]
	if !is || len(parts) == 0 {
		return len(parts) > 0 && w["ino"] != "", nil // or it is of a filesystem as a whole
	}
	handle, err := hex.DecodeString(text)
	typ, err2 := strconv.ParseUint(w["fhandle-type"], 16, 32)
	if err := errors.Join(err, err2); err != nil {
		return false, fmt.Errorf("a watch of %q makes no sense: %w", text, err)
	}
	root, err := unix.Open(dir+"root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(root)
	tried := false
	for _, m := range parts {
		in, could, err := shows(root, m, unix.NewFileHandle(int32(typ), handle))
		if in || err != nil {
			return in, err
		}
		tried = tried || could
	}
	return !tried, nil
}

// shows reports whether a mount shows the file of a handle, and whether that can be found out: a file
// that is deleted, or whose name the kernel does not know, is in no directory.
func shows(root int, m mount, handle unix.FileHandle) (in, could bool, err error) {
	at, err := openIn(root, m.point)
	if err != nil {
		return false, false, nil
	}
	defer unix.Close(at)
	if id, err := mountID(fmt.Sprintf("/proc/self/fdinfo/%d", at)); err != nil || id != m.id {
		return false, false, err // another lies over it
	}
	// Not by O_PATH, which takes no handles.
	from, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", at), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return false, false, nil
	}
	defer unix.Close(from)
	fd, err := unix.OpenByHandleAt(from, handle, unix.O_PATH|unix.O_CLOEXEC)
	switch {
	case errors.Is(err, unix.ESTALE), errors.Is(err, unix.EPERM), errors.Is(err, unix.EOPNOTSUPP):
		return false, false, nil
	case err != nil:
		return false, false, fmt.Errorf("a watch on the mount at %s: %w", quoted(m.point), err)
	}
	defer unix.Close(fd)
	var is, found unix.Stat_t
	if err := unix.Fstat(fd, &is); err != nil {
		return false, false, err
	}
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return false, false, err
	}
	if is.Nlink == 0 || path == "/" && is.Mode&unix.S_IFMT != unix.S_IFDIR {
		return false, false, nil
	}
	if !below(path, m.point) {
		return false, true, nil
	}
	rest := strings.TrimPrefix(strings.TrimPrefix(path, m.point), "/")
	if rest == "" {
		rest = "."
	}
	there, err := unix.Openat2(at, rest, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC | unix.O_NOFOLLOW,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return false, true, nil
	}
	defer unix.Close(there)
	if err := unix.Fstat(there, &found); err != nil {
		return false, true, err
	}
	return found.Dev == is.Dev && found.Ino == is.Ino, true, nil
}

// device proves that a file is no device that the container has not.
func (l *look) device(pid int, what, path string, st *unix.Stat_t) error {
	block := st.Mode&unix.S_IFMT == unix.S_IFBLK
	if !block && st.Mode&unix.S_IFMT != unix.S_IFCHR || l.spec.hostRoot() {
		return nil
	}
	if major, minor := unix.Major(st.Rdev), unix.Minor(st.Rdev); !l.spec.device(block, major, minor) &&
		!(major == 10 && minor == 200 && l.spec.can("NET_ADMIN")) {
		return refuseOf(pid, what, "%s is device %d:%d, which the container has not", quoted(path), major, minor)
	}
	return nil
}
