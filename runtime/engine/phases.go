package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/worktree"
)

// The phases of a restore. Before phaseSwap, recovery rolls the restore back; from then
// on the old processes may be gone, and recovery finishes it. From phaseProven on the files
// are proven to be the checkpoint's, so a running sandbox is a restored one. In phaseHosts
// the sandbox is restored and is not touched any more; only host files are put back.
const (
	phasePrepare = "prepare"
	phaseSwap    = "swap"
	phaseProven  = "proven"
	phaseHosts   = "hosts"
)

// restoring is the journal's data of a restore.
type restoring struct {
	Phase     string          `json:"phase"`
	Trees     []worktree.Tree `json:"trees"` // the trees that it changes, the upperdir first
	Attempt   int             `json:"attempt"`
	FilesOnly bool            `json:"files_only"`
	Recreated bool            `json:"recreated"` // the sandbox had been removed
	Fork      bool            `json:"fork"`      // the sandbox is a new one, of another's checkpoint
	Salvage   bool            `json:"salvage"`
	Was       runtime.Status  `json:"was"`  // before the verb
	Undo      string          `json:"undo"` // the undo checkpoint
	NoUndo    bool            `json:"no_undo"`

	// Redo is where redo leads once it is restored; redoPresent stands for the undo checkpoint.
	Redo []string `json:"redo,omitempty"`

	// Begun is the boot of the host in which the restore began. A record from elsewhere cannot
	// know it: a restore of another boot starts nothing and writes no host files.
	Begun string `json:"begun,omitempty"`

	HostFiles []string `json:"host_files,omitempty"` // attached files that are put back
	HostUndo  string   `json:"host_undo,omitempty"`  // the checkpoint that has their previous contents, if not Undo

	// From phaseProven on: when the sandbox was last started before the restore's own
	// start, and the boot in which the files were proven.
	Started time.Time `json:"started,omitzero"`
	Boot    string    `json:"boot,omitempty"`
}

// thisBoot reports whether the restore began in this boot of the host.
func (d restoring) thisBoot() bool { return d.Begun != "" && d.Begun == bootID() }

// untouched reports whether a restore that displaces files had not begun to before a power
// cut.
func (d restoring) untouched() (bool, error) {
	if d.Phase != phaseSwap || len(d.Trees) == 0 {
		return false, nil
	}
	return d.Trees[0].Untouched()
}

// own returns the trees of a restore in the journal that belong to the container, and the
// directory of one that does not. Recovery must not touch the latter: it writes to trees and
// removes files beside them.
func (d restoring) own(c runtime.Container) (own []worktree.Tree, foreign string) {
	for _, t := range d.Trees {
		is := t.Number == 0 && c.Upper != "" && t.Dir == c.Upper ||
			t.Number > 0 && t.Number <= len(d.Trees) && slices.ContainsFunc(c.Volumes, func(v runtime.Volume) bool {
				return v.Path == t.Dir
			})
		if is {
			own = append(own, t)
		} else {
			foreign = t.Dir
		}
	}
	return own, foreign
}

// discard deletes what was staged and, with all, the displaced files, which are the way back.
func (d *restoring) discard(all bool) error {
	var errs []error
	for i := range d.Trees {
		errs = append(errs, d.Trees[i].Clear(all))
	}
	return errors.Join(errs...)
}

// note writes the state of the restore to the journal; lazy is as in store.Intent.
func (r *restoration) note(ctx context.Context, lazy bool) error {
	return r.e.advance(ctx, r.seq, r.data, lazy)
}

// record records what the restore is to change, before it lays out anything.
func (r *restoration) record(ctx context.Context) error {
	return errors.Join(r.note(ctx, true), failpoint.Hit("restore.before-layout"))
}

// begin records that the files may be changed from here on.
func (r *restoration) begin(ctx context.Context) error {
	if r.data.Phase = phaseSwap; r.resumed {
		return r.note(ctx, true)
	}
	return r.files.changes[0].Begin(func(lazy bool) error { return r.note(ctx, lazy) })
}

// proven records that the files are the checkpoint's: a sandbox that runs from here on is a
// restored one.
func (r *restoration) proven(ctx context.Context) error {
	r.data.Phase, r.data.Started, r.data.Boot = phaseProven, r.processes.before, bootID()
	return errors.Join(r.note(ctx, true), failpoint.Hit("restore.after-proof"))
}

// start starts the sandbox, and makes the files durable beside that.
func (r *restoration) start(ctx context.Context) error {
	durable := guard.Start(func() error { return r.files.sync(ctx) })
	err := r.processes.start(ctx)
	r.sb.steps.Begin(runtime.PhaseSyncing, 0)
	r.files.learn() // during the sync: the file caches need not be durable
	return errors.Join(err, <-durable)
}

// hasRun reports whether a killed restore was proven and its sandbox was started after that, by
// the restore or by a later verb, even if it has ended since: its changes to the files are its
// own. A start before a reboot does not count: what was not on the disk then is lost.
func (r *restoration) hasRun() bool {
	if !r.resumed || r.data.Phase != phaseProven {
		return false
	}
	if r.c.Status == runtime.Running || r.c.Status == runtime.Paused {
		return true
	}
	return r.data.Boot != "" && r.data.Boot == bootID() && !r.c.Started.IsZero() && !r.c.Started.Equal(r.data.Started)
}

// head records that the sandbox is at the checkpoint.
func (r *restoration) head(ctx context.Context) error {
	if r.data.Phase == phaseHosts {
		return nil
	}
	r.data.Redo = r.redo()
	if err := r.e.store.SetHead(ctx, r.sb.ID, r.row.ID, r.data.Attempt, r.data.Redo...); err != nil {
		return err
	}
	if r.sb.Held != "" {
		if err := r.e.store.Hold(ctx, r.sb.ID, ""); err != nil {
			return err
		}
	}
	return failpoint.Hit("restore.after-head")
}

// failed takes a failed restore back, and says what has become of the sandbox.
func (r *restoration) failed(ctx context.Context, undo *undo.Stack, err error) error {
	if err == nil {
		return nil
	}
	if r.processes.started {
		// The files must stay as they are while processes may run on them.
		if e2 := r.processes.halt(ctx); e2 != nil {
			return fmt.Errorf("%w; and it cannot be stopped: %w (%w)", err, e2, errUnfinished)
		}
	}
	undo.Run(ctx, &err)
	if !r.processes.ending || r.resumed || errors.Is(err, errUnfinished) || r.data.Recreated || r.data.Fork {
		return err
	}

	// --rm must not remove what a failed restore has put back.
	ctx = context.WithoutCancel(ctx)
	err = errors.Join(err, r.e.store.Keep(ctx, r.sb.ID, true))
	now, e2 := r.sb.host.Inspect(ctx, r.sb.ID)
	switch {
	case errors.Is(e2, runtime.ErrNotFound):
		err = fmt.Errorf("%w: it was removed while it was being restored", runtime.ErrState)
	case e2 != nil:
	case now.Status == runtime.Running || now.Status == runtime.Paused:
		err = errors.Join(err, r.e.restarts.begun(r.spec)) // its restart policy stays in force
		err = hint(err, "The sandbox could not be stopped and goes on, with the files it had before.")
	case r.files.present != nil && r.files.present.row.Kind == runtime.KindFull && !r.data.NoUndo:
		err = hint(err, fmt.Sprintf("The sandbox is stopped, with the files it had before; bring its processes back with: agentbox restore --undo %[1]s, or start it afresh with: agentbox start %[1]s", r.sb.Name))
	case r.c.Status == runtime.Running:
		err = hint(err, "The sandbox is stopped, with the files it had before; start it afresh with: agentbox start "+
			r.sb.Name)
	}
	return err
}
