package audit

import (
	"context"
	"log/slog"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/runtime"
)

// own puts on record what an Engine does by itself.
type own struct {
	log   *Log
	by    string
	tries Tries
}

// Tries records actions that have failed and are tried again, each second perhaps.
type Tries struct {
	mu     sync.Mutex
	failed map[string]string // with which outcome
}

// maxTries bounds the records; then they are dropped, and failures are reported once more.
const maxTries = 1000

// FailedBefore reports whether an action that has ended has failed just as the try before.
func (t *Tries) FailedBefore(ctx context.Context, op *runtime.Op, err error) bool {
	if !op.Own.Past && !frees[op.Verb] || len(op.Own.Made) > 0 {
		return false
	}
	key := keyOf(ctx, op)
	was := t.last(key)
	return t.came(key, err) == was && err != nil
}

func keyOf(ctx context.Context, op *runtime.Op) string {
	about := op.Subject(ctx)
	return strings.Join(append([]string{op.Verb, about.Sandbox, about.Checkpoint, op.To}, op.Own.Did...), " ")
}

func (d *own) do(ctx context.Context, op *runtime.Op, do func() error) error {
	r := asked(op)
	r.Why = Clip(op.Own.Why)
	r.about(op.Subject(ctx))
	for _, id := range op.Own.Made {
		r.Made = some(r.Made, id)
	}
	r.did(op.Own.Did)
	by, durable := Self(op.Own.By), op.Own.By != "" || op.Own.Alone
	if op.Own.By == "" {
		by = whoAsks(ctx, d.by)
	}
	if op.Own.Past && len(op.Own.Made) > 0 { // not one of the retried actions
		err := do()
		d.log.past(by, r, err, durable)
		return err
	}
	key := keyOf(ctx, op)
	if was := d.tries.last(key); op.Own.Past || was != "" {
		// Another attempt is recorded only if its outcome differs.
		err := do()
		if d.tries.came(key, err) != was {
			d.log.past(by, r, err, durable)
		}
		return err
	}
	return d.log.Do(by, r, func(r *Record) error {
		err := do()
		if frees[r.Verb] { // which is tried until it succeeds
			d.tries.came(key, err)
		}
		r.came(d.log, op, err)
		return err
	})
}

// last is with which outcome something has failed before; empty: it has not.
func (t *Tries) last(key string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed[key]
}

// came records the outcome of an action.
func (t *Tries) came(key string, err error) (outcome string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	outcome = Outcome(err)
	delete(t.failed, key)
	if err != nil {
		if t.failed == nil || len(t.failed) >= maxTries {
			t.failed = map[string]string{}
		}
		t.failed[key] = outcome
	}
	return outcome
}

// past puts on record what is done already; durable is as in Append.
func (l *Log) past(by Who, r Record, err error, durable bool) {
	r.Phase, r.Who, r.Outcome = Note, by, Outcome(err)
	if _, err := l.Append(r, durable); err != nil {
		slog.Error("audit record not written", "verb", r.Verb, "sandbox", r.Sandbox, "err", err)
	}
}
