package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/store"
)

// unchanged returns the head of a sandbox, whose lock is held, if that has exactly the files that a
// new checkpoint would have; nil: it does not. The sandbox may run: what it has changed by the time
// of the call is seen, what it changes meanwhile may not be.
func (cs *checkpoints) unchanged(
	ctx context.Context, sb *locked, opts runtime.CheckpointOptions,
) (_ *store.Checkpoint, err error) {
	row, err := cs.store.Head(ctx, sb.Sandbox)
	if errors.Is(err, runtime.ErrNotFound) || err == nil && (row.Status != store.Ready || row.Damaged != "") {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	sb.steps.Begin(runtime.PhaseLooking, 0)
	cmp, err := cs.compareWith(ctx, sb, c, row.ID)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, cmp.close()) }()
	same, err := cmp.same(ctx, opts.WithVolumes)
	if err != nil || !same {
		return nil, err
	}
	return &row, nil
}

// reused reports a checkpoint that made a new one unnecessary; nil: there is none.
func reused(row *store.Checkpoint) (c runtime.Checkpoint) {
	if row == nil {
		return c
	}
	c = checkpointView(*row)
	c.Unchanged, c.Reused, c.Added, c.Warnings = true, true, 0, nil
	return c
}

// comparison compares the files of a sandbox, as they are now, with those of a checkpoint, as Diff
// does: the modification time of a directory alone is no change.
type comparison struct {
	cs      *checkpoints
	sb      *locked
	c       runtime.Container
	reader  *store.Reader
	scratch string // a directory for what is collected

	// own: what the sandbox itself has changed counts, in what the checkpoint has; a directory
	// below a workspace may be another, and volumes may have come.
	own bool
}

func (cs *checkpoints) compareWith(
	ctx context.Context, sb *locked, c runtime.Container, checkpoint string,
) (*comparison, error) {
	r, err := cs.store.OpenCheckpoint(ctx, checkpoint)
	if err != nil {
		return nil, err
	}
	dir, err := cs.store.Scratch()
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return &comparison{cs: cs, sb: sb, c: c, reader: r, scratch: dir}, nil
}

func (p *comparison) close() error { return errors.Join(p.reader.Close(), os.RemoveAll(p.scratch)) }

// same reports whether the files are those of the checkpoint: the upperdir, workspaces, and with
// volumes the engine's volumes too. A directory below a workspace that is not what it was makes a
// difference, unless the workspace shows all the same what it showed then.
func (p *comparison) same(ctx context.Context, volumes bool) (bool, error) {
	untouched, err := p.untouched(ctx, p.c.Upper, 0)
	if err != nil {
		return false, err
	}
	m := p.reader.Manifest()
	for _, v := range p.c.Volumes {
		if !volumes && !v.Workspace() {
			continue
		}
		tree := 1 + slices.IndexFunc(m.Volumes, func(had store.Volume) bool { return had.Name == v.Name && !had.Below })
		switch {
		case tree == 0 && p.own:
			continue
		case tree == 0:
			return false, nil
		}
		as, err := p.untouched(ctx, v.Path, tree)
		if err == nil && as && v.Workspace() && !p.own {
			as, err = p.untouchedTree(ctx, worktree.Tree{Dir: v.Lower, Number: m.Below(tree), Below: true})
		}
		if err != nil {
			return false, err
		}
		if !as && !v.Workspace() {
			return false, nil
		}
		untouched = untouched && as
	}
	if !untouched {
		return p.shows(ctx, p.own)
	}
	d := p.differ(p.own)
	defer func() { err = errors.Join(err, d.close()) }()
	_, err = d.sinceCheckpoint(ctx, m.ID)
	return err == nil && len(d.managedChanges()) == 0, err
}

// untouched reports whether the file cache shows that a directory is a tree of the checkpoint.
func (p *comparison) untouched(ctx context.Context, dir string, tree int) (bool, error) {
	return p.untouchedTree(ctx, worktree.Tree{Dir: dir, Number: tree})
}

func (p *comparison) untouchedTree(ctx context.Context, t worktree.Tree) (bool, error) {
	t.Home = p.cs.home(p.sb)
	return t.IsUntouched(ctx, filepath.Join(p.scratch, fmt.Sprint(t.Number)), worktree.Target{Reader: p.reader})
}

// shows reports whether Diff shows no change since the checkpoint; own: none of the sandbox itself.
func (p *comparison) shows(ctx context.Context, own bool) (same bool, err error) {
	d := p.differ(own)
	defer func() { err = errors.Join(err, d.close()) }()
	root, err := d.sinceCheckpoint(ctx, p.reader.Manifest().ID)
	if err == nil {
		root.lower, err = layers(ctx, p.sb.Sandbox, p.c, p.sb.host)
	}
	if errors.Is(err, runtime.ErrUnsupported) {
		return false, nil // its engine does not tell what lies below
	}
	if err != nil {
		return false, err
	}
	areas, err := d.workspaces(ctx, root, "")
	if err != nil {
		return false, err
	}
	areas = slices.Insert(areas, 0, root)
	changed := len(d.managedChanges()) > 0
	for i := 0; i < len(areas) && !changed; i++ {
		err := d.compare(ctx, areas, i, false, func(overlay.Change) error { return errEnough })
		if changed = errors.Is(err, errEnough); err != nil && !changed {
			return false, err
		}
	}
	if changed && own && len(areas) > 1 {
		return p.shows(ctx, false) // a restore may have made them show what the checkpoint has
	}
	return !changed, nil
}

func (p *comparison) differ(own bool) *differ {
	return &differ{e: p.cs.core, sb: p.sb.Sandbox, c: p.c, own: own}
}

// sinceCheckpoint makes a checkpoint one side of the Diff, and the files as they are the other.
func (d *differ) sinceCheckpoint(ctx context.Context, checkpoint string) (root area, err error) {
	root.at = "."
	for i, ref := range []string{checkpoint, ""} {
		err = errors.Join(err, d.side(ctx, i, ref, &root, new(runtime.DiffState)))
	}
	return root, err
}
