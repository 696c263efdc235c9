package engine_test

import (
	"bytes"
	"errors"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestDamagedStays has a checkpoint in which verification found damage: no verb may pass it
// on as an intact one.
func TestDamagedStays(t *testing.T) {
	r := newRig(t, nil)
	sb := r.create(t, "box")
	if err := os.WriteFile(filepath.Join(sb.Upperdir, "a"),
		[]byte(strings.Repeat("precious ", 1000)), 0o600); err != nil {
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
		"export": r.ExportCheckpoint(ctx, ck.ID, io.Discard, runtime.ExportOptions{}),
		// nothing listens there
		"push":    second(r.PushCheckpoint(ctx, ck.ID, "127.0.0.1:1/x:y", runtime.RegistryOptions{})),
		"restore": second(r.Restore(ctx, "box", runtime.RestoreOptions{})),
		"fork":    second(r.Fork(ctx, "box", runtime.ForkOptions{Checkpoint: ck.ID})),
	} {
		if !errors.Is(err, runtime.ErrCorrupt) || len(fault.Hint(err)) == 0 {
			t.Errorf("%s: %v, hints %q", verb, err, fault.Hint(err))
		}
	}
}

// TestImportConflicts imports checkpoints under names that are taken.
func TestImportConflicts(t *testing.T) {
	there, here := newRig(t, nil), newRig(t, nil)
	there.create(t, "box")
	first, err := there.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "good"})
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	if err := there.ExportCheckpoint(ctx, first.ID, &archive, runtime.ExportOptions{}); err != nil {
		t.Fatal(err)
	}
	// Another sandbox takes the name there in the meantime.
	if err := there.RemoveCheckpoint(ctx, first.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := there.Checkpoint(ctx, "box", runtime.CheckpointOptions{Name: "good"}); err != nil {
		t.Fatal(err)
	}
	here.create(t, "box")
	refused := func(r *rig, what string, in io.Reader, opts runtime.ImportOptions, says string) {
		t.Helper()
		before, err := r.Checkpoints(ctx, runtime.CheckpointFilter{All: true})
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.ImportCheckpoint(ctx, in, opts)
		if !errors.Is(err, runtime.ErrExists) || !strings.Contains(err.Error(), says) ||
			!strings.Contains(strings.Join(fault.Hint(err), " "), "--name") {
			t.Errorf("%s: %v, hints %q", what, err, fault.Hint(err))
		}
		after, err := r.Checkpoints(ctx, runtime.CheckpointFilter{All: true})
		if err != nil || len(after) != len(before) {
			t.Errorf("%s left %d checkpoints of %d, %v", what, len(after), len(before), err)
		}
	}
	refused(here, "a name that is taken", iotest.ErrReader(errors.New("it is read")),
		runtime.ImportOptions{Name: "box"}, "sandbox box")
	refused(here, "the name in the archive", bytes.NewReader(archive.Bytes()), runtime.ImportOptions{}, "sandbox box")
	refused(there, "a checkpoint's name", bytes.NewReader(archive.Bytes()), runtime.ImportOptions{}, "checkpoint good")
	for _, r := range []*rig{there, here} {
		got, err := r.ImportCheckpoint(ctx, bytes.NewReader(archive.Bytes()), runtime.ImportOptions{Name: "copy"})
		if err != nil || got.SandboxName != "copy" || got.Name != "good" {
			t.Errorf("under another name: %+v, %v", got, err)
		}
	}
	if out, err := there.Restore(ctx, "copy", runtime.RestoreOptions{Foreign: true}); err != nil ||
		out.Sandbox.Name != "copy" {
		t.Errorf("restored: %+v, %v", out, err)
	}
}

// TestUndoElsewhere moves an undo checkpoint to another store. There it is a checkpoint like
// any other: it is listed, and restores do not remove it.
func TestUndoElsewhere(t *testing.T) {
	there := newRig(t, nil)
	there.create(t, "box")
	if _, err := there.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	out, err := there.Restore(ctx, "box", runtime.RestoreOptions{})
	if err != nil || out.Undo == "" {
		t.Fatal(out, err)
	}
	var archive bytes.Buffer
	if err := there.ExportCheckpoint(ctx, out.Undo, &archive, runtime.ExportOptions{}); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref, opts := strings.TrimPrefix(server.URL, "http://")+"/x:y", runtime.RegistryOptions{PlainHTTP: true}
	if _, err := there.PushCheckpoint(ctx, out.Undo, ref, opts); err != nil {
		t.Fatal(err)
	}
	for verb, bring := range map[string]func(*rig) (runtime.Checkpoint, error){
		"import": func(r *rig) (runtime.Checkpoint, error) {
			return r.ImportCheckpoint(ctx, &archive, runtime.ImportOptions{})
		},
		"pull": func(r *rig) (runtime.Checkpoint, error) { return r.PullCheckpoint(ctx, ref, opts) },
	} {
		here := newRig(t, nil)
		if ck, err := bring(here); err != nil || ck.Trigger == runtime.TriggerUndo {
			t.Errorf("%s: %+v, %v", verb, ck, err)
		}
		if list, err := here.Checkpoints(ctx, runtime.CheckpointFilter{}); err != nil || len(list) != 1 ||
			list[0].ID != out.Undo {
			t.Errorf("%s: %+v, %v", verb, list, err)
		}
	}
}
