package engine_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// engineRemoves is a backend whose engine, if removes says so, removes containers that stop.
type engineRemoves struct {
	runtime.Backend
	removes, stuck bool
}

func (b *engineRemoves) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	c.AutoRemove = b.removes
	return c, err
}

func (b *engineRemoves) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	if b.stuck {
		return nil, errors.New("it does not start")
	}
	return b.Backend.Start(ctx, id, opts)
}

// TestRestartKept: a restart does not lose an --rm sandbox, even if the start fails or the
// engine would remove the container.
func TestRestartKept(t *testing.T) {
	b := &engineRemoves{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"sleep", "1000"},
		Network: runtime.Network{Mode: runtime.NetworkNone}, AutoRemove: true,
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	is := func(status runtime.Status, kept bool) {
		t.Helper()
		if err := r.Reap(ctx, sb.ID); err != nil { // as after every exit
			t.Error(err)
		}
		now, err := r.Sandbox(ctx, sb.ID)
		if err != nil || now.Status != status || now.Kept != kept {
			t.Errorf("it is %s, kept %v: %v", now.Status, now.Kept, err)
		}
	}
	b.removes = true
	if err := r.Restart(ctx, sb.ID, 0); !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "--rm") {
		t.Errorf("restarted, or: %v", err)
	}
	is(runtime.Running, false)
	b.removes, b.stuck = false, true
	if err := r.Restart(ctx, sb.ID, 0); err == nil {
		t.Error("it has started")
	}
	is(runtime.Exited, true)
	b.stuck = false
	if err := r.Restart(ctx, sb.ID, 0); err != nil {
		t.Fatal(err)
	}
	is(runtime.Running, false)
	if err := r.Restart(ctx, sb.ID, 0); err != nil {
		t.Fatal(err)
	}
	is(runtime.Running, false)
	// Killed once it had started.
	if err := r.store.Keep(ctx, sb.ID, true); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Begin(ctx, store.Intent{Op: "start", Sandbox: sb.ID}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.RecoverInterrupted(ctx); err != nil {
		t.Fatal(err)
	}
	is(runtime.Running, false)
}
