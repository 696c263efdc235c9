package docker

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// locked runs fn while no other process gives out addresses or networks of
// this root.
func (b *Backend) locked(fn func() error) error {
	if err := os.MkdirAll(b.root, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(b.root, "docker.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return fn()
}
