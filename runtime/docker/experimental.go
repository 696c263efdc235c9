package docker

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/system"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/lsm"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
)

// A container under plain runc is restored by the daemon's own means, if they
// are switched on (experimental). The daemon takes images from the container's
// own checkpoints/ only.

// restoresItself reports whether the daemon restores a container by its own means,
// and why not. Since version 28 it fills the network namespace of a process that
// there is not yet in the course of its restore.
func restoresItself(info *system.Info, c box) (why string) {
	switch {
	case !info.ExperimentalBuild:
		return "the daemon's experimental restore is off"
	case ownNetwork(c) && major(info.ServerVersion) >= 28:
		return "the daemon's experimental restore, since version 28, works with the host's network only"
	}
	return ""
}

// major returns the first number of a daemon's version. A version without one is of a
// development build, and counts as the newest.
func major(version string) int {
	first, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return math.MaxInt
	}
	return n
}

const checkpointPrefix = "agentbox-"

// layOutCheckpoint copies the staged images to where the daemon finds them, and
// returns the name it finds them by.
func (b *Backend) layOutCheckpoint(c box) (string, error) {
	r, err := stage.At(b.stageRun, c.ID).Load()
	if err != nil {
		return "", err
	}
	if err := b.dropCheckpoints(c); err != nil {
		return "", err
	}
	dir, err := checkpointsDir(c)
	if err != nil {
		return "", err
	}
	name := checkpointPrefix + "restore"
	to := filepath.Join(dir, name)
	if err := os.MkdirAll(to, 0o700); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(r.Images)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		if err := copyFile(filepath.Join(r.Images, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return "", errors.Join(err, os.RemoveAll(to))
		}
	}
	// The daemon has said which since it first started the container.
	if c.AppArmorProfile != "" || !lsm.AppArmor() {
		if err := lsm.Set(to, c.AppArmorProfile); err != nil {
			return "", errors.Join(err, os.RemoveAll(to))
		}
	}
	return name, nil
}

func checkpointsDir(c box) (string, error) {
	if c.HostnamePath == "" {
		return "", fmt.Errorf("container %s: %w: the daemon names no directory of it", c.ID, fault.ErrUnsupported)
	}
	return filepath.Join(filepath.Dir(c.HostnamePath), "checkpoints"), nil
}

func (b *Backend) dropCheckpoints(c box) error {
	dir, err := checkpointsDir(c)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), checkpointPrefix) {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// copyFile shares the blocks where the filesystem can.
func copyFile(from, to string) (err error) {
	src, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		return nil
	}
	_, err = io.Copy(dst, src)
	return err
}
