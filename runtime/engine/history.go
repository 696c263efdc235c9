package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// History returns the checkpoints of a sandbox, even a removed one, newest first. A
// checkpoint always comes after its descendants.
func (v checkpointVerbs) History(ctx context.Context, ref string, opts runtime.HistoryOptions) ([]runtime.HistoryEntry, error) {
	return verb(ctx, v.e, reads(onSandbox("log", ref)), func(ctx context.Context) ([]runtime.HistoryEntry, error) {
		return v.e.checkpoints.history(ctx, ref, opts)
	})
}

func (cs *checkpoints) history(
	ctx context.Context, ref string, opts runtime.HistoryOptions,
) (_ []runtime.HistoryEntry, err error) {
	sb, _, err := cs.owner(ctx, ref)
	if err != nil {
		return nil, err
	}
	rows, err := cs.store.Checkpoints(ctx, store.Filter{SandboxID: sb.ID, All: opts.All})
	if err != nil {
		return nil, err
	}
	forks, err := cs.store.Forks(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	uncounted := make([]*store.Checkpoint, len(rows))
	for i := range rows {
		uncounted[i] = &rows[i]
	}
	cs.countAll(ctx, uncounted)
	list := make([]runtime.HistoryEntry, len(rows))
	at := map[string]int{}
	for i, row := range rows {
		list[i] = runtime.HistoryEntry{
			Checkpoint: checkpointView(row), Children: []string{}, Head: row.ID == sb.Head,
			Forks: []runtime.ForkedInto{},
		}
		for _, f := range forks[row.ID] {
			list[i].Forks = append(list[i].Forks, runtime.ForkedInto{Sandbox: f.ID, SandboxName: f.Name})
		}
		at[row.ID] = i
		if row.Status != store.Ready {
			continue
		}
		// The record names the nearest remaining ancestor, the manifest the original
		// parent. `checkpoint verify` reports a damaged manifest.
		r, err := cs.store.OpenCheckpoint(ctx, row.ID)
		if err == nil {
			list[i].ParentDeleted = r.Manifest().Parent != row.Parent
			err = r.Close()
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			cs.log.Warn("checkpoint not readable", "checkpoint", row.ID, "err", err)
		}
	}
	ledger, err := cs.effects.of(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	for _, f := range slices.Backward(ledger) {
		if i, ok := at[f.Head]; ok {
			list[i].Effects = append(list[i].Effects, f)
		}
	}
	for _, c := range list {
		if i, ok := at[c.Parent]; ok {
			list[i].Children = append(list[i].Children, c.ID)
		}
	}
	return list, nil
}

// certain refuses a reference that is a prefix of one sandbox's id and the name of another,
// removed one that can be restored.
func (e *core) certain(ctx context.Context, ref string, sb store.Sandbox) error {
	if sb.ID == "" || ref == sb.ID || ref == sb.Name || strings.Contains(ref, "://") {
		return nil
	}
	row, err := e.store.NewestOfName(ctx, ref, false)
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	return hint(fmt.Errorf("%w: %q begins the id of sandbox %s and is the name of a removed one",
		runtime.ErrInvalid, ref, sb.Name),
		fmt.Sprintf("Name the one that is there %s, the removed one %s.", sb.Name, row.SandboxID))
}

// owner finds a sandbox that a user names, even a removed one with checkpoints left.
func (e *core) owner(ctx context.Context, ref string) (sb store.Sandbox, gone bool, err error) {
	if sb, err = e.find(ctx, ref); !errors.Is(err, runtime.ErrNotFound) {
		return sb, false, errors.Join(err, e.certain(ctx, ref, sb))
	}
	row, err2 := e.newestOfGone(ctx, ref, false)
	if err2 != nil {
		if errors.Is(err2, runtime.ErrNotFound) {
			err2 = err
		}
		return sb, false, err2
	}
	sb = store.Sandbox{ID: row.SandboxID, Name: row.SandboxName, ImageDigest: row.ImageDigest, Spec: row.Spec}
	s, err := specOf(sb.ID, sb.Spec)
	sb.Backend, sb.Image = cmp.Or(s.Backend, e.first), s.Image
	return sb, true, err
}
