package audit

import (
	"context"
	"log/slog"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/runtime/engine"
)

// deeds puts on record what an Engine does by itself.
type deeds struct {
	log   *Log
	by    string
	tries Tries
}

// Tries remembers what has failed and is tried again, each second perhaps.
type Tries struct {
	mu     sync.Mutex
	failed map[string]string // with which outcome
}

// maxTries bounds what is remembered; then it is forgotten, and told once more.
const maxTries = 1000

// Again tells of a deed that has ended whether it has failed just as the try before.
func (t *Tries) Again(d *engine.Deed, err error) bool {
	if !d.Past && !frees[d.Verb] || len(d.Made) > 0 {
		return false
	}
	was := t.last(keyOf(d))
	return t.came(keyOf(d), err) == was && err != nil
}

func keyOf(d *engine.Deed) string {
	return strings.Join(append([]string{d.Verb, d.Sandbox, d.Checkpoint, d.To}, d.Did...), " ")
}

// Deeds is what an Engine does things of its own by (engine.Options.Deeds). by is
// as in New, for what belongs to a verb.
func (l *Log) Deeds(by string) func(context.Context, *engine.Deed, func() error) error {
	d := &deeds{log: l, by: by}
	return d.do
}

func (d *deeds) do(ctx context.Context, deed *engine.Deed, do func() error) error {
	r := Record{Verb: deed.Verb, Ref: Clip(deed.Ref), To: deed.To, Signal: deed.Signal, Why: Clip(deed.Why)}
	r.about(deed.Subject)
	for _, id := range deed.Made {
		r.Made = some(r.Made, id)
	}
	r.did(deed.Did)
	by := Self(deed.By)
	if deed.By == "" {
		by = whoAsks(ctx, d.by)
	}
	if deed.Past && len(deed.Made) > 0 { // it is none that was tried before
		err := do()
		d.log.past(by, r, err, deed.By != "" || deed.Alone)
		return err
	}
	key := keyOf(deed)
	if was := d.tries.last(key); deed.Past || was != "" {
		// That it is tried once more is no news. What comes of it may be.
		err := do()
		if d.tries.came(key, err) != was {
			d.log.past(by, r, err, deed.By != "" || deed.Alone)
		}
		return err
	}
	return d.log.Do(by, r, func(r *Record) error {
		err := do()
		if frees[r.Verb] { // which is tried until it succeeds
			d.tries.came(key, err)
		}
		r.restored(d.log, deed.Restored)
		return err
	})
}

// last is with which outcome something has failed before; empty: it has not.
func (t *Tries) last(key string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed[key]
}

// came notes the outcome of something.
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
		slog.Error("this is not on record", "verb", r.Verb, "sandbox", r.Sandbox, "err", err)
	}
}
