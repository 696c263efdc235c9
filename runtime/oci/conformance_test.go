package oci_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/oci"
)

// TestConformance needs root, runc, conmon, criu and a static busybox.
func TestConformance(t *testing.T) {
	wrapper := filepath.Join(t.TempDir(), "agentbox-runtime")
	build := exec.Command("go", "build", "-o", wrapper, "../../cmd/agentbox-runtime")
	// It is the init of sandboxes too, whatever libc their image has.
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build agentbox-runtime: %v\n%s", err, out)
	}
	backendtest.Run(t, backendtest.Factory{
		// as by default; what has none is tested by hand here and end to end
		IDs:   &idmap.Map{Base: 1 << 20, Size: 1 << 16},
		Lower: backendtest.BusyboxLower,
		New: func(t *testing.T, root string) runtime.Backend {
			b, err := oci.Open(oci.Options{Root: root, Run: filepath.Join(root, "run"), Wrapper: wrapper})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
	})
}
