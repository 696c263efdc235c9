package criu

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A process that works in a directory which was made a moment ago is likely to be about to
// remove it: dpkg unpacks each package's control files with tar in such a one. A restore makes a
// directory that was removed anew, with another inode number, and a program that has compared
// the numbers, as tar does, fails. So Settle lets such a process go on for a moment, too. It
// does not insist: a shell may well stay in the directory that it has made.

// Tests change these.
var (
	// young is the age up to which a directory counts as made a moment ago.
	young = time.Second
	// youngLimit is how long Settle waits for processes to leave young directories.
	youngLimit = 250 * time.Millisecond
)

// inYoung returns a process that works in a young directory of its root filesystem; nil: none
// does. Other filesystems are not looked at, as one might not answer.
func inYoung(pids []int, now time.Time) *instant {
	seen := map[string]bool{}
	for _, p := range pids {
		link := fmt.Sprintf("/proc/%d/cwd", p)
		where, err := os.Readlink(link)
		if err != nil || where == "/" || seen[where] {
			continue
		}
		seen[where] = true
		if age, known := ageOf(link, fmt.Sprintf("/proc/%d/root", p), now); known && age >= 0 && age < young {
			return &instant{tid: p, why: youngInstant}
		}
	}
	return nil
}

// ageOf returns how long ago a directory was made, if its filesystem knows and the directory is
// on the same mount as root.
func ageOf(link, root string, now time.Time) (age time.Duration, known bool) {
	fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(fd)
	r, err := unix.Open(root, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, false
	}
	defer unix.Close(r)
	if m := mountOf(fd); m < 0 || m != mountOf(r) {
		return 0, false
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_BTIME, &st); err != nil ||
		st.Mask&unix.STATX_BTIME == 0 {
		return 0, false
	}
	return now.Sub(time.Unix(st.Btime.Sec, int64(st.Btime.Nsec))), true
}

// mountOf returns the id of the mount that an open file is on, without a call to its
// filesystem; negative: it is not known. The kernel's own mounts may have the id 0.
func mountOf(fd int) int {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return -1
	}
	return parseFdinfo(string(info)).mount
}
