package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
	"github.com/agentbox/agentbox/runtime/internal/kernel"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// Create makes a stopped container. It first clears away what a killed Create left. The bind
// sources must exist.
func (l *Lifecycle) Create(ctx context.Context, spec runtime.Spec, lower []string) (err error) {
	id := spec.ID
	if !record.IsID(id) {
		return fmt.Errorf("%w: container id %q", fault.ErrInvalid, id)
	}
	if err := errors.Join(bundle.Check(spec), l.checkWorkspaces(spec)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	unlock, left, err := l.claim(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	switch _, err := l.hooks.Look(ctx, id); {
	case err == nil:
		return fmt.Errorf("container %s: %w", id, fault.ErrExists)
	case !errors.Is(err, fault.ErrNotFound):
		return err
	}

	var undo undo.Stack
	defer func() { undo.Run(ctx, &err) }()
	undo.Add(func(ctx context.Context) error {
		return errors.Join(l.wipe(ctx, id, false), os.Remove(l.Dir(id)))
	})
	if left {
		err = l.wipe(ctx, id, true)
	} else {
		err = stage.At(l.Stage, id).Clear()
	}
	if err != nil {
		return err
	}
	return l.hooks.Make(ctx, spec, lower)
}

// maxWorkspaces is how many workspaces a sandbox can have. A checkpoint has two trees of each.
const maxWorkspaces = 16

// checkWorkspaces refuses a workspace over, or in, the directories in which its changes are kept:
// an overlay cannot be part of itself.
func (l *Lifecycle) checkWorkspaces(s runtime.Spec) error {
	n := 0
	for _, m := range s.Mounts {
		if m.Type != runtime.MountWorkspace {
			continue
		}
		if n++; n > maxWorkspaces {
			return fmt.Errorf("%w: more than %d workspaces", fault.ErrInvalid, maxWorkspaces)
		}
		real := fsx.Resolved(m.Source)
		for _, own := range []string{l.Base, l.Stage} {
			if fsx.Within(real, own) || fsx.Within(own, real) {
				return &fault.Error{
					Err:  fmt.Errorf("%w: workspace %s: agentbox keeps its state in %s", fault.ErrInvalid, m.Source, own),
					Hint: "Name a directory that does not contain it, or keep the state elsewhere with --root.",
				}
			}
		}
	}
	return nil
}

// LayOut makes the directories of a container that Make makes.
func (l *Lifecycle) LayOut(c Container) error {
	p := l.place(c)
	return p.LayOut(c.Spec, c.Lower[0], p.Upper)
}

// Remove stops the container and frees all it has. It works on whatever is
// there, and can be called again after it was interrupted.
func (l *Lifecycle) Remove(ctx context.Context, id string) error {
	// The lock is on a directory; a container that has lost it gets it back
	// for the purpose.
	unlock, _, err := l.claim(ctx, id)
	if errors.Is(err, fault.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()

	v, err := l.hooks.Look(ctx, id)
	strays := err != nil || l.unattended(v)
	if err == nil && v.Live() {
		v.Exit, err = l.end(ctx, v, runtime.StopOptions{})
		v.Status = runtime.Exited
		strays = strays || err != nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil && !errors.Is(err, fault.ErrNotFound) {
		// Kill what there is, whatever its record says.
		l.log.Warn("container removed by force", "sandbox", id, "error", err)
	}
	if v.Status == runtime.Exited {
		// A full disk does not keep it from being removed.
		if err := l.keepExit(id, v.Exit); err != nil {
			l.log.Warn("exit code not kept for waiting clients", "sandbox", id, "error", err)
		}
	}
	if err := l.hit("remove.after-stop"); err != nil {
		return err
	}

	if err := l.place(Container{Spec: v.Spec}).SettleApply(v.Spec, l.log); err != nil {
		return err
	}
	if err := l.wipe(ctx, id, strays); err != nil {
		return err
	}
	if err := os.Remove(l.Dir(id)); gone(err) != nil {
		return err
	}
	if err := l.hit("remove.after-files"); err != nil {
		return err
	}
	return fsx.SyncDir(filepath.Dir(l.Dir(id)))
}

// wipe frees everything of a container except its empty directory, which is
// locked; strays is for release.
func (l *Lifecycle) wipe(ctx context.Context, id string, strays bool) error {
	// Without its record it is half-made from here on, and cannot be started.
	if err := l.removeRecord(id); err != nil {
		return err
	}
	if err := l.hit("remove.after-record"); err != nil {
		return err
	}
	if err := l.release(ctx, id, strays); err != nil {
		return err
	}
	if err := l.Net.Release(ctx, id); err != nil {
		return err
	}
	if err := stage.At(l.Stage, id).Clear(); err != nil {
		return err
	}
	if err := l.hit("remove.after-release"); err != nil {
		return err
	}
	// A mount that is left would let us delete what is not ours.
	if err := kernel.UnmountBelow(l.RunDir(id), l.Dir(id)); err != nil {
		return err
	}
	if err := l.hooks.Unmake(ctx, id); err != nil {
		return err
	}
	return l.removeFiles(id)
}

// List returns every id of which a file, a link or an address of ours exists, and those of more
// that are of this backend. Cgroups are not asked: they are the host's, and may be another root's.
func (l *Lifecycle) List(ctx context.Context, more ...string) ([]string, error) {
	ids, err := l.Net.List(ctx)
	if err != nil {
		return nil, err
	}
	names, err := l.names()
	if err != nil {
		return nil, err
	}
	ids = slices.DeleteFunc(slices.Concat(ids, names, more), func(id string) bool {
		return !record.IsID(id) || l.OwnedByOther(id)
	})
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
