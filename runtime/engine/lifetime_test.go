package engine_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/store"
)

func (r *rig) createShort(t *testing.T, name string, s runtime.Spec, p *policy.Policy) runtime.Sandbox {
	t.Helper()
	s.Name, s.Image, s.Network.Mode = name, "base", runtime.NetworkNone
	s.Args = []string{"sleep", "1000"}
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: s, Policy: p})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// age makes a sandbox look as if created, and marked, so long ago, before the last boot.
func (r *rig) age(t *testing.T, name string, by time.Duration) {
	t.Helper()
	sb, err := r.store.Sandbox(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	var s runtime.Spec
	if err := json.Unmarshal(sb.Spec, &s); err != nil {
		t.Fatal(err)
	}
	s.Lifetime.Begun = runtime.Moment{Time: s.Lifetime.Begun.Time.Add(-by), Boot: "another"}
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.store.SetSpec(ctx, sb.ID, data); err != nil {
		t.Fatal(err)
	}
	if slices.Contains(r.marks(t), name) {
		if err := os.WriteFile(filepath.Join(r.root, "supervised", sb.ID), []byte("another 1"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *rig) events(t *testing.T, name string) (types []string) {
	t.Helper()
	err := r.Events(ctx, name, runtime.EventOptions{}, func(e runtime.Event) error {
		types = append(types, e.Type)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return types
}

// TestRevive: the next command does what a missing supervisor has not done (none runs here). It
// stops expired sandboxes, removes --rm ones, and starts a supervisor for the others.
func TestRevive(t *testing.T) {
	r := newRig(t, nil)
	for name, s := range map[string]runtime.Spec{
		"over":    {Lifetime: runtime.Lifetime{TTL: time.Hour}},
		"gone":    {Lifetime: runtime.Lifetime{TTL: time.Hour}, AutoRemove: true},
		"young":   {Lifetime: runtime.Lifetime{TTL: 3 * time.Hour}},
		"idle":    {Lifetime: runtime.Lifetime{Idle: time.Hour}},
		"stopped": {Lifetime: runtime.Lifetime{TTL: time.Hour}},
		"plain":   {},
	} {
		r.createShort(t, name, s, nil)
		if _, err := r.Start(ctx, name, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Stop(ctx, "stopped", 0); err != nil {
		t.Fatal(err)
	}
	r.started = 0
	own, err := engine.TakeSupervision(filepath.Join(r.root, "run"))
	if err != nil || own == nil {
		t.Fatal(own, err)
	}
	if err := r.Revive(ctx); err != nil || r.started > 0 {
		t.Errorf("%d supervisors started beside one: %v", r.started, err)
	}
	own.Release(false)
	for _, name := range []string{"over", "gone", "young", "idle", "stopped", "plain"} {
		r.age(t, name, 2*time.Hour)
	}
	if err := r.Revive(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sandbox(ctx, "gone"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("what was to go with its exit: %v", err)
	}
	for name, want := range map[string]runtime.Status{
		"over": runtime.Exited, "young": runtime.Running, "idle": runtime.Running, "stopped": runtime.Exited,
		"plain": runtime.Running,
	} {
		sb, err := r.Sandbox(ctx, name)
		if err != nil || sb.Status != want || sb.Expired != (want == runtime.Exited) {
			t.Errorf("%s is %s, expired %v, %v", name, sb.Status, sb.Expired, err)
		}
	}
	if left := r.marks(t); !slices.Equal(left, []string{"idle", "young"}) || r.started != 1 {
		t.Errorf("%d supervisors started, for %v", r.started, left)
	}
	if got := r.events(t, "over"); !slices.Equal(got, []string{runtime.EventExpired}) {
		t.Errorf("events %v", got)
	}
	if got := r.events(t, "stopped"); got != nil {
		t.Errorf("events of one that was stopped: %v", got)
	}
	// It cannot be started until it is given more time.
	if _, err := r.Start(ctx, "over", nil); !errors.Is(err, runtime.ErrState) {
		t.Errorf("start: %v", err)
	}
	hour := time.Hour
	if _, err := r.UpdateLifetime(ctx, "over", runtime.LifetimeChange{TTL: &hour}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, "over", nil); err != nil {
		t.Errorf("start: %v", err)
	}
	for _, name := range []string{"over", "young", "idle", "stopped", "plain"} {
		if err := r.Remove(ctx, name, runtime.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
	}
	if left := r.marks(t); left != nil {
		t.Errorf("marks are left: %v", left)
	}
	if _, err := os.Stat(filepath.Join(r.root, "events")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("events are left: %v", err)
	}
}

// TestReviveClockSetBack: a killed supervisor is found even if the clock was set back.
func TestReviveClockSetBack(t *testing.T) {
	r := newRig(t, nil)
	sb := r.createShort(t, "box", runtime.Spec{Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	r.age(t, "box", 2*time.Hour)
	ahead := time.Now().Add(time.Hour)
	if err := os.Chtimes(filepath.Join(r.root, "supervised", sb.ID), ahead, ahead); err != nil {
		t.Fatal(err)
	}
	if err := r.Revive(ctx); err != nil {
		t.Fatal(err)
	}
	if now, err := r.Sandbox(ctx, "box"); err != nil || now.Status != runtime.Exited || !now.Expired {
		t.Errorf("%s, expired %v, %v", now.Status, now.Expired, err)
	}
}

// TestExpiryWaits: a sandbox is not stopped before a checkpoint on it is done, and an
// interrupted verb is recovered first.
func TestExpiryWaits(t *testing.T) {
	r := newRig(t, nil)
	sb := r.createShort(t, "box", runtime.Spec{Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	r.age(t, "box", 2*time.Hour)
	status := func(want runtime.Status) {
		t.Helper()
		if err := r.Revive(ctx); err != nil {
			t.Fatal(err)
		}
		if now, err := r.Sandbox(ctx, "box"); err != nil || now.Status != want {
			t.Errorf("%s, %v; want %s", now.Status, err, want)
		}
	}
	lock, err := r.store.Lock(ctx, sb.ID, "checkpoint", 0)
	if err != nil {
		t.Fatal(err)
	}
	status(runtime.Running)
	seq, err := r.store.Begin(ctx, store.Intent{Op: "checkpoint", Sandbox: sb.ID})
	if err != nil {
		t.Fatal(err)
	}
	lock.Unlock()
	status(runtime.Running)
	if err := r.store.Done(ctx, seq); err != nil {
		t.Fatal(err)
	}
	status(runtime.Exited)
}

// TestExpiredAfterReboot has the TTL remove an --rm sandbox whose end with the host no
// process has seen.
func TestExpiredAfterReboot(t *testing.T) {
	r := newRig(t, nil)
	r.createShort(t, "box", runtime.Spec{Lifetime: runtime.Lifetime{TTL: time.Hour}, AutoRemove: true}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(ctx, "box", 0); err != nil {
		t.Fatal(err)
	}
	for _, revive := range []func(context.Context) error{r.ReviveOfBoot, r.Revive} {
		r.age(t, "box", time.Minute)
		for range 2 {
			if err := revive(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := r.Sandbox(ctx, "box"); err != nil {
			t.Errorf("before its time: %v", err)
		}
	}
	r.age(t, "box", time.Hour)
	if err := r.ReviveOfBoot(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Sandbox(ctx, "box"); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("after its time: %v", err)
	}
}

// TestLifetimeOfCheckpoints: the TTL of a sandbox starts over only in a fork, or when the
// sandbox is recreated.
func TestLifetimeOfCheckpoints(t *testing.T) {
	r := newRig(t, nil)
	r.createShort(t, "box", runtime.Spec{Lifetime: runtime.Lifetime{TTL: time.Hour}}, nil)
	ck, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.age(t, "box", 2*time.Hour)
	if _, err := r.Start(ctx, "box", nil); !errors.Is(err, runtime.ErrState) {
		t.Errorf("start: %v", err)
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: ck.ID}); err != nil {
		t.Errorf("a restore that starts nothing: %v", err)
	}
	if sb, err := r.Sandbox(ctx, "box"); err != nil || !sb.Expired {
		t.Errorf("a restore has begun its time anew: %v", err)
	}
	if _, err := r.Fork(ctx, "box", runtime.ForkOptions{
		Names: []string{"other"}, Checkpoint: ck.ID, NoStart: true,
	}); err != nil {
		t.Fatal(err)
	}
	if err := r.Remove(ctx, "box", runtime.RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{Checkpoint: ck.ID}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"box", "other"} {
		if sb, err := r.Sandbox(ctx, name); err != nil || sb.Expired || sb.Spec.Lifetime.TTL != time.Hour {
			t.Errorf("%s: %+v, %v", name, sb.Spec.Lifetime, err)
		}
	}
}

// TestReviveOfBoot: any command restarts a sandbox with a restart policy in the boot of
// the host in which it was started; in a later boot only the service or recover does.
func TestReviveOfBoot(t *testing.T) {
	r := newRig(t, nil)
	sb := r.createShort(t, "box", runtime.Spec{Restart: runtime.Restart{Policy: runtime.RestartAlways}}, nil)
	if _, err := r.Start(ctx, "box", nil); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(ctx, "box", 0); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.root, "restarts", sb.ID)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var st map[string]any
	if err := json.Unmarshal(data, &st); err != nil {
		t.Fatal(err)
	}
	delete(st, "stopped")
	here := st["boot"]
	for _, c := range []struct {
		boot any
		any  bool // command brings it back
	}{{here, true}, {"", false}, {"11111111-2222-3333-4444-555555555555", false}} {
		st["boot"] = c.boot
		text, err := json.Marshal(st)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, revive := range []struct {
			what string
			do   func(context.Context) error
			want bool
		}{{"a command", r.ReviveOfBoot, c.any}, {"the service", r.Revive, true}} {
			r.started = 0
			mark := filepath.Join(r.root, "supervised", sb.ID)
			if err := os.WriteFile(mark, fmt.Appendf(nil, "%s 1", c.boot), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := revive.do(ctx); err != nil || r.started > 0 != revive.want {
				t.Errorf("boot %q, %s: %d supervisors started, %v", c.boot, revive.what, r.started, err)
			}
		}
	}
}
