package engine

import (
	"context"
	"errors"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
)

// Upkeep configures the background work of a service; zero: never.
type Upkeep struct {
	Reconcile time.Duration // interval of Reconcile, which also runs at once
	Prune     time.Duration // interval of pruning by the policies' retention rules
	Rate      int64         // bytes that pruning may copy per second; 0: no bound

	// Reconciled, unless nil, is called with the result of each Reconcile.
	Reconciled func(runtime.ReconcileReport, error)
}

// upkeepTime bounds one Reconcile or one pruning. The next one does the rest.
const upkeepTime = 10 * time.Minute

// lookSupervisor is how often the service looks whether a supervisor is needed and missing.
const lookSupervisor = 5 * time.Second

// Upkeep does the background work of u until ctx ends, and returns once none of it is under
// way. It logs errors, and tries again the next time.
func (e *Engine) Upkeep(ctx context.Context, u Upkeep) {
	var all guard.WaitGroup
	defer all.Wait()
	all.Go(func() {
		e.repeat(ctx, u.Reconcile, true, func(ctx context.Context) error {
			report, err := e.recovery.reconcile(ctx, true)
			if u.Reconciled != nil {
				u.Reconciled(report, err)
			}
			if len(report.Deeds()) > 0 || report.Failed > 0 {
				e.log.Info("host reconciled", "sandboxes", report.Sandboxes, "found", report.Counts, "failed",
					report.Failed, "took", report.Took)
			}
			return err
		})
	})
	all.Go(func() { e.repeat(ctx, lookSupervisor, true, e.Revive) })
	all.Go(func() {
		e.repeat(ctx, lookUnstarted, true, func(ctx context.Context) error {
			_, err := e.sandboxes.freeUnstarted(ctx, runtime.Own{Alone: true})
			return err
		})
	})
	all.Go(func() {
		e.repeat(ctx, u.Prune, false, func(ctx context.Context) error {
			out, err := e.upkeep.retainQuietly(ctx, u.Rate)
			if len(out.Removed) > 0 || out.Freed > 0 {
				e.log.Info("pruned", "checkpoints", len(out.Removed), "freed", out.Freed)
			}
			return err
		})
	})
}

// repeat calls fn again and again, with a pause of every after each call. Each cause of a
// failure is logged once in a row.
func (e *core) repeat(ctx context.Context, every time.Duration, now bool, fn func(context.Context) error) {
	if every <= 0 {
		return
	}
	for said := ""; ; {
		if now {
			soon, cancel := context.WithTimeout(ctx, upkeepTime)
			err := guard.Do(func() error { return fn(soon) })
			cancel()
			text := ""
			if err != nil {
				text = err.Error()
			}
			switch {
			case err == nil || ctx.Err() != nil || text == said:
			case errors.Is(err, runtime.ErrBusy): // no failure, unless it persists
				e.log.Info("upkeep postponed", "err", err)
			default:
				e.log.Error("upkeep failed", "err", err)
			}
			said = text
		}
		now = true
		t := time.NewTimer(every)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// recordPruned reports the removals by retention rules to the observers, per sandbox.
func (up *upkeep) recordPruned(ctx context.Context, out runtime.Pruned, err error) {
	var order []string
	at := map[string]*runtime.Op{}
	for _, p := range out.Removed {
		c := p.Checkpoint
		if at[c.Sandbox] == nil {
			subject := runtime.Subject{Sandbox: c.Sandbox, Name: c.SandboxName}
			at[c.Sandbox], order = runtime.ByItself("prune", subject,
				runtime.Own{Why: "retention", Past: true, Alone: true}), append(order, c.Sandbox)
		}
		at[c.Sandbox].Own.Made = append(at[c.Sandbox].Own.Made, c.ID)
	}
	for _, id := range order {
		_ = up.observed(ctx, at[id], func(context.Context) error { return err }) // Upkeep logs the error
	}
}
