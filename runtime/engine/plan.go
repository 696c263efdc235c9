package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/criu"
	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
	"github.com/agentbox/agentbox/runtime/internal/changes"
)

// PlanRestore returns what Restore would change if it were called now. It does not freeze a
// running sandbox.
func (v checkpointVerbs) PlanRestore(
	ctx context.Context, ref string, opts runtime.RestoreOptions,
) (runtime.RestorePlan, error) {
	return verb(ctx, v.e, errorsNamed(reads(onSandbox("restore plan", ref))),
		func(ctx context.Context) (runtime.RestorePlan, error) {
			return v.e.restores.planRestore(ctx, ref, opts)
		})
}

func (rs *restores) planRestore(
	ctx context.Context, ref string, opts runtime.RestoreOptions,
) (out runtime.RestorePlan, err error) {
	defer func() { err = fail("restore", ref, err) }()
	return rs.planTo(ctx, ref, opts, nil)
}

// planTo is planRestore for an aim; nil: the options name the checkpoint.
func (rs *restores) planTo(
	ctx context.Context, ref string, opts runtime.RestoreOptions, to *aim,
) (out runtime.RestorePlan, err error) {
	if err := checkRestore(opts); err != nil {
		return out, err
	}
	opts.Pull.Policy = image.PullNever
	opts.FilesOnly = opts.FilesOnly || opts.Strategy == runtime.StrategyFiles
	r, err := rs.target(ctx, ref, nil, opts, to)
	if err != nil {
		return out, err
	}
	defer r.sb.lock.Unlock()
	r.strategy = opts.Strategy
	if err := r.possible(); err != nil {
		return out, err
	}
	out = runtime.RestorePlan{
		Sandbox: r.sb.ID, SandboxName: r.sb.Name, Checkpoint: checkpointView(r.row), Recreates: r.data.Recreated,
		Changes: []runtime.Change{}, Ends: []runtime.PlanProcess{}, Begins: []runtime.PlanProcess{},
		Effects: []string{}, Compensates: []runtime.Effect{},
	}
	if r.reader, err = rs.store.OpenCheckpoint(ctx, r.row.ID); err != nil {
		return out, err
	}
	defer func() { err = errors.Join(err, r.reader.Close()) }()
	for _, p := range []part{r.processes, r.effects, r.attached} { // in the order of the report
		if err := p.plan(ctx, &out); err != nil {
			return out, err
		}
	}
	if opts.Strategy == runtime.StrategyRecreate && !r.data.Recreated {
		asked, err := specOf(r.row.SandboxID, r.row.Spec)
		if err == nil {
			r.caveats, err = claim(&asked, r.row, r.grants, r.full())
		}
		if err != nil {
			return out, err
		}
	}
	if err := r.files.plan(ctx, &out); err != nil || r.data.Recreated {
		return out, err
	}
	addEffects(&out, r)
	return out, nil
}

// plan adds the processes that end and begin, and how their restore is tried.
func (r *processesPart) plan(ctx context.Context, out *runtime.RestorePlan) error {
	if r.full() {
		for _, p := range r.reader.Manifest().Processes.List {
			out.Begins = append(out.Begins, runtime.PlanProcess{Pid: p.Pid, Command: p.Command})
		}
		if err := errors.Join(r.checkTools(), r.planOpened(ctx)); err != nil {
			if r.strategy != runtime.StrategyAuto {
				return err
			}
			out.Effects = append(out.Effects, fmt.Sprintf("With its processes it cannot be restored now: %v.", err))
		}
	}
	if r.strategy != "" {
		ways, err := waysOf(runtime.RestoreOptions{Strategy: r.strategy, FilesOnly: r.data.FilesOnly}, r.row.Kind)
		if err != nil {
			return err
		}
		var names []string
		for _, w := range ways {
			names = append(names, w.strategy)
		}
		out.Effects = append(out.Effects, fmt.Sprintf("It is tried in this order: %s.",
			strings.Join(slices.Compact(names), ", ")))
	}
	if r.c.Pid == 0 {
		return nil
	}
	list, err := criu.Alive(r.c.Pid)
	for _, p := range list {
		out.Ends = append(out.Ends, runtime.PlanProcess{Pid: p.Pid, Command: p.Cmdline})
	}
	return err
}

// planOpened checks whether the files that processes of the checkpoint have open in bind
// mounts still exist. Restore checks that with all of the images staged.
func (r *processesPart) planOpened(ctx context.Context) (err error) {
	dir, err := r.e.store.Scratch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := r.reader.ExtractImages(ctx, filepath.Join(dir, "images"), criu.OpenFileImages...); err != nil {
		return err
	}
	return r.mounts.checkOpened(filepath.Join(dir, "images"))
}

// plan adds the paths that change.
func (r *filesPart) plan(ctx context.Context, out *runtime.RestorePlan) (err error) {
	if r.data.Recreated {
		return r.planMade(ctx, out)
	}
	if err := r.check(ctx); err != nil {
		return err
	}
	dir, err := r.e.store.Scratch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if r.moved, err = r.findMoved(ctx, r.reader); err != nil {
		return err
	}
	for i := range r.data.Trees {
		c, err := r.data.Trees[i].Plan(ctx, r.target(), worktree.PlanOptions{Scratch: dir})
		if err != nil {
			return err
		}
		out.Bytes += c.Bytes()
		if n := c.Len(); i > 0 && n > 0 {
			out.Effects = append(out.Effects, fmt.Sprintf("%d paths of volume %s change.", n,
				r.reader.Manifest().Volumes[r.data.Trees[i].Number-1].Name))
		}
		if err := c.Close(); err != nil {
			return err
		}
	}

	// The changes that a user of the sandbox sees are not those that are written to the
	// upperdir.
	lower, err := layers(ctx, r.sb.Sandbox, r.c, r.sb.host)
	if err != nil {
		return err
	}
	then := overlay.Side{Tree: func() (io.ReadCloser, error) { return r.reader.Tree(ctx, 0) }, Taken: vouched(r.row)}
	return overlay.Diff(ctx, overlay.Side{Dir: r.c.Upper}, then, overlay.DiffOptions{Lower: lower},
		func(c overlay.Change) error {
			countChanges(out, c)
			return nil
		})
}

// planMade is plan for a sandbox that is made again.
func (r *filesPart) planMade(ctx context.Context, out *runtime.RestorePlan) error {
	out.Effects = append(out.Effects, fmt.Sprintf("The sandbox is made again, with id %s.", short(r.sb.ID)))
	if r.row.Foreign {
		out.Effects = append(out.Effects, fmt.Sprintf("The checkpoint comes from elsewhere. Its command: %s.",
			strings.Join(r.spec.Args, " ")))
	}
	for _, text := range r.caveats {
		out.Effects = append(out.Effects, sentence(text))
	}
	for entry, err := range worktree.Entries(ctx, r.reader, 0) {
		if err != nil {
			return err
		}
		if entry.Path != "." {
			countChanges(out, overlay.Change{Path: entry.Path, Kind: overlay.Added, New: &entry})
			out.Bytes += entry.Size
		}
	}
	return nil
}

// sentence makes a sentence of a warning.
func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }

// countChanges adds a change to a plan.
func countChanges(p *runtime.RestorePlan, c overlay.Change) {
	switch c.Kind {
	case overlay.Added:
		p.Added++
	case overlay.Deleted:
		p.Deleted++
	default:
		p.Modified++
	}
	p.Changes = append(p.Changes, changes.Of(c))
}

// addEffects adds the other effects of a restore to a plan.
func addEffects(p *runtime.RestorePlan, r *restoration) {
	say := func(format string, a ...any) { p.Effects = append(p.Effects, fmt.Sprintf(format, a...)) }
	was := runtime.Status(r.reader.Manifest().Status)
	switch {
	case r.full() && was == runtime.Paused:
		say("The processes of the checkpoint come back paused.")
	case r.full():
	case was == runtime.Running || was == runtime.Paused || isBase(r.row) && r.c.Status == runtime.Running:
		say("The command is started afresh: the checkpoint has, or gives, no processes.")
	case r.c.Pid != 0:
		say("The sandbox will be stopped, as it was at the checkpoint.")
	}
	if r.data.NoUndo {
		say("The present state is lost: --no-undo.")
	} else {
		say("The present state becomes an undo checkpoint; bring it back with: agentbox restore --undo %s", r.sb.Name)
	}
	for _, w := range slices.Concat(r.row.Warnings, r.managed.unplaced()) {
		say("Not restored: %s.", w)
	}
	for _, text := range r.caveats {
		say("%s", sentence(text))
	}
}

// plan adds the effects that are compensated.
func (r *effectsPart) plan(ctx context.Context, p *runtime.RestorePlan) error {
	due, gone, err := r.due(ctx)
	if gone > 0 {
		p.Effects = append(p.Effects,
			fmt.Sprintf("Compensated since this checkpoint, and not applied again: %s.", effects(gone)))
	}
	switch {
	case err != nil || len(due) == 0:
	case r.off:
		p.Effects = append(p.Effects, fmt.Sprintf("Not compensated, by --no-effects: %s.", effects(len(due))))
	default:
		p.Compensates = due
	}
	return err
}
