package backendtest

import (
	"context"
	"errors"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

func TestMemory(t *testing.T) {
	Run(t, Factory{
		New:    func(_ *testing.T, root string) runtime.Backend { return NewMemory(root) },
		Lower:  BusyboxLower,
		Cannot: MemoryCannot(),
	})
}

// recorder is a test that may fail without failing the one it is part of.
type recorder struct {
	testing.TB
	cleanups []func()
	failed   bool
}

func (r *recorder) Helper()               {}
func (r *recorder) Cleanup(fn func())     { r.cleanups = append(r.cleanups, fn) }
func (r *recorder) Errorf(string, ...any) { r.failed = true }

func (r *recorder) end() {
	for _, fn := range r.cleanups {
		fn()
	}
}

func TestFaulty(t *testing.T) {
	ctx := context.Background()
	mine := errors.New("mine")
	spec := runtime.Spec{ID: newID(), Args: []string{"sleep", "1000"}}
	m := NewMemory(t.TempDir())

	r := &recorder{TB: t}
	b := Faulty(r, m, map[Op]Fault{
		Create: {Err: mine, Skip: 1},
		Start:  {Err: mine, Times: 1},
		Stop:   {Err: mine, After: true},
		Mount:  {Do: func(id string) { _ = m.Stop(ctx, id, runtime.StopOptions{}) }},
	})
	if err := b.Create(ctx, spec, nil); err != nil {
		t.Fatalf("the first Create: %v", err)
	}
	if err := b.Create(ctx, spec, nil); !errors.Is(err, mine) {
		t.Errorf("the second Create: %v", err)
	}
	if _, err := b.Start(ctx, spec.ID, runtime.StartOptions{}); !errors.Is(err, mine) {
		t.Errorf("the first Start: %v", err)
	}
	if _, err := b.Start(ctx, spec.ID, runtime.StartOptions{}); err != nil {
		t.Errorf("the second Start: %v", err)
	}
	if err := b.Stop(ctx, spec.ID, runtime.StopOptions{}); !errors.Is(err, mine) {
		t.Errorf("Stop: %v", err)
	}
	if c, err := b.Inspect(ctx, spec.ID); err != nil || c.Status != runtime.Exited {
		t.Errorf("after a Stop that was done and failed: %v, %v", c.Status, err)
	}
	if _, err := b.Start(ctx, spec.ID, runtime.StartOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.Mount(ctx, spec.ID, func(string) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("Mount: %v", err)
	}
	if c, _ := b.Inspect(ctx, spec.ID); c.Status != runtime.Exited {
		t.Errorf("what was to happen at Mount did not: it is %s", c.Status)
	}
	if r.end(); r.failed {
		t.Error("every fault fired, and yet the test was failed")
	}

	r = &recorder{TB: t}
	Faulty(r, m, map[Op]Fault{Exec: {Err: mine}})
	if r.end(); !r.failed {
		t.Error("a fault that never fired did not fail its test")
	}
}
