package criu

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A program that walks a tree, as rm -r, find and tar do, has a directory open that it has begun
// to read, and compares inode numbers on its way. If a restore makes that directory anew, with
// another number, the program takes the tree for one that was tampered with, and gives up. So
// Settle lets it go on for a moment, as it does in a young directory: most walks are over by
// then. A process that holds such a directory open and does not run is not waited for.

const (
	// walkerFiles bounds the open files that one look for walkers costs: everything is frozen
	// meanwhile. A process that has more of them walks no tree.
	walkerFiles, walkerTotal = 64, 1024
	// A process that ran, or waited for a processor, for less than idleTime in each of the last
	// idleLooks is idle. To be thawed and frozen again takes it some 50 µs.
	idleTime  = 100 * time.Microsecond
	idleLooks = 3
)

// walkers remembers the processes that seem to walk a tree, from one look to the next.
type walkers struct {
	ran  map[int]time.Duration // how long a process had run, or waited to, at the last look
	idle map[int]int           // how many looks in a row it has hardly
}

// next returns a process that walks a tree of its root filesystem; nil: none does. Newer
// processes are looked at first.
func (w *walkers) next(pids []int) *instant {
	if w.ran == nil {
		w.ran, w.idle = map[int]time.Duration{}, map[int]int{}
	}
	left := walkerTotal
	for _, p := range slices.Backward(slices.Sorted(slices.Values(pids))) {
		if left <= 0 {
			return nil
		}
		if w.idle[p] < idleLooks && readsDirectory(p, &left) && w.runs(p) {
			return &instant{tid: p, why: walkInstant}
		}
	}
	return nil
}

// runs reports whether a process is not idle.
func (w *walkers) runs(pid int) bool {
	now, err := cpuTime(pid)
	if err != nil {
		return false
	}
	if before, seen := w.ran[pid]; seen && now-before < idleTime {
		w.idle[pid]++
	} else {
		w.idle[pid] = 0
	}
	w.ran[pid] = now
	return w.idle[pid] < idleLooks
}

// cpuTime returns how long the threads that a process has now have run, or waited for a processor.
func cpuTime(pid int) (sum time.Duration, err error) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0, err
	}
	for _, t := range tasks {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, t.Name()))
		if err != nil {
			return 0, err
		}
		var ran, waited time.Duration
		if _, err := fmt.Sscan(string(data), &ran, &waited); err != nil {
			return 0, err
		}
		sum += ran + waited
	}
	return sum, nil
}

// readsDirectory reports whether a process has a directory on its root's mount open that it has
// begun to read. It asks the kernel's records alone: a filesystem might not answer.
func readsDirectory(pid int, left *int) bool {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return false
	}
	names, _ := dir.Readdirnames(walkerFiles + 1) // none: it has nothing open
	dir.Close()
	if *left -= len(names); len(names) > walkerFiles {
		return false
	}
	root := -1
	for _, name := range names {
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, name))
		if err != nil {
			continue
		}
		fd := parseFdinfo(string(info))
		if fd.flags&unix.O_DIRECTORY == 0 || fd.pos == 0 {
			continue
		}
		if root < 0 {
			if root = rootMount(pid); root < 0 {
				return false
			}
		}
		if fd.mount == root {
			return true
		}
	}
	return false
}

// rootMount returns the id of the mount that a process's root is on; negative: it is not known.
func rootMount(pid int) int {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	defer unix.Close(fd)
	return mountOf(fd)
}

// openFile is what /proc/PID/fdinfo/FD says of any open file.
type openFile struct {
	pos   int64
	flags int
	mount int // negative: it is not known
}

func parseFdinfo(text string) openFile {
	fd := openFile{mount: -1}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		switch name {
		case "pos":
			fd.pos, _ = strconv.ParseInt(value, 10, 64)
		case "flags":
			n, _ := strconv.ParseInt(value, 8, 64)
			fd.flags = int(n)
		case "mnt_id":
			if n, err := strconv.Atoi(value); err == nil {
				fd.mount = n
			}
		}
	}
	return fd
}
