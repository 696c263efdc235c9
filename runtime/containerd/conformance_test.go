package containerd_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/enginetest"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/backendtest"
	"github.com/agentbox/agentbox/runtime/containerd"
)

func TestMain(m *testing.M) {
	// The monitors of the tests' containers are this program, too.
	if len(os.Args) > 2 && os.Args[1] == "monitor" {
		if err := containerd.Monitor(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "monitor:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(enginetest.Main(m))
}

// TestConformance needs root, containerd, runc, criu and a static busybox.
func TestConformance(t *testing.T) {
	wrapper := filepath.Join(enginetest.Build(t, "", "agentbox-runtime"), "agentbox-runtime")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := enginetest.StartContainerd(t, enginetest.ContainerdOptions{})
	open := func(t *testing.T, root string) *containerd.Backend {
		b, err := containerd.Open(containerd.Options{
			Root: root, Run: filepath.Join(root, "run"), Address: d.Address, Monitor: []string{self, "monitor"}, Wrapper: wrapper,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = b.Close() })
		return b
	}
	backendtest.Run(t, backendtest.Factory{
		Lower: backendtest.BusyboxLower,
		Image: func(t *testing.T) (name, digest string) {
			img, err := open(t, t.TempDir()).Images().Import(t.Context(), "busybox", backendtest.BusyboxLower(t)[0])
			if err != nil {
				t.Fatal(err)
			}
			return img.Name, img.Digest
		},
		New:     func(t *testing.T, root string) runtime.Backend { return open(t, root) },
		Restart: func(t *testing.T) { d.Restart(t) },
		Leaks: func(t *testing.T, ids []string) (found []string) {
			for _, id := range ids {
				for _, what := range []string{"containers", "tasks", "snapshots", "leases"} {
					if out, err := d.Try("-n", containerd.DefaultNamespace, what, "ls"); err != nil || strings.Contains(out, id) {
						found = append(found, fmt.Sprintf("%s of containerd: %v %s", what, err, out))
					}
				}
				if out, _ := exec.Command("find", d.State, "-name", "*"+id+"*").Output(); len(out) > 0 {
					found = append(found, string(out))
				}
			}
			return found
		},
	})
}
