package engine

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/changes"
	"github.com/agentbox/agentbox/runtime/store"
)

// maxChanges is how many changes a Diff lists unless asked for more.
const maxChanges = 1_000_000

// Diff lists what a user of a sandbox finds changed between two states of its files. It
// only reads, and does not freeze a running sandbox.
func (v checkpointVerbs) Diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error) {
	return verb(ctx, v.e, reads(onSandbox("diff", req.Sandbox)), func(ctx context.Context) (runtime.Diff, error) {
		return v.e.checkpoints.diff(ctx, req)
	})
}

func (cs *checkpoints) diff(ctx context.Context, req runtime.DiffRequest) (runtime.Diff, error) {
	return cs.diffKnown(ctx, req, "")
}

// diffKnown is diff where a checkpoint, unless now is empty, has just read the directories below workspaces.
func (cs *checkpoints) diffKnown(ctx context.Context, req runtime.DiffRequest, now string) (_ runtime.Diff, err error) {
	d, host, gone, err := cs.differ(ctx, req.Sandbox)
	if err != nil {
		return runtime.Diff{}, err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	if now != "" {
		if d.now, err = cs.store.OpenCheckpoint(ctx, now); err != nil {
			return runtime.Diff{}, err
		}
		d.readers = append(d.readers, d.now)
	}
	sb, c := d.sb, d.c
	out := runtime.Diff{Sandbox: sb.ID, SandboxName: sb.Name, Changes: []runtime.Change{}}
	from, err := diffFrom(req, sb, gone)
	if err != nil {
		return out, err
	}

	for _, p := range slices.Concat(req.Paths, []string{cmp.Or(req.Relative, "/")}) {
		if !path.IsAbs(p) {
			return out, fmt.Errorf("%w: the path %q is not absolute", runtime.ErrInvalid, p)
		}
	}
	for _, p := range req.Paths {
		d.only = append(d.only, inTree(path.Clean(p)))
	}
	root := area{at: "."}
	for i, ref := range []string{from, req.To} {
		state := []*runtime.DiffState{&out.From, &out.To}[i]
		if err := d.side(ctx, i, ref, &root, state); err != nil {
			return out, err
		}
	}
	if root.lower, err = layers(ctx, sb, c, host); err != nil {
		return out, err
	}
	areas, err := d.workspaces(ctx, root, req.To)
	if err != nil {
		return out, err
	}
	areas = slices.Insert(areas, 0, root)
	if err := d.changes(ctx, req, areas, &out); err != nil {
		return out, err
	}

	if req.Patch {
		from, err := d.contents(ctx, out.Changes, areas)
		if err != nil {
			return out, err
		}
		n, err := fillPatches(ctx, out.Changes, req.Relative, func(c runtime.Change, newer bool) (io.ReadCloser, error) {
			return from.open(ctx, c, newer)
		})
		if err != nil {
			return out, err
		}
		if n < len(out.Changes) {
			out.Changes, out.Truncated = out.Changes[:n], true
		}
	}
	return out, nil
}

// differ finds a sandbox whose recorded states are to be read; gone: it was removed.
func (cs *checkpoints) differ(ctx context.Context, ref string) (d differ, host Host, gone bool, err error) {
	sb, gone, err := cs.owner(ctx, ref)
	if err != nil {
		return d, host, gone, err
	}
	if host, err = cs.host(sb.Backend); err != nil {
		return d, host, gone, err
	}
	var c runtime.Container
	if !gone {
		c, err = host.Inspect(ctx, sb.ID)
		if errors.Is(err, runtime.ErrNotFound) {
			gone = true
		} else if err != nil {
			return d, host, gone, err
		}
	}
	return differ{e: cs.core, sb: sb, c: c}, host, gone, nil
}

// diffFrom returns what a sandbox is compared with: the checkpoint that the request names, else
// its head, else its image. One with workspaces is compared with its image and with their
// directories: its head moves with every step. It refuses a comparison with the state of a sandbox that is gone.
func diffFrom(req runtime.DiffRequest, sb store.Sandbox, gone bool) (string, error) {
	removed := fmt.Errorf("%w: it was removed", runtime.ErrState)
	from := cmp.Or(req.From, sb.Head)
	if s, err := spec(sb); req.From == "" && !gone && err == nil && len(s.Workspaces()) > 0 {
		from = runtime.DiffImage
	}
	if from == "" && gone {
		return "", hint(removed, "Compare two of its checkpoints: agentbox diff "+sb.Name+
			"@A @B (see agentbox log "+sb.Name+").")
	}
	if req.To == "" && gone {
		return "", hint(removed, "Name a second checkpoint to compare with; see agentbox log "+sb.Name+".")
	}
	return cmp.Or(from, runtime.DiffImage), nil
}

// errEnough ends a comparison at the limit.
var errEnough = errors.New("enough")

// changes compares the two sides of all areas, up to the limit of changes.
func (d *differ) changes(ctx context.Context, req runtime.DiffRequest, areas []area, out *runtime.Diff) error {
	limit := req.Limit
	if limit <= 0 {
		limit = maxChanges
	}
	for i := range areas {
		if !d.wantsOf(areas, i) {
			continue
		}
		if err := d.changesIn(ctx, req, areas, i, limit, out); err != nil {
			return err
		}
	}
	extra := slices.DeleteFunc(d.managedChanges(), func(c runtime.Change) bool { return !d.wants(inTree(c.Path)) })
	out.Changes = append(out.Changes, extra...)
	if len(extra) > 0 || len(areas) > 1 {
		slices.SortStableFunc(out.Changes, func(a, b runtime.Change) int {
			return overlay.ComparePaths(inTree(a.Path), inTree(b.Path))
		})
		if len(out.Changes) > limit {
			out.Changes, out.Truncated = out.Changes[:limit], true
		}
	}
	return nil
}

// changesIn adds the changes of one area.
func (d *differ) changesIn(
	ctx context.Context, req runtime.DiffRequest, areas []area, i, limit int, out *runtime.Diff,
) error {
	a := areas[i]
	var list []overlay.Change
	err := d.compare(ctx, areas, i, req.Paranoid, func(c overlay.Change) error {
		if a.given(c) {
			return nil
		}
		if len(list) == limit {
			return errEnough
		}
		list = append(list, c)
		return nil
	})
	enough := errors.Is(err, errEnough)
	if err != nil && !enough {
		return err
	}
	out.Truncated = out.Truncated || enough
	if !req.NoRenames {
		if list, err = overlay.FindRenames(ctx, list); err != nil {
			return err
		}
	}
	for _, c := range list {
		c.Path = a.outside(c.Path)
		if c.Kind == overlay.Renamed {
			c.From = a.outside(c.From)
		}
		out.Changes = append(out.Changes, changes.Of(c))
	}
	return nil
}

// compare calls fn for each change of one area that can be seen in the sandbox, and is wanted.
func (d *differ) compare(ctx context.Context, areas []area, i int, paranoid bool, fn func(overlay.Change) error) error {
	a := areas[i]
	return overlay.Diff(ctx, a.sides[0], a.sides[1], overlay.DiffOptions{Lower: a.lower, Paranoid: paranoid},
		func(c overlay.Change) error {
			name := a.outside(c.Path)
			if at, _ := areaOf(areas, name); at != i || i == 0 && d.covered(name) || !d.wants(name) {
				return nil // it is hidden by what is mounted there
			}
			return fn(c)
		})
}

// differ is one Diff under way.
type differ struct {
	e       *core
	sb      store.Sandbox
	c       runtime.Container
	readers []*store.Reader
	managed [2]map[string]store.Managed // nil: not known
	only    []string                    // what it is limited to; empty: nothing
	now     *store.Reader               // of a checkpoint that has just read the directories below; may be nil
	own     bool                        // what was changed below workspaces does not count
	scratch string                      // see scratchDir; may be empty
}

func (d *differ) close() error {
	var errs []error
	for _, r := range d.readers {
		errs = append(errs, r.Close())
	}
	if d.scratch != "" {
		errs = append(errs, os.RemoveAll(d.scratch))
	}
	return errors.Join(errs...)
}

// side resolves a reference to one side of the Diff.
func (d *differ) side(ctx context.Context, i int, ref string, root *area, state *runtime.DiffState) error {
	switch ref {
	case runtime.DiffImage:
		state.Kind = runtime.DiffOfImage
		return nil
	case "":
		state.Kind = runtime.DiffOfNow
		d.managed[i] = map[string]store.Managed{}
		ids, err := ids(d.sb)
		if err != nil {
			return err
		}
		for name, file := range d.c.Managed {
			// A managed file that is missing, or not a regular file any more, is
			// not a change of the sandbox's files.
			if m, err := readManaged(file, ids); err == nil {
				d.managed[i][name] = m
			}
		}
		root.sides[i] = overlay.Side{Dir: d.c.Upper}
		return nil
	}
	row, err := d.checkpoint(ctx, ref)
	if err != nil {
		return err
	}
	r, err := d.e.store.OpenCheckpoint(ctx, row.ID)
	if err != nil {
		return err
	}
	d.readers = append(d.readers, r)
	*state = runtime.DiffState{Kind: runtime.DiffOfCheckpoint, Checkpoint: row.ID, Name: row.Name, Created: row.Created}
	d.managed[i] = r.Manifest().Managed
	side := overlay.Side{Tree: func() (io.ReadCloser, error) { return r.Tree(ctx, 0) }}
	if row.SandboxID == d.sb.ID {
		// The times say nothing about another sandbox's files.
		side.Taken = vouched(row)
	}
	root.sides[i], root.from[i] = side, &worktree.Target{Reader: r}
	return nil
}

// vouched returns from when on the times of files show whether they have changed since the
// checkpoint; zero: they do not. After a power loss of the host, the data of a file can be
// older than its times.
func vouched(row store.Checkpoint) time.Time {
	if row.Created.Before(time.Now().Add(-uptime())) {
		return time.Time{}
	}
	return row.Created
}

// checkpoint finds a checkpoint of the sandbox or, failing that, one of another sandbox over
// the same image.
func (d *differ) checkpoint(ctx context.Context, ref string) (store.Checkpoint, error) {
	row, err := d.e.checkpointIn(ctx, d.sb.ID, ref)
	if errors.Is(err, runtime.ErrNotFound) && store.IsHead(ref) && d.sb.Head != "" {
		row, err = d.e.store.Checkpoint(ctx, d.sb.Head) // a fork begins at one of its origin
		ref = d.sb.Head
	}
	if err == nil {
		err = notOwn(d.sb, ref, row)
	}
	switch {
	case errors.Is(err, runtime.ErrNotFound) && len(fault.Hint(err)) > 0:
		return row, err
	case errors.Is(err, runtime.ErrNotFound):
		return row, hint(err, "List what there is with: agentbox log "+d.sb.Name)
	case err != nil:
		return row, err
	case row.SandboxID != d.sb.ID && (row.ImageDigest != d.sb.ImageDigest || row.ImageDigest == ""):
		return row, fmt.Errorf("%w: checkpoint %s is of sandbox %s, which is not over the same image", runtime.ErrState,
			short(row.ID), row.SandboxName)
	}
	return row, nil
}

// layers returns the directories under a sandbox's upperdir.
func layers(ctx context.Context, sb store.Sandbox, c runtime.Container, host Host) ([]string, error) {
	if len(sb.Lower) > 0 {
		return sb.Lower, nil
	}
	if len(c.Lower) > 0 {
		return c.Lower, nil
	}
	if host.Images != nil {
		img, err := host.Images.ResolveDigest(ctx, sb.ImageDigest)
		if err == nil && len(img.Lower) > 0 {
			return img.Lower, nil
		}
		if err != nil && !errors.Is(err, runtime.ErrNotFound) {
			return nil, err
		}
	}
	return nil, hint(fmt.Errorf("%w: the layers of image %s are not to be had from backend %s",
		runtime.ErrUnsupported, sb.Image, sb.Backend),
		"Of a container that exists they are; restore it first.")
}

// wants reports whether a path lies in what the Diff is limited to.
func (d *differ) wants(name string) bool {
	return len(d.only) == 0 || slices.ContainsFunc(d.only, func(top string) bool {
		_, in := area{at: top}.within(name)
		return in
	})
}

// wantsOf reports whether anything in an area may lie in what the Diff is limited to.
func (d *differ) wantsOf(areas []area, i int) bool {
	return len(d.only) == 0 || slices.ContainsFunc(d.only, func(top string) bool {
		at, _ := areaOf(areas, top)
		_, inside := area{at: top}.within(areas[i].at)
		return at == i || inside
	})
}

// covered reports whether the backend binds a file of its own over a path, so that the
// upperdir's file is not visible in the sandbox.
func (d *differ) covered(name string) bool {
	for _, m := range d.managed {
		if _, ok := m["/"+name]; ok {
			return true
		}
	}
	_, ok := d.c.Managed["/"+name]
	return ok
}

// managedChanges compares the files that the backend binds over the root. It ignores files
// that one of the states lacks, because nothing had been started or because it is the
// image: the backend made those.
func (d *differ) managedChanges() (list []runtime.Change) {
	for _, name := range slices.Sorted(maps.Keys(d.managed[0])) {
		a := d.managed[0][name]
		b, ok := d.managed[1][name]
		if !ok {
			continue
		}
		var what []string
		if !bytes.Equal(a.Data, b.Data) {
			what = append(what, overlay.WhatContent)
		}
		if a.Mode != b.Mode {
			what = append(what, overlay.WhatMode)
		}
		if a.UID != b.UID || a.GID != b.GID {
			what = append(what, overlay.WhatOwner)
		}
		if len(what) > 0 {
			state := func(m store.Managed) *runtime.FileState {
				return &runtime.FileState{
					Type: string(overlay.TypeFile), Mode: changes.Octal(m.Mode), UID: m.UID, GID: m.GID,
					Size: int64(len(m.Data)),
				}
			}
			list = append(list, runtime.Change{
				Path: name, Change: string(overlay.Modified), Type: string(overlay.TypeFile), What: what,
				Old: state(a), New: state(b),
			})
		}
	}
	return list
}

func inTree(p string) string {
	if p == "/" {
		return "."
	}
	return strings.TrimPrefix(p, "/")
}
