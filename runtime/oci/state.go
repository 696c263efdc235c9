package oci

import (
	"context"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/box"
)

// Look implements box.Hooks.
func (h hooks) Look(ctx context.Context, id string) (box.View, error) { return h.box.Look(ctx, id) }

// Attend implements box.Hooks: a conmon that was killed cannot be replaced.
func (h hooks) Attend(context.Context, string, box.Run) error { return nil }

// Monitored implements box.Hooks.
func (h hooks) Monitored(dir string) (bool, error) {
	p, err := monitor(dir)
	if p != nil {
		p.Close()
	}
	return p != nil, err
}

// AwaitMonitor implements box.Hooks: it returns when neither conmon nor the first process of a run
// is left.
func (h hooks) AwaitMonitor(ctx context.Context, id string, run box.Run) error {
	p, err := monitor(run.Bundle)
	if err != nil {
		return err
	}
	if p != nil {
		defer p.Close()
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	if p, err = h.first(id, run.Number); p != nil {
		defer p.Close()
		return p.Wait(ctx)
	}
	return err
}

// Inspect describes the current state.
func (b *Backend) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	v, ok := b.cachedView(id)
	if !ok {
		var err error
		began := time.Now()
		if v, err = b.box.Open(ctx, id); err != nil {
			v.Close()
			return runtime.Container{}, err
		}
		if !b.cacheView(id, v, began) {
			v.Close()
		}
	}
	c := b.box.Describe(v)
	c.EmptyNetwork = v.Spec.IDs != nil
	if v.Status != runtime.Created {
		c.OOMAt = b.oomAt(id, v.Run.Number)
	}
	return c, nil
}
