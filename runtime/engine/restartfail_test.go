package engine_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// onLog calls fn once, when something is logged.
type onLog struct {
	slog.Handler
	message string
	fn      func()
}

func (h *onLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == h.message && h.fn != nil {
		fn := h.fn
		h.fn = nil
		fn()
	}
	return h.Handler.Handle(ctx, r)
}

// refusing is a backend that refuses to start sandboxes when told to.
type refusing struct {
	runtime.Backend
	refuse bool
}

func (b *refusing) Start(ctx context.Context, id string, opts runtime.StartOptions) (func() error, error) {
	if b.refuse {
		return nil, errors.New("no")
	}
	return b.Backend.Start(ctx, id, opts)
}

// TestStopAfterFailedRestart: a stop by the owner between a failed restart and its record
// holds. Without a stop the failure is recorded, and the next restart follows.
func TestStopAfterFailedRestart(t *testing.T) {
	for _, stopped := range []bool{true, false} {
		b := &refusing{}
		r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
		sb := r.restarting(t, runtime.RestartFromCommand)
		if _, err := r.Start(ctx, sb.ID, nil); err != nil {
			t.Fatal(err)
		}
		if err := b.Stop(ctx, sb.ID, runtime.StopOptions{}); err != nil { // it ends by itself
			t.Fatal(err)
		}
		b.refuse = true
		watch, end := context.WithTimeout(ctx, 20*time.Second)
		r.log.message, r.log.fn = "sandbox not restarted", func() {
			if stopped {
				if err := r.Stop(ctx, sb.ID, 0); err != nil {
					t.Error(err)
				}
				return
			}
			r.log.fn = func() { // the second one
				b.refuse = false
				end()
			}
		}
		err := r.supervise(watch)
		if stopped && err != nil || !stopped && !errors.Is(err, context.Canceled) {
			t.Fatalf("the supervisor: %v", err)
		}
		end()
		got, err := r.Sandbox(ctx, sb.ID)
		if err != nil || got.Restarts.Stopped != stopped || (got.Restarts.Error == "") != stopped ||
			got.Status != runtime.Exited {
			t.Errorf("stopped: %v: %s, %+v, %v", stopped, got.Status, got.Restarts, err)
		}
	}
}

// failed is a backend whose sandboxes always end with 1.
type failed struct{ runtime.Backend }

func (b *failed) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	if c.Status == runtime.Exited {
		c.ExitCode = 1
	}
	return c, err
}

// failing has a sandbox that may fail once more, and has failed; ends has it fail.
func failing(t *testing.T) (r *rig, sb runtime.Sandbox, ends func()) {
	t.Helper()
	b := &failed{}
	r = newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "s", Image: "base", Args: []string{"false"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Restart: runtime.Restart{Policy: runtime.RestartOnFailure, Retries: 1},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	ends = func() {
		if err := b.Stop(ctx, sb.ID, runtime.StopOptions{}); err != nil {
			t.Error(err)
		}
	}
	ends()
	return r, sb, ends
}

// TestGiveUpWaitsForLock: the supervisor records that a sandbox has used up its retries only under
// the sandbox's lock; otherwise a start under way would lose its own record.
func TestGiveUpWaitsForLock(t *testing.T) {
	r, sb, ends := failing(t)
	watch, end := context.WithCancel(ctx)
	defer end()
	var lock *store.Lock
	r.log.message, r.log.fn = "sandbox restarted", func() {
		ends()
		var err error
		if lock, err = r.store.Lock(ctx, sb.ID, "start", 0); err != nil {
			t.Error(err)
		}
		// Longer than the supervisor waits for a lock.
		time.AfterFunc(1200*time.Millisecond, end)
	}
	if err := r.supervise(watch); !errors.Is(err, context.Canceled) {
		t.Errorf("the supervisor has ended: %v", err)
	}
	got, err := r.Sandbox(ctx, sb.ID)
	if err != nil || got.Restarts.GivenUp || got.Restarts.Count != 1 {
		t.Errorf("while another has it: %+v, %v", got.Restarts, err)
	}
	lock.Unlock()
	if err := r.supervise(ctx); err != nil {
		t.Error(err)
	}
	if got, err = r.Sandbox(ctx, sb.ID); err != nil || !got.Restarts.GivenUp {
		t.Errorf("it has failed as often as it may: %+v, %v", got.Restarts, err)
	}
}

// TestGiveUpRecovers: an interrupted verb on a sandbox that has used up its retries prevents
// its supervisor neither from recording that nor from ending.
func TestGiveUpRecovers(t *testing.T) {
	r, sb, ends := failing(t)
	r.log.message, r.log.fn = "sandbox restarted", func() {
		ends()
		if _, err := r.store.Begin(ctx, store.Intent{Op: "start", Sandbox: sb.ID}); err != nil {
			t.Error(err)
		}
	}
	soon, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := r.supervise(soon); err != nil {
		t.Errorf("the supervisor: %v", err)
	}
	if got, err := r.Sandbox(ctx, sb.ID); err != nil || !got.Restarts.GivenUp {
		t.Errorf("it has failed as often as it may: %+v, %v", got.Restarts, err)
	}
}
