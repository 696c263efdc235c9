package engine_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// ending is a backend whose sandbox exits at the first attempt to pause it.
type ending struct {
	runtime.Backend
	ended bool
}

func (b *ending) Pause(ctx context.Context, id string) error {
	c, err := b.Inspect(ctx, id)
	if err == nil && !b.ended && c.Status == runtime.Running {
		b.ended = true
		err = b.Stop(ctx, id, runtime.StopOptions{})
		c.Status = runtime.Exited
	}
	if err == nil && c.Status != runtime.Running {
		err = fmt.Errorf("%w: it is %s", runtime.ErrState, c.Status)
	}
	if err != nil {
		return err
	}
	return b.Backend.Pause(ctx, id)
}

// TestRestoreEndsUnder: a sandbox that exits during a restore, as in a crash loop, is restored
// anyway, and its previous state is kept.
func TestRestoreEndsUnder(t *testing.T) {
	b := &ending{}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "box", Image: "base", Args: []string{"sleep", "1000"},
		Network: runtime.Network{Mode: runtime.NetworkNone},
	}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(sb.Upperdir, "file")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	has := func(want string) {
		t.Helper()
		if got, err := os.ReadFile(file); err != nil || string(got) != want {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	write("then")
	then, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	write("now")
	out, err := r.Restore(ctx, sb.ID, runtime.RestoreOptions{Checkpoint: then.ID})
	if err != nil || !b.ended || out.Undo == "" {
		t.Fatalf("it has ended: %v: %+v, %v", b.ended, out, err)
	}
	has("then")
	if _, err := r.Restore(ctx, sb.ID, runtime.RestoreOptions{Undo: true}); err != nil {
		t.Fatal(err)
	}
	has("now")
	if left, err := r.store.Intents(ctx); err != nil || len(left) > 0 {
		t.Errorf("left in the journal: %+v, %v", left, err)
	}
}
