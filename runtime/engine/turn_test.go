package engine_test

import (
	"context"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// TestAsideWhileLocked: a verb gives up its turn while it waits for the clean-up after an
// exit, which may take long, or need a turn itself.
func TestAsideWhileLocked(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	lock, err := r.store.Lock(ctx, sb.ID, "reap", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	var told []string
	with := runtime.WithAside(ctx, func() func() {
		told = append(told, "aside")
		lock.Unlock()
		return func() { told = append(told, "back") }
	})
	if _, err := r.Start(with, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	if len(told) != 2 || told[0] != "aside" || told[1] != "back" {
		t.Errorf("told %q", told)
	}
	if got, err := r.Sandbox(ctx, sb.ID); err != nil || got.Started.IsZero() {
		t.Errorf("not started: %+v, %v", got, err)
	}
}

// TestListCancelled: a list whose context ends while it inspects sandboxes is an error, not
// empty.
func TestListCancelled(t *testing.T) {
	with, cancel := context.WithCancel(ctx)
	r := newRig(t, func(b runtime.Backend) runtime.Backend { return &cancelling{b, func() {}} })
	r.create(t, "box")
	r2 := newRigAt(t, r.root, func(b runtime.Backend) runtime.Backend { return &cancelling{b, cancel} })
	if list, err := r2.Sandboxes(with); err == nil {
		t.Errorf("%d sandboxes, and no error", len(list))
	}
}

// cancelling is a backend whose Inspect has a side effect.
type cancelling struct {
	runtime.Backend
	fn func()
}

func (b *cancelling) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	b.fn()
	return b.Backend.Inspect(context.WithoutCancel(ctx), id)
}
