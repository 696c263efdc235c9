package criu

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A file that processes have open, mapped or run, or work in, may have lost its name:
// deleted, or replaced by a rename. CRIU takes it along as a ghost if it has no link
// left at all. A file of a lower layer of an overlay keeps its links, for the layer is as
// it was; and of a file with several names others may be left. CRIU would make a link to
// such a file in the sandbox for as long as the dump takes (link-remap), where the
// capture of the files beside it meets it, and a directory has no links.
//
// So such files are external to CRIU, which writes down all of them but what they
// are, and the images are completed afterwards (goneimages.go), while all is frozen: a
// ghost with its contents, or the name that is left. Nothing in the sandbox is touched.

// gone is a file of which some process holds a name that is no more.
type gone struct {
	mount int // id of the mount it was opened on
	stat  unix.Stat_t
	held  []holder

	lost  string // the first path that is gone
	ghost uint32 // id of the ghost in the images; 0: none yet
	link  uint32 // id of the name that is left; 0: none yet
	other string // that name, within the upperdir; "": none
	asked bool
}

// holder is one way in which a process holds a file.
type holder struct {
	proc string // in /proc, leads to the file
	pid  int    // in the container
	fd   int    // -1: a mapping, the program, a directory that it works in
	path string
	gone bool // the path is no name of the file any more
}

// ofCRIU is how CRIU names the file.
func (g *gone) ofCRIU() string { return fmt.Sprintf("file[%x:%x]", g.mount, g.stat.Ino) }

type inodeOn struct {
	mount    int
	dev, ino uint64
}

const deletedSuffix = " (deleted)"

// goneFiles are those of a dump, by what CRIU calls them.
type goneFiles struct {
	init    int
	members []int
	files   map[string]*gone
	linked  bool // CRIU makes links itself: on a tmpfs, of which it takes the files along
}

// findGone looks for them among frozen processes. Without any, most often, it costs a look
// at the names of what they hold.
func findGone(initPid int, members []int) (*goneFiles, error) {
	g := &goneFiles{init: initPid, members: members, files: map[string]*gone{}}
	known := map[inodeOn]*gone{}
	root := fmt.Sprintf("/proc/%d/root", initPid)
	for _, pid := range members {
		err := eachHeld(pid, true, func(h holder) error {
			st, where, err := lookAt(h.proc)
			if err != nil || st.Nlink == 0 {
				return err // CRIU takes it along
			}
			var seen unix.Stat_t
			if unix.Lstat(root+h.path+deletedSuffix, &seen) == nil && seen.Dev == st.Dev && seen.Ino == st.Ino {
				return nil // that is its name
			}
			switch where.filesystem {
			case unix.TMPFS_MAGIC:
				g.linked = true
				return nil
			case unix.OVERLAYFS_SUPER_MAGIC:
			default:
				return nil
			}
			key := inodeOn{where.mount, st.Dev, st.Ino}
			if known[key] == nil {
				known[key] = &gone{mount: where.mount, stat: st, lost: h.path}
				g.files[known[key].ofCRIU()] = known[key]
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if len(known) == 0 {
		return g, nil
	}
	for _, pid := range members { // all that hold one of them, by whatever name
		err := eachHeld(pid, false, func(h holder) error {
			st, where, err := lookAt(h.proc)
			if err != nil {
				return err
			}
			if f := known[inodeOn{where.mount, st.Dev, st.Ino}]; f != nil {
				f.held = append(f.held, h)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return g, nil
}

// eachHeld calls fn with all that a process holds that has a path; with lost only with what may
// have lost it. A process or descriptor that ends meanwhile is no error.
func eachHeld(pid int, lost bool, fn func(holder) error) error {
	proc := fmt.Sprintf("/proc/%d", pid)
	inside := pid
	if status, err := readStatus(pid); err == nil {
		inside = status
	}
	one := func(path string, fd int) error {
		to, err := os.Readlink(path)
		if err != nil || !strings.HasPrefix(to, "/") {
			return nil
		}
		name, is := strings.CutSuffix(to, deletedSuffix)
		if lost && !is {
			return nil
		}
		err = fn(holder{proc: path, pid: inside, fd: fd, path: name, gone: is})
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EACCES) ||
			errors.Is(err, unix.ENXIO) {
			return nil
		}
		return err
	}
	for _, name := range []string{"exe", "cwd", "root"} {
		if err := one(filepath.Join(proc, name), -1); err != nil {
			return err
		}
	}
	if err := eachMapped(proc, lost, func(path string) error { return one(path, -1) }); err != nil {
		return err
	}
	list, err := os.ReadDir(filepath.Join(proc, "fd"))
	if err != nil {
		return nil // it has ended
	}
	for _, d := range list {
		fd, err := strconv.Atoi(d.Name())
		if err != nil {
			continue
		}
		if err := one(filepath.Join(proc, "fd", d.Name()), fd); err != nil {
			return err
		}
	}
	return nil
}

// eachMapped calls fn with the paths in map_files of mapped files, each file once.
func eachMapped(proc string, lost bool, fn func(path string) error) error {
	f, err := os.Open(filepath.Join(proc, "maps"))
	if err != nil {
		return nil // it has ended
	}
	defer f.Close()
	seen := map[string]bool{}
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 64<<10), 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if lost && !strings.HasSuffix(line, deletedSuffix) {
			continue
		}
		// Addresses, permissions, offset, device, inode and, after spaces, the path.
		at := strings.IndexByte(line, '/')
		fields := strings.Fields(line)
		if at < 0 || len(fields) < 6 {
			continue
		}
		file := fields[3] + fields[4] + line[at:]
		if seen[file] {
			continue
		}
		seen[file] = true
		from, to, ok := strings.Cut(fields[0], "-")
		start, e1 := strconv.ParseUint(from, 16, 64)
		end, e2 := strconv.ParseUint(to, 16, 64)
		if !ok || e1 != nil || e2 != nil {
			continue
		}
		if err := fn(filepath.Join(proc, "map_files", fmt.Sprintf("%x-%x", start, end))); err != nil {
			return err
		}
	}
	return nil
}

// place is where a file lies.
type place struct {
	mount      int
	filesystem int64
}

// lookAt looks at what a link of /proc leads to, without opening it.
func lookAt(path string) (st unix.Stat_t, at place, err error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return st, at, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := unix.Fstat(fd, &st); err != nil {
		return st, at, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	var sfs unix.Statfs_t
	if err := unix.Fstatfs(fd, &sfs); err != nil {
		return st, at, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	if at.mount = mountOf(fd); at.mount < 0 {
		return st, at, fmt.Errorf("the mount of %s is not known", path)
	}
	at.filesystem = int64(sfs.Type)
	return st, at, nil
}

// readStatus returns a process's pid in the innermost namespace.
func readStatus(pid int) (int, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if ids, ok := strings.CutPrefix(line, "NSpid:"); ok {
			f := strings.Fields(ids)
			return strconv.Atoi(f[len(f)-1])
		}
	}
	return pid, nil
}

// within refuses what is too large to take along.
func (g *goneFiles) within(limit int64) error {
	if limit <= 0 {
		limit = DefaultGhostLimit
	}
	for _, f := range g.files {
		if size := f.stat.Blocks * 512; f.stat.Mode&unix.S_IFMT == unix.S_IFREG && size > limit {
			return &DumpError{
				Diagnosis: Diagnosis{
					Code:   "ghost-limit",
					Reason: fmt.Sprintf("a process keeps %s open, which is deleted and has %d MiB; at most %d MiB are taken along", f.lost, size>>20, limit>>20),
					Hint:   "Have the process close it or restart the process, or checkpoint the files alone (--files-only).",
				},
				Err: fmt.Errorf("%s is deleted and too large: %w", f.lost, fault.ErrUnsupported),
			}
		}
	}
	return nil
}
