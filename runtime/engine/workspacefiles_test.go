package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

// TestBoundWorkspaces: the directories of workspaces may have so many files in all. What lies behind
// symlinks and mounts does not count, and what has the most is named.
func TestBoundWorkspaces(t *testing.T) {
	one, two, other := t.TempDir(), t.TempDir(), t.TempDir()
	fill := func(dir string, n int) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	fill(other, 5000)
	fill(filepath.Join(one, "src", "node_modules", "deep", "er"), 300) // 304 with the directories
	fill(filepath.Join(one, "cache"), 100)                             // 101
	fill(filepath.Join(one, "rest"), 9)                                // 10
	fill(two, 50)
	mounted := filepath.Join(one, "rest", "mounted")                                                             // 416 with it
	if err := errors.Join(os.Mkdir(mounted, 0o755), os.Symlink(other, filepath.Join(two, "link"))); err != nil { // 51
		t.Fatal(err)
	}
	if err := unix.Mount(other, mounted, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(mounted, 0); err != nil {
			t.Error(err)
		}
	}()
	mounts := []runtime.Mount{
		{Type: "bind", Source: other, Target: "/b"}, {Type: runtime.MountWorkspace, Source: one, Target: "/one"},
		{Type: runtime.MountWorkspace, Source: two, Target: "/two"},
	}
	for _, most := range []int64{-1, 0, 467} {
		if err := boundWorkspaces(t.Context(), mounts, most); err != nil {
			t.Errorf("%d: %v", most, err)
		}
	}
	for _, c := range []struct {
		most int64
		said string
	}{
		{466, two + ": more than 466 files"},
		{415, fmt.Sprintf("%s: more than 415 files, which every checkpoint looks at; of those found most are in "+
			"%[1]s/src/node_modules/deep (301), %[1]s/cache (100)", one)},
		{1, one + ": more than 1 files"},
	} {
		err := boundWorkspaces(t.Context(), mounts, c.most)
		var hinted *runtime.Error
		if !errors.Is(err, runtime.ErrInvalid) || !strings.Contains(err.Error(), c.said) || !errors.As(err, &hinted) ||
			!strings.Contains(hinted.Hint, fmt.Sprintf("--workspace-files %d", 4*c.most)) {
			t.Errorf("%d: %v, %+v", c.most, err, hinted)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := boundWorkspaces(ctx, mounts, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := exec.Command("sh", "-c", `cd "$0"; for i in $(seq 1500); do mkdir d; cd d || exit 1; done`, two).Run(); err != nil {
		t.Fatal(err)
	}
	if err := boundWorkspaces(t.Context(), mounts, 0); err != nil {
		t.Errorf("deeper than any path is long: %v", err)
	}
}
