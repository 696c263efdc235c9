package docker

import (
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/enginetest"
)

// TestImageStore needs what TestDocker does, and Docker Engine 27. Its daemon has
// containerd's image store.
func TestImageStore(t *testing.T) {
	h := newHost(t, enginetest.ImageStore(t))
	if out := h.Docker(t, "info", "-f", "{{.DriverStatus}}"); !strings.Contains(out, "io.containerd.snapshotter.v1") {
		t.Fatalf("the daemon's storage: %s", out)
	}
	for _, c := range []struct {
		name string
		run  func(*box)
	}{
		{"checkpoint and restore", shows},
		{"older ones and files only", older},
		{"connections survive", connections},
		{"the daemon dies during a checkpoint", daemonInCheckpoint},
		{"the daemon dies during a restore", daemonInRestore},
		{"a read-only container", readOnly},
		{"hosts file", hostsFile},
		{"sandboxes of its own", ownSandboxes},
		{"commits", commits},
		{"secrets", secrets},
		{"reaped", reaped},
		{"killed anywhere", killedAnywhere},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(h.box(t)) })
	}
}
