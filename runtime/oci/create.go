package oci

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Create makes a stopped container. It first clears away what a killed Create left. The bind
// sources must exist.
func (b *Backend) Create(ctx context.Context, spec runtime.Spec, lower []string) error {
	if len(lower) == 0 {
		return fmt.Errorf("%w: no lower directory", fault.ErrInvalid)
	}
	if spec.IDs != nil {
		if err := spec.IDs.Check(); err != nil {
			return err
		}
	}
	return b.box.Create(ctx, spec, lower)
}

// Make implements box.Hooks.
func (h hooks) Make(_ context.Context, spec runtime.Spec, lower []string) error {
	c := box.Container{Spec: spec, Lower: lower}
	upper, work := h.box.Dir(spec.ID, "upper"), h.box.Dir(spec.ID, "work")
	for _, dir := range []string{upper, work} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	if err := h.box.LayOut(c); err != nil {
		return err
	}
	// Overlayfs makes files in the one and renames them into the other. What a sandbox changes in
	// its workspaces counts for its limit, too.
	dirs := []string{upper, work}
	for _, w := range h.box.Workspaces(c) {
		dirs = append(dirs, w.Upper, w.Work)
	}
	if _, err := overlay.GiveProject(dirs...); err != nil {
		return err
	}
	if err := failpoint.Hit("oci.create.after-dirs"); err != nil {
		return err
	}
	if err := h.box.Save(spec.ID, c); err != nil {
		return err
	}
	return failpoint.Hit("oci.create.after-record")
}

// Unmake implements box.Hooks: the number of the upperdir's quota is free once no file and no
// limit has it.
func (h hooks) Unmake(_ context.Context, id string) error {
	_, err := overlay.LimitProject(h.box.Dir(id, "upper"), 0)
	return err
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if err := record.CheckID(id); err != nil {
		return nil // nothing of ours is called that
	}
	if !b.box.Exists(id) {
		// Deleting its files does not end its processes.
		if held, err := b.Held(ctx); err != nil || len(held[id]) == 0 {
			return errors.Join(err, b.box.Net.Release(ctx, id)) // an address may be all that is left
		}
	}
	return b.box.Remove(ctx, id)
}
