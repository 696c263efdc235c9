package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/store"
)

// maxUndoPaths bounds the paths of one undo.
const maxUndoPaths = 100

// putting is the journal's data of an undo of paths.
type putting struct {
	Was   runtime.Status `json:"was"`  // before the verb
	Undo  string         `json:"undo"` // id of the undo checkpoint
	Paths []putPath      `json:"paths"`
	Begun bool           `json:"begun"` // all is staged: the rest of the work is finished
}

// putPath is a path that goes back. What the checkpoint has there is staged in a directory beside it.
type putPath struct {
	Path   string `json:"path"`
	Stage  string `json:"stage"`  // path of that directory
	Absent bool   `json:"absent"` // the checkpoint has nothing there
}

// undoPaths is Undo for some paths alone: they become what a checkpoint has there, in place. The
// sandbox, if it runs, stands still meanwhile, and its processes go on.
func (rs *restores) undoPaths(
	ctx context.Context, ref string, opts runtime.UndoOptions,
) (out runtime.Restored, err error) {
	defer func() { err = fail(opUndo, ref, err) }()
	steps := progress.Follow(opts.Progress)
	defer steps.End()
	data, err := puttingOf(opts.Paths)
	if err != nil {
		return out, err
	}
	sb, err := rs.acquire(ctx, ref, opUndo, lockWait)
	if err != nil {
		return out, err
	}
	defer rs.upkeep.tidy(ctx)
	defer sb.lock.Unlock()
	if err := mayUse(sb.Sandbox); err != nil {
		return out, err
	}
	t, err := rs.trailOf(ctx, sb)
	if err != nil {
		return out, err
	}
	row, _, err := t.undo(max(opts.Steps, 1))
	if err == nil && row.Foreign {
		err = foreignHead(sb.Name, row)
	}
	if err := errors.Join(err, checkDamage(sb.Name, row, false)); err != nil {
		return out, err
	}
	sb.steps = steps
	s, err := spec(sb.Sandbox)
	if err != nil {
		return out, err
	}
	h, err := rs.admission.hooksOf("restore", s)
	if err != nil {
		return out, err
	}
	defer func() { h.failed(ctx, err) }()
	h.of(row)
	if err := h.before(ctx, policy.BeforeRestore); err != nil {
		return out, err
	}
	out = runtime.Restored{Checkpoint: checkpointView(row), Redo: len(t.redo)}
	if out.Undo, out.Changed, out.Warnings, err = rs.putPaths(ctx, sb, s, row, data); err != nil {
		return runtime.Restored{}, err
	}
	out.Sandbox, err = rs.sandboxes.inspect(context.WithoutCancel(ctx), sb.ID)
	out.Warnings = slices.Concat(out.Warnings, h.after(ctx, policy.AfterRestore))
	rs.log.Info("paths undone", "sandbox", sb.ID, "checkpoint", row.ID, "paths", len(data.Paths))
	return out, err
}

// puttingOf refuses paths that cannot go back by themselves.
func puttingOf(paths []string) (putting, error) {
	var data putting
	if len(paths) > maxUndoPaths {
		return data, fmt.Errorf("%w: %d paths, at most %d go back at once", runtime.ErrInvalid, len(paths), maxUndoPaths)
	}
	for i, p := range paths {
		if !path.IsAbs(p) || path.Clean(p) == "/" || len(p) >= unix.PathMax {
			return data, fmt.Errorf("%w: path %.200q must be absolute, and not /", runtime.ErrInvalid, p)
		}
		p = path.Clean(p)
		for _, o := range data.Paths {
			if fsx.Within(o.Path, p) || fsx.Within(p, o.Path) {
				return data, fmt.Errorf("%w: of %q and %q one has the other in it", runtime.ErrInvalid, o.Path, p)
			}
		}
		stage := path.Join(path.Dir(p), fmt.Sprintf(".agentbox-undo-%s-%d", newID(), i))
		data.Paths = append(data.Paths, putPath{Path: p, Stage: stage})
	}
	return data, nil
}

// mayPut refuses paths that have mounts in them, or lie in one that is in no checkpoint.
func (d putting) mayPut(s runtime.Spec, c runtime.Container) error {
	var mounts []string
	for _, m := range s.Mounts {
		mounts = append(mounts, path.Clean(m.Target))
		for _, p := range d.Paths {
			if m.Type != runtime.MountWorkspace && fsx.Within(path.Clean(m.Target), p.Path) {
				return fmt.Errorf("%w: %s lies in the %s at %s, which is in no checkpoint", runtime.ErrUnsupported, p.Path,
					m.Type, m.Target)
			}
		}
	}
	for name := range c.Managed {
		mounts = append(mounts, name)
	}
	mounts = append(mounts, "/proc", "/sys", "/dev", runtime.SecretsDir)
	slices.Sort(mounts)
	for _, p := range d.Paths {
		for _, at := range mounts {
			if fsx.Within(p.Path, at) {
				return hint(fmt.Errorf("%w: %s has the mount %s in it", runtime.ErrUnsupported, p.Path, at),
					"Name what is beside or in it, or undo all: agentbox undo "+s.Name)
			}
		}
	}
	return nil
}

// putPaths keeps the present state of a sandbox, and puts paths back.
func (rs *restores) putPaths(
	ctx context.Context, sb *locked, s runtime.Spec, row store.Checkpoint, data putting,
) (undo string, changed int, warnings []string, err error) {
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return "", 0, nil, err
	}
	if err := data.mayPut(s, c); err != nil {
		return "", 0, nil, err
	}
	unlock, err := lockSlot(c)
	if err != nil {
		return "", 0, nil, err
	}
	defer unlock()
	k, err := rs.presentOf(ctx, sb, c)
	if err != nil {
		return "", 0, nil, err
	}
	data.Was, data.Undo = c.Status, k.row.ID
	in := store.Intent{Op: opUndoPaths, Sandbox: sb.ID, Checkpoint: row.ID, Lazy: true}
	err = rs.intent(ctx, in, data, func(seq int64) (err error) {
		if _, err := rs.checkpoints.record(ctx, k); err != nil {
			return fmt.Errorf("keep the present state: %w", err)
		}
		defer func() { err = errors.Join(err, k.cut.End(), rs.checkpoints.thaw(context.WithoutCancel(ctx), k)) }()
		err = rs.stagePaths(ctx, sb, row, &data)
		if err == nil {
			data.Begun = true
			err = rs.advance(ctx, seq, data, false)
		}
		if err == nil {
			err = failpoint.Hit("undo.paths.after-stage")
		}
		if err != nil {
			ctx := context.WithoutCancel(ctx)
			return errors.Join(err, rs.unstagePaths(ctx, sb, data), rs.store.RemoveCheckpoint(ctx, k.row.ID))
		}
		if err := rs.exchangePaths(context.WithoutCancel(ctx), sb, data); err != nil {
			return fmt.Errorf("%w (%w); what was there is in checkpoint %s", err, errUnfinished, short(k.row.ID))
		}
		return nil
	})
	return k.row.ID, len(data.Paths), k.row.Warnings, err
}

// presentOf prepares the undo checkpoint of an undo of paths, which leaves the sandbox frozen.
func (rs *restores) presentOf(ctx context.Context, sb *locked, c runtime.Container) (*making, error) {
	k, err := rs.checkpoints.prepare(ctx, sb, c, runtime.CheckpointOptions{
		// Its processes go on, so that there is nothing to bring back of them.
		FilesOnly: true, Trigger: runtime.TriggerUndo, TCP: runtime.TCPEstablished,
	})
	if err == nil {
		k.hold = true
	}
	return k, err
}

// stagePaths writes what the checkpoint has at each path beside it.
func (rs *restores) stagePaths(ctx context.Context, sb *locked, row store.Checkpoint, data *putting) error {
	sb.steps.Begin(runtime.PhaseStaging, 0)
	paths := make([]string, len(data.Paths))
	for i, p := range data.Paths {
		paths[i] = p.Path
	}
	return rs.checkpoints.onView(ctx, recordedState{sb.ID, row.ID}, paths[0], func(v *overlay.View) error {
		if err := v.Foresee(paths...); err != nil {
			return err
		}
		return rs.stageFrom(ctx, sb, v, data)
	})
}

// stageFrom is stagePaths for what a view has.
func (rs *restores) stageFrom(ctx context.Context, sb *locked, v *overlay.View, data *putting) error {
	return rs.onPaths(ctx, sb, *data, func(dir string, ids *idmap.Map, root string, i int) error {
		p := &data.Paths[i]
		stage := filepath.Join(dir, path.Base(p.Stage))
		if err := ids.AsRoot(func() error { return os.Mkdir(stage, 0o700) }); err != nil {
			return err
		}
		r, w := io.Pipe()
		read := guard.Start(func() error {
			err := guard.Do(func() error { return copyOf(v, p.Path, w) })
			_ = w.CloseWithError(err) // the reader waits for it
			return err
		})
		err := cptar.To(ctx, root, ids, p.Stage, r)
		_ = r.Close() // the writer waits for it
		if none := <-read; errors.Is(none, runtime.ErrNotFound) {
			p.Absent = true
			return ids.AsRoot(func() error { return os.RemoveAll(stage) })
		} else if none != nil {
			return none
		}
		return err
	})
}

// exchangePaths makes each path what was staged. It can be repeated after a crash.
func (rs *restores) exchangePaths(ctx context.Context, sb *locked, data putting) error {
	sb.steps.Begin(runtime.PhasePutting, 0)
	return rs.onPaths(ctx, sb, data, func(dir string, ids *idmap.Map, _ string, i int) error {
		p := data.Paths[i]
		return ids.AsRoot(func() error {
			at, stage := filepath.Join(dir, path.Base(p.Path)), filepath.Join(dir, path.Base(p.Stage))
			if p.Absent {
				return os.RemoveAll(at)
			}
			staged := filepath.Join(stage, path.Base(p.Path))
			if _, err := os.Lstat(staged); errors.Is(err, os.ErrNotExist) {
				return os.RemoveAll(stage) // it is in place
			} else if err != nil {
				return err
			}
			if err := os.RemoveAll(at); err != nil {
				return err
			}
			if err := failpoint.Hit("undo.paths.between"); err != nil {
				return err
			}
			return errors.Join(os.Rename(staged, at), os.RemoveAll(stage))
		})
	})
}

// unstagePaths removes what was staged.
func (rs *restores) unstagePaths(ctx context.Context, sb *locked, data putting) error {
	err := rs.onPaths(ctx, sb, data, func(dir string, ids *idmap.Map, _ string, i int) error {
		return ids.AsRoot(func() error { return os.RemoveAll(filepath.Join(dir, path.Base(data.Paths[i].Stage))) })
	})
	if errors.Is(err, runtime.ErrNotFound) { // from that path on nothing was staged
		return nil
	}
	return err
}

// onPaths calls fn for each path with the directory that it is in, by a path of the host that no symlink
// leads out of.
func (rs *restores) onPaths(
	ctx context.Context, sb *locked, data putting, fn func(dir string, ids *idmap.Map, root string, i int) error,
) error {
	ids, err := ids(sb.Sandbox)
	if err != nil {
		return err
	}
	return sb.host.Mount(ctx, sb.ID, func(root string) error {
		jail, err := policy.Open(root)
		if err != nil {
			return err
		}
		defer jail.Close()
		for i, p := range data.Paths {
			dir, _, err := jail.Parent(p.Path)
			if errors.Is(err, runtime.ErrNotFound) {
				err = hint(err, "The directory that it is in is not there; let that go back: --path "+path.Dir(p.Path))
			}
			if err != nil {
				return err
			}
			err = fn(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), ids, root, i)
			if err := errors.Join(err, dir.Close()); err != nil {
				return fmt.Errorf("%s: %w", p.Path, err)
			}
		}
		return nil
	})
}

// finishUndoPaths does the rest of an undo of paths that was killed once all was staged, and takes another
// one back.
func (rec *recovery) finishUndoPaths(
	ctx context.Context, in store.Intent, host Host, lock *store.Lock,
) (did string, err error) {
	data, err := decode[putting](in.Data)
	if err != nil {
		return "", err
	}
	row, err := rec.store.Sandbox(ctx, in.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	sb := &locked{Sandbox: row, host: host, lock: lock}
	ready, err := rec.store.FinishPending(ctx, data.Undo)
	if err != nil {
		return "", err
	}
	did = fmt.Sprintf("took back the half-done undo of paths of sandbox %s", short(in.Sandbox))
	if data.Begun && ready {
		did = fmt.Sprintf("finished the undo of paths of sandbox %s", short(in.Sandbox))
		err = rec.restores.exchangePaths(ctx, sb, data)
	} else if err = rec.restores.unstagePaths(ctx, sb, data); err == nil && ready {
		err = rec.store.RemoveCheckpoint(ctx, data.Undo)
	}
	if err != nil {
		return "", err
	}
	thawed, err := rec.letGo(ctx, host, in.Sandbox, data.Was, true)
	return did + thawed, err
}
