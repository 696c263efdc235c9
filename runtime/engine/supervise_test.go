package engine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/flock"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

// await waits until something is so.
func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("still not so: %s", what)
		}
	}
}

// TestSupervision: one process has the right to supervise; the log beside the lock is bounded,
// and goes with it.
func TestSupervision(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	if own, err := engine.TakeSupervision(run); own != nil || err != nil {
		t.Errorf("without a directory: %v, %v", own, err)
	}
	if err := os.Mkdir(run, 0o700); err != nil {
		t.Fatal(err)
	}
	own, err := engine.TakeSupervision(run)
	if err != nil || own == nil {
		t.Fatal(own, err)
	}
	if second, err := engine.TakeSupervision(run); second != nil || err != nil {
		t.Errorf("a second one: %v, %v", second, err)
	}
	for range 1<<20/10 + 1 {
		if _, err := own.Write([]byte("0123456789")); err != nil {
			t.Fatal(err)
		}
	}
	if data, err := os.ReadFile(filepath.Join(run, "supervisor")); err != nil || len(data) > 100 || len(data) == 0 {
		t.Error(len(data), err)
	}
	own.Release(true)
	if left, err := os.ReadDir(run); err != nil || len(left) != 0 {
		t.Error("left behind:", left, err)
	}
}

// supervising starts a supervisor in this process, and returns what waits for its end.
func (r *rig) supervising(t *testing.T) (ended func() error) {
	t.Helper()
	own, err := engine.TakeSupervision(filepath.Join(r.root, "run"))
	if err != nil || own == nil {
		t.Fatal(own, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	done := make(chan error, 1)
	go func() { done <- r.Supervise(ctx, own) }()
	t.Cleanup(cancel)
	return func() error { return <-done }
}

// TestSupervisorEnds: a supervisor attends to what is marked while it runs, and ends with the
// last of it.
func TestSupervisorEnds(t *testing.T) {
	r := newRig(t, nil)
	for _, name := range []string{"a", "b"} {
		r.createShort(t, name, runtime.Spec{StopSignal: "KILL", Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	}
	if _, err := r.Start(ctx, "a", nil); err != nil {
		t.Fatal(err)
	}
	l := r.leaseOf(t, runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{For: time.Hour}})
	ended := r.supervising(t)
	if _, err := r.Start(ctx, "b", nil); err != nil {
		t.Fatal(err)
	}
	second := time.Second
	for _, name := range []string{"a", "b"} { // it hears of it
		if _, err := r.UpdateLifetime(ctx, name, runtime.LifetimeChange{TTL: &second}); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "their marks are gone", func() bool { return slices.Equal(r.marks(t), []string{"leases"}) })
	for _, name := range []string{"a", "b"} {
		if sb, err := r.Sandbox(ctx, name); err != nil || sb.Status != runtime.Exited || !sb.Expired {
			t.Errorf("%s: %s, %v", name, sb.Status, err)
		}
	}
	if _, err := r.ReleaseLease(ctx, l.ID); err != nil {
		t.Fatal(err)
	}
	if err := ended(); err != nil || r.marks(t) != nil {
		t.Errorf("%v, marks %v", err, r.marks(t))
	}
	if left, err := os.ReadDir(filepath.Join(r.root, "run")); err != nil || len(left) != 0 {
		t.Error("left behind:", left, err)
	}
}

// stuckOrBroken is a backend that, for one sandbox each, panics and hangs.
type stuckOrBroken struct {
	runtime.Backend
	broken, stuck atomic.Pointer[string]
}

func (b *stuckOrBroken) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	if p := b.broken.Load(); p != nil && *p == id {
		panic("a defect")
	}
	if p := b.stuck.Load(); p != nil && *p == id {
		<-ctx.Done()
		return runtime.Container{}, ctx.Err()
	}
	return b.Backend.Inspect(ctx, id)
}

// TestSupervisorConfines: a panic and a hang over one sandbox keep the supervisor from no other,
// and a sandbox is attended to again when its trouble is over.
func TestSupervisorConfines(t *testing.T) {
	b := &stuckOrBroken{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	ids := map[string]string{}
	for _, name := range []string{"broken", "stuck", "well"} {
		s := runtime.Spec{StopSignal: "KILL", Lifetime: runtime.Lifetime{TTL: time.Second}}
		ids[name] = r.createShort(t, name, s, nil).ID
		if _, err := r.Start(ctx, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	broken, stuck := ids["broken"], ids["stuck"]
	b.broken.Store(&broken)
	b.stuck.Store(&stuck)
	_ = r.supervising(t)
	await(t, "the one is stopped", func() bool { return slices.Equal(r.marks(t), []string{"broken", "stuck"}) })
	b.broken.Store(nil)
	await(t, "the broken one is stopped", func() bool { return slices.Equal(r.marks(t), []string{"stuck"}) })
}

// TestSupervisorRecovers: a supervisor takes back the checkpoint in which the last one was killed.
func TestSupervisorRecovers(t *testing.T) {
	r := newRig(t, nil)
	sb := r.createShort(t, "box", runtime.Spec{Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.store.Begin(ctx, store.Intent{
		Op: "checkpoint", Sandbox: sb.ID, Data: []byte(`{"was": "running"}`),
	}); err != nil {
		t.Fatal(err)
	}
	_ = r.supervising(t)
	await(t, "the journal is empty", func() bool {
		list, err := r.store.Intents(ctx)
		return err == nil && len(list) == 0
	})
}

// TestSupervisorOfRemovedRoot: a supervisor whose root is removed ends, and makes nothing of it
// again.
func TestSupervisorOfRemovedRoot(t *testing.T) {
	r := newRig(t, nil)
	r.leaseOf(t, runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{For: time.Hour}})
	_ = r.createShort(t, "over", runtime.Spec{StopSignal: "KILL", Lifetime: runtime.Lifetime{TTL: time.Second}}, nil)
	if _, err := r.Start(ctx, "over", nil); err != nil {
		t.Fatal(err)
	}
	ended := r.supervising(t)
	await(t, "it is at work", func() bool { return slices.Equal(r.marks(t), []string{"leases"}) })
	away := r.root + ".away"
	if err := os.Rename(r.root, away); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(away) })
	if err := os.Remove(filepath.Join(away, "supervised", "leases")); err != nil { // which wakes it
		t.Fatal(err)
	}
	if err := ended(); !errors.Is(err, runtime.ErrNotFound) {
		t.Error(err)
	}
	if _, err := os.Lstat(r.root); err == nil {
		t.Error("it has made its root again")
	}
}

// TestReviveLeases: leases of an earlier boot, or of a killed command, are supervised from the next
// command on, but only while there are any.
func TestReviveLeases(t *testing.T) {
	r := newRig(t, nil)
	l := r.leaseOf(t, runtime.LeaseRequest{LeaseTerms: runtime.LeaseTerms{For: time.Hour}})
	mark := filepath.Join(r.root, "supervised", "leases")
	revive := func() {
		t.Helper()
		r.started = 0
		if _, err := r.EndLeases(ctx); err != nil {
			t.Fatal(err)
		}
		if err := r.ReviveOfBoot(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for what, change := range map[string]func() error{
		"killed": func() error { return os.Remove(mark) },
		"booted": func() error { return os.WriteFile(mark, []byte("another 1"), 0o600) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if revive(); r.started != 1 || r.marks(t) == nil {
			t.Errorf("%s: %d supervisors started, marks %v", what, r.started, r.marks(t))
		}
	}
	if _, err := r.ReleaseLease(ctx, l.ID); err != nil {
		t.Fatal(err)
	}
	if revive(); r.started != 0 || r.marks(t) != nil {
		t.Errorf("without leases: %d supervisors started, marks %v", r.started, r.marks(t))
	}
}

// TestOldWatches: a process of an older version keeps its sandbox until it ends.
func TestOldWatches(t *testing.T) {
	r := newRig(t, nil)
	sb := r.createShort(t, "box", runtime.Spec{StopSignal: "KILL", Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	r.started = 0
	old := filepath.Join(r.root, "watch", sb.ID)
	err := errors.Join(os.Remove(filepath.Join(r.root, "supervised", sb.ID)), os.Mkdir(filepath.Dir(old), 0o700),
		os.WriteFile(old, nil, 0o600))
	if err != nil {
		t.Fatal(err)
	}
	alive, err := flock.Try(old, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.ReviveOfBoot(ctx); err != nil || r.started > 0 || r.marks(t) != nil {
		t.Errorf("while a watch runs: %d supervisors started, marks %v, %v", r.started, r.marks(t), err)
	}
	alive.Unlock() // it was killed
	if err := r.ReviveOfBoot(ctx); err != nil || r.started != 1 || !slices.Equal(r.marks(t), []string{"box"}) {
		t.Errorf("then: %d supervisors started, marks %v, %v", r.started, r.marks(t), err)
	}
	if _, err := os.Lstat(filepath.Dir(old)); !errors.Is(err, os.ErrNotExist) {
		t.Error("its mark is left:", err)
	}
}
