package portable

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store"
)

// The store has what is exported, and takes what is imported.
var (
	_ Data   = (*store.Reader)(nil)
	_ Target = (*store.Draft)(nil)
)

func openStore(t testing.TB) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), t.TempDir())
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// stored makes a checkpoint with all that there can be, in a store.
func stored(t testing.TB, s *store.Store) (id string) {
	t.Helper()
	dir, volume := t.TempDir(), t.TempDir()
	everything(t, dir)
	large := make([]byte, 3<<20)
	_, _ = rand.Read(large)
	must(t, os.WriteFile(filepath.Join(dir, "large"), large, 0o600))
	must(t, os.WriteFile(filepath.Join(volume, "v"), []byte("volume"), 0o600))
	d, err := s.BeginCheckpoint(t.Context(), store.Checkpoint{
		SandboxID: strings.Repeat("ab", 16), SandboxName: "box", Kind: store.KindFull,
		Trigger: "test", Created: created,
		ImageDigest: "sha256:" + strings.Repeat("d", 64), Labels: map[string]string{"a": "b"},
		Spec: json.RawMessage(`{"image":"bb","args":["sh"],"hostname":"box","workdir":"/","network":{"mode":"none"},"resources":{}}`),
	})
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	for i, from := range []string{dir, volume} {
		must(t, d.PutTree(t.Context(), i, func(fn func(overlay.Entry) error) error {
			return walk(t, d.Sink(), from, fn)
		}))
	}
	must(t, os.WriteFile(filepath.Join(d.CRIUDir(), "inventory.img"), []byte("inventory"), 0o600))
	for i := range 9 { // so that the manifest does not name them
		must(t, os.WriteFile(filepath.Join(d.CRIUDir(), fmt.Sprintf("route-%d.img", 1+i)), []byte("route"), 0o600))
	}
	must(t, os.WriteFile(filepath.Join(d.CRIUDir(), "pages-1.img"), append(large, large...), 0o600))
	must(t, d.PutImages(t.Context()))
	c, err := d.Commit(t.Context(), store.Manifest{
		Volumes: []store.Volume{{Name: "data"}}, Processes: &store.Processes{Count: 1},
		Status: "running", TCP: "established",
		Managed: map[string]store.Managed{"/etc/hosts": {Mode: 0o644, Data: []byte("127.0.0.1 box\n")}},
	})
	must(t, err)
	return c.ID
}

func reader(t testing.TB, s *store.Store, id string) *store.Reader {
	t.Helper()
	r, err := s.OpenCheckpoint(t.Context(), id)
	must(t, err)
	t.Cleanup(func() { must(t, r.Close()) })
	return r
}

func TestStore(t *testing.T) {
	from, to := openStore(t), openStore(t)
	old := reader(t, from, stored(t, from))
	raw, err := old.Manifest().Encode()
	must(t, err)
	if list := old.Manifest().Processes; list.Listed == nil || list.Listed.Entries != 11 {
		t.Errorf("%+v", list)
	}
	archive := exported(t, Checkpoint{Manifest: raw, Data: old}, Options{})
	if again := exported(t, Checkpoint{Manifest: raw, Data: old}, Options{}); !bytes.Equal(archive, again) {
		t.Error("the second export has other bytes")
	}

	a, err := Open(t.Context(), bytes.NewReader(archive), OpenOptions{Scratch: t.TempDir()})
	must(t, err)
	defer a.Close()
	m, err := store.ParseManifest(a.Facts().Manifest)
	must(t, err)
	d, err := to.BeginCheckpoint(t.Context(), store.Checkpoint{
		ID: m.ID, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
		Trigger: m.Trigger, Created: m.Created,
		ImageDigest: m.ImageDigest, Labels: m.Labels, Spec: m.Spec,
	})
	must(t, err)
	defer d.Close()
	_, err = a.Import(t.Context(), d, ImportOptions{})
	must(t, err)
	c, err := d.Commit(t.Context(), m)
	must(t, err)
	got := reader(t, to, c.ID)
	// Cut anew by the same rules, it is the same checkpoint to the last byte.
	if got.Digest() != old.Digest() {
		now, err := got.Manifest().Encode()
		must(t, err)
		t.Errorf("the manifest was\n%s\nand is\n%s", raw, now)
	}
	must(t, got.Verify(t.Context(), true))
	for i := range 2 {
		if x, y := readTree(t, old, i), readTree(t, got, i); !bytes.Equal(x, y) {
			t.Errorf("tree %d was\n%s\nand is\n%s", i, x, y)
		}
	}
	one, two := filepath.Join(t.TempDir(), "x"), filepath.Join(t.TempDir(), "x")
	must(t, old.ExtractImages(t.Context(), one))
	must(t, got.ExtractImages(t.Context(), two))
	for _, name := range []string{"inventory.img", "route-9.img", "pages-1.img"} {
		x, err := os.ReadFile(filepath.Join(one, name))
		must(t, err)
		y, err := os.ReadFile(filepath.Join(two, name))
		must(t, err)
		if !bytes.Equal(x, y) {
			t.Errorf("%s is another", name)
		}
	}
	if again := exported(t, Checkpoint{Manifest: raw, Data: got}, Options{}); !bytes.Equal(archive, again) {
		t.Error("the export of the import has other bytes")
	}
}

func readTree(t testing.TB, r *store.Reader, n int) []byte {
	t.Helper()
	tree, err := r.Tree(t.Context(), n)
	must(t, err)
	defer tree.Close()
	data, err := io.ReadAll(tree)
	must(t, err)
	return data
}
