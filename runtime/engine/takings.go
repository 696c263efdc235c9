package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// takings takes the checkpoints of one sandbox at its interval, beside its supervision: a
// checkpoint may take longer than limits can wait.
type takings struct {
	e     *Engine
	id    string
	under atomic.Bool
	stop  context.CancelFunc
	all   guard.WaitGroup
}

// begin begins to take checkpoints of a sandbox that runs, if it has an interval and they are
// not taken already.
func (t *takings) begin(ctx context.Context, s runtime.Spec) error {
	on, err := every(s)
	if err != nil || on.Interval == 0 || t.under.Load() {
		return err
	}
	if old, err := t.e.marks.taken(t.id); old || err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	t.stop = stop
	t.under.Store(true)
	t.all.Go(func() {
		defer t.under.Store(false)
		defer stop()
		r := rounds{
			every: on.Interval, log: t.e.log.With("sandbox", t.id), status: t.status,
			take: func(ctx context.Context) error {
				_, err := t.e.Checkpoint(ctx, t.id,
					runtime.CheckpointOptions{Trigger: runtime.TriggerInterval, Automatic: true, IfChanged: s.TakesSteps()})
				return err
			},
		}
		_ = guard.Do(func() error { r.run(ctx); return nil }) // a panic is in the log
	})
	return nil
}

// end ends the taking, and calls off a checkpoint that is under way.
func (t *takings) end() {
	if t.stop != nil {
		t.stop()
	}
	t.all.Wait()
}

// status is empty for a sandbox that is gone.
func (t *takings) status(ctx context.Context) (runtime.Status, error) {
	sb, err := t.e.sandboxes.inspect(ctx, t.id)
	if errors.Is(err, runtime.ErrNotFound) {
		return "", nil
	}
	return sb.Status, err
}

// rounds takes a checkpoint at each interval.
type rounds struct {
	every  time.Duration
	status func(context.Context) (runtime.Status, error)
	take   func(context.Context) error
	log    *slog.Logger
}

// run returns when the sandbox has ended. What fails is logged, once for each cause in a row,
// and tried again at the next interval.
func (r rounds) run(ctx context.Context) {
	tick := time.NewTicker(r.every)
	defer tick.Stop()
	said, times := "", 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		over, err := r.round(ctx)
		if over || ctx.Err() != nil {
			return
		}
		// A tick that came meanwhile is dropped: if a checkpoint takes longer than the
		// interval, the sandbox is to run, and other verbs to have their turn.
		tick.Reset(r.every)
		if err == nil {
			if times > 1 {
				r.log.Info("interval checkpoints resumed", "failed", times)
			}
			said, times = "", 0
			continue
		}
		times++
		if said != err.Error() {
			said = err.Error()
			r.log.Warn("interval checkpoint failed; retrying at the next interval", "every", r.every, "err", err)
		}
	}
}

// round takes one checkpoint, unless the sandbox is over or stands still.
func (r rounds) round(ctx context.Context) (over bool, err error) {
	status, err := r.status(ctx)
	if err != nil || hasEnded(status) || status == runtime.Paused {
		return err == nil && hasEnded(status), err
	}
	if err := r.take(ctx); err != nil {
		status, e2 := r.status(ctx)
		return e2 == nil && hasEnded(status), err
	}
	return false, nil
}

func hasEnded(s runtime.Status) bool { return s == "" || s == runtime.Exited || s == runtime.Created }
