package podman

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// Inspect lists the volumes whose data is in a directory of this host, and VolumeUsers the
// containers that could write there too.
func TestVolumes(t *testing.T) {
	source := t.TempDir()
	podman(t, "volume", "create", "-o", "type=none", "-o", "o=bind", "-o", "device="+source, "elsewhere")
	t.Cleanup(func() { podman(t, "volume", "rm", "-f", "named", "elsewhere") })
	b := newBox(t, "-v", "named:/data", "-v", "named:/again", "-v", "elsewhere:/elsewhere", "-v", "/anonymous", "-v",
		source+":/bound", "bt", "sh", "-c", "echo mine > /data/f; "+forever)
	find := func(is func(runtime.Volume) bool) runtime.Volume {
		t.Helper()
		list := b.inspect().Volumes
		i := slices.IndexFunc(list, is)
		if i < 0 || len(list) != 2 {
			t.Fatalf("volumes: %+v", list)
		}
		return list[i]
	}
	named := func(v runtime.Volume) bool { return v.Name == "named" }
	anonymous := func(v runtime.Volume) bool { return v.Target == "/anonymous" }
	v := find(named)
	if v.Target != "/data" && v.Target != "/again" {
		t.Errorf("%+v", v)
	}
	eventually(t, "it has written", func() bool {
		data, _ := os.ReadFile(filepath.Join(v.Path, "f"))
		return string(data) == "mine\n"
	})
	other := newBox(t, "--name", "other", "-v", "named:/d", "bt", "sh", "-c", forever)
	bound := newBox(t, "--name", "bound", "-v", v.Path+":/d", "bt", "sh", "-c", forever)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(v.Path, link))
	linked := newBox(t, "--name", "linked", "-v", link+":/d", "bt", "sh", "-c", forever)
	above := newBox(t, "--name", "above", "-v", filepath.Dir(v.Path)+":/d", "bt", "sh", "-c", forever)
	newBox(t, "--name", "reader", "-v", filepath.Dir(v.Path)+":/d:ro", "bt", "sh", "-c", forever)
	newBox(t, "--name", "stranger", "-v", "/data", "bt", "sh", "-c", forever)
	is := func(want ...string) {
		t.Helper()
		users, err := b.VolumeUsers(b.ctx, b.id, []runtime.Volume{find(named), find(anonymous)})
		must(t, err)
		if got := slices.Sorted(slices.Values(users["named"])); !slices.Equal(got, want) {
			t.Errorf("volume named is used by %q, want %q", got, want)
		}
		if len(users) > 1 || len(want) == 0 && len(users) > 0 {
			t.Errorf("volumes are used so: %q", users)
		}
	}
	is("above", "bound", "linked", "other")
	for _, b := range []*box{linked, above} {
		must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	}
	is("bound", "other")
	must(t, other.Pause(b.ctx, other.id))
	must(t, bound.Stop(b.ctx, bound.id, runtime.StopOptions{}))
	is("other")
	podman(t, "rm", "-f", "-t", "0", "other")
	is()
	must(t, b.Stop(b.ctx, b.id, runtime.StopOptions{}))
	is()
}

// A part of a volume is not where its data is.
func TestPartOfVolume(t *testing.T) {
	b := newBox(t, "-v", "whole:/data", "bt", "sh", "-c", forever)
	t.Cleanup(func() { podman(t, "volume", "rm", "-f", "whole") })
	c, err := b.look(b.ctx, b.id)
	must(t, err)
	for part, want := range map[string]int{"": 1, "dir": 0} {
		c.Mounts[0].SubPath = part
		if list, err := b.volumes(b.ctx, c); err != nil || len(list) != want {
			t.Errorf("of %q: %+v, %v", part, list, err)
		}
	}
}
