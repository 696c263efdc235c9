package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Create makes a stopped container. What a killed Create left is cleared away
// first. The bind sources must be there already.
func (b *Backend) Create(ctx context.Context, spec runtime.Spec, lower []string) (err error) {
	id := spec.ID
	if !idPattern.MatchString(id) {
		return fmt.Errorf("%w: container id %q", fault.ErrInvalid, id)
	}
	if len(lower) == 0 {
		return fmt.Errorf("%w: no lower directory", fault.ErrInvalid)
	}
	if _, err := bundle.UserMounts(spec.Mounts); err != nil {
		return err
	}
	if _, err := bundle.StopSignal(spec, ""); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// Whoever leaves anything of a container leaves one of these, since they
	// go last.
	left := b.traces(id)
	if err := os.Mkdir(b.dir(id), 0o700); errors.Is(err, fs.ErrExist) {
		left = true
	} else if err != nil {
		return err
	}
	unlock, err := b.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(b.dir(id, "container.json")); err == nil {
		return fmt.Errorf("container %s: %w", id, fault.ErrExists)
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		return errors.Join(b.wipe(ctx, id, false), os.Remove(b.dir(id)))
	})
	if left {
		err = b.wipe(ctx, id, true)
	} else {
		err = stage.Clear(b.run, id)
	}
	if err != nil {
		return err
	}
	if err := b.layOut(spec, lower[0]); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.create.after-dirs"); err != nil {
		return err
	}
	if err := record.WriteJSON(b.dir(id, "container.json"), container{spec, lower}, true); err != nil {
		return err
	}
	if err := record.SyncDir(filepath.Dir(b.dir(id))); err != nil {
		return err
	}
	return failpoint.Hit("oci.create.after-record")
}

// layOut makes a container's directories. The upperdir is what the container
// sees as the inode of /, so it takes after the image's.
func (b *Backend) layOut(spec runtime.Spec, top string) error {
	id := spec.ID
	var st unix.Stat_t
	if err := unix.Stat(top, &st); err != nil {
		return fmt.Errorf("lower directory %s: %w", top, err)
	}
	for _, name := range []string{"work", "merged", "runs", "etc", "upper"} {
		if err := os.Mkdir(b.dir(id, name), 0o700); err != nil {
			return err
		}
	}
	// A container's other users pass through it on their way.
	if err := os.Chmod(b.dir(id, "etc"), 0o755); err != nil {
		return err
	}
	if spec.Init {
		if err := b.place(id).CopyInit(); err != nil {
			return fmt.Errorf("copy the init: %w", err)
		}
	}
	upper := b.dir(id, "upper")
	if err := os.Chown(upper, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(upper, st.Mode&0o7777); err != nil {
		return err
	}
	times := []unix.Timespec{st.Atim, st.Mtim}
	return unix.UtimesNanoAt(unix.AT_FDCWD, upper, times, unix.AT_SYMLINK_NOFOLLOW)
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if err := checkID(id); err != nil {
		return nil // nothing of ours is called that
	}
	if !b.traces(id) {
		return b.net.Release(ctx, id) // an address may be all that is left
	}
	// The lock is on a directory; a container that has lost it gets it back
	// for the purpose.
	if err := os.Mkdir(b.dir(id), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	unlock, err := b.lock(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	v, err := b.look(ctx, id)
	strays := err != nil || b.unattended(v)
	if err == nil && v.live() {
		v.exit, err = b.end(ctx, v, runtime.StopOptions{})
		v.status = runtime.Exited
		strays = strays || err != nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !errors.Is(err, fault.ErrNotFound) {
		// Kill what there is, whatever its record says.
		b.log.Warn("remove by force", "sandbox", id, "error", err)
	}
	if v.status == runtime.Exited {
		if err := b.bury(id, v.exit); err != nil {
			return err
		}
	}
	if err := failpoint.Hit("oci.remove.after-stop"); err != nil {
		return err
	}
	if err := b.wipe(ctx, id, strays); err != nil {
		return err
	}
	if err := os.Remove(b.dir(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := failpoint.Hit("oci.remove.after-files"); err != nil {
		return err
	}
	return record.SyncDir(filepath.Dir(b.dir(id)))
}

// traces tells whether anything of a container exists.
func (b *Backend) traces(id string) bool {
	for _, path := range []string{b.dir(id), b.runDir(id), filepath.Join(b.ociRoot(), id)} {
		if _, err := os.Lstat(path); err == nil {
			return true
		}
	}
	return false
}

// wipe frees everything of a container except its empty directory, which is
// locked; strays is for release.
func (b *Backend) wipe(ctx context.Context, id string, strays bool) error {
	// Without its record it is half-made from here on, and nobody starts it.
	err := os.Remove(b.dir(id, "container.json"))
	if err == nil {
		err = record.SyncDir(b.dir(id))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := failpoint.Hit("oci.remove.after-record"); err != nil {
		return err
	}
	if err := b.release(ctx, id, strays); err != nil {
		return err
	}
	if err := b.net.Release(ctx, id); err != nil {
		return err
	}
	if err := stage.Clear(b.run, id); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.remove.after-release"); err != nil {
		return err
	}
	// A mount that is left would let us delete what is not ours.
	if err := kernel.UnmountBelow(b.runDir(id), b.dir(id)); err != nil {
		return err
	}
	entries, err := os.ReadDir(b.dir(id))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(b.dir(id, e.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(b.runDir(id))
}
