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
)

// SweepTemp removes the directories that killed restores leave in /tmp, where
// CRIU, wherever its working directory is, puts a container's mounts together.
// They are empty: the mounts were in a namespace that is gone. While any CRIU
// runs, one of them may be its own, and all are left for the next time.
func SweepTemp() error { return sweepTemp("/tmp") }

func sweepTemp(dir string) error {
	// Listed first: what a CRIU that starts meanwhile makes is not among them.
	found, err := filepath.Glob(filepath.Join(escapeGlob(dir), ".criu.mntns.*"))
	if err != nil || len(found) == 0 {
		return err
	}
	if runs, err := criuRuns(); err != nil || runs {
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
			continue // anybody may make such a name there
		}
		if err := unix.Rmdir(path); err != nil && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("remove %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func criuRuns() (bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		// One that has ended since it was listed reads as an error.
		name, err := os.ReadFile(filepath.Join("/proc", e.Name(), "comm"))
		if err == nil && strings.HasPrefix(string(name), "criu") {
			return true, nil
		}
	}
	return false, nil
}
