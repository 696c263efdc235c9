package engine

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"time"

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
	Was   runtime.Status `json:"was"`   // before the verb
	Undo  string         `json:"undo"`  // id of the undo checkpoint
	Areas []putArea      `json:"areas"` // known once it is taken
	Begun bool           `json:"begun"` // all is staged: the rest of the work is finished

	paths []string // the requested ones
}

// putArea is what goes back in the root filesystem or in a workspace.
type putArea struct {
	At    string `json:"at"`    // where it is in the sandbox
	Stage string `json:"stage"` // path of the directory in it that has what the checkpoint has, by the numbers of puts
	Puts  []put  `json:"puts"`

	// Mtime is that of the directory At in the end, which the stage comes into and goes from.
	Mtime *overlay.Time `json:"mtime,omitempty"`
}

// put is one path that differs from what the checkpoint has there.
type put struct {
	Path string  `json:"path"`
	Kind putKind `json:"kind"`
}

type putKind string

const (
	putWhole  putKind = "whole"  // replaced with all that is in it
	putAbsent putKind = "absent" // removed
	putLook   putKind = "look"   // a directory: its owner, mode, time and attributes
)

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
	rs.log.Info("paths undone", "sandbox", sb.ID, "checkpoint", row.ID, "paths", out.Changed)
	return out, err
}

// puttingOf refuses paths that cannot go back by themselves.
func puttingOf(paths []string) (putting, error) {
	var data putting
	if len(paths) > maxUndoPaths {
		return data, fmt.Errorf("%w: %d paths, at most %d go back at once", runtime.ErrInvalid, len(paths), maxUndoPaths)
	}
	for _, p := range paths {
		if !path.IsAbs(p) || path.Clean(p) == "/" || len(p) >= unix.PathMax {
			return data, fmt.Errorf("%w: path %.200q must be absolute, and not /", runtime.ErrInvalid, p)
		}
		p = path.Clean(p)
		for _, o := range data.paths {
			if fsx.Within(o, p) || fsx.Within(p, o) {
				return data, fmt.Errorf("%w: of %q and %q one contains the other", runtime.ErrInvalid, o, p)
			}
		}
		data.paths = append(data.paths, p)
	}
	return data, nil
}

// mayPut refuses paths that have mounts in them, or lie in one that is in no checkpoint.
func mayPut(paths []string, s runtime.Spec, c runtime.Container) error {
	mounts := []string{"/proc", "/sys", "/dev", runtime.SecretsDir}
	kinds := []string{"files of the kernel", "files of the kernel", "devices", "secrets"}
	for name := range c.Managed {
		mounts, kinds = append(mounts, name), append(kinds, "file of the host")
	}
	for _, m := range s.Mounts {
		mounts, kinds = append(mounts, path.Clean(m.Target)), append(kinds, m.Type)
	}
	for _, p := range paths {
		for i, at := range mounts {
			workspace := kinds[i] == runtime.MountWorkspace
			switch {
			case workspace && fsx.Within(at, p):
			case fsx.Within(p, at):
				return hint(fmt.Errorf("%w: %s has the mount %s in it", runtime.ErrUnsupported, p, at),
					"Name what is beside or in it, or undo all: agentbox undo "+s.Name)
			case fsx.Within(at, p):
				return fmt.Errorf("%w: %s lies in %s (%s), which is in no checkpoint", runtime.ErrUnsupported, p, at, kinds[i])
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
	if err := mayPut(data.paths, s, c); err != nil {
		return "", 0, nil, err
	}
	unlock, err := lockSlot(c)
	if err != nil {
		return "", 0, nil, err
	}
	defer unlock()
	var k *making
	err = rs.checkpoints.onView(ctx, recordedState{sb.ID, row.ID}, "/", func(v *overlay.View) error {
		plans, err := rs.foresee(ctx, sb, s, c, v, data.paths)
		if err != nil {
			return err
		}
		if k, err = rs.presentOf(ctx, sb, c); err != nil {
			return err
		}
		return rs.replacePaths(ctx, k, row, v, plans, &data)
	})
	if k == nil {
		return "", 0, nil, err
	}
	for _, a := range data.Areas {
		for _, p := range a.Puts {
			if p.Kind != putLook {
				changed++
			}
		}
	}
	return k.row.ID, changed, k.row.Warnings, err
}

// replacePaths freezes the sandbox, records it, and puts what differs in it.
func (rs *restores) replacePaths(
	ctx context.Context, k *making, row store.Checkpoint, v *overlay.View, plans []*pathPlan, data *putting,
) error {
	sb := k.sb
	data.Was, data.Undo = k.c.Status, k.row.ID
	in := store.Intent{Op: opUndoPaths, Sandbox: sb.ID, Checkpoint: row.ID, Lazy: true}
	return rs.intent(ctx, in, *data, func(seq int64) (err error) {
		if _, err := rs.checkpoints.record(ctx, k); err != nil {
			return fmt.Errorf("keep the present state: %w", err)
		}
		defer func() { err = errors.Join(err, k.cut.End(), rs.checkpoints.thaw(context.WithoutCancel(ctx), k)) }()
		if err = rs.planPaths(ctx, sb, row, plans, data); err == nil {
			err = rs.advance(ctx, seq, *data, false)
		}
		if err == nil {
			err = rs.stagePaths(ctx, sb, v, *data)
		}
		if err == nil {
			data.Begun = true
			err = rs.advance(ctx, seq, *data, false)
		}
		if err == nil {
			err = failpoint.Hit("undo.paths.after-stage")
		}
		if err != nil {
			ctx := context.WithoutCancel(ctx)
			return errors.Join(err, rs.unstagePaths(ctx, sb, *data), rs.store.RemoveCheckpoint(ctx, k.row.ID))
		}
		if err := rs.exchangePaths(context.WithoutCancel(ctx), sb, *data); err != nil {
			return fmt.Errorf("%w (%w); what was there is in checkpoint %s", err, errUnfinished, short(k.row.ID))
		}
		return nil
	})
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

// stagePaths writes what the checkpoint has of each put into the stage of its area.
func (rs *restores) stagePaths(ctx context.Context, sb *locked, v *overlay.View, data putting) error {
	sb.steps.Begin(runtime.PhaseStaging, 0)
	return rs.inAreas(ctx, sb, data, func(j *policy.Jail, ids *idmap.Map, root string, a putArea) error {
		at, close, err := areaDir(j, a)
		if err != nil {
			return err
		}
		defer close()
		if err := ids.AsRoot(func() error { return os.Mkdir(filepath.Join(at, path.Base(a.Stage)), 0o700) }); err != nil {
			return err
		}
		r, w := io.Pipe()
		read := guard.Start(func() error {
			err := guard.Do(func() error { return a.write(v, w) })
			_ = w.CloseWithError(err) // the reader waits for it
			return err
		})
		err = cptar.To(ctx, root, ids, a.Stage, r)
		_ = r.Close() // the writer waits for it
		return cmp.Or(<-read, err)
	})
}

// write writes what a view has of the puts as an archive.
func (a putArea) write(v *overlay.View, w io.Writer) error {
	out := bufio.NewWriterSize(w, 256<<10)
	t := viewTar{w: overlay.NewTarWriter(out), first: map[string]string{}}
	numbers, onTheWay := map[string]int{}, map[string]bool{}
	for i, p := range a.Puts {
		if p.Kind == putAbsent {
			continue
		}
		name := inTree(p.Path)
		for numbers[name] = i; name != "." && !onTheWay[path.Dir(name)]; name = path.Dir(name) {
			onTheWay[path.Dir(name)] = true
		}
	}
	whole := ""
	err := v.Walk(inTree(a.At), func(f *overlay.ViewFile) error {
		i, is := numbers[f.Path]
		switch {
		case is:
			t.top, t.name = f.Path, strconv.Itoa(i)
			if whole = ""; a.Puts[i].Kind == putWhole {
				whole = f.Path
			}
		case whole != "" && inOrAt(f.Path, whole):
		case f.Type == overlay.TypeDir && !onTheWay[f.Path]:
			return fs.SkipDir
		default:
			return nil
		}
		return t.add(f)
	})
	if err != nil {
		return err
	}
	if err := errors.Join(t.w.Close(), out.Flush()); err != nil {
		return err
	}
	if len(t.report.Skipped) > 0 {
		return &cptar.Partial{Report: t.report}
	}
	return nil
}

// exchangePaths makes each path what was staged. It can be repeated after a crash.
func (rs *restores) exchangePaths(ctx context.Context, sb *locked, data putting) error {
	sb.steps.Begin(runtime.PhasePutting, 0)
	return rs.inAreas(ctx, sb, data, func(j *policy.Jail, ids *idmap.Map, _ string, a putArea) error {
		at, close, err := areaDir(j, a)
		if err != nil {
			return err
		}
		defer close()
		return ids.AsRoot(func() error {
			stage, close, err := a.openStage(at)
			if err != nil {
				return err
			}
			defer close()
			for i, p := range a.Puts {
				if err := p.exchange(j, filepath.Join(stage, strconv.Itoa(i))); err != nil {
					return fmt.Errorf("%s: %w", p.Path, err)
				}
				if err := failpoint.Hit("undo.paths.between"); err != nil {
					return err
				}
			}
			return a.unstage(at)
		})
	})
}

// openStage returns the stage by a path of the host until close. After a failure the sandbox goes on with it:
// no symlink in its place is followed.
func (a putArea) openStage(dir string) (at string, close func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, path.Base(a.Stage)), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return "/proc/self/fd/-1", func() {}, nil // all that was in it is in place
	}
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", f.Fd()), func() { _ = f.Close() }, nil
}

// unstage removes the stage from the area's directory.
func (a putArea) unstage(dir string) error {
	err := os.RemoveAll(filepath.Join(dir, path.Base(a.Stage)))
	if err == nil && a.Mtime != nil {
		t := time.Unix(a.Mtime.Sec, a.Mtime.Nsec)
		err = os.Chtimes(dir, t, t)
	}
	return err
}

// exchange replaces a path with what is staged. Nothing is left of the stage once it was done, but for a directory's
// look.
func (p put) exchange(j *policy.Jail, staged string) error {
	dir, base, err := j.Parent(p.Path)
	if err != nil {
		return err
	}
	defer dir.Close()
	at := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), base)
	if p.Kind == putAbsent {
		return os.RemoveAll(at)
	}
	there, err := os.Lstat(staged)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it is in place
	}
	if err != nil {
		return err
	}
	if p.Kind == putLook {
		return cptar.Dress(staged, at)
	}
	now, err := os.Lstat(at)
	if err == nil && (there.IsDir() || now.IsDir()) {
		err = os.RemoveAll(at)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Rename(staged, at)
}

// unstagePaths removes what was staged.
func (rs *restores) unstagePaths(ctx context.Context, sb *locked, data putting) error {
	return rs.inAreas(ctx, sb, data, func(j *policy.Jail, ids *idmap.Map, _ string, a putArea) error {
		at, close, err := areaDir(j, a)
		if errors.Is(err, runtime.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		defer close()
		return ids.AsRoot(func() error { return a.unstage(at) })
	})
}

// inAreas calls fn for each area with the sandbox's files, whose root is also a path of the host.
func (rs *restores) inAreas(
	ctx context.Context, sb *locked, data putting, fn func(j *policy.Jail, ids *idmap.Map, root string, a putArea) error,
) error {
	if len(data.Areas) == 0 {
		return nil
	}
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
		for _, a := range data.Areas {
			if err := fn(jail, ids, root, a); err != nil {
				return err
			}
		}
		return nil
	})
}

// areaDir returns the directory of an area by a path of the host that no symlink leads out of, until close.
func areaDir(j *policy.Jail, a putArea) (at string, close func(), err error) {
	f, err := j.OpenFile(a.At, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d", f.Fd()), func() { _ = f.Close() }, nil
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
