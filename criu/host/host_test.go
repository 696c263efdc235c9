package host

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestSearchPath(t *testing.T) {
	for in, want := range map[string]string{
		"":                             "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"/usr/bin:/bin":                "/usr/local/sbin:/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin",
		"/opt/x:/usr/local/sbin:/sbin": "/opt/x:/usr/local/sbin:/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/bin",
		".:rel:/usr/local/sbin":        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	} {
		if got := SearchPath(in); got != want {
			t.Errorf("SearchPath(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestFind(t *testing.T) {
	a, b := t.TempDir(), t.TempDir()
	for _, p := range []string{a, b} {
		if err := os.WriteFile(filepath.Join(p, "tool-xyz"), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", a+":"+b)
	if got, err := Find("tool-xyz", nil); err != nil || got != filepath.Join(a, "tool-xyz") {
		t.Fatalf("Find = %q, %v", got, err)
	}
	self, err := os.Stat(filepath.Join(a, "tool-xyz"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := Find("tool-xyz", func(st os.FileInfo) bool { return os.SameFile(st, self) })
	if err != nil || got != filepath.Join(b, "tool-xyz") {
		t.Fatalf("Find past itself = %q, %v", got, err)
	}
	if _, err := Find("no-such-tool-xyz", nil); !errors.Is(err, fault.ErrNotFound) {
		t.Fatalf("Find of nothing: %v", err)
	}
}

// A killed restore leaves the container's files reachable below the runtime's
// state; sweeping must free them without touching one.
func TestSweepRestore(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts filesystems: run it as root")
	}
	root, files, work := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "odd[name]*")
	for _, d := range []string{filepath.Join(root, "c", "criu-root"), filepath.Join(work, ".criu.cgyard.abc")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(files, "precious"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(files, filepath.Join(root, "c", "criu-root"), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", filepath.Join(work, ".criu.cgyard.abc"), "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	// A yard of which the tmpfs is gone and a mount on what was below is left.
	torn := filepath.Join(work, ".criu.cgyard.torn", "a b", "unified")
	if err := os.MkdirAll(torn, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(files, torn, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(torn, "..", "cgroup.procs"), []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := SweepRestore(root, "c", work); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(work); err != nil || len(left) > 0 {
		t.Fatalf("left in the working directory: %v, %v", left, err)
	}
	if err := os.RemoveAll(filepath.Join(root, "c")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(files, "precious")); err != nil {
		t.Fatalf("the container's files went with the runtime's state: %v", err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), root) || strings.Contains(string(mounts), filepath.Dir(work)) {
		t.Fatal("still mounted")
	}
}
