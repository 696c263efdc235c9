package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/registry"
	"github.com/agentbox/agentbox/runtime/store"
)

func open(t *testing.T) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

type tree map[string][]byte

func noise(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 9))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32()) & 0x7f
	}
	return b
}

// take makes a full checkpoint of files and one page image.
func take(t *testing.T, s *store.Store, c store.Checkpoint, files tree, pages []byte) store.Checkpoint {
	t.Helper()
	ctx := t.Context()
	d, err := s.BeginCheckpoint(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	entries := []overlay.Entry{{Path: ".", Type: overlay.TypeDir, Mode: 0o755}}
	for _, p := range slices.SortedFunc(maps.Keys(files), overlay.ComparePaths) {
		e := overlay.Entry{Path: p, Type: overlay.TypeFile, Mode: 0o644, Size: int64(len(files[p]))}
		if e.Digest, e.Chunks, err = d.Sink().Data(ctx, e.Size, bytes.NewReader(files[p])); err != nil {
			t.Fatal(err)
		}
		entries = append(entries, e)
	}
	err = d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
		for _, e := range entries {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = os.WriteFile(filepath.Join(d.CRIUDir(), "pages-1.img"), pages, 0o600)
	}
	if err == nil {
		err = d.PutImages(ctx)
	}
	var done store.Checkpoint
	if err == nil {
		done, err = d.Commit(ctx, store.Manifest{
			TCP: "established", Processes: &store.Processes{Count: 1, List: []store.Process{{Pid: 1, Command: "sh"}}},
		})
	}
	if err != nil {
		t.Fatal(err, d.Abort(context.WithoutCancel(ctx), err))
	}
	return done
}

// same wants the checkpoint to be whole and to hold exactly this.
func same(t *testing.T, s *store.Store, id string, files tree, pages []byte) {
	t.Helper()
	r, err := s.OpenCheckpoint(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := r.Verify(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	stream, err := r.Tree(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	got := tree{}
	err = overlay.ReadTree(stream, func(e overlay.Entry) error {
		if e.Type != overlay.TypeFile {
			return nil
		}
		f, err := r.Source().Data(t.Context(), e)
		if err != nil {
			return err
		}
		defer f.Close()
		got[e.Path], err = io.ReadAll(f)
		return err
	})
	if err := errors.Join(err, stream.Close()); err != nil {
		t.Fatal(err)
	}
	if !maps.EqualFunc(got, files, bytes.Equal) {
		t.Fatalf("%d files came back, %d went in", len(got), len(files))
	}
	im, err := r.Image(t.Context(), "pages-1.img")
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(im)
	if err := errors.Join(err, im.Close()); err != nil || !bytes.Equal(data, pages) {
		t.Fatalf("pages differ: %v", err)
	}
}

func push(t *testing.T, s *store.Store, ref, id string, o registry.Options) registry.Pushed {
	t.Helper()
	r, err := s.OpenCheckpoint(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	m := r.Manifest()
	data, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	about := registry.About{ID: m.ID, Manifest: data, Image: m.ImageDigest}
	if m.Parent != "" {
		about.Ancestors = []string{m.Parent}
	}
	p, err := registry.Push(t.Context(), ref, r, about, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// pull does what an Engine does.
func pull(
	ctx context.Context, s *store.Store, ref string, o registry.Options,
) (store.Checkpoint, registry.Pulled, error) {
	var d *store.Draft
	p, err := registry.Pull(ctx, ref, func(ctx context.Context, data []byte) (registry.Target, error) {
		m, err := store.ParseManifest(data)
		if err != nil {
			return nil, err
		}
		d, err = s.BeginCheckpoint(ctx, store.Checkpoint{ID: m.ID, Name: m.Name, SandboxID: m.SandboxID,
			SandboxName: m.SandboxName, Kind: m.Kind,
			Parent: m.Parent, Trigger: m.Trigger, Created: m.Created, ImageDigest: m.ImageDigest,
			Labels: m.Labels, Spec: m.Spec})
		return d, err
	}, o)
	var done store.Checkpoint
	if err == nil {
		var m store.Manifest
		if m, err = store.ParseManifest(p.Manifest); err == nil {
			done, err = d.CommitAs(ctx, m)
		}
	}
	if d != nil {
		if err != nil {
			err = errors.Join(err, d.Abort(context.WithoutCancel(ctx), err))
		} else {
			err = d.Close()
		}
	}
	return done, p, err
}

func TestStores(t *testing.T) {
	broken := "" // the digest of a blob whose transfers break
	inner := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)), ggcr.WithReferrersSupport(true))
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if broken != "" && r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/"+broken) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	defer web.Close()
	host := strings.TrimPrefix(web.URL, "http://")
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	o := registry.Options{Transport: tr, Scratch: t.TempDir()}

	from, to := open(t), open(t)
	files := tree{"big": noise(1, 3<<20)}
	for i := range 300 {
		files[fmt.Sprintf("f%03d", i)] = noise(uint64(100+i), 2000)
	}
	pages := noise(2, 4<<20)
	box := store.Sandbox{
		ID: store.NewID(), Name: "web", Backend: "oci", Spec: json.RawMessage(`{"id":"x"}`), Image: "busybox",
		ImageDigest: "sha256:1", Lower: []string{"/a"},
	}
	if err := from.PutSandbox(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	base := store.Checkpoint{
		SandboxID: box.ID, SandboxName: box.Name, Kind: store.KindFull, Trigger: "manual",
		ImageDigest: box.ImageDigest, Spec: box.Spec,
	}
	one := take(t, from, base, files, pages)
	whole := push(t, from, host+"/team/web:one", one.ID, o)
	got, _, err := pull(t.Context(), to, host+"/team/web:one", o)
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest != one.Digest || got.ID != one.ID || got.Status != store.Ready {
		t.Errorf("pulled %+v, pushed %+v", got, one)
	}
	same(t, to, one.ID, files, pages)

	// A little changes.
	later, laterPages := maps.Clone(files), bytes.Clone(pages)
	for i := range 3 {
		later[fmt.Sprintf("f%03d", 50*i)] = noise(uint64(900+i), 2000)
	}
	delete(later, "f299")
	for i := 0; i < len(laterPages); i += 64 * 4096 { // 1.5 % of the pages
		copy(laterPages[i:], noise(uint64(5000+i), 4096))
	}
	next := base
	next.Parent = one.ID
	two := take(t, from, next, later, laterPages)
	p := push(t, from, host+"/team/web:two", two.ID, o)
	t.Logf("first %d bytes; then %d travelled, %d skipped", whole.Bytes, p.Bytes, p.Skipped)
	if p.Bytes > whole.Bytes/20 || p.Skipped < whole.Bytes/2 {
		t.Errorf("%+v after %+v", p, whole)
	}
	got, pulled, err := pull(t.Context(), to, host+"/team/web:two", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("pulled %d bytes, skipped %d", pulled.Bytes, pulled.Skipped)
	if got.Digest != two.Digest || pulled.Bytes > whole.Bytes/20 {
		t.Errorf("%+v, %d bytes", got, pulled.Bytes)
	}
	same(t, to, two.ID, later, laterPages)
	same(t, to, one.ID, files, pages)

	// A pull of what is there is refused before anything travels.
	if _, _, err := pull(t.Context(), to, host+"/team/web:two", o); !errors.Is(err, fault.ErrExists) {
		t.Errorf("%v", err)
	}
	same(t, to, two.ID, later, laterPages)

	// A pull that fails leaves nothing that is ready, and can be repeated.
	third := open(t)
	var m struct{ Layers []struct{ Digest string } }
	resp, err := http.Get(web.URL + "/v2/team/web/manifests/two")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(json.NewDecoder(resp.Body).Decode(&m), resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
	if len(m.Layers) != 5 {
		t.Fatalf("layers: %+v", m.Layers)
	}
	broken = m.Layers[3].Digest
	if _, _, err := pull(t.Context(), third, host+"/team/web:two", o); !errors.Is(err, fault.ErrDenied) {
		t.Fatalf("%v", err)
	}
	if _, err := third.OpenCheckpoint(t.Context(), two.ID); err == nil {
		t.Error("half a checkpoint is ready")
	}
	broken = ""
	// The record of the failed pull has the id.
	if err := third.RemoveCheckpoint(t.Context(), two.ID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := pull(t.Context(), third, host+"/team/web@"+strings.Split(p.Reference, "@")[1], o); err != nil {
		t.Fatal(err)
	}
	same(t, third, two.ID, later, laterPages)

	left, err := os.ReadDir(o.Scratch)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the scratch directory: %v, %v", left, err)
	}
}
