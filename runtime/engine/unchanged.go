package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

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

// comparison compares the files of a sandbox, as they are now, with those of a checkpoint.
type comparison struct {
	c       runtime.Container
	home    worktree.Home
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
	return &comparison{c: c, home: cs.home(sb), reader: r, scratch: dir}, nil
}

func (p *comparison) close() error { return errors.Join(p.reader.Close(), os.RemoveAll(p.scratch)) }

// same reports whether the files are those of the checkpoint: the upperdir, workspaces, and with
// volumes the engine's volumes too. A directory below a workspace that is not what it was makes a
// difference, unless the workspace shows all the same what it showed then.
func (p *comparison) same(ctx context.Context, volumes bool) (bool, error) {
	if changed, err := p.differs(ctx, p.c.Upper, 0, worktree.Target{Reader: p.reader}); changed || err != nil {
		return false, err
	}
	m := p.reader.Manifest()
	for _, v := range p.c.Volumes {
		if !volumes && !v.Workspace() {
			continue
		}
		at := slices.IndexFunc(m.Volumes, func(had store.Volume) bool { return had.Name == v.Name && !had.Below })
		if at < 0 && p.own {
			continue
		}
		if at < 0 {
			return false, nil
		}
		if same, err := p.sameVolume(ctx, v, at+1); !same || err != nil {
			return false, err
		}
	}
	return true, nil
}

// sameVolume is same for a volume, which is that tree of the checkpoint.
func (p *comparison) sameVolume(ctx context.Context, v runtime.Volume, tree int) (bool, error) {
	m := p.reader.Manifest()
	to := worktree.Target{Reader: p.reader}
	changed, err := p.differs(ctx, v.Path, tree, to)
	if err != nil || !v.Workspace() || !changed && p.own {
		return !changed, err
	}
	under := m.Below(tree)
	if under == 0 {
		return false, nil
	}
	lower := p.tree(v.Lower, under)
	lower.Below = true
	moved, err := lower.Differs(ctx, p.out(under), to)
	if err != nil {
		return false, fmt.Errorf("read %s, below workspace %s: %w", v.Lower, v.Name, err)
	}
	if !moved || !changed {
		return moved == changed, nil
	}
	to.Moved = map[int]worktree.Moved{tree: {Below: under, Now: lower.Entries()}}
	changed, err = p.differs(ctx, v.Path, tree, to)
	return !changed, err
}

func (p *comparison) differs(ctx context.Context, dir string, tree int, to worktree.Target) (bool, error) {
	t, out := p.tree(dir, tree), p.out(tree)
	if err := os.RemoveAll(out); err != nil {
		return false, err
	}
	return t.Differs(ctx, out, to)
}

func (p *comparison) tree(dir string, number int) *worktree.Tree {
	return &worktree.Tree{Dir: dir, Number: number, Home: p.home}
}

func (p *comparison) out(tree int) string { return filepath.Join(p.scratch, fmt.Sprint(tree)) }
