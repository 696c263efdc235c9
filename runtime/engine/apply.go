package engine

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/project"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/store"
)

// Apply copies a sandbox's changes into the directory that it is layered over, or those of its
// workspaces into the directories that these lie over.
func (v hostVerbs) Apply(ctx context.Context, ref string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	sandbox, named := splitState(ref)
	if !named {
		sandbox.sandbox = ref
	}
	return verb(ctx, v.e, onState("apply", ref), func(ctx context.Context) (runtime.Applied, error) {
		if named && sandbox.state == "" {
			return runtime.Applied{}, fmt.Errorf("%w: it names no checkpoint after the @", runtime.ErrInvalid)
		}
		return v.e.sandboxes.apply(ctx, v.e.restores, sandbox, opts)
	})
}

// apply is Apply; rs makes the forks of validators.
func (bx *sandboxes) apply(
	ctx context.Context, rs *restores, ref recordedState, opts runtime.ApplyOptions,
) (out runtime.Applied, err error) {
	if err := checkApply(ref, opts); err != nil {
		return out, err
	}
	sb, err := bx.acquire(ctx, ref.sandbox, "apply", lockWait)
	if err != nil {
		return out, err
	}
	var taken store.Checkpoint
	defer func() {
		if taken.ID != "" {
			bx.upkeep.makeRoom(ctx, sb.Sandbox, checkpointView(taken)) // after the unlock
		}
	}()
	defer sb.lock.Unlock()
	c, err := sb.host.Inspect(ctx, sb.ID)
	if err != nil {
		return out, err
	}
	run, err := bx.applier(ref, sb, c, opts)
	if err != nil {
		return out, err
	}
	if w, ok := run.(*workspaces); ok && !opts.Undo {
		w.restores = rs
		if taken, err = w.open(ctx, ref); err != nil {
			return out, err
		}
		defer func() { err = errors.Join(err, w.close()) }()
	}
	do := func() (err error) {
		out, err = run.Apply(ctx, sb.ID, opts)
		out.Sandbox, out.SandboxName = sb.ID, sb.Name
		if w, ok := run.(*workspaces); ok && err != nil && w.home().Unfinished() {
			err = fmt.Errorf("%w (%w)", err, errUnfinished)
		}
		return err
	}
	if opts.DryRun {
		return out, do()
	}
	if c.Busy != "" {
		return out, hint(fmt.Errorf("%w: %s", runtime.ErrState, c.Busy), c.Remedy)
	}
	err = bx.intent(ctx, store.Intent{Op: opApply, Sandbox: sb.ID}, nil, func(int64) error {
		if err := failpoint.Hit("apply.before-backend"); err != nil {
			return err
		}
		if err := do(); err != nil {
			return err
		}
		return failpoint.Hit("apply.after-backend")
	})
	if err == nil {
		bx.log.Info("changes applied", "sandbox", sb.ID, "original", out.Original, "changes",
			len(out.Changes), "undone", out.Undone)
	}
	return out, err
}

// checkApply refuses what does not depend on the sandbox.
func checkApply(ref recordedState, opts runtime.ApplyOptions) error {
	ways := 0
	for _, is := range []bool{opts.Markers, opts.Ours, opts.Theirs || opts.Force} {
		if is {
			ways++
		}
	}
	switch {
	case opts.DryRun && opts.Undo:
		return fmt.Errorf("%w: --dry-run cannot be combined with --undo", runtime.ErrInvalid)
	case opts.Undo && (ref.state != "" || opts.Workspace != "" || len(opts.Paths) > 0):
		return hint(fmt.Errorf("%w: an undo takes back all that the last apply did", runtime.ErrInvalid),
			"Name the sandbox alone: agentbox apply --undo "+ref.sandbox)
	case ways > 1:
		return fmt.Errorf("%w: --markers, --ours and --theirs exclude each other", runtime.ErrInvalid)
	case opts.Picks != nil && (opts.Undo || ref.state == ""):
		return fmt.Errorf("%w: picks need the checkpoint that they were made from", runtime.ErrInvalid)
	case opts.Patch && !opts.DryRun:
		return fmt.Errorf("%w: patches need a dry run", runtime.ErrInvalid)
	}
	for _, p := range append(slices.Clone(opts.Paths), opts.Allow...) {
		if !path.IsAbs(p) && len(opts.Paths) > 0 {
			return fmt.Errorf("%w: the path %q is not absolute", runtime.ErrInvalid, p)
		}
	}
	return nil
}

// applier returns what applies the changes of a sandbox.
func (bx *sandboxes) applier(
	ref recordedState, sb *locked, c runtime.Container, opts runtime.ApplyOptions,
) (runtime.Original, error) {
	switch {
	case c.Applies != "":
		w := &workspaces{core: bx.core, checkpoints: bx.checkpoints, sb: sb, c: c}
		return w, w.choose(opts)
	case sb.host.Original == nil:
		return nil, hint(fmt.Errorf("%w: sandbox %s has no workspace to apply",
			runtime.ErrUnsupported, sb.Name),
			"Create one over a directory: --workspace DIR. Volumes can lie over one, too: "+
				"agentbox volume create NAME --from DIR")
	case ref.state != "" || opts.Workspace != "" || len(opts.Paths) > 0 || opts.Markers || opts.Ours || opts.Patch ||
		opts.Picks != nil:
		return nil, hint(fmt.Errorf("%w: a volume is applied as it is, and as a whole", runtime.ErrUnsupported),
			"Restore it to the checkpoint first; --force overwrites what was changed in the directory.")
	}
	if opts.Undo {
		return sb.host.Original, nil
	}
	return sb.host.Original, volumeRules(sb.Sandbox, c)
}

// volumeRules refuses an apply of a volume that has to be judged first: for that it takes a fork.
func volumeRules(sb store.Sandbox, c runtime.Container) error {
	s, err := spec(sb)
	if err != nil {
		return err
	}
	p, err := recorded(s)
	if err != nil {
		return err
	}
	whose, asks := "its policy", p != nil && p.Rules.Apply.Asks()
	for _, dir := range c.Lower {
		file, err := readProject(dir)
		if err != nil && !errors.Is(err, runtime.ErrNotFound) { // that the apply has its own words for
			return rulesUnknown(dir, err)
		}
		if file.Apply.Asks() {
			whose, asks = filepath.Join(dir, project.Name), true
		}
	}
	if !asks {
		return nil
	}
	return hint(fmt.Errorf("%w: %s has rules of an apply (validators, approval, canaries), which a volume cannot be "+
		"judged by", runtime.ErrUnsupported, whose), "Use a sandbox with the directory as a workspace: --workspace DIR.")
}

// finishApply finishes an Apply that was killed or rolls it back.
func finishApply(ctx context.Context, in store.Intent, host Host, w *workspaces) (did string, err error) {
	if host.Original != nil {
		did, err = host.Original.Settle(ctx, in.Sandbox)
	} else {
		did, err = w.settle(ctx, host, in.Sandbox)
	}
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil // the sandbox was removed since
	}
	return did, err
}

// workspaces applies the changes of a sandbox's workspaces. What comes is what a checkpoint has, so
// that it is of one instant, and the sandbox may go on. Its own files are left as they are: over
// a directory that has the same, they show the same.
type workspaces struct {
	*core
	checkpoints *checkpoints
	restores    *restores

	sb     *locked
	c      runtime.Container
	rules  applyRules
	chosen []runtime.Volume
	row    store.Checkpoint
	reader *store.Reader
	bases  *lineage
}

// triggerApply is the trigger of the checkpoint that an apply takes.
const triggerApply = "apply"

// appliedNote is what is kept with an apply.
type appliedNote struct {
	Checkpoint string `json:"checkpoint"` // what was applied
	// Paths are, for each workspace by its path, those that were applied; ".": all.
	Paths map[string][]string `json:"paths,omitempty"`
	// Picks are, for each workspace, what was picked; then there are no Paths.
	Picks map[string]apply.Taken `json:"picks,omitempty"`
}

func (w *workspaces) home() apply.Home {
	return apply.OfWorkspaces(w.c.Applies, w.sb.Name, w.c.Volumes, w.log)
}

// choose finds the workspaces that an apply is about.
func (w *workspaces) choose(opts runtime.ApplyOptions) error {
	var all []string
	for _, v := range w.c.Volumes {
		if !v.Workspace() {
			continue
		}
		all = append(all, v.Target)
		if opts.Workspace != "" && path.Clean(opts.Workspace) != v.Target {
			continue
		}
		w.chosen = append(w.chosen, v)
	}
	if len(w.chosen) == 0 {
		return hint(fmt.Errorf("%w: sandbox %s has no workspace %q", runtime.ErrNotFound, w.sb.Name, opts.Workspace),
			"It has "+strings.Join(all, ", ")+".")
	}
	if len(opts.Paths) == 0 {
		return nil
	}
	for _, p := range opts.Paths {
		p = path.Clean(p)
		above := func(v runtime.Volume) bool { _, in := apply.Inside(p, v.Target); return in }
		if _, ok := w.innermost(p); !ok && !slices.ContainsFunc(w.chosen, above) {
			return hint(fmt.Errorf("%w: the path %q is in no workspace that is applied", runtime.ErrInvalid, p),
				"Paths are those in the sandbox; its workspaces are "+strings.Join(all, ", ")+".")
		}
	}
	w.chosen = slices.DeleteFunc(w.chosen, func(v runtime.Volume) bool { return len(w.only(v, opts.Paths)) == 0 })
	return nil
}

// innermost returns the chosen workspace that has a path of the sandbox.
func (w *workspaces) innermost(p string) (v runtime.Volume, ok bool) {
	for _, one := range w.chosen {
		if _, in := apply.Inside(one.Target, p); in && len(one.Target) > len(v.Target) {
			v, ok = one, true
		}
	}
	return v, ok
}

// only returns which paths in a workspace are applied.
func (w *workspaces) only(v runtime.Volume, paths []string) []string {
	if len(paths) == 0 {
		return []string{"."}
	}
	var list []string
	for _, p := range paths {
		p = path.Clean(p)
		if in, ok := w.innermost(p); ok && in.Target == v.Target {
			rel, _ := apply.Inside(v.Target, p)
			list = append(list, rel)
		} else if _, in := apply.Inside(p, v.Target); in {
			return []string{"."} // it is a directory above
		}
	}
	return list
}

// open opens the checkpoint that is applied. If none is named it takes one.
func (w *workspaces) open(ctx context.Context, ref recordedState) (taken store.Checkpoint, err error) {
	for _, v := range w.chosen { // before a checkpoint is taken for nothing
		dir, err := apply.OpenRoot(v.Lower)
		if err != nil {
			return taken, fmt.Errorf("workspace %s: %w", v.Target, err)
		}
		_ = dir.Close() // only ever a handle
	}
	if ref.state == "" {
		w.row, taken, err = w.take(ctx)
	} else if w.row, err = w.checkpointIn(ctx, w.sb.ID, ref.state); err == nil && w.row.SandboxID != w.sb.ID {
		err = hint(fmt.Errorf("%w: checkpoint %s is of sandbox %s", runtime.ErrState, short(w.row.ID),
			w.row.SandboxName), "Apply what "+w.sb.Name+" has itself: agentbox checkpoint ls "+w.sb.Name)
	}
	if err != nil {
		return taken, err
	}
	if w.reader, err = w.store.OpenCheckpoint(ctx, w.row.ID); err != nil {
		return taken, err
	}
	notes, err := w.home().Notes()
	if err != nil {
		return taken, errors.Join(err, w.close())
	}
	w.bases, err = newLineage(w.core, w.row, notes)
	return taken, err
}

// take takes a checkpoint of the files, unless the head has just these.
func (w *workspaces) take(ctx context.Context) (row, taken store.Checkpoint, err error) {
	opts := runtime.CheckpointOptions{FilesOnly: true, Trigger: triggerApply, TCP: runtime.TCPEstablished}
	head, err := w.checkpoints.unchanged(ctx, w.sb, opts)
	if err != nil {
		return row, taken, err
	}
	if head != nil {
		return *head, taken, nil
	}
	taken, err = w.checkpoints.checkpointOf(ctx, w.sb, opts, "")
	return taken, taken, err
}

func (w *workspaces) close() error {
	err := w.bases.close()
	if w.reader != nil {
		err = errors.Join(err, w.reader.Close())
	}
	return err
}

// Apply implements runtime.Original.
func (w *workspaces) Apply(ctx context.Context, _ string, opts runtime.ApplyOptions) (runtime.Applied, error) {
	out := apply.Nothing(opts)
	home := w.home()
	add := func(path, original string) {
		if out.Original == "" {
			out.Original = original
		}
		out.Workspaces = append(out.Workspaces, runtime.AppliedWorkspace{Path: path, Original: original})
	}
	if opts.Undo {
		places, err := apply.Undo(ctx, home, opts.Force)
		for _, p := range places {
			add(p.At, p.From)
		}
		return out, err
	}
	out.Checkpoint = w.row.ID
	s, err := spec(w.sb.Sandbox)
	if err != nil {
		return out, err
	}
	picks, err := w.picks(opts)
	if err != nil {
		return out, err
	}
	note := appliedNote{Checkpoint: w.row.ID, Paths: map[string][]string{}}
	list := make([]apply.Change, 0, len(w.chosen)) // the note is of its elements
	m := w.reader.Manifest()
	for _, v := range w.chosen {
		n := m.Workspace(v.Target)
		if n == 0 || m.Below(n) == 0 {
			return out, fmt.Errorf("%w: checkpoint %s has no workspace %s", runtime.ErrState,
				short(w.row.ID), v.Target)
		}
		add(v.Target, v.Lower)
		at := slices.IndexFunc(home.Places, func(p apply.Place) bool { return p.At == v.Target })
		change := apply.Change{
			Place:  home.Places[at],
			Source: apply.Source{Entries: worktree.Entries(ctx, w.reader, n), Data: w.reader.Source()},
			Base:   w.bases.of(v.Target), Only: w.only(v, opts.Paths), Picks: picks[v.Target],
		}
		for _, mount := range s.Mounts {
			if rel, in := apply.Inside(v.Target, path.Clean(mount.Target)); in && rel != "." {
				change.Hidden = append(change.Hidden, rel)
			}
		}
		note.Paths[v.Target] = change.Only
		list = append(list, change)
	}
	if home.Note = note; opts.Picks != nil {
		home.Note = pickedNote{w.row.ID, list}
	}
	if w.rules, err = w.readRules(s); err != nil {
		return out, err
	}
	home.Review = func(ctx context.Context, staged *apply.Staged) error { return w.review(ctx, staged, opts, &out) }
	home.Judged = len(w.rules.validators) > 0
	home.Begin = func() error { return w.begin(ctx, out) }
	if opts.DryRun {
		w.rules.planned(&out)
	}
	home.Canaries = w.parts(&out)
	return out, apply.Run(ctx, home, list, opts, &out)
}

// Settle implements runtime.Original.
func (w *workspaces) Settle(context.Context, string) (string, error) { return apply.Settle(w.home()) }

// settle is Settle for recovery.
func (w *workspaces) settle(ctx context.Context, host Host, id string) (string, error) {
	sb, err := w.store.Sandbox(ctx, id)
	if err != nil {
		return "", err
	}
	c, err := host.Inspect(ctx, id)
	if err != nil || c.Applies == "" {
		return "", err
	}
	w.sb, w.c = &locked{Sandbox: sb}, c
	return w.Settle(ctx, id)
}
