package docker

import (
	"context"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/flock"
)

// locked runs fn while no other process gives out addresses or networks of
// this root.
func (b *Backend) locked(fn func() error) error {
	if err := os.MkdirAll(b.root, 0o700); err != nil {
		return err
	}
	l, err := flock.Lock(context.Background(), filepath.Join(b.root, "docker.lock"), 0)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return fn()
}
