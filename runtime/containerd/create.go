package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/home"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
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
func (b *Backend) Create(ctx context.Context, spec runtime.Spec, lower []string) (err error) {
	id := spec.ID
	if !home.IsID(id) {
		return fmt.Errorf("%w: container id %q", fault.ErrInvalid, id)
	}
	if len(lower) > 0 {
		return fmt.Errorf("%w: containerd runs its own images, not directories such as %s", fault.ErrInvalid, lower[0])
	}
	if err := bundle.Check(spec); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if root, err := b.elsewhere(ctx, id); err != nil {
		return err
	} else if root != "" {
		return &fault.Error{Op: "container " + id, Hint: "Use it there, with --root " + root + ", or import its checkpoint as a sandbox of its own with --name.",
			Err: fmt.Errorf("%w in containerd, as a sandbox of the root %s", fault.ErrExists, root)}
	}
	unlock, left, err := b.home.Claim(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if c, err := b.load(id); err == nil {
		switch err := b.present(ctx, c); {
		case err == nil:
			return fmt.Errorf("container %s: %w", id, fault.ErrExists)
		case !errors.Is(err, fault.ErrNotFound):
			return err
		}
	}
	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		return errors.Join(b.wipe(ctx, id), os.Remove(b.home.Dir(id)))
	})
	if left {
		err = b.wipe(ctx, id)
	} else {
		err = stage.At(b.home.Stage, id).Clear()
	}
	if err != nil {
		return err
	}
	// Until the container refers to it, containerd's garbage collector would
	// take the snapshot.
	return b.leased(ctx, func(ctx context.Context) error { return b.make(ctx, spec) })
}

// make makes a container whose directory is there and empty.
func (b *Backend) make(ctx context.Context, spec runtime.Spec) error {
	id := spec.ID
	parent, name, err := b.chain(ctx, spec.ImageDigest)
	if err != nil {
		return err
	}
	labels := map[string]string{rootLabel: b.home.Base}
	mounts, err := b.snapshots().Prepare(ctx, id, parent, snapshots.WithLabels(labels))
	if err != nil {
		return plain(err)
	}
	c := container{Spec: spec}
	if err := c.layers(b.snapshotter, mounts); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.create.after-snapshot"); err != nil {
		return err
	}
	if err := b.place(id).LayOut(spec, c.Lower[0], c.Upper); err != nil {
		return err
	}
	if err := b.home.Save(id, c); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.create.after-record"); err != nil {
		return err
	}
	if err := b.wrap(); err != nil {
		return err
	}
	opts, err := typeurl.MarshalAny(&options.Options{BinaryName: b.wrapPath(), Root: filepath.Join(b.home.Run, "runc")})
	if err != nil {
		return err
	}
	// Every start writes its own.
	placeholder, err := typeurl.MarshalAny(&specs.Spec{Version: specs.Version, Root: &specs.Root{Path: b.home.Dir(id, "merged")}, Process: &specs.Process{Args: spec.Args, Cwd: "/"}})
	if err != nil {
		return err
	}
	labels = map[string]string{rootLabel: b.home.Base, nameLabel: spec.Name}
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
func (c *container) layers(snapshotter string, mounts []mount.Mount) error {
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
		return fmt.Errorf("%w: snapshotter %s names no upperdir: %q", fault.ErrUnsupported, snapshotter, mounts[0].Options)
	}
	return nil
}

// wrapPath is the program that containerd's shims call.
func (b *Backend) wrapPath() string { return filepath.Join(b.home.Root, "agentbox-runtime") }

// wrap writes that program. The shims have the daemon's environment and take
// nothing but a path, so this is how agentbox-runtime learns of our
// directories.
func (b *Backend) wrap() error {
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
	text := fmt.Sprintf("#!/bin/sh\nexport %s=%s AGENTBOX_RUNTIME=%s\nexec %s \"$@\"\n", stage.Env, quote(b.home.Stage), quote(b.oci), quote(b.wrapper))
	have, _, err := record.Read(b.wrapPath())
	if err == nil && string(have) == text {
		return nil
	}
	return record.Write(b.wrapPath(), []byte(text), 0o755, true)
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (b *Backend) Remove(ctx context.Context, id string) error {
	if err := home.Check(id); err != nil {
		return nil // nothing of ours is called that
	}
	if a, err := b.adopted(id); a != nil || err != nil {
		return a.remove(ctx)
	}
	if !b.home.Traces(id) {
		if err := b.drop(ctx, id); err != nil && !isDown(err) {
			return err
		}
		return b.net.Release(ctx, id) // an address may be all that is left
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
	if err == nil && v.live() {
		v.exit, err = b.end(ctx, v, runtime.StopOptions{})
		v.status = runtime.Exited
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
	if err := failpoint.Hit("containerd.remove.after-stop"); err != nil {
		return err
	}
	if err := b.wipe(ctx, id); err != nil {
		return err
	}
	if err := b.home.Drop(id); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.remove.after-files"); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(b.home.Dir(id)))
}

// wipe frees everything of a container except its empty directory, which is
// locked.
func (b *Backend) wipe(ctx context.Context, id string) error {
	// Without its record it is half-made from here on, and cannot be started.
	if err := b.home.Unsave(id); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.remove.after-record"); err != nil {
		return err
	}
	if err := b.release(ctx, id); err != nil {
		return err
	}
	if err := b.net.Release(ctx, id); err != nil {
		return err
	}
	if err := stage.At(b.home.Stage, id).Clear(); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.remove.after-release"); err != nil {
		return err
	}
	// A mount that is left would let us delete what is not ours.
	if err := kernel.UnmountBelow(b.home.RunDir(id), b.home.Dir(id)); err != nil {
		return err
	}
	if err := b.drop(ctx, id); err != nil {
		return err
	}
	if err := failpoint.Hit("containerd.remove.after-drop"); err != nil {
		return err
	}
	return b.home.Empty(id)
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
	if err := gone(err); err != nil || !home.Elsewhere(b.home.Base, labels[rootLabel]) {
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
	return errors.Join(err, gone(b.client.LeasesService().Delete(context.WithoutCancel(ctx), lease, leases.SynchronousDelete)))
}

// gone returns nil for an error that says that there was nothing to delete.
func gone(err error) error {
	if err = plain(err); errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	return err
}
