package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/apply"
	"github.com/agentbox/agentbox/runtime/internal/record"
)

// home keeps the applies of a volume.
func (v *Volumes) home(rec stored) apply.Home {
	name := "volume " + rec.Name
	return apply.Home{Dir: v.path(rec.Name), Name: name, Log: v.log, Places: []apply.Place{{
		From: rec.From, Name: name, At: "/", Upper: v.path(rec.Name, "upper"),
	}}}
}

// Apply implements runtime.Original.
func (b Backend) Apply(ctx context.Context, id string, opts runtime.ApplyOptions) (out runtime.Applied, err error) {
	rec, unlock, err := b.locked(ctx, id)
	if err != nil {
		return out, err
	}
	defer unlock()
	out = apply.Nothing(opts)
	out.Original = rec.From
	if rec.From == "" {
		return out, fmt.Errorf("volume %s: %w: it lies over no directory that could take its changes",
			rec.Name, fault.ErrUnsupported)
	}
	if !opts.DryRun {
		if err := b.idle(ctx, rec); err != nil {
			return out, err
		}
	}
	home := b.home(rec)
	if opts.Undo {
		if err := b.unchanged(ctx, rec); err != nil {
			return out, err
		}
		_, err := apply.Undo(ctx, home, opts.Force)
		return out, err
	}
	upper, err := apply.OpenRoot(home.Places[0].Upper)
	if err != nil {
		return out, err
	}
	defer upper.Close()
	all := apply.Change{Place: home.Places[0], Source: apply.Upperdir(ctx, upper)}
	return out, apply.Run(ctx, home, []apply.Change{all}, opts, &out)
}

// unchanged proves that an undo takes away no change of the volume's.
func (b Backend) unchanged(ctx context.Context, rec stored) error {
	n := 0
	err := overlay.Walk(ctx, b.path(rec.Name, "upper"), overlay.WalkOptions{}, func(overlay.Entry) error {
		n++
		return nil
	})
	if err == nil && n > 1 && !b.home(rec).Last().IsZero() {
		err = &fault.Error{Err: fmt.Errorf("volume %s: %w: it was changed since it was applied",
			rec.Name, fault.ErrState),
			Hint: "Checkpoint it, then restore or apply it; an undo needs a volume without changes."}
	}
	return err
}

// Settle implements runtime.Original.
func (b Backend) Settle(ctx context.Context, id string) (string, error) {
	rec, err := b.find(id)
	if err != nil {
		return "", err
	}
	unlock, err := record.Lock(ctx, b.path(rec.Name), "volume "+rec.Name)
	if err != nil {
		return "", err
	}
	defer unlock()
	return b.settle(rec.Name)
}

// settle brings an apply that was killed to its end. The lock is held.
func (v *Volumes) settle(name string) (did string, err error) {
	if _, err := os.Lstat(v.path(name, apply.DirApply)); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	rec, err := v.load(name)
	if err != nil {
		return "", err
	}
	return apply.Settle(v.home(rec))
}
