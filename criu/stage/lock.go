package stage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/agentbox/agentbox/internal/fault"
)

// Lock keeps every other Lock of the container away until unlock is called, or
// this process ends: several roots of agentbox may have taken on one container,
// and each has only its own locks. It does not wait: ErrBusy.
func Lock(run, id string) (unlock func(), err error) {
	if _, err := place(run, id); err != nil {
		return nil, err
	}
	path := filepath.Join(run, "lock", id)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("lock %s: %w", id, err)
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", id, err)
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			_ = f.Close()
			if errors.Is(err, syscall.EINTR) {
				continue
			}
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, fmt.Errorf("container %s: an agentbox with another root works on it: %w", id, fault.ErrBusy)
			}
			return nil, fmt.Errorf("lock %s: %w", id, err)
		}
		// The one who had it before us has deleted the file.
		mine, err := f.Stat()
		if there, e := os.Lstat(path); err != nil || e != nil || !os.SameFile(mine, there) {
			_ = f.Close()
			continue
		}
		return func() {
			_ = os.Remove(path)
			_ = f.Close()
		}, nil
	}
}
