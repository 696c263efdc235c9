package criu

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// inode names a file inside a container.
type inode struct{ dev, ino uint64 }

// Bounds of the search for watched files.
const (
	maxWatches     = 10_000
	maxWatchedDirs = 200_000
	maxWatchTime   = 3 * time.Second
)

// Watches returns paths, as seen inside the container of initPid, of the files
// and directories that its processes watch by inotify.
//
// CRIU opens a watched file by its file handle, which an overlay mounted
// without nfs_export cannot do; given the path by irmap-scan-path it looks
// there and succeeds. Any `tail -f`, node or editor would fail a dump else.
// The container should be paused. What is not found in a bounded search is
// left out.
func Watches(initPid int) ([]string, error) {
	pids, err := Members(initPid)
	if err != nil {
		return nil, err
	}
	return watches(initPid, pids)
}

func watches(initPid int, pids []int) ([]string, error) {
	want := map[inode]bool{}
	for _, p := range pids {
		watchedBy(p, want)
	}
	if len(want) == 0 {
		return nil, nil
	}
	root, err := os.OpenRoot(fmt.Sprintf("/proc/%d/root", initPid))
	if err != nil {
		return nil, fmt.Errorf("watched files: %w", err)
	}
	defer root.Close()
	return findInodes(root, want)
}

// watchedBy adds what a process watches.
func watchedBy(pid int, want map[inode]bool) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, fd := range fds {
		if link, err := os.Readlink(filepath.Join(dir, fd.Name())); err != nil || link != "anon_inode:inotify" {
			continue
		}
		info, err := os.Open(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd.Name()))
		if err != nil {
			continue
		}
		lines := bufio.NewScanner(info)
		for lines.Scan() && len(want) < maxWatches {
			// inotify wd:1 ino:99e172 sdev:27 mask:fff ...
			if !bytes.HasPrefix(lines.Bytes(), []byte("inotify ")) {
				continue
			}
			var in inode
			for _, f := range strings.Fields(lines.Text()) {
				k, v, _ := strings.Cut(f, ":")
				n, err := strconv.ParseUint(v, 16, 64)
				if err != nil {
					continue
				}
				switch k {
				case "ino":
					in.ino = n
				case "sdev":
					// The kernel's own form: 12 bits of major, 20 of minor.
					in.dev = unix.Mkdev(uint32(n>>20), uint32(n&(1<<20-1)))
				}
			}
			want[in] = true
		}
		info.Close()
	}
}

var errFound = errors.New("all found")

// findInodes walks a root filesystem, staying on it, until all are found.
func findInodes(root *os.Root, want map[inode]bool) ([]string, error) {
	var files, folders []string
	var rootDev uint64
	dirs, start := 0, time.Now()
	err := fs.WalkDir(root.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // gone, or not readable; the rest is worth looking at
		}
		info, err := d.Info()
		if err != nil {
			return nil
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		if !ok {
			return nil
		}
		if path == "." {
			rootDev = uint64(st.Dev)
		}
		in := inode{uint64(st.Dev), st.Ino}
		if want[in] {
			switch {
			case path == ".": // CRIU does not take the root itself
			case d.IsDir():
				folders = append(folders, "/"+path)
			default:
				files = append(files, "/"+path)
			}
			if delete(want, in); len(want) == 0 {
				return errFound
			}
		}
		if d.IsDir() {
			if dirs++; dirs > maxWatchedDirs || time.Since(start) > maxWatchTime {
				return errFound
			}
			if uint64(st.Dev) != rootDev {
				return fs.SkipDir // another mount; there handles work
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFound) {
		return nil, err
	}
	// CRIU descends into each directory that is not the one it looks for.
	return append(files, folders...), nil
}
