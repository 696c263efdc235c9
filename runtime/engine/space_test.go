package engine_test

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// TestRestoreWithoutRoom restores a large file on a disk that is full: the error
// says how much is needed and free, and what to do, and nothing has changed.
func TestRestoreWithoutRoom(t *testing.T) {
	root, err := os.MkdirTemp("/dev/shm", "engine")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", root, "tmpfs", 0, "size=24m,mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(root, unix.MNT_DETACH), os.Remove(root)); err != nil {
			t.Error(err)
		}
	})
	r := newRigAt(t, root, nil)
	sb := r.create(t, "box")
	write := func(path string, size int) {
		t.Helper()
		data := make([]byte, size)
		_, _ = rand.Read(data) // never fails
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	large := filepath.Join(sb.Upperdir, "large")
	write(large, 6<<20)
	if _, err := r.Checkpoint(ctx, "box", runtime.CheckpointOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(large); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(sb.Upperdir, "small"), 100)
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(root, "filler"), int(st.Bavail)*int(st.Bsize)-(3<<20))

	_, err = r.Restore(ctx, "box", runtime.RestoreOptions{})
	hints := strings.Join(fault.Hint(err), " ")
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "6.291MB is needed") ||
		!strings.Contains(err.Error(), "MB is free at "+root) ||
		!strings.Contains(hints, "agentbox prune") || !strings.Contains(hints, "as it was") {
		t.Errorf("restored: %v\nhints: %s", err, hints)
	}
	if got := contents(t, sb.Upperdir); len(got) != 1 || len(got["small"]) != 100 {
		t.Errorf("%d files after it", len(got))
	}
	if list, err := r.Checkpoints(ctx, runtime.CheckpointFilter{}); err != nil || len(list) != 1 {
		t.Errorf("checkpoints after it: %+v, %v", list, err)
	}
	if err := os.Remove(filepath.Join(root, "filler")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Restore(ctx, "box", runtime.RestoreOptions{}); err != nil {
		t.Error(err)
	}
}
