package engine

import (
	"context"
	"errors"

	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
)

// part is what a restore changes of a sandbox, or beside it: its files, its processes, the
// attached host files. The order of the steps is run's; a part knows what each step is for it,
// also for a restore that was killed and is resumed.
type part interface {
	check(ctx context.Context) error                          // proves what can be proven; changes nothing
	plan(ctx context.Context, out *runtime.RestorePlan) error // adds what would happen; changes nothing
	prepare(ctx context.Context) error                        // lays out what is needed, beside the present state
	commit(ctx context.Context) error                         // replaces, once the old processes have ended
	arrange(ctx context.Context) error                        // does what the start needs; the files are proven
	settle(ctx context.Context) error                         // ends the work, once the sandbox is restored
	revert(ctx context.Context) error                         // takes back what was done so far
	close() error                                             // gives back what is held open
}

// noWork is a part for which no step is anything.
type noWork struct{}

func (noWork) check(context.Context) error                      { return nil }
func (noWork) plan(context.Context, *runtime.RestorePlan) error { return nil }
func (noWork) prepare(context.Context) error                    { return nil }
func (noWork) commit(context.Context) error                     { return nil }
func (noWork) arrange(context.Context) error                    { return nil }
func (noWork) settle(context.Context) error                     { return nil }
func (noWork) revert(context.Context) error                     { return nil }
func (noWork) close() error                                     { return nil }

// newRestoration returns a restore with its parts, in the order of their steps.
func (rs *restores) newRestoration(sb *locked, data restoring) *restoration {
	r := &restoration{e: rs.engine, sb: sb, data: data}
	r.processes = &processesPart{restoration: r}
	r.secrets = &secretsPart{restoration: r}
	r.managed = &managedPart{restoration: r}
	r.files = &filesPart{restoration: r}
	r.attached = &attachedPart{restoration: r}
	r.effects = &effectsPart{restoration: r}
	r.mounts = &mountsPart{restoration: r}
	r.parts = []part{r.processes, r.secrets, r.managed, r.files, r.mounts, r.attached, r.effects}
	return r
}

// forks makes it the restore of a checkpoint into a new sandbox, which has no host files, no
// effects, and managed files of its own.
func (r *restoration) forks(f *forkPart) {
	f.restoration, r.fork = r, f
	r.parts = []part{r.processes, r.secrets, r.files, r.mounts, f}
}

// reverts takes back what the parts have done, the last part first.
func (r *restoration) reverts() *undo.Stack {
	undo := new(undo.Stack)
	for _, p := range r.parts {
		undo.Add(p.revert)
	}
	return undo
}

// step is one step of a restore.
type step func(context.Context) error

// each is a step that every part takes, in order.
func (r *restoration) each(do func(part, context.Context) error) step {
	return func(ctx context.Context) error {
		for _, p := range r.parts {
			if err := do(p, ctx); err != nil {
				return err
			}
		}
		return nil
	}
}

// take takes steps up to the first error.
func take(ctx context.Context, steps ...step) error {
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// closed closes all parts.
func (r *restoration) closed() error {
	var errs []error
	for _, p := range r.parts {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}
