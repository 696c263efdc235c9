package oci

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/record"
	"github.com/agentbox/agentbox/runtime/internal/userns"
)

// TestIDsElsewhere: a root sees which ranges the running sandboxes of others have,
// and not those of its own.
func TestIDsElsewhere(t *testing.T) {
	withWrapper := func(o *Options) { o.Wrapper = wrapperBinary(t) }
	mine, other := newBox(t, withWrapper), newBox(t, withWrapper)
	for _, x := range []*fixture{mine, other} {
		for {
			shut, err := userns.PrivateParent(x.box.Base)
			must(t, err)
			if shut == "" {
				break
			}
			must(t, os.Chmod(shut, 0o711)) // a test's directories are 0700
		}
	}
	ids := idmap.Map{Base: 1<<31 - 1<<17, Size: 1 << 16}
	id := mine.up(with(spec("sleep", "1000"), func(s *runtime.Spec) { s.IDs = &ids }))
	for x, want := range map[*fixture]bool{mine: false, other: true} {
		list, err := x.IDsElsewhere()
		must(t, err)
		if slices.Contains(list, ids.Base) != want {
			t.Errorf("%v, of my own root: %v", list, x == mine)
		}
	}
	must(t, mine.Remove(t.Context(), id))
	list, err := other.IDsElsewhere()
	must(t, err)
	if slices.Contains(list, ids.Base) {
		t.Errorf("%v after it was removed", list)
	}
}

// TestHostMapsKept: what was found out about the host is looked up, and found
// out anew when it is of other programs or damaged.
func TestHostMapsKept(t *testing.T) {
	x := newBox(t, func(o *Options) { o.Wrapper = wrapperBinary(t) })
	path := x.box.Run + "/userns.json"
	first, err := x.hostMaps(t.Context())
	must(t, err)
	of, err := x.mapsOf()
	must(t, err)
	must(t, record.WriteJSON(path, mapping{of, "as it is kept"}, false))
	if why, err := x.hostMaps(t.Context()); why != "as it is kept" || err != nil {
		t.Errorf("%q, %v", why, err)
	}
	for _, damage := range []func(){
		func() { must(t, record.WriteJSON(path, mapping{"another kernel", "as it is kept"}, false)) },
		func() { write(t, path, "{", 0o600) },
	} {
		damage()
		left := filepath.Join(x.box.Base, ".userns", "merged") // by a trial that was killed
		must(t, os.MkdirAll(left, 0o700))
		must(t, unix.Mount("tmpfs", left, "tmpfs", 0, ""))
		if why, err := x.hostMaps(t.Context()); why != first || err != nil {
			t.Errorf("%q, %v; at first %q", why, err, first)
		}
		if _, err := os.Lstat(filepath.Dir(left)); !os.IsNotExist(err) {
			t.Errorf("the trial is still there: %v", err)
		}
	}
}
