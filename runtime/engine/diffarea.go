package engine

import (
	"context"
	"fmt"
	"io"
	"iter"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/store"
)

// area is a part of a sandbox's files that a Diff compares by itself: the root filesystem or a
// workspace.
type area struct {
	at    string // where it is in the sandbox, as paths of trees are; ".": it is the root
	lower []string
	sides [2]overlay.Side
	from  [2]*worktree.Target // of a checkpoint
	tree  [2]int              // its number in that

	applied []*appliedAt // of a workspace: what was applied to its directory
}

// workspaces returns the areas of a sandbox's workspaces. Over a directory that has changed since a
// checkpoint, that side shows what the checkpoint has.
func (d *differ) workspaces(ctx context.Context, root area, to string) (list []area, err error) {
	s, err := spec(d.sb)
	if err != nil {
		return nil, err
	}
	for _, m := range s.Workspaces() {
		name := path.Clean(m.Target)
		a := area{at: inTree(name), lower: []string{m.Source}}
		if root.from[0] == nil && root.sides[0].Dir == "" {
			if a.applied, err = d.appliedOf(name); err != nil {
				return nil, err
			}
		}
		for i := range a.sides {
			switch {
			case root.from[i] != nil:
				err = d.workspaceOf(ctx, &a, i, name, root)
			case i == 1 && to == "":
				a.sides[i] = d.workspaceNow(name)
			}
			if err != nil {
				return nil, err
			}
		}
		list = append(list, a)
	}
	return list, nil
}

// workspaceNow returns the side of a workspace as it is.
func (d *differ) workspaceNow(name string) overlay.Side {
	at := slices.IndexFunc(d.c.Volumes, func(v runtime.Volume) bool { return v.Workspace() && v.Name == name })
	if at < 0 {
		return overlay.Side{}
	}
	return overlay.Side{Dir: d.c.Volumes[at].Path}
}

// workspaceOf makes side i of an area that of a checkpoint.
func (d *differ) workspaceOf(ctx context.Context, a *area, i int, name string, root area) error {
	reader := root.from[i].Reader
	m := reader.Manifest()
	n := m.Workspace(name)
	if n == 0 {
		return nil // it had none yet: the directory as it is
	}
	to := worktree.Target{Reader: reader}
	if below := m.Below(n); below > 0 && !d.own {
		now, err := d.movedBelow(ctx, i, name, a.lower[0], below, to)
		if err != nil {
			return err
		}
		if now != nil {
			to.Moved = map[int]worktree.Moved{n: {Below: below, Now: now}}
		}
	}
	a.from[i], a.tree[i] = &to, n
	a.sides[i] = overlay.Side{
		Tree: func() (io.ReadCloser, error) { return to.Tree(ctx, n) }, Taken: root.sides[i].Taken,
	}
	return nil
}

// scratchDir returns a directory for files that go with the differ.
func (d *differ) scratchDir() (_ string, err error) {
	if d.scratch == "" {
		d.scratch, err = d.e.store.Scratch()
	}
	return d.scratch, err
}

// movedBelow returns what the directory below a workspace has now; nil: what tree below of a checkpoint has.
func (d *differ) movedBelow(
	ctx context.Context, i int, name, dir string, below int, to worktree.Target,
) (iter.Seq2[overlay.Entry, error], error) {
	if d.now != nil {
		m, then := d.now.Manifest(), to.Reader.Manifest()
		at := m.Below(m.Workspace(name))
		if at == 0 || at == below && m.SameTree(&then, below) {
			return nil, nil
		}
		return worktree.Entries(ctx, d.now, at), nil
	}
	scratch, err := d.scratchDir()
	if err != nil {
		return nil, err
	}
	home := worktree.Home{Store: d.e.store, Sandbox: d.sb.ID, Log: d.e.log}
	t := worktree.Tree{Dir: dir, Number: below, Below: true, Home: home}
	changed, err := t.Differs(ctx, filepath.Join(scratch, fmt.Sprintf("%d-%d", i, below)), to)
	if err != nil {
		return nil, fmt.Errorf("read %s, below workspace %s: %w", t.Dir, name, err)
	}
	if !changed {
		return nil, nil
	}
	return t.Entries(), nil
}

// appliedOf returns what of a workspace was applied to its directory.
func (d *differ) appliedOf(name string) (list []*appliedAt, err error) {
	if d.c.Applies == "" {
		return nil, nil
	}
	notes, err := apply.OfWorkspaces(d.c.Applies, d.sb.Name, d.c.Volumes, d.e.log).Notes()
	if err != nil {
		return nil, err
	}
	l, err := newLineage(d.e, store.Checkpoint{}, notes)
	if err != nil {
		return nil, err
	}
	for _, of := range l.applied {
		if at := of[name]; at != nil {
			list = append(list, at)
		}
	}
	return list, nil
}

// given reports whether a change is only that an apply gave a file an owner, as it does with all that
// comes.
func (a area) given(c overlay.Change) bool {
	return slices.Equal(c.What, []string{overlay.WhatOwner}) &&
		slices.ContainsFunc(a.applied, func(at *appliedAt) bool { return at.has(c.Path) || at.dirs[c.Path] })
}

// within returns the path in the area of a path in the sandbox, and whether it is in it.
func (a area) within(name string) (string, bool) {
	if a.at == "." {
		return name, true
	}
	if name == a.at {
		return ".", true
	}
	return strings.CutPrefix(name, a.at+"/")
}

// outside returns the path in the sandbox of a path in the area.
func (a area) outside(name string) string { return path.Join(a.at, name) }

// areaOf returns the area that has a path, and the path in it: the innermost one. The first area is
// the root.
func areaOf(areas []area, name string) (at int, in string) {
	for i, a := range areas {
		if rest, is := a.within(name); is && (at == 0 || len(a.at) > len(areas[at].at)) {
			at, in = i, rest
		}
	}
	return at, in
}
