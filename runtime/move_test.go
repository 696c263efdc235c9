package runtime_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestDamagedStays has a checkpoint in which verification found damage: nobody
// may get it as a whole one.
func TestDamagedStays(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"), []byte(strings.Repeat("precious ", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	ck, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{})
	if err != nil {
		t.Fatal(err)
	}
	packs, err := filepath.Glob(filepath.Join(r.root, "packs/*/*"))
	if err != nil || len(packs) != 1 {
		t.Fatal(packs, err)
	}
	data, err := os.ReadFile(packs[0])
	if err != nil {
		t.Fatal(err)
	}
	data[20] ^= 1
	if err := os.WriteFile(packs[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := r.Verify(ctx, runtime.VerifyOptions{ReadData: true}); err != nil || len(got.Damaged) != 1 {
		t.Fatalf("verify: %+v, %v", got, err)
	}
	for verb, err := range map[string]error{
		"export":  r.ExportCheckpoint(ctx, ck.ID, io.Discard, runtime.ExportOptions{}),
		"push":    second(r.PushCheckpoint(ctx, ck.ID, "127.0.0.1:1/x:y", runtime.RegistryOptions{})), // nobody is there
		"restore": second(r.Restore(ctx, "box", runtime.RestoreOptions{})),
		"fork":    second(r.Fork(ctx, "box", runtime.ForkOptions{Checkpoint: ck.ID})),
	} {
		if !errors.Is(err, runtime.ErrCorrupt) || len(fault.Hint(err)) == 0 {
			t.Errorf("%s: %v, hints %q", verb, err, fault.Hint(err))
		}
	}
}
