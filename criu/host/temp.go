package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/proc"
)

// SweepTemp removes the directories that killed CRIUs leave in /tmp, whatever their working
// directory was. CRIU assembles a container's mounts there and, at every start, probes how the
// kernel moves mounts. Its mounts were in a namespace that is gone; the first of them, a tmpfs,
// is in ours too where / is shared, as under systemd. While any CRIU runs, one of the directories
// may be its own, so all are left for the next sweep.
func SweepTemp() error { return sweepTemp("/tmp", criuRuns) }

func sweepTemp(dir string, running func() (bool, error)) error {
	// Listed first: what a CRIU that starts meanwhile makes is not among them.
	var found []string
	for _, name := range []string{".criu.mntns.*", ".criu.move_mount_set_group.*"} {
		list, err := filepath.Glob(filepath.Join(escapeGlob(dir), name))
		if err != nil {
			return err
		}
		found = append(found, list...)
	}
	if len(found) == 0 {
		return nil
	}
	if runs, err := running(); err != nil || runs {
		return err
	}
	var errs []error
	for _, path := range found {
		st, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if sys, ok := st.Sys().(*syscall.Stat_t); !ok || !st.IsDir() || int(sys.Uid) != os.Geteuid() {
			continue // any user can create such a name there
		}
		err = unix.Rmdir(path)
		if err == unix.EBUSY {
			if err = unmountTmpfs(path); err == nil {
				err = unix.Rmdir(path)
			}
		}
		if err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("remove %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// unmountTmpfs leaves a mount of another kind alone: EBUSY.
func unmountTmpfs(path string) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	var st unix.Statfs_t
	err = unix.Fstatfs(fd, &st)
	_ = unix.Close(fd) // before the mount can go
	switch {
	case err != nil:
		return err
	case st.Type != unix.TMPFS_MAGIC:
		return unix.EBUSY
	}
	// With the mount below it, by which CRIU tries to move one.
	return unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
}

func criuRuns() (bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && mayUseTemp(pid) {
			return true, nil
		}
	}
	return false, nil
}

// mayUseTemp reports whether a process is a CRIU that can still use its directories. One that
// has ended cannot, even if its parent never reaps it.
func mayUseTemp(pid int) bool {
	// One that has ended since it was listed reads as an error.
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil || !namedCRIU(strings.TrimSuffix(string(name), "\n")) {
		return false
	}
	st, err := proc.ReadThread(pid)
	return err == nil && !st.Ended()
}

// namedCRIU reports whether a process with that name may be a CRIU: criu itself, or a copy
// such as criu-4.2 or criu-ns. A program that is merely called after it, as criu.test, is none.
func namedCRIU(comm string) bool { return comm == "criu" || strings.HasPrefix(comm, "criu-") }
