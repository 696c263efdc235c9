package oci

import (
	"context"
	"fmt"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// live is Look for a container that has processes.
func (b *Backend) live(ctx context.Context, id string) (box.View, error) {
	v, err := b.box.Look(ctx, id)
	if err == nil && !v.Live() {
		err = fmt.Errorf("%w: it is %s", fault.ErrState, v.Status)
	}
	return v, err
}

// Pause freezes every process of a running container.
func (b *Backend) Pause(ctx context.Context, id string) error {
	v, err := b.live(ctx, id)
	if err != nil {
		return err
	}
	if !v.Noted {
		// Frozen, it would look like one that waits for its start.
		if err := b.box.NoteStart(id, v.Run.Number, v.Started); err != nil {
			return err
		}
	}
	return b.box.Runtime(id).Pause(ctx)
}

// Unpause thaws a paused container.
func (b *Backend) Unpause(ctx context.Context, id string) error {
	if _, err := b.live(ctx, id); err != nil {
		return err
	}
	return b.box.Runtime(id).Resume(ctx)
}

// Kill sends a signal to a container's first process.
func (b *Backend) Kill(ctx context.Context, id, signal string) error {
	if _, err := b.live(ctx, id); err != nil {
		return err
	}
	return b.box.Runtime(id).Kill(ctx, signal, false)
}

// Adopt finds nothing: whatever this backend runs, it made.
func (b *Backend) Adopt(_ context.Context, ref string) (runtime.Spec, error) {
	return runtime.Spec{}, fmt.Errorf("container %s: the oci backend has only sandboxes of its own: %w",
		ref, fault.ErrUnsupported)
}

// KillStrays implements box.Hooks.
func (h hooks) KillStrays(ctx context.Context, id string) error {
	if err := h.killStrays(ctx, id); err != nil {
		return err
	}
	return failpoint.Hit("oci.stop.after-strays")
}

// Free implements box.Hooks.
func (h hooks) Free(_ context.Context, id string) error {
	h.uncache(id)
	return h.unmapBinds(id)
}
