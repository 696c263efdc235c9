package engine_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// managing is a backend with a managed file, whose location it can withhold.
type managing struct {
	runtime.Backend
	file string
}

func (b *managing) Inspect(ctx context.Context, id string) (runtime.Container, error) {
	c, err := b.Backend.Inspect(ctx, id)
	if b.file != "" {
		c.Managed = map[string]string{"/etc/hosts": b.file}
	}
	return c, err
}

// TestManagedWithoutPlace: a managed file that the backend has no place for causes a warning.
func TestManagedWithoutPlace(t *testing.T) {
	hosts := filepath.Join(t.TempDir(), "hosts")
	put := func(text string) {
		if err := os.WriteFile(hosts, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b := &managing{file: hosts}
	r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
	sb := r.create(t, "box")
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Wait(ctx, sb.ID); err != nil { // what is in memory cannot be frozen
		t.Fatal(err)
	}
	put("then")
	then, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{FilesOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	const words = "/etc/hosts is not as in the checkpoint"
	for _, told := range []bool{true, false} {
		put("now")
		if b.file = hosts; !told {
			b.file = ""
		}
		plan, err := r.PlanRestore(ctx, sb.ID, runtime.RestoreOptions{Checkpoint: then.ID})
		if err != nil {
			t.Fatal(err)
		}
		done, err := r.Restore(ctx, sb.ID, runtime.RestoreOptions{Checkpoint: then.ID})
		if err != nil {
			t.Fatal(err)
		}
		want := "now"
		if told {
			want = "then"
		}
		if got, err := os.ReadFile(hosts); err != nil || string(got) != want {
			t.Errorf("told %v: it is %q, %v", told, got, err)
		}
		if said := strings.Contains(strings.Join(done.Warnings, "\n"), words); said == told {
			t.Errorf("told %v: the restore warns of %q", told, done.Warnings)
		}
		if said := strings.Contains(strings.Join(plan.Effects, "\n"), words); said == told {
			t.Errorf("told %v: the plan tells of %q", told, plan.Effects)
		}
	}
}

// TestManagedUnfinished: recovery that cannot finish a killed restore brings back the managed
// files that the restore had replaced; one that can leaves the checkpoint's.
func TestManagedUnfinished(t *testing.T) {
	for fail, want := range map[string]string{"restore.after-stop": "was", "restore.after-proof": "was", "": "then"} {
		hosts := filepath.Join(t.TempDir(), "hosts")
		b := &managing{file: hosts}
		r := newRig(t, func(under runtime.Backend) runtime.Backend { b.Backend = under; return b })
		sb := r.create(t, "box")
		if _, err := r.Start(ctx, sb.ID, nil); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Wait(ctx, sb.ID); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(hosts, []byte("then"), 0o644); err != nil {
			t.Fatal(err)
		}
		then, err := r.Checkpoint(ctx, sb.ID, runtime.CheckpointOptions{FilesOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		// It was killed once it had put the file, with the file of before beside it.
		if err := os.WriteFile(hosts+".old", []byte("was"), 0o644); err != nil {
			t.Fatal(err)
		}
		data, err := json.Marshal(map[string]any{
			"phase": "proven", "was": "exited", "trees": []any{map[string]any{"dir": sb.Upperdir}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.store.Begin(ctx, store.Intent{
			Op: "restore", Sandbox: sb.ID, Checkpoint: then.ID, Data: data,
		}); err != nil {
			t.Fatal(err)
		}
		t.Setenv("AGENTBOX_FAILPOINT", fail+"=error")
		done, err := r.RecoverInterrupted(ctx)
		t.Setenv("AGENTBOX_FAILPOINT", "")
		if err != nil || len(done.Actions) != 1 || strings.HasPrefix(done.Actions[0], "finished") != (fail == "") {
			t.Errorf("%s: %q, %v", fail, done.Actions, err)
		}
		if got, err := os.ReadFile(hosts); err != nil || string(got) != want {
			t.Errorf("%s: it is %q, want %q (%v)", fail, got, want, err)
		}
		if _, err := os.Lstat(hosts + ".old"); !os.IsNotExist(err) {
			t.Errorf("%s: the copy is left: %v", fail, err)
		}
	}
}
