package oci

import (
	"context"

	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// Mount makes a container's root filesystem reachable while fn runs: of one
// that runs or is paused the root that its first process sees, volumes
// included; of a stopped one its overlay, without volumes, and no other verb
// can change it meanwhile.
//
// The path leads through a descriptor of this process. It is good for opening
// and for openat; its text must not be resolved, because the kernel shows such
// a link as "/".
func (b *Backend) Mount(ctx context.Context, id string, fn func(root string) error) error {
	v, err := b.look(ctx, id)
	if err != nil {
		return err
	}
	if v.live() {
		return bundle.OnLive(v.pid, fn)
	}
	unlock, err := b.home.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if v, err = b.look(ctx, id); err != nil {
		return err
	}
	if v.live() {
		unlock()
		return bundle.OnLive(v.pid, fn)
	}
	if err := b.settle(ctx, v); err != nil {
		return err
	}
	return b.place(id).OnStopped(ctx, b.log.With("sandbox", id), b.root(v.container), fn)
}
