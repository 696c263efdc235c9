package store

import (
	"errors"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestManifestWorkspaces: a workspace is named by its path in the sandbox, once, and has at most one
// directory below it.
func TestManifestWorkspaces(t *testing.T) {
	digest := digestOf(nil)
	tree := Tree{Entries: 2, Data: 7, Bytes: 5, Digest: digest, Chunks: Chunks{{Digest: digest, Len: 5}}}
	parsed := func(volumes ...Volume) (Manifest, error) {
		m := describe()
		m.Version, m.ID, m.SandboxID, m.SandboxName, m.Kind = Version, NewID(), NewID(), "c", KindFiles
		m.Created, m.Spec, m.Processes, m.Files = time.Unix(1, 5), []byte("{}"), nil, []Tree{tree}
		for i := range volumes {
			volumes[i].Files = tree
		}
		m.Volumes = volumes
		data, err := m.Encode()
		if err != nil {
			return m, err
		}
		return ParseManifest(data)
	}
	m, err := parsed(Volume{Name: "/work"}, Volume{Name: "/work", Below: true}, Volume{Name: "vol"}, Volume{Name: "/work/in"})
	if err != nil {
		t.Fatal(err)
	}
	for tree, want := range []int{0, 2, 0, 0, 0, 0} {
		if got := m.Below(tree); got != want {
			t.Errorf("below tree %d lies %d, want %d", tree, got, want)
		}
	}
	for _, bad := range [][]Volume{
		{{Name: "/"}}, {{Name: "/work/"}}, {{Name: "/work/../etc"}}, {{Name: "//work"}}, {{Name: "/a\nb"}},
		{{Name: "/work"}, {Name: "/work"}}, {{Name: "vol"}, {Name: "vol"}}, {{Name: "/work", Below: true}},
		{{Name: "vol"}, {Name: "vol", Below: true}},
		{{Name: "/work"}, {Name: "/work", Below: true}, {Name: "/work", Below: true}},
	} {
		if _, err := parsed(bad...); !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
