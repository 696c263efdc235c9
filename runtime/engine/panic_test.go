package engine_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
)

// defective is a backend that panics for one container, or when it lists all.
type defective struct {
	runtime.Backend
	over  string
	start bool
	lists atomic.Int64
}

func (b *defective) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	if id == b.over {
		panic("a defect")
	}
	return b.Backend.Inspect(ctx, id)
}

func (b *defective) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	if b.start {
		panic("a defect")
	}
	return b.Backend.Start(ctx, id, opts)
}

func (b *defective) List(ctx context.Context) ([]string, error) {
	if b.lists.Add(1) > 0 && b.over != "" {
		panic("a defect")
	}
	return b.Backend.List(ctx)
}

// TestPanicInAView: a panic for one sandbox leaves the others on the list, and the process
// alive.
func TestPanicInAView(t *testing.T) {
	b := &defective{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	for _, name := range []string{"a", "b", "c"} {
		r.create(t, name)
	}
	sb, err := r.Sandbox(ctx, "b")
	if err != nil {
		t.Fatal(err)
	}
	before := guard.Count()
	b.over = sb.ID
	list, err := r.Sandboxes(ctx)
	if err != nil || len(list) != 3 || guard.Count() != before+1 {
		t.Errorf("%+v, %v, %d panics", list, err, guard.Count()-before)
	}
	for _, sb := range list {
		if want := map[bool]runtime.Status{
			true: runtime.Unknown, false: runtime.Created,
		}[sb.ID == b.over]; sb.Status != want {
			t.Errorf("%s is %s, want %s", sb.Name, sb.Status, want)
		}
	}
}

// TestPanicInUpkeep: the background work of a service continues after a panic.
func TestPanicInUpkeep(t *testing.T) {
	b := &defective{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "a")
	b.over = sb.ID
	soon, end := context.WithTimeout(ctx, 30*time.Second)
	var all sync.WaitGroup
	all.Go(func() { r.Upkeep(soon, engine.Upkeep{Reconcile: time.Millisecond}) })
	for b.lists.Load() < 3 && soon.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	end()
	all.Wait()
	if n := b.lists.Load(); n < 3 {
		t.Errorf("it looked %d times", n)
	}
	b.over = ""
	if _, err := r.Reconcile(ctx); err != nil { // its lock is free
		t.Error(err)
	}
}

// TestPanicInAVerb: a panic in a verb becomes its error, and the verb is recovered: no intent
// stays in the journal, and no lock.
func TestPanicInAVerb(t *testing.T) {
	b := &defective{start: true}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "a")
	_, err := r.Start(ctx, sb.ID, nil)
	var p *guard.Panic
	if !errors.As(err, &p) || !strings.Contains(string(p.Stack), "defective") {
		t.Fatal(err)
	}
	if left, err := r.store.Intents(ctx); err != nil || len(left) != 0 {
		t.Errorf("in the journal after the panic: %+v, %v", left, err)
	}
	b.start = false
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Error(err)
	}
	if left, err := r.store.Intents(ctx); err != nil || len(left) != 0 {
		t.Errorf("in the journal: %+v, %v", left, err)
	}
}

// TestPanicInALease: a panic for one member of a lease prevents neither the removal of the
// others nor the next attempt.
func TestPanicInALease(t *testing.T) {
	b := &defective{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	l, err := r.CreateLease(ctx, runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{
		Owner: runtime.OwnerHeartbeat, Interval: time.Hour,
	}})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, name := range []string{"a", "b"} {
		sb, err := r.Create(ctx, runtime.CreateRequest{
			Lease: l.ID, Spec: runtime.Spec{
				Name: name, Image: "base", Args: []string{"true"}, Network: runtime.Network{Mode: runtime.NetworkNone},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	b.over = ids[0]
	if _, err := r.ReleaseLease(ctx, l.ID); err == nil {
		t.Error("the lease has ended")
	}
	if _, err := r.Sandbox(ctx, ids[1]); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("the other one: %v", err)
	}
	b.over = ""
	if _, err := r.EndLeases(ctx); err != nil {
		t.Error(err)
	}
	if _, err := r.store.Sandbox(ctx, ids[0]); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("the one: %v", err)
	}
}
