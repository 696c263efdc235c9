package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What CRIU mounts for the time of a restore is none of the host's hierarchies:
// a monitor that was moved there in its last instant left files in its place.
func TestHierarchiesOfARestore(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts cgroup filesystems: run it as root")
	}
	before, err := Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{".criu.cgyard.abc/unified", "again"} {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(at, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", at, "cgroup2", 0, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	after, err := Hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	if len(after) == 0 || len(before) != len(after) {
		t.Fatalf("%d hierarchies, then %d", len(before), len(after))
	}
	for _, m := range after {
		if strings.HasPrefix(m.Path, dir) {
			t.Errorf("it lists %s", m.Path)
		}
	}
}
