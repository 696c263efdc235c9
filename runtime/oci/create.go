package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
)

// Create makes a stopped container. It first clears away what a killed Create left. The bind
// sources must exist.
func (b *Backend) Create(ctx context.Context, spec runtime.Spec, lower []string) (err error) {
	id := spec.ID
	if !home.IsID(id) {
		return fmt.Errorf("%w: container id %q", fault.ErrInvalid, id)
	}
	if len(lower) == 0 {
		return fmt.Errorf("%w: no lower directory", fault.ErrInvalid)
	}
	if err := bundle.Check(spec); err != nil {
		return err
	}
	if spec.IDs != nil {
		if err := spec.IDs.Check(); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	unlock, left, err := b.home.Claim(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(b.home.Dir(id, "container.json")); err == nil {
		return fmt.Errorf("container %s: %w", id, fault.ErrExists)
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		return errors.Join(b.wipe(ctx, id, false), os.Remove(b.home.Dir(id)))
	})
	if left {
		err = b.wipe(ctx, id, true)
	} else {
		err = stage.At(b.home.Stage, id).Clear()
	}
	if err != nil {
		return err
	}
	for _, name := range []string{"upper", "work"} {
		if err := os.Mkdir(b.home.Dir(id, name), 0o700); err != nil {
			return err
		}
	}
	// Overlayfs makes files in the one and renames them into the other.
	if _, err := overlay.GiveProject(b.home.Dir(id, "upper"), b.home.Dir(id, "work")); err != nil {
		return err
	}
	if err := b.place(id).LayOut(spec, lower[0], b.home.Dir(id, "upper")); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.create.after-dirs"); err != nil {
		return err
	}
	if err := b.home.Save(id, container{spec, lower}); err != nil {
		return err
	}
	return failpoint.Hit("oci.create.after-record")
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if err := home.Check(id); err != nil {
		return nil // nothing of ours is called that
	}
	if !b.home.Traces(id) {
		// Deleting its files does not end its processes.
		if held, err := b.Held(ctx); err != nil || len(held[id]) == 0 {
			return errors.Join(err, b.net.Release(ctx, id)) // an address may be all that is left
		}
	}
	// The lock is on a directory; a container that has lost it gets it back
	// for the purpose.
	unlock, _, err := b.home.Claim(ctx, id)
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
		b.log.Warn("container removed by force", "sandbox", id, "error", err)
	}
	if v.status == runtime.Exited {
		// A full disk does not keep it from being removed.
		if err := b.home.Bury(id, v.exit); err != nil {
			b.log.Warn("exit code not kept for waiting clients", "sandbox", id, "error", err)
		}
	}
	if err := failpoint.Hit("oci.remove.after-stop"); err != nil {
		return err
	}
	if err := b.wipe(ctx, id, strays); err != nil {
		return err
	}
	if err := b.home.Drop(id); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.remove.after-files"); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(b.home.Dir(id)))
}

// wipe frees everything of a container except its empty directory, which is
// locked; strays is for release.
func (b *Backend) wipe(ctx context.Context, id string, strays bool) error {
	// Without its record it is half-made from here on, and cannot be started.
	if err := b.home.Unsave(id); err != nil {
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
	if err := stage.At(b.home.Stage, id).Clear(); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.remove.after-release"); err != nil {
		return err
	}
	// A mount that is left would let us delete what is not ours.
	if err := kernel.UnmountBelow(b.home.RunDir(id), b.home.Dir(id)); err != nil {
		return err
	}
	// Its number is free once no file and no limit has it.
	if _, err := overlay.LimitProject(b.home.Dir(id, "upper"), 0); err != nil {
		return err
	}
	return b.home.Empty(id)
}
