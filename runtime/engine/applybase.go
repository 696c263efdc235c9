package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"path"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/store"
)

// lineage is the history of the checkpoint that is applied. It tells what the files of a workspace
// were made of: at the last checkpoint at which the workspace itself had nothing at a path, the
// directory below had it; or, if a checkpoint since was applied, it is what the sandbox had then.
type lineage struct {
	*core
	row     store.Checkpoint
	applied map[string]map[string]*appliedAt // by checkpoint and workspace
	readers []*store.Reader
}

func newLineage(c *core, row store.Checkpoint, notes []json.RawMessage) (*lineage, error) {
	l := &lineage{core: c, row: row, applied: map[string]map[string]*appliedAt{}}
	for _, text := range notes {
		var note appliedNote
		if err := json.Unmarshal(text, &note); err != nil {
			return nil, fmt.Errorf("a note of an apply: %w: %w", runtime.ErrCorrupt, err)
		}
		to := l.applied[note.Checkpoint]
		if to == nil {
			to = map[string]*appliedAt{}
			l.applied[note.Checkpoint] = to
		}
		at := func(workspace string) *appliedAt {
			if to[workspace] == nil {
				to[workspace] = &appliedAt{}
			}
			return to[workspace]
		}
		for workspace, paths := range note.Paths {
			at(workspace).add(paths, apply.Taken{})
		}
		for workspace, picks := range note.Picks {
			at(workspace).add(nil, picks)
		}
	}
	return l, nil
}

func (l *lineage) close() error {
	if l == nil {
		return nil
	}
	var errs []error
	for _, r := range l.readers {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// ancestor is a workspace in a checkpoint of the lineage.
type ancestor struct {
	reader       *store.Reader
	upper, below int
	digest       string     // of the tree below
	applied      *appliedAt // nil: nothing
	used         bool       // it has the data of a base
}

// done closes the reader of an ancestor, unless its data is wanted.
func (l *lineage) done(a *ancestor) error {
	if a == nil {
		return nil
	}
	if a.used {
		l.readers = append(l.readers, a.reader)
		return nil
	}
	return a.reader.Close()
}

// of returns the bases of a workspace.
func (l *lineage) of(workspace string) apply.Base {
	return func(ctx context.Context, paths map[string]bool) (map[string]apply.BaseEntry, error) {
		b := bases{open: map[string]bool{}, found: map[string]apply.BaseEntry{}}
		for p := range paths {
			b.open[p] = true
		}
		var last *ancestor
		for a, err := range l.ancestors(ctx, workspace) {
			if err == nil {
				err = errors.Join(b.next(ctx, last, a), l.done(last))
				last = a
			}
			if err != nil {
				return nil, errors.Join(err, l.done(last))
			}
			if len(b.open) == 0 {
				break
			}
		}
		if last == nil {
			return b.found, nil
		}
		// What the sandbox had changed before the oldest checkpoint that is left has no base: what the
		// directory had then may be the owner's change.
		err := b.fromBelow(ctx, last)
		return b.found, errors.Join(err, l.done(last))
	}
}

// ancestors lists the checkpoints of the lineage that have a workspace, the newest first. One that
// cannot be read is left out: then the base is an older one, and there are more conflicts.
func (l *lineage) ancestors(ctx context.Context, workspace string) iter.Seq2[*ancestor, error] {
	return func(yield func(*ancestor, error) bool) {
		seen := map[string]bool{}
		for row := l.row; !seen[row.ID]; {
			if err := ctx.Err(); err != nil {
				yield(nil, err)
				return
			}
			seen[row.ID] = true
			r, err := l.store.OpenCheckpoint(ctx, row.ID)
			switch {
			case errors.Is(err, runtime.ErrNotFound), errors.Is(err, runtime.ErrState),
				errors.Is(err, runtime.ErrCorrupt):
				l.log.Warn("checkpoint not readable", "checkpoint", row.ID, "err", err)
			case err != nil:
				yield(nil, err)
				return
			default:
				m := r.Manifest()
				n := m.Workspace(workspace)
				if n == 0 || m.Below(n) == 0 {
					if err := r.Close(); err != nil {
						yield(nil, err)
					}
					return
				}
				a := &ancestor{reader: r, upper: n, below: m.Below(n), applied: l.applied[row.ID][workspace]}
				a.digest = m.Volumes[a.below-1].Files.Digest
				if !yield(a, nil) {
					return
				}
			}
			if row.Parent == "" {
				return
			}
			if row, err = l.store.Checkpoint(ctx, row.Parent); errors.Is(err, runtime.ErrNotFound) {
				return
			} else if err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// bases are found one checkpoint after the other.
type bases struct {
	open  map[string]bool // paths of which the base is not known yet
	found map[string]apply.BaseEntry
}

// next looks at a checkpoint, and at the newer one before it (nil: it is the newest). Of checkpoints
// over the same directory the oldest has changed the least.
func (b *bases) next(ctx context.Context, newer, a *ancestor) error {
	if newer != nil && newer.digest != a.digest {
		if err := b.fromBelow(ctx, newer); err != nil {
			return err
		}
	}
	if a.applied != nil {
		return b.fromApplied(ctx, a)
	}
	return nil
}

// fromBelow takes what the directory had at the open paths of which the workspace itself had nothing.
func (b *bases) fromBelow(ctx context.Context, a *ancestor) error {
	if len(b.open) == 0 {
		return nil
	}
	u, err := readUpper(ctx, a)
	if err != nil {
		return err
	}
	free := map[string]bool{}
	for p := range b.open {
		if !u.has(p) {
			free[p] = true
		}
	}
	return b.pick(ctx, a, a.below, free)
}

// fromApplied takes what the workspace showed at the open paths that were applied.
func (b *bases) fromApplied(ctx context.Context, a *ancestor) error {
	u, err := readUpper(ctx, a)
	if err != nil {
		return err
	}
	upper, below := map[string]bool{}, map[string]bool{}
	for p := range b.open {
		if !a.applied.has(p) {
			continue
		}
		if u.has(p) {
			upper[p] = true
		} else {
			below[p] = true
		}
	}
	if err := errors.Join(b.pick(ctx, a, a.upper, upper), b.pick(ctx, a, a.below, below)); err != nil {
		return err
	}
	for p, part := range a.applied.parts {
		if of, ok := b.found[p]; ok && upper[p] && of.Type == overlay.TypeFile {
			b.found[p] = part.Base(of)
		}
	}
	return nil
}

func inOrAt(p, top string) bool {
	_, in := area{at: top}.within(p)
	return in
}

// pick takes the entries of a tree at some paths as their bases.
func (b *bases) pick(ctx context.Context, a *ancestor, tree int, paths map[string]bool) error {
	if len(paths) == 0 {
		return nil
	}
	a.used = true
	links := map[string][]string{}
	for e, err := range worktree.Entries(ctx, a.reader, tree) {
		if err != nil {
			return err
		}
		if !paths[e.Path] {
			continue
		}
		if e.Hardlink != "" {
			links[e.Hardlink] = append(links[e.Hardlink], e.Path)
			continue
		}
		b.found[e.Path] = apply.BaseEntry{Entry: e, Data: a.reader.Source()}
	}
	if len(links) > 0 {
		for e, err := range worktree.Entries(ctx, a.reader, tree) {
			if err != nil {
				return err
			}
			for _, name := range links[e.Path] {
				one := e
				one.Path = name
				b.found[name] = apply.BaseEntry{Entry: one, Data: a.reader.Source()}
			}
		}
	}
	for p := range paths {
		delete(b.open, p)
	}
	return nil
}

// upper is what a workspace itself had.
type upper struct {
	paths  map[string]bool
	hiding map[string]bool // below these, nothing of the directory shows
}

func readUpper(ctx context.Context, a *ancestor) (upper, error) {
	u := upper{map[string]bool{}, map[string]bool{}}
	for e, err := range worktree.Entries(ctx, a.reader, a.upper) {
		if err != nil {
			return u, err
		}
		u.paths[e.Path] = e.Path != "." // the top directory is there from the start
		if e.Type != overlay.TypeDir || e.Xattrs["trusted.overlay.opaque"] == "y" {
			u.hiding[e.Path] = true
		}
	}
	return u, nil
}

// has reports whether a path did not show the directory below.
func (u upper) has(p string) bool {
	if u.paths[p] {
		return true
	}
	for p != "." && p != "/" {
		if p = path.Dir(p); u.hiding[p] {
			return true
		}
	}
	return false
}
