package containerd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// Look implements box.Hooks, for a sandbox of ours and for an adopted container. Whether a sandbox
// is there at all is for containerd to say, as long as that answers.
func (h hooks) Look(ctx context.Context, id string) (box.View, error) {
	rec, err := h.readRecord(id)
	if err != nil {
		return box.View{}, err
	}
	if rec.Theirs != nil {
		return (&adoptee{h.Backend, rec}).look(ctx)
	}
	if err := h.present(ctx, id); err != nil && !isDown(err) {
		return box.View{}, err
	}
	return h.box.Look(ctx, id)
}

// present asks containerd for the container of a sandbox of ours.
func (b *Backend) present(ctx context.Context, id string) error {
	_, err := b.client.ContainerService().Get(in(ctx, b.namespace), id)
	if err = plain(err); errors.Is(err, fault.ErrNotFound) {
		return fmt.Errorf("container %s: %w", id, fault.ErrNotFound)
	}
	return err
}

// Monitored implements box.Hooks.
func (h hooks) Monitored(dir string) (bool, error) { return monitored(dir) }

// Attend implements box.Hooks.
func (h hooks) Attend(ctx context.Context, id string, run box.Run) error {
	watched, err := monitored(run.Bundle)
	if err != nil || watched {
		return err
	}
	if err := h.rewatch(ctx, id, run.Number); err != nil {
		h.log.Warn("monitor missing", "sandbox", id, "err", err)
	}
	return nil
}

// MonitorExit implements box.Hooks: our monitor writes exit.json itself.
func (h hooks) MonitorExit(string, int) (exit box.Exit, ok bool, err error) { return exit, false, nil }

// AwaitMonitor implements box.Hooks: it starts a run's monitor again when it is gone, and returns
// when that is of no use.
func (h hooks) AwaitMonitor(ctx context.Context, id string, run box.Run) error {
	again := time.NewTicker(time.Second) // nothing tells of a monitor's death
	defer again.Stop()
	for tries := 0; ; {
		watched, err := monitored(run.Bundle)
		if err != nil {
			return err
		}
		if watched {
			select {
			case <-again.C:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if _, ok, err := h.box.RecordedExit(id, run.Number); ok || err != nil {
			return err
		}
		if _, err := os.Stat(h.box.StartDir(id, run.Number)); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if tries++; tries > 3 {
			return nil
		}
		err = h.rewatch(ctx, id, run.Number)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		h.log.Warn("monitor missing", "sandbox", id, "err", err)
		if _, err := os.Stat(run.Bundle); errors.Is(err, fs.ErrNotExist) {
			return nil // a reboot took it, and the processes too
		}
	}
}

// Inspect tells what is so now. While containerd does not answer it tells what
// the kernel and our own records say.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.inspect(ctx)
	}
	v, err := hooks{b}.Look(ctx, id)
	if err != nil {
		return runtime.Container{}, err
	}
	c := b.box.Describe(v)
	if b.box.Wrapper == b.box.OCI {
		c.NoRestore, c.Remedy = "agentbox-runtime is not installed beside agentbox", "Install it (make install)."
	}
	return c, nil
}

// Wait blocks until the container has exited. It returns ErrState for a container that was never
// started: there is no exit to wait for. One that was removed not long ago still answers.
func (b *Backend) Wait(ctx context.Context, id string) (runtime.Exit, error) {
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.wait(ctx)
	}
	return b.box.Wait(ctx, id)
}

// rootLabel names, on everything that we make in containerd, the root that it
// belongs to.
const (
	rootLabel = "agentbox.root"
	nameLabel = "agentbox.name"
)

// List returns every id of which a file, a link, an address, a container or a
// snapshot of ours exists.
func (b *Backend) List(ctx context.Context) ([]string, error) {
	var made []string
	ns := in(ctx, b.namespace)
	mine := fmt.Sprintf("labels.%q==%q", rootLabel, b.box.Base)
	list, err := b.client.ContainerService().List(ns, mine)
	if err == nil {
		for _, c := range list {
			made = append(made, c.ID)
		}
		err = b.snapshots().Walk(ns, func(_ context.Context, s snapshotInfo) error {
			made = append(made, s.Name)
			return nil
		}, mine)
	}
	if err = plain(err); err != nil && !errors.Is(err, fault.ErrNotFound) && !isDown(err) {
		return nil, err
	}
	ids, err := b.box.List(ctx, made...)
	return slices.DeleteFunc(ids, func(id string) bool {
		a, _ := b.adopted(id)
		return a != nil
	}), err
}
