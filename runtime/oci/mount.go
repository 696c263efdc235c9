package oci

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/agentbox/agentbox/internal/fault"
)

// root pins the root directory that a process sees.
func (p *process) root() (*os.File, error) {
	f, err := openRoot(fmt.Sprintf("/proc/%d/root", p.pid))
	if err != nil {
		return nil, err
	}
	// Had the process ended before, the number could have been another's.
	if !p.alive() {
		return nil, errors.Join(fmt.Errorf("process %d has ended: %w", p.pid, fault.ErrState), f.Close())
	}
	return f, nil
}

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
		return b.mountLive(v, fn)
	}
	unlock, err := b.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if v, err = b.look(ctx, id); err != nil {
		return err
	}
	if v.live() {
		unlock()
		return b.mountLive(v, fn)
	}
	if err := b.settle(ctx, v); err != nil {
		return err
	}
	if err := b.mountRoot(v.record); err != nil {
		return err
	}
	root, err := openRoot(b.dir(id, "merged"))
	if err == nil {
		err = onRoot(root, fn)
	}
	return errors.Join(err, b.unmountRoot(context.WithoutCancel(ctx), id))
}

func (b *Backend) mountLive(v view, fn func(root string) error) error {
	first, ok := b.first(v.Spec.ID, v.run.Number)
	if !ok {
		return fmt.Errorf("container %s has ended: %w", v.Spec.ID, fault.ErrState)
	}
	defer first.close()
	root, err := first.root()
	if err != nil {
		return err
	}
	return onRoot(root, fn)
}

// onRoot runs fn and lets the root go.
func onRoot(root *os.File, fn func(root string) error) error {
	// Under our pid, so that programs which fn starts find it as well.
	err := fn(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), root.Fd()))
	return errors.Join(err, root.Close())
}
