package docker_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentbox/agentbox/internal/enginetest"
	"github.com/agentbox/agentbox/runtime"
)

// Every other container that can write to a container's volume is reported, however it has
// the volume. It needs what TestConformance does.
func TestVolumeUsers(t *testing.T) {
	e := start(t, nil)
	b := e.open(t, enginetest.Dir(t))
	run := func(args ...string) string {
		t.Helper()
		id := e.Docker(t, append(append([]string{"run", "-d"}, args...), imageName, "sleep", "1000")...)
		t.Cleanup(func() { e.Docker(t, "rm", "-f", id) })
		return id
	}
	s, err := b.Adopt(t.Context(), run("-v", "named:/data", "-v", "/anonymous"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := b.Inspect(t.Context(), s.ID)
	if err != nil || len(c.Volumes) != 2 {
		t.Fatalf("volumes: %+v, %v", c.Volumes, err)
	}
	at := c.Volumes[slices.IndexFunc(c.Volumes, func(v runtime.Volume) bool { return v.Name == "named" })].Path
	link := filepath.Join(enginetest.Dir(t), "link")
	if err := os.Symlink(at, link); err != nil {
		t.Fatal(err)
	}
	run("--name", "other", "-v", "named:/d")
	run("--name", "bound", "-v", at+":/d:ro")
	run("--name", "linked", "-v", link+":/d")
	run("--name", "above", "-v", filepath.Dir(at)+":/d")
	run("--name", "reader", "-v", filepath.Dir(at)+":/d:ro")
	run("--name", "stranger", "-v", "/data", "--tmpfs", "/tmp")
	e.Docker(t, "pause", "other")
	is := func(want ...string) {
		t.Helper()
		users, err := b.VolumeUsers(t.Context(), s.ID, c.Volumes)
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Sorted(slices.Values(users["named"])); !slices.Equal(got, want) || len(users) != 1 {
			t.Errorf("volumes are used so: %q; want of the named one %q", users, want)
		}
	}
	is("above", "bound", "linked", "other")
	e.Docker(t, "kill", "above")
	is("bound", "linked", "other")
}
