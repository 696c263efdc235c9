package containerd_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	client "github.com/containerd/containerd"
	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/namespaces"
	"github.com/containerd/containerd/snapshots"

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
			Root: root, Run: filepath.Join(root, "run"), Address: d.Address,
			Monitor: []string{self, "monitor"}, Wrapper: wrapper,
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
			objects, err := objectsOf(d)
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range ids {
				for _, o := range objects {
					if strings.Contains(o, id) {
						found = append(found, o)
					}
				}
			}
			return found
		},
	})
}

// objectsOf describes what a containerd has, by calls of its own: a ctr for each
// kind would take much longer.
func objectsOf(d *enginetest.Containerd) (found []string, err error) {
	c, err := client.New(d.Address)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	// Not the test's context, which is over when it cleans up.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ctx = namespaces.WithNamespace(ctx, containerd.DefaultNamespace)
	containers, err := c.ContainerService().List(ctx)
	if err != nil {
		return nil, err
	}
	for _, made := range containers {
		found = append(found, "container "+made.ID)
	}
	list, err := c.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, err
	}
	for _, task := range list.Tasks {
		found = append(found, fmt.Sprintf("task %s of %s", task.ID, task.ContainerID))
	}
	held, err := c.LeasesService().List(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range held {
		found = append(found, fmt.Sprintf("lease %+v", l))
	}
	err = c.SnapshotService("overlayfs").Walk(ctx, func(_ context.Context, s snapshots.Info) error {
		found = append(found, fmt.Sprintf("snapshot %s on %s", s.Name, s.Parent))
		return nil
	})
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(d.State, func(path string, _ fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it went away while we walked
		}
		found = append(found, "file "+path)
		return err
	})
	return found, err
}
