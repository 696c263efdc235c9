package engine

import (
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"time"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// countTime bounds how long a verb that lists checkpoints counts their changes. The next one counts
// the rest.
const countTime = time.Second

// countAll counts the changes of checkpoints that are not counted yet, as far as the time goes. What
// cannot be counted stays unknown.
func (cs *checkpoints) countAll(ctx context.Context, rows []*store.Checkpoint) {
	for began := time.Now(); len(rows) > 0 && time.Since(began) < countTime && ctx.Err() == nil; rows = rows[1:] {
		if row := rows[0]; row.Changes == nil && row.Status == store.Ready {
			if err := cs.count(ctx, row); err != nil {
				cs.log.Debug("changes of a checkpoint not counted", "checkpoint", row.ID, "err", err)
			}
		}
	}
}

// count counts the changes of a checkpoint since its parent, once.
func (cs *checkpoints) count(ctx context.Context, row *store.Checkpoint) (err error) {
	if row.Changes != nil {
		return nil
	}
	d, host, _, err := cs.differ(ctx, row.SandboxID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	from := row.Parent
	if from == "" {
		from = runtime.DiffImage
	}
	root := area{at: "."}
	for i, ref := range []string{from, row.ID} {
		if err := d.side(ctx, i, ref, &root, new(runtime.DiffState)); err != nil {
			return err
		}
	}
	if root.lower, err = layers(ctx, d.sb, d.c, host); err != nil {
		return err
	}
	areas, err := d.recorded(ctx, root)
	if err != nil {
		return err
	}
	areas = slices.Insert(areas, 0, root)
	n := store.Changes{Modified: int64(len(d.managedChanges()))}
	for i := range areas {
		err := d.compare(ctx, areas, i, false, func(c overlay.Change) error {
			switch c.Kind {
			case overlay.Added:
				n.Added++
			case overlay.Deleted:
				n.Deleted++
			default:
				n.Modified++
			}
			return ctx.Err()
		})
		if err != nil {
			return err
		}
	}
	row.Changes = &n
	return cs.store.SetChanges(ctx, row.ID, row.Parent, n)
}

// recorded returns the areas of a sandbox's workspaces for two checkpoints, with what these have of the
// directories below.
func (d *differ) recorded(ctx context.Context, root area) (list []area, err error) {
	s, err := spec(d.sb)
	if err != nil {
		return nil, err
	}
	for _, m := range s.Mounts {
		if m.Type != runtime.MountWorkspace {
			continue
		}
		name := path.Clean(m.Target)
		a := area{at: inTree(name), lower: []string{m.Source}}
		digest := ""
		for i, from := range root.from {
			if from == nil {
				continue // the image
			}
			had := from.Reader.Manifest()
			a.tree[i] = 1 + slices.IndexFunc(had.Volumes, func(v store.Volume) bool { return v.Workspace() && v.Name == name })
			below := had.Below(a.tree[i])
			if below == 0 {
				continue // it had no workspace yet
			}
			a.from[i] = from
			if is := had.Volumes[below-1].Files.Digest; digest == "" {
				digest = is
			} else if digest != is { // it lay over what is not the same any more
				a.lower = nil
			}
		}
		for i, from := range a.from {
			if from == nil {
				continue
			}
			had := from.Reader.Manifest()
			a.sides[i].Tree = func() (io.ReadCloser, error) { return from.Reader.Tree(ctx, a.tree[i]) }
			if a.lower == nil {
				a.sides[i].Tree = wholeWorkspace(ctx, from.Reader, a.tree[i], had.Below(a.tree[i]))
			}
		}
		list = append(list, a)
	}
	return list, nil
}
