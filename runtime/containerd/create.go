package containerd

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/containers"
	"github.com/containerd/containerd/leases"
	"github.com/containerd/containerd/mount"
	"github.com/containerd/containerd/snapshots"
	"github.com/containerd/typeurl/v2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

type (
	snapshotInfo = snapshots.Info
	taskInfo     = task.Process
)

// runtimeName is the shim that runs our sandboxes.
const runtimeName = "io.containerd.runc.v2"

func (b *Backend) snapshots() snapshots.Snapshotter { return b.client.SnapshotService(b.snapshotter) }

// Create makes a stopped container. It first clears away what a killed Create left. The bind
// sources must exist.
func (b *Backend) Create(ctx context.Context, spec runtime.Spec, lower []string) error {
	id := spec.ID
	if len(lower) > 0 {
		return fmt.Errorf("%w: containerd runs its own images, not directories such as %s", fault.ErrInvalid, lower[0])
	}
	if record.IsID(id) {
		if root, err := b.elsewhere(ctx, id); err != nil {
			return err
		} else if root != "" {
			return &fault.Error{
				Op: "container " + id, Err: fmt.Errorf("%w in containerd, as a sandbox of the root %s",
					fault.ErrExists, root),
				Hint: "Use it there, with --root " + root +
					", or import its checkpoint as a sandbox of its own with --name.",
			}
		}
	}
	return b.box.Create(ctx, spec, lower)
}

// Make implements box.Hooks.
func (h hooks) Make(ctx context.Context, spec runtime.Spec, _ []string) error {
	// Until the container refers to it, containerd's garbage collector would
	// take the snapshot.
	return h.leased(ctx, func(ctx context.Context) error { return h.make(ctx, spec) })
}

// make makes a container whose directory is there and empty.
func (b *Backend) make(ctx context.Context, spec runtime.Spec) error {
	id := spec.ID
	parent, name, err := b.chain(ctx, spec.ImageDigest)
	if err != nil {
		return err
	}
	labels := map[string]string{rootLabel: b.box.Base}
	mounts, err := b.snapshots().Prepare(ctx, id, parent, snapshots.WithLabels(labels))
	if err != nil {
		return plain(err)
	}
	c := box.Container{Spec: spec}
	if err := layers(&c, b.snapshotter, mounts); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.create.after-snapshot"); err != nil {
		return err
	}
	if err := b.box.LayOut(c); err != nil {
		return err
	}
	if err := b.box.Save(id, c); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.create.after-record"); err != nil {
		return err
	}
	if err := b.wrap(); err != nil {
		return err
	}
	opts, err := typeurl.MarshalAny(&options.Options{BinaryName: b.wrapPath(), Root: filepath.Join(b.box.Run, "runc")})
	if err != nil {
		return err
	}
	// Every start writes its own.
	placeholder, err := typeurl.MarshalAny(&specs.Spec{
		Version: specs.Version, Root: &specs.Root{Path: b.box.Dir(id, "merged")},
		Process: &specs.Process{Args: spec.Args, Cwd: "/"},
	})
	if err != nil {
		return err
	}
	labels = map[string]string{rootLabel: b.box.Base, nameLabel: spec.Name}
	for k, v := range spec.Labels {
		// containerd takes no more; the record has them all.
		if len(k)+len(v) <= 4096 && k != rootLabel && k != nameLabel {
			labels[k] = v
		}
	}
	_, err = b.client.ContainerService().Create(ctx, containers.Container{
		ID: id, Labels: labels, Image: name, Spec: placeholder,
		Runtime:     containers.RuntimeInfo{Name: runtimeName, Options: opts},
		Snapshotter: b.snapshotter, SnapshotKey: id,
	})
	if err != nil {
		return plain(err)
	}
	return failpoint.Hit("containerd.create.after-container")
}

// layers takes a snapshot's directories out of what it would be mounted with.
func layers(c *box.Container, snapshotter string, mounts []mount.Mount) error {
	if len(mounts) != 1 || mounts[0].Type != "overlay" {
		kind := "no mount"
		if len(mounts) > 0 {
			kind = mounts[0].Type
		}
		return &fault.Error{
			Err:  fmt.Errorf("%w: snapshotter %s keeps what a container changes in a way (%s) that agentbox cannot capture: it needs an overlay with an upperdir", fault.ErrUnsupported, snapshotter, kind),
			Hint: "Use the overlayfs snapshotter.",
		}
	}
	for _, o := range mounts[0].Options {
		switch key, value, _ := strings.Cut(o, "="); key {
		case "lowerdir":
			c.Lower = strings.Split(value, ":")
		case "upperdir":
			c.Upper = value
		case "workdir":
			c.Work = value
		}
	}
	if c.Upper == "" || c.Work == "" || len(c.Lower) == 0 {
		return fmt.Errorf("%w: snapshotter %s names no upperdir: %q", fault.ErrUnsupported,
			snapshotter, mounts[0].Options)
	}
	return nil
}

// wrapPath is the program that containerd's shims call.
func (b *Backend) wrapPath() string { return filepath.Join(b.box.Root, "agentbox-runtime") }

// wrap writes that program. The shims have the daemon's environment and take
// nothing but a path, so this is how agentbox-runtime learns of our
// directories.
func (b *Backend) wrap() error {
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
	text := fmt.Sprintf("#!/bin/sh\nexport %s=%s AGENTBOX_RUNTIME=%s\nexec %s \"$@\"\n", stage.Env, quote(b.box.Stage),
		quote(b.box.OCI), quote(b.box.Wrapper))
	have, _, err := record.Read(b.wrapPath())
	if err == nil && string(have) == text {
		return nil
	}
	return record.Write(b.wrapPath(), []byte(text), 0o755, true)
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if err := record.CheckID(id); err != nil {
		return nil // nothing of ours is called that
	}
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.remove(ctx)
	}
	if !b.box.Exists(id) {
		if err := b.drop(ctx, id); err != nil && !isDown(err) {
			return err
		}
		return b.box.Net.Release(ctx, id) // an address may be all that is left
	}
	return b.box.Remove(ctx, id)
}

// Unmake implements box.Hooks.
func (h hooks) Unmake(ctx context.Context, id string) error {
	if err := h.drop(ctx, id); err != nil {
		return err
	}
	return failpoint.Hit("containerd.remove.after-drop")
}

// elsewhere names the other root of this machine, if there is one, that an id is
// a sandbox of: a checkpoint that is carried to another root brings the id along,
// and all roots have one namespace of containerd.
func (b *Backend) elsewhere(ctx context.Context, id string) (root string, err error) {
	ctx = in(ctx, b.namespace)
	var labels map[string]string
	c, err := b.client.ContainerService().Get(ctx, id)
	if labels = c.Labels; errors.Is(plain(err), fault.ErrNotFound) {
		var s snapshotInfo
		s, err = b.snapshots().Stat(ctx, id)
		labels = s.Labels
	}
	if err := gone(err); err != nil || !record.OtherRoot(b.box.Base, labels[rootLabel]) {
		return "", err
	}
	return labels[rootLabel], nil
}

// drop deletes a container and its snapshot from containerd, and has the files
// deleted too: by itself containerd does that some time later.
func (b *Backend) drop(ctx context.Context, id string) error {
	if root, err := b.elsewhere(ctx, id); err != nil || root != "" {
		return err
	}
	ctx = in(ctx, b.namespace)
	if err := gone(b.client.ContainerService().Delete(ctx, id)); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.remove.after-container"); err != nil {
		return err
	}
	return b.dropSnapshot(ctx, b.snapshotter, id)
}

// dropSnapshot deletes a snapshot, if it is there, and its files.
func (b *Backend) dropSnapshot(ctx context.Context, snapshotter, key string) error {
	// A lease's end collects the garbage, and can be waited for.
	lease, err := b.client.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(time.Hour))
	if err != nil {
		return plain(err)
	}
	err = gone(b.client.SnapshotService(snapshotter).Remove(ctx, key))
	return errors.Join(err, gone(b.client.LeasesService().Delete(context.WithoutCancel(ctx), lease,
		leases.SynchronousDelete)))
}

// gone returns nil for an error that says that there was nothing to delete.
func gone(err error) error {
	if err = plain(err); errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	return err
}
