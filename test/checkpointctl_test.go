//go:build vm

package test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestCheckpointctl has checkpointctl, which few distributions have, read what
// agentbox exports: what the archive is of, its processes with their files and
// environment, and its mounts.
func TestCheckpointctl(t *testing.T) {
	b := newBox(t)
	b.start("c", "--network", "none", "-e", "MARK=here", "busybox", "sh", "-c", "exec 3>/open; sleep 5000 & "+counter)
	b.reaches("c", 3)
	id := b.checkpoint("c")
	file := filepath.Join(b.root, "c.tar.zst")
	b.ok("checkpoint", "export", id, file)
	said := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("checkpointctl", append(args, file)...).CombinedOutput()
		if err != nil {
			t.Fatalf("checkpointctl %q: %v\n%s", args, err, out)
		}
		t.Logf("checkpointctl %q:\n%s", args, out)
		return string(out)
	}
	has := func(out string, words ...string) {
		t.Helper()
		for _, w := range words {
			if !strings.Contains(out, w) {
				t.Errorf("%q is not in\n%s", w, out)
			}
		}
	}
	has(said("show"), "c", "busybox", "Podman")
	has(said("inspect", "--all", "--ps-tree-cmd", "--ps-tree-env"), "CRIU dump statistics", "Engine: Podman",
		"sh -c exec 3>", "sleep 5000", "/open", "MARK=here", "/proc")
}
