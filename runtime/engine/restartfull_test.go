package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// TestStopOnFullDisk stops a sandbox with a restart policy on a full disk: the stop works
// and the sandbox is not restarted, even if only the record of that could be written.
func TestStopOnFullDisk(t *testing.T) {
	r := newRig(t, nil)
	dir := filepath.Join(r.root, "restarts")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	sb, err := r.Create(ctx, runtime.CreateRequest{Spec: runtime.Spec{
		Name: "s", Image: "base", Args: []string{"sleep", "1000"}, Network: runtime.Network{Mode: runtime.NetworkNone},
		Restart: runtime.Restart{Policy: runtime.RestartAlways},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	full := filepath.Join(dir, "full")
	if err := os.WriteFile(full, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	if err := r.Stop(ctx, sb.ID, 0); err != nil {
		t.Fatal(err)
	}
	got, err := r.Sandbox(ctx, sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if got.Status != runtime.Exited || got.Restarts == nil || !got.Restarts.Stopped {
		t.Errorf("%+v", got)
	}
	if report, err := r.Reconcile(ctx); err != nil {
		t.Errorf("%+v, %v", report, err)
	}
	if err := r.supervise(ctx); err != nil {
		t.Error(err)
	}
	if got, err := r.Sandbox(ctx, sb.ID); err != nil || got.Status != runtime.Exited || r.marks(t) != nil {
		t.Errorf("it comes back: %s, marks %v, %v", got.Status, r.marks(t), err)
	}
	if err := os.Remove(full); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Start(ctx, sb.ID, nil); err != nil {
		t.Fatal(err)
	}
	if got, err = r.Sandbox(ctx, sb.ID); err != nil || *got.Restarts != (runtime.Restarts{}) {
		t.Errorf("after a start: %+v, %v", got.Restarts, err)
	}
	if err := r.Remove(ctx, sb.ID, runtime.RemoveOptions{Force: true}); err != nil {
		t.Fatal(err)
	}
	if list, err := os.ReadDir(dir); err != nil || len(list) > 0 {
		t.Errorf("left over: %v, %v", list, err)
	}
}
