package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
)

// sharer makes a sandbox that has the volume "one" and never runs out of time.
func (r *rig) sharer(t *testing.T, name string) runtime.Sandbox {
	t.Helper()
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: name, Image: "base", Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Mounts: []runtime.Mount{{Type: "volume", Source: "one", Target: "/one"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// TestSharedVolume: a volume is neither captured nor changed while another sandbox may write
// to it.
func TestSharedVolume(t *testing.T) {
	r := newRig(t, nil)
	r.sharer(t, "v")
	r.sharer(t, "other")
	file := filepath.Join(r.root, "memory/volumes/one/data/f")
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("old")
	ck, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{WithVolumes: true})
	if err != nil {
		t.Fatal(err)
	}
	put("new")
	if _, err := r.Start(ctx, "other", nil); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, runtime.ErrState) || !strings.Contains(err.Error(), "volume one is in use by other") {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err = r.Checkpoint(ctx, "v", runtime.CheckpointOptions{WithVolumes: true})
	refused("a checkpoint", err)
	_, err = r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: ck.ID})
	refused("a restore", err)
	if got, _ := os.ReadFile(file); string(got) != "new" {
		t.Errorf("the volume has %q", got)
	}
	if err := r.Stop(ctx, "other", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: ck.ID}); err != nil {
		t.Error(err)
	}
}

// TestVolumeUsersUnknown: an engine that cannot list the users of a volume prevents only
// verbs that capture or change the volume, and before they change anything.
func TestVolumeUsersUnknown(t *testing.T) {
	mine := errors.New("another container is being committed")
	fault := backendtest.Fault{Err: mine}
	for skip, fails := range map[int]bool{0: false, 1: true, 2: true, 3: true, 4: true} {
		fault.Skip = skip
		r := newRig(t, func(b runtime.Backend) runtime.Backend {
			return backendtest.Faulty(t, b, map[backendtest.Op]backendtest.Fault{backendtest.VolumeUsers: fault})
		})
		sb := r.sharer(t, "v")
		plain, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: plain.ID}); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(sb.Upperdir, "f")
		if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		ck, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{WithVolumes: true})
		if !fails {
			if !errors.Is(err, mine) {
				t.Errorf("a checkpoint: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("new"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Restore(ctx, "v", runtime.RestoreOptions{Checkpoint: ck.ID}); !errors.Is(err, mine) {
			t.Errorf("a restore whose question %d is not answered: %v", skip, err)
		}
		if got, _ := os.ReadFile(file); string(got) != "new" {
			t.Errorf("after a restore that failed at question %d: %q", skip, got)
		}
	}
}

// plainBackend is a backend that knows nothing of its volumes' users.
type plainBackend struct{ runtime.Backend }

// TestVolumeUsersNotTold: a backend that cannot list the users of a volume does not count as
// one whose volume is unused.
func TestVolumeUsersNotTold(t *testing.T) {
	r := newRig(t, func(b runtime.Backend) runtime.Backend { return plainBackend{b} })
	r.sharer(t, "v")
	if _, err := r.Checkpoint(ctx, "v", runtime.CheckpointOptions{WithVolumes: true}); !errors.Is(err,
		runtime.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}
