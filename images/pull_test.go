package images

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/fault"
)

// blob is a layer of a test, compressed in some way.
func blob(t testing.TB, kind string, stream []byte) source.Layer {
	t.Helper()
	var b bytes.Buffer
	mt := string(types.OCILayer)
	switch kind {
	case "gzip":
		w := gzip.NewWriter(&b)
		_, err := w.Write(stream)
		ok(t, errors.Join(err, w.Close()))
	case "zstd":
		w, err := zstd.NewWriter(&b)
		ok(t, err)
		_, err = w.Write(stream)
		ok(t, errors.Join(err, w.Close()))
		mt = string(types.OCILayerZStd)
	default:
		b.Write(stream)
		mt = string(types.OCIUncompressedLayer)
	}
	data := b.Bytes()
	return source.Layer{Digest: digestOf(data), Size: int64(len(data)), MediaType: mt, DiffID: digestOf(stream),
		Open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

func configOf(t testing.TB, layers []source.Layer) []byte {
	t.Helper()
	f := v1.ConfigFile{
		OS: "linux", Architecture: "amd64", RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Cmd: []string{"sh"}, User: "7"},
	}
	for i, l := range layers {
		h, err := v1.NewHash(l.DiffID)
		ok(t, err)
		f.RootFS.DiffIDs = append(f.RootFS.DiffIDs, h)
		f.History = append(f.History, v1.History{CreatedBy: fmt.Sprint("step ", i)},
			v1.History{CreatedBy: "ENV", EmptyLayer: true})
	}
	b, err := json.Marshal(f)
	ok(t, err)
	return b
}

func take(t testing.TB, s *Store, name string, layers ...source.Layer) (image.Image, error) {
	t.Helper()
	return s.take(ctx, reference.Reference{}, "docker.io/library/"+name+":latest",
		made{configOf(t, layers), layers}, image.PullOptions{})
}

func noise(n int, seed uint64) string {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return string(b)
}

// pushed is an image in a registry in this process, and the requests it gets.
type pushed struct {
	ref    string
	handle atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool] // true: it has answered
	blobs  atomic.Int64
}

func push(t testing.TB, layers ...source.Layer) *pushed {
	t.Helper()
	p := &pushed{}
	reg := registry.New(registry.WithBlobHandler(registry.NewInMemoryBlobHandler()))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/blobs/sha256") && r.Method == http.MethodGet {
			p.blobs.Add(1)
			if h := p.handle.Load(); h != nil && (*h)(w, r) {
				return
			}
		}
		reg.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	p.ref = strings.TrimPrefix(srv.URL, "http://") + "/team/web:1"
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: "linux", Architecture: "amd64", Config: v1.Config{Cmd: []string{"sh"}, Env: []string{"A=b"}},
	})
	ok(t, err)
	for _, l := range layers {
		r, err := l.Open(ctx)
		ok(t, err)
		data, err := io.ReadAll(r)
		ok(t, err)
		id, err := v1.NewHash(l.DiffID)
		ok(t, err)
		img, err = mutate.Append(img, mutate.Addendum{Layer: withDiffID{static.NewLayer(data,
			types.MediaType(l.MediaType)), id}, MediaType: types.MediaType(l.MediaType)})
		ok(t, err)
	}
	img = mutate.ConfigMediaType(mutate.MediaType(img, types.OCIManifestSchema1), types.OCIConfigJSON)
	ref, err := reference.Parse(p.ref, "")
	ok(t, err)
	_, err = source.Write(ctx, ref, img, image.SourceOptions{Insecure: true})
	ok(t, err)
	return p
}

type withDiffID struct {
	v1.Layer
	id v1.Hash
}

func (l withDiffID) DiffID() (v1.Hash, error) { return l.id, nil }

var insecure = image.PullOptions{Policy: image.PullAlways, Source: image.SourceOptions{Insecure: true}}

func TestPull(t *testing.T) {
	s := store(t)
	layers := []source.Layer{
		blob(t, "gzip", rootfs(t, "one")),
		blob(t, "zstd", archive(t, ent{tar.Header{Name: "etc/.wh.f"}, ""}, ent{tar.Header{Name: "etc/g"}, "two"})),
		blob(t, "", archive(t, ent{tar.Header{Name: "opt/", Typeflag: tar.TypeDir, Mode: 0o700}, ""})),
	}
	p := push(t, layers...)
	opts := insecure
	var last map[string]image.Progress
	opts.Progress = func(p image.Progress) { last[p.Layer] = p }
	last = map[string]image.Progress{}
	img, err := s.Pull(ctx, p.ref, opts)
	ok(t, err)
	if img.Name != p.ref || len(img.Layers) != 3 || img.Platform != "linux/amd64" ||
		!slices.Equal(img.Config.Env, []string{"A=b"}) || len(img.RepoDigests) != 1 || img.Size == 0 {
		t.Errorf("%+v", img)
	}
	ok(t, s.Verify(ctx, img.Digest))
	for _, l := range layers {
		if last[l.Digest].Stage != image.StageDone || last[l.Digest].Done != l.Size {
			t.Errorf("%+v", last)
		}
	}
	// By all its names, without asking.
	p.blobs.Store(0)
	d, err := s.Inspect(ctx, p.ref)
	ok(t, err)
	repo, _, _ := strings.Cut(p.ref, ":1")
	for _, ref := range []string{
		p.ref, "docker://" + p.ref, img.Digest, img.Digest[7:19], repo + "@" + d.ManifestDigest, img.RepoDigests[0],
	} {
		if got, err := s.Pull(ctx, ref, image.PullOptions{}); err != nil || got.Digest != img.Digest {
			t.Errorf("%s: %+v %v", ref, got, err)
		}
		if got, err := s.Pull(ctx, ref, image.PullOptions{Policy: image.PullNever}); err != nil ||
			got.Digest != img.Digest {
			t.Errorf("%s: %+v %v", ref, got, err)
		}
	}
	if len(d.LayerList) != 3 || d.LayerList[1].MediaType != string(types.OCILayerZStd) || d.Source != p.ref ||
		len(d.Names) != 1 || digestOf(d.RawConfig) != img.Digest {
		t.Errorf("%+v", d)
	}
	again, err := s.Pull(ctx, p.ref, opts)
	if err != nil || again.Digest != img.Digest || last[layers[0].Digest].Stage != image.StagePresent {
		t.Errorf("%+v %v %v", again, last, err)
	}
	if n := p.blobs.Load(); n > 1 { // the configuration
		t.Errorf("%d blobs of an image that is here", n)
	}
	if _, err := s.Pull(ctx, "nowhere",
		image.PullOptions{Policy: image.PullNever}); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if _, err := s.Pull(ctx, "x", image.PullOptions{Policy: "often"}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	// A layer that was deleted comes again.
	ok(t, os.RemoveAll(filepath.Dir(img.Lower[0])))
	again, err = s.Pull(ctx, p.ref, image.PullOptions{Source: insecure.Source})
	ok(t, err)
	ok(t, s.Verify(ctx, again.Digest))

	ok(t, s.Tag(ctx, p.ref, "web:2"))
	if tagged, err := s.Resolve(ctx, "web:2"); err != nil || tagged.Name != "web:2" || tagged.Digest != img.Digest {
		t.Errorf("%+v %v", tagged, err)
	}
	if err := s.Tag(ctx, "web:3", "x"); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if err := s.Tag(ctx, "web:2", "x@"+img.Digest); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	ok(t, s.Remove(ctx, p.ref, nil))
	ok(t, s.Verify(ctx, img.Digest))
	ok(t, s.Remove(ctx, "web:2", nil))
	leftovers(t, s, 0)
}

func TestPrune(t *testing.T) {
	s := store(t)
	base := blob(t, "", rootfs(t, "base"))
	var ids []string
	for _, n := range []string{"a", "b", "c"} {
		img, err := take(t, s, n, base, blob(t, "gzip", rootfs(t, n)))
		ok(t, err)
		ids = append(ids, img.Digest)
	}
	_, err := s.Resolve(ctx, "busybox")
	ok(t, err)
	gone, freed, err := s.Prune(ctx, false, nil)
	if err != nil || len(gone) != 0 || freed != 0 {
		t.Errorf("%v %d %v", gone, freed, err)
	}
	_, err = take(t, s, "a", base) // the old one has no name any more
	ok(t, err)
	gone, freed, err = s.Prune(ctx, false, nil)
	if err != nil || len(gone) != 1 || gone[0].Digest != ids[0] || freed != 3 {
		t.Errorf("%v %d %v", gone, freed, err)
	}
	gone, _, err = s.Prune(ctx, true, func(d string) bool { return d == ids[1] })
	if err != nil || len(gone) != 2 {
		t.Errorf("%v %v", gone, err)
	}
	if img, err := s.Resolve(ctx, "b"); err != nil || img.Digest != ids[1] {
		t.Errorf("%+v %v", img, err)
	}
	leftovers(t, s, 3) // b's and busybox's
}

// One of many pulls of the same layer, in this process and others, unpacks it.
func TestPullAtOnce(t *testing.T) {
	s := store(t)
	p := push(t, blob(t, "gzip", archive(t, ent{tar.Header{Name: "etc/f"}, noise(1<<20, 1)})))
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			if i < 3 {
				if _, err := s.Pull(ctx, p.ref, insecure); err != nil {
					t.Error(err)
				}
			} else if out, err := other(filepath.Dir(s.dir), "IMAGES_TEST_PULL="+p.ref); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	if n := p.blobs.Load(); n > 7 { // six configurations
		t.Errorf("%d blobs were asked for", n)
	}
	img, err := s.Resolve(ctx, p.ref)
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	leftovers(t, s, 1)
}

// A pull that ends early leaves nothing that is used, and the next one requests only the rest.
func TestPullResumes(t *testing.T) {
	s := store(t)
	l := blob(t, "", archive(t, ent{tar.Header{Name: "etc/f"}, noise(6<<20, 2)}))
	p := push(t, l, blob(t, "gzip", rootfs(t, "whole")))
	cut, cancel := context.WithCancel(ctx)
	half := func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, l.Digest) {
			return false
		}
		body, err := l.Open(ctx)
		if err != nil {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(l.Size))
		_, _ = io.CopyN(w, body, 3<<20)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	}
	p.handle.Store(&half)
	opts := insecure
	opts.Progress = func(p image.Progress) {
		if p.Layer == l.Digest && p.Done > 2<<20 || p.Stage == image.StageDone {
			time.AfterFunc(50*time.Millisecond, cancel) // for the other layer to arrive
		}
	}
	if _, err := s.Pull(cut, p.ref, opts); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	hex, _ := hexOf(l.DiffID)
	if _, err := os.Stat(s.path("tmp", tmpLayer+hex)); err == nil {
		t.Error("the half layer is still there")
	}
	if list, err := s.List(ctx); err != nil || len(list) != 0 {
		t.Errorf("%v %v", list, err)
	}
	var asked string
	rest := func(w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, l.Digest) {
			asked = r.Header.Get("Range")
		}
		return false
	}
	p.handle.Store(&rest)
	part, err := os.ReadFile(s.path("tmp", tmpPartial+l.Digest[7:]))
	ok(t, err)
	img, err := s.Pull(ctx, p.ref, insecure)
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	if !strings.HasPrefix(asked, fmt.Sprintf("bytes=%d-", len(part))) || len(part) < 2<<20 {
		t.Errorf("the layer was asked for from %q, and %d bytes of it were here", asked, len(part))
	}
	leftovers(t, s, 2)

	// A beginning that is another blob's is forgotten.
	s = store(t)
	part[1000] ^= 1
	ok(t, os.WriteFile(s.path("tmp", tmpPartial+l.Digest[7:]), part, 0o600))
	img, err = s.Pull(ctx, p.ref, insecure)
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	leftovers(t, s, 2)
}

// A disk that fills refuses the pull, and is as free as before.
func TestPullNoSpace(t *testing.T) {
	root := t.TempDir()
	ok(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=24m"))
	defer unix.Unmount(root, unix.MNT_DETACH)
	s, err := Open(root)
	ok(t, err)
	p := push(t, blob(t, "gzip", archive(t, ent{tar.Header{Name: "etc/f"}, noise(20<<20, 5)})))
	if _, err := s.Pull(ctx, p.ref, insecure); !errors.Is(err, unix.ENOSPC) || len(fault.Hint(err)) == 0 {
		t.Error(err)
	}
	leftovers(t, s, 0)
}

// A blob with the wrong contents is refused, and nothing is left.
func TestPullRefused(t *testing.T) {
	good := rootfs(t, "x")
	other := blob(t, "gzip", rootfs(t, "other"))
	for what, c := range map[string]struct {
		layer source.Layer
		want  error
	}{
		"another diffID": {func() source.Layer {
			l := blob(t, "gzip", good)
			l.Open = other.Open
			return l
		}(), fault.ErrCorrupt},
		"cut":    {blob(t, "gzip", good[:len(good)-1500]), fault.ErrInvalid},
		"no tar": {blob(t, "zstd", []byte(noise(4096, 3))), fault.ErrInvalid},
		"escape": {blob(t, "gzip", archive(t, ent{tar.Header{Name: "../evil"}, "x"})), fault.ErrInvalid},
		"broken": {func() source.Layer {
			l := blob(t, "gzip", good)
			l.Open = func(context.Context) (io.ReadCloser, error) { return io.NopCloser(errReader{fault.ErrBusy}), nil }
			return l
		}(), fault.ErrBusy},
		"wrong bytes": {func() source.Layer {
			l := blob(t, "gzip", good)
			l.Open = func(context.Context) (io.ReadCloser, error) {
				return io.NopCloser(io.MultiReader(bytes.NewReader([]byte("\x1f\x8b\x08rubbish")),
					errReader{fault.ErrCorrupt})), nil
			}
			return l
		}(), fault.ErrCorrupt},
	} {
		s := store(t)
		if _, err := take(t, s, "x", c.layer); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		leftovers(t, s, 0)
	}
	s := store(t)
	for what, config := range map[string]string{
		"windows": `{"os":"windows","rootfs":{"type":"layers"}}`, "no json": "x",
		"more layers": `{"os":"linux","rootfs":{"type":"layers","diff_ids":["` + other.DiffID + `"]}}`,
	} {
		if _, err := s.take(ctx, reference.Reference{}, "", made{[]byte(config), nil},
			image.PullOptions{}); err == nil {
			t.Error(what)
		}
	}
	leftovers(t, s, 0)
}

// A pull's layers are not collected before its record is there.
func TestPullAgainstGC(t *testing.T) {
	s := store(t)
	first, second := blob(t, "", rootfs(t, "1")), blob(t, "", rootfs(t, "2"))
	open := second.Open
	second.Open = func(ctx context.Context) (io.ReadCloser, error) {
		hex, _ := hexOf(first.DiffID)
		for range 1000 { // until the other layer is in
			if _, err := os.Stat(s.path("layers", hex)); err == nil {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if _, err := s.GC(ctx, nil); err != nil {
			return nil, err
		}
		return open(ctx)
	}
	img, err := take(t, s, "x", first, second)
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	ok(t, s.Remove(ctx, "x", nil))
	leftovers(t, s, 0)
}

// A process that dies at any instant of a pull leaves an image that is whole or
// none, and the next pull goes through.
func TestPullKilled(t *testing.T) {
	p := push(t, blob(t, "gzip", rootfs(t, "1")), blob(t, "gzip",
		archive(t, ent{tar.Header{Name: "etc/f"}, noise(2<<20, 4)})))
	for _, point := range []string{
		"images.pull.before-sync", "images.pull.before-rename", "images.pull.after-rename", "images.pull.before-record",
		"images.import.before-index",
	} {
		for _, action := range []string{"kill", "error"} {
			s := store(t)
			root := filepath.Dir(s.dir)
			out, err := other(root, "IMAGES_TEST_PULL="+p.ref, "AGENTBOX_FAILPOINT="+point+"="+action)
			if err == nil {
				if !failpoints(t) {
					t.Skip("built without the tag failpoint")
				}
				t.Fatalf("%s did not fire: %s", point, out)
			}
			if _, err := s.Resolve(ctx, p.ref); !errors.Is(err, fault.ErrNotFound) {
				t.Errorf("%s: %v", point, err)
			}
			img, err := s.Pull(ctx, p.ref, insecure)
			ok(t, err)
			ok(t, s.Verify(ctx, img.Digest))
			ok(t, s.Remove(ctx, p.ref, nil))
			_, err = s.GC(ctx, nil)
			ok(t, err)
			leftovers(t, s, 0)
		}
	}
}

// The image that goes out is the one that came in.
func TestV1(t *testing.T) {
	s := store(t)
	layers := []source.Layer{
		blob(t, "gzip", rootfs(t, "1")), blob(t, "zstd", archive(t, ent{tar.Header{Name: "etc/.wh.f"}, ""})),
	}
	img, err := take(t, s, "x", layers...)
	ok(t, err)
	out, err := s.V1(ctx, img.Digest)
	ok(t, err)
	first, err := out.Digest()
	ok(t, err)
	dir := "oci:" + filepath.Join(t.TempDir(), "layout") + ":x"
	ref, err := reference.Parse(dir, "")
	ok(t, err)
	_, err = source.Write(ctx, ref, out, image.SourceOptions{})
	ok(t, err)
	if msg, err := exec.Command("skopeo", "inspect", dir).CombinedOutput(); err != nil {
		t.Errorf("skopeo: %v %s", err, msg)
	}
	elsewhere := store(t)
	back, err := elsewhere.Pull(ctx, dir, image.PullOptions{})
	if err != nil || back.Digest != img.Digest || !slices.Equal(back.Layers, img.Layers) {
		t.Fatalf("%+v %v", back, err)
	}
	ok(t, elsewhere.Verify(ctx, back.Digest))
	again, err := elsewhere.V1(ctx, back.Digest)
	ok(t, err)
	if second, err := again.Digest(); err != nil || second != first {
		t.Errorf("%s and %s: %v", first, second, err)
	}
	// One layer more, of which alone the bytes are read.
	more, err := mutate.AppendLayers(out, static.NewLayer(rootfs(t, "more"), types.OCIUncompressedLayer))
	ok(t, err)
	added, err := s.Add(ctx, "more", more)
	ok(t, err)
	if len(added.Layers) != 3 || added.Layers[0] != img.Layers[0] {
		t.Errorf("%+v", added)
	}
	ok(t, s.Verify(ctx, added.Digest))
}

// A sweep takes nothing away from a writer.
func TestV1AgainstSweep(t *testing.T) {
	s := store(t)
	img, err := take(t, s, "x", blob(t, "gzip", rootfs(t, "1")))
	ok(t, err)
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		var err error
		for {
			select {
			case <-stop:
				done <- err
				return
			default:
				err = errors.Join(err, s.sweep(0))
			}
		}
	}()
	for range 60 {
		out, err := s.V1(ctx, img.Digest)
		ok(t, err)
		if _, err := out.Digest(); err != nil {
			t.Error(err)
			break
		}
		ok(t, os.Remove(filepath.Join(filepath.Dir(img.Lower[0]), "gzip.json")))
	}
	close(stop)
	ok(t, <-done)
}

func TestOldIndex(t *testing.T) {
	s := store(t)
	layer := "sha256:" + strings.Repeat("a", 64)
	old := `{"version":1,"layers":["` + layer + `"],"config":{"cmd":["sh"]}}`
	digest := digestOf([]byte(old))
	hex, _ := hexOf(digest)
	ok(t, os.MkdirAll(s.path("layers", strings.Repeat("a", 64), "diff"), 0o755))
	ok(t, os.WriteFile(s.path("records", hex+".json"), []byte(`{"manifest":`+old+
		`,"created":"2026-01-01T00:00:00Z","bytes":5}`), 0o600))
	ok(t, os.WriteFile(s.path("index.json"), []byte(`{"version":1,"names":{"debian:12":{"digest":"`+digest+
		`"},"busybox:latest":{"digest":"`+digest+`","builtin":true}}}`), 0o600))
	for _, ref := range []string{digest, "debian:12", digest[7:20]} {
		img, err := s.Resolve(ctx, ref)
		if err != nil || img.Name != "debian:12" || len(img.Lower) != 1 ||
			!slices.Equal(img.Config.Cmd, []string{"sh"}) {
			t.Errorf("%s: %+v %v", ref, img, err)
		}
	}
	if err := s.Verify(ctx, digest); !errors.Is(err, fault.ErrUnsupported) || len(fault.Hint(err)) == 0 {
		t.Error(err)
	}
	if _, err := s.V1(ctx, digest); !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}
	if img, err := s.Resolve(ctx, "busybox"); err != nil || img.Digest == digest {
		t.Errorf("%+v %v", img, err)
	}
	ok(t, s.Remove(ctx, "debian:12", nil))
	leftovers(t, s, 1)
}

// A layer that came while its directory was waited for is not unpacked again, and what a pull
// that was killed left in the directory goes.
func TestClaimOfWhatIsThere(t *testing.T) {
	s := store(t)
	dir := s.path("tmp", "one")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "left"), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	asked := 0
	got, hold, err := s.claim(t.Context(), "one", func() bool { asked++; return asked > 1 })
	if got != "" || hold != nil || err != nil {
		t.Errorf("%q, %v, %v", got, hold, err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
}
