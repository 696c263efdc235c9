package store

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"
)

// The ledger of a sandbox outlives it for as long as it has checkpoints, and goes then.
func TestEffects(t *testing.T) {
	ctx := t.Context()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	other := put(t, s, "other")
	parent := taken(t, s, of(b, "parent", KindFiles), sample(1, 10))
	row := of(b, "child", KindFiles)
	row.Parent = parent.ID
	child := taken(t, s, row, sample(2, 10))
	for _, sandbox := range []string{b.ID, b.ID, other.ID} {
		must(t, s.PutEffect(ctx, Effect{
			ID: NewID(), Sandbox: sandbox, Head: child.ID, Status: "outstanding", Created: time.Now(),
			Data: json.RawMessage(`{}`),
		}))
	}
	text := func() (out string) {
		for _, e := range must1(s.Effects(ctx, b.ID)) {
			out += fmt.Sprintf("%s %s at %s\n", e.Status, e.Data,
				map[string]string{parent.ID: "parent", child.ID: "child", "": "none"}[e.Head])
		}
		return out
	}
	first := must1(s.Effects(ctx, b.ID))[0].ID
	must(t, s.SetEffect(ctx, first, "compensated", json.RawMessage(`{"x":1}`)))
	if got, want := text(), "compensated {\"x\":1} at child\noutstanding {} at child\n"; got != want {
		t.Errorf("%s", got)
	}
	if newest := must1(s.NewestEffect(ctx, b.ID)); newest == first || newest != must1(s.Effects(ctx, b.ID))[1].ID {
		t.Errorf("newest: %s", newest)
	}
	if err := s.SetEffect(ctx, NewID(), "x", json.RawMessage(`{}`)); err == nil {
		t.Error("one that is not there was changed")
	}
	must(t, s.RemoveCheckpoint(ctx, child.ID))
	must(t, s.DeleteSandbox(ctx, b.ID))
	if got, want := text(), "compensated {\"x\":1} at parent\noutstanding {} at parent\n"; got != want {
		t.Errorf("without the child and the sandbox: %s", got)
	}
	must(t, s.RemoveCheckpoint(ctx, parent.ID))
	if got := text(); got != "" {
		t.Errorf("without all: %s", got)
	}
	if n := len(must1(s.Effects(ctx, other.ID))); n != 1 {
		t.Errorf("%d effects of the other sandbox", n)
	}
}
