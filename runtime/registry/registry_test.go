package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

func TestRoundTrip(t *testing.T) {
	s, o := serve(t), fast(t)
	src := sample(1, 60, 20_000)
	src.add([]byte("x")) // one byte
	big := bytes.Repeat([]byte("0123456789abcdef"), pack.MaxChunk/16)
	src.add(big)
	var last, total int64
	o.Progress = func(d, n int64) {
		if d < last || d > n {
			t.Errorf("progress went from %d to %d of %d", last, d, n)
		}
		last, total = d, n
	}
	p := mustPush(t, s.Host()+"/team/web:before", src, about(id1), o)
	if last != src.bytes() || total != src.bytes() {
		t.Errorf("progress ends with %d of %d, there are %d bytes", last, total, src.bytes())
	}
	empty(t, o.Scratch)

	a := s.artifact(t, "team/web", "before")
	if want := a.m.Config.Size + a.uses.Size + a.packs[0].pack.Size + a.packs[0].index.Size; p.Bytes != want ||
		want > src.bytes()/5 || p.Skipped != 0 {
		t.Errorf("%+v, the blobs have %d bytes", p, want)
	}
	if a.m.ArtifactType != ArtifactType || a.m.Config.MediaType != ManifestType || len(a.packs) != 1 ||
		a.m.Subject != nil || a.m.Annotations["org.opencontainers.image.title"] != id1 {
		t.Errorf("%s", a.raw)
	}
	if got := s.blob(t, "team/web", a.m.Config.Digest.String()); string(got) != string(about(id1).Manifest) {
		t.Errorf("config: %s", got)
	}
	// The blob is a pack to package pack.
	f := filepath.Join(t.TempDir(), "pack")
	if err := os.WriteFile(f, s.blob(t, "team/web", a.packs[0].pack.Digest.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := pack.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if r.Count() != int64(len(src.chunks)) {
		t.Errorf("%d chunks, want %d", r.Count(), len(src.chunks))
	}

	for _, ref := range []string{":before", ":" + Tag(id1), strings.TrimPrefix(p.Reference, s.Host()+"/team/web")} {
		dst := newMemory()
		last, total = 0, 0
		got := pullInto(t, s.Host()+"/team/web"+ref, dst, o)
		src.same(t, dst)
		if string(got.Manifest) != string(about(id1).Manifest) || got.Reference != p.Reference || got.Skipped != 0 {
			t.Errorf("%s: %+v", ref, got)
		}
		if last != a.packs[0].pack.Size || total != last {
			t.Errorf("progress ends with %d of %d", last, total)
		}
	}
}

func TestNothingToPush(t *testing.T) {
	s, o := serve(t), fast(t)
	src := newMemory() // a checkpoint of nothing has no chunks
	mustPush(t, s.Host()+"/web", src, about(id1), o)
	dst := newMemory()
	pullInto(t, s.Host()+"/web:"+Tag(id1), dst, o)
	if len(dst.chunks) != 0 {
		t.Error("pieces came from nowhere")
	}
	if got := s.Requests("PUT /v2/web/manifests/"); len(got) != 1 {
		t.Errorf("without a tag only the checkpoint's own is set: %q", got)
	}
}

func TestPushAgain(t *testing.T) {
	s, o := serve(t), fast(t)
	src := sample(1, 40, 4000)
	first := mustPush(t, s.Host()+"/web:a", src, about(id1), o)
	s.Forget()
	again := mustPush(t, s.Host()+"/web:b", src, about(id1), o)
	if again.Bytes != 0 || again.Skipped != first.Bytes || again.Reference != first.Reference {
		t.Errorf("first %+v, again %+v", first, again)
	}
	if up := s.Requests("POST"); len(up) != 0 {
		t.Errorf("uploads: %q", up)
	}
	if s.artifact(t, "web", "b").m.Config.Digest != s.artifact(t, "web", "a").m.Config.Digest {
		t.Error("the new tag is something else")
	}
	// Elsewhere the same bytes come out.
	other := serve(t)
	p := mustPush(t, other.Host()+"/web:a", src.clone(), about(id1), o)
	if strings.Split(p.Reference, "@")[1] != strings.Split(first.Reference, "@")[1] {
		t.Errorf("%s and %s", p.Reference, first.Reference)
	}
}

// Only what the parent's artifact lacks travels, both ways.
func TestIncremental(t *testing.T) {
	s, o := serve(t), fast(t)
	parent := sample(1, 200, 4000)
	mustPush(t, s.Host()+"/web:one", parent, about(id1), o)
	one := s.artifact(t, "web", "one")

	child := parent.clone()
	n := 0
	for d := range child.chunks { // 10 are gone, 10 are new
		if n++; n <= 10 {
			delete(child.chunks, d)
		}
	}
	extra := sample(2, 10, 4000)
	for _, p := range extra.chunks {
		child.add(p)
	}
	s.Forget()
	p := mustPush(t, s.Host()+"/web:two", child, about(id2, "5555555555556666", id1), o) // the parent was never pushed
	if p.Bytes > 2*extra.bytes() || p.Bytes < extra.bytes()/4 || p.Skipped < one.packs[0].pack.Size {
		t.Errorf("%+v, new are %d bytes", p, extra.bytes())
	}
	if _, got := s.Bytes(); got > 2*extra.bytes() {
		t.Errorf("the registry got %d bytes", got)
	}
	two := s.artifact(t, "web", "two")
	if len(two.packs) != 2 || two.packs[0].pack.Digest != one.packs[0].pack.Digest {
		t.Fatalf("%s", two.raw)
	}

	// A host that has the parent fetches one pack.
	s.Forget()
	dst := parent.clone()
	got := pullInto(t, s.Host()+"/web:two", dst, o)
	if dst.puts != 10 || got.Skipped != one.packs[0].pack.Size || got.Bytes > 2*extra.bytes()+200*36 {
		t.Errorf("%d puts, %+v", dst.puts, got)
	}
	if r := s.Requests("GET /v2/web/blobs/" + one.packs[0].pack.Digest.String()); len(r) != 0 {
		t.Errorf("the parent's pack was fetched: %q", r)
	}
	// A host that has nothing gets exactly the child: not what only the parent had.
	dst = newMemory()
	pullInto(t, s.Host()+"/web:two", dst, o)
	child.same(t, dst)
	// A host that has all but one chunk gets that one.
	dst = child.clone()
	for d := range extra.chunks {
		delete(dst.chunks, d)
		break
	}
	if pullInto(t, s.Host()+"/web:two", dst, o); dst.puts != 1 {
		t.Errorf("%d puts", dst.puts)
	}

	// A pack of which little is needed is not dragged along.
	small := newMemory()
	for _, p := range extra.chunks {
		small.add(p)
	}
	for d, p := range parent.chunks {
		if child.chunks[d] != nil {
			small.add(p)
			break
		}
	}
	mustPush(t, s.Host()+"/web:three", small, about(id3, id2), o)
	three := s.artifact(t, "web", "three")
	if len(three.packs) != 2 || three.packs[0].pack.Digest != two.packs[1].pack.Digest ||
		three.packs[1].pack.Digest == one.packs[0].pack.Digest {
		t.Errorf("%s", three.raw)
	}
	dst = newMemory()
	pullInto(t, s.Host()+"/web:three", dst, o)
	small.same(t, dst)
}

// A long line of checkpoints does not become a long list of packs.
func TestChain(t *testing.T) {
	s, o := serve(t), fast(t)
	m := newMemory()
	var before []string
	for i := range maxReused + 10 {
		for _, p := range sample(uint64(1000+i), 2, 100).chunks {
			m.add(p)
		}
		id := fmt.Sprintf("%016x", i+1)
		id = id[4:] + "0000"
		mustPush(t, s.Host()+"/web:"+fmt.Sprint("n", i), m, about(id, before...), o)
		before = append([]string{id}, before...)
	}
	last := s.artifact(t, "web", fmt.Sprint("n", maxReused+9))
	if len(last.packs) > maxReused+1 {
		t.Errorf("%d packs", len(last.packs))
	}
	dst := newMemory()
	pullInto(t, s.Host()+"/web:"+fmt.Sprint("n", maxReused+9), dst, o)
	m.same(t, dst)
}

// A blob that a registry lost is pushed anew.
func TestLostPack(t *testing.T) {
	blobs := ggcr.NewInMemoryBlobHandler()
	s, o := serve(t, ggcr.WithBlobHandler(blobs)), fast(t)
	src := sample(1, 20, 3000)
	mustPush(t, s.Host()+"/web:one", src, about(id1), o)
	lost := s.artifact(t, "web", "one").packs[0].pack
	for _, id := range []string{id1, id2} {
		if err := blobs.(ggcr.BlobDeleteHandler).Delete(t.Context(), "", lost.Digest); err != nil {
			t.Fatal(err)
		}
		if p := mustPush(t, s.Host()+"/web:one", src, about(id, id1), o); p.Bytes < lost.Size {
			t.Errorf("%+v", p)
		}
		dst := newMemory()
		pullInto(t, s.Host()+"/web:one", dst, o)
		src.same(t, dst)
	}
}

func TestReferrers(t *testing.T) {
	for _, api := range []bool{true, false} {
		s, o := serve(t, ggcr.WithReferrersSupport(api)), fast(t)
		img, err := random.Image(1000, 1)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := name.ParseReference(s.Host() + "/web:base")
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.Write(ref, img, remote.WithTransport(o.Transport)); err != nil {
			t.Fatal(err)
		}
		h, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		a := about(id1)
		a.Image = h.String()
		p := mustPush(t, s.Host()+"/web:one", sample(1, 3, 100), a, o)
		index, err := remote.Referrers(ref.Context().Digest(h.String()), remote.WithTransport(o.Transport))
		if err != nil {
			t.Fatal(err)
		}
		m, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Manifests) == 0 || !strings.HasSuffix(p.Reference, m.Manifests[0].Digest.String()) {
			t.Errorf("api %v: %s refers to %s: %+v", api, p.Reference, h, m.Manifests)
		}
		if sub := s.artifact(t, "web", "one").m.Subject; sub == nil || sub.Digest != h {
			t.Errorf("subject %+v", sub)
		}

		// The same checkpoint is pushed anew when its image came later.
		late := about(id3)
		src := sample(4, 3, 100)
		mustPush(t, s.Host()+"/web:late", src, late, o)
		late.Image = h.String()
		mustPush(t, s.Host()+"/web:late", src, late, o)
		if sub := s.artifact(t, "web", "late").m.Subject; sub == nil {
			t.Error("the image that came later is not referred to")
		}

		// An image that is not there is not referred to, and neither is what is no digest.
		for i, image := range []string{"sha256:" + strings.Repeat("a", 64), "blake3:00", ""} {
			a := about(id2)
			a.Image = image
			mustPush(t, s.Host()+"/web:two", sample(uint64(i), 3, 100), a, o)
			if sub := s.artifact(t, "web", "two").m.Subject; sub != nil {
				t.Errorf("subject %+v for %q", sub, image)
			}
		}
	}
}

func TestReferences(t *testing.T) {
	src := sample(1, 1, 10)
	for _, ref := range []string{
		"", "web", "web:one", "me/web:one", "Me/web", "localhost/", "127.0.0.1:1/UP:x",
		"127.0.0.1:1/web@sha256:" + strings.Repeat("a", 64),
	} {
		if _, err := Push(t.Context(), ref, src, about(id1), fast(t)); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	for _, id := range []string{"", "../../x", "a b"} {
		if _, err := Push(t.Context(), "127.0.0.1:1/web", src, about(id), fast(t)); id != "" &&
			!errors.Is(err, fault.ErrInvalid) {
			t.Errorf("id %q: %v", id, err)
		}
	}
	_, err := Push(t.Context(), "web:one", src, about(id1), fast(t))
	if h := fault.Hint(err); len(h) == 0 || !strings.Contains(h[0], "HOST/NAME:TAG") {
		t.Errorf("hints %q", h)
	}
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// Nothing leaves this host in the clear unless the user said so. The library
// by itself would do it for private addresses and *.local.
func TestPlainHTTP(t *testing.T) {
	for _, host := range []string{"10.1.2.3:5000", "192.168.7.7", "registry.local:5000", "registry.example:5000"} {
		for _, asked := range []bool{false, true} {
			plain := 0
			o := fast(t)
			o.PlainHTTP = asked
			o.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
				if r.URL.Scheme == "http" {
					plain++
				}
				return nil, http.ErrSchemeMismatch
			})
			_, err := Pull(t.Context(), host+"/web:one", newMemory().begin, o)
			if err == nil || (plain > 0) != asked {
				t.Errorf("%s, asked %v: %d plain requests, %v", host, asked, plain, err)
			}
			if h := fault.Hint(err); !asked && (len(h) == 0 || !strings.Contains(h[0], "--plain-http")) {
				t.Errorf("%s: hints %q for %v", host, h, err)
			}
		}
	}
}

// Credentials come from where docker login put them.
func TestLogin(t *testing.T) {
	s, o := serve(t), fast(t)
	s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		u, p, ok := r.BasicAuth()
		if ok && u == "ann" && p == "secret" {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	})
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("DOCKER_CONFIG", filepath.Join(home, ".docker"))
	src := sample(1, 5, 100)
	_, err := Push(t.Context(), s.Host()+"/web:one", src, about(id1), o)
	if h := fault.Hint(err); !errors.Is(err, fault.ErrDenied) || len(h) == 0 ||
		!strings.Contains(h[0], "docker login "+s.Host()) {
		t.Fatalf("%v, hints %q", err, h)
	}
	config, _ := json.Marshal(map[string]any{"auths": map[string]any{s.Host(): map[string]string{"auth": "YW5uOnNlY3JldA=="}}})
	if err := os.MkdirAll(filepath.Join(home, ".docker"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, ".docker/config.json"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	mustPush(t, s.Host()+"/web:one", src, about(id1), o)
	dst := newMemory()
	pullInto(t, s.Host()+"/web:one", dst, o)
	src.same(t, dst)
}

// The way of most registries: TLS, and a token from another server for each scope.
func TestTLSAndToken(t *testing.T) {
	var mu sync.Mutex
	scopes := map[string]int{}
	inner := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	var s *httptest.Server
	s = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/token":
			u, p, _ := r.BasicAuth()
			scope := r.URL.Query().Get("scope")
			mu.Lock()
			scopes[scope]++
			mu.Unlock()
			if u != "ann" || p != "secret" {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			_ = json.NewEncoder(w).Encode(map[string]string{"token": "for " + scope})
		case r.Header.Get("Authorization") == "Bearer for repository:web:push,pull",
			r.Header.Get("Authorization") == "Bearer for repository:web:pull" &&
				(r.Method == http.MethodGet || r.Method == http.MethodHead):
			inner.ServeHTTP(w, r)
		default:
			w.Header().Set("WWW-Authenticate", `Bearer realm="`+s.URL+`/token",service="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer s.Close()
	ref := strings.TrimPrefix(s.URL, "https://") + "/web:one"
	o := fast(t)
	o.Transport = s.Client().Transport
	src := sample(1, 5, 100)
	o.Keychain = authn.NewMultiKeychain()
	if _, err := Push(t.Context(), ref, src, about(id1), o); !errors.Is(err, fault.ErrDenied) ||
		len(fault.Hint(err)) == 0 {
		t.Errorf("without a login: %v", err)
	}
	o.Keychain = keys{}
	mustPush(t, ref, src, about(id1), o)
	dst := newMemory()
	pullInto(t, ref, dst, o)
	src.same(t, dst)
	if scopes["repository:web:push,pull"] == 0 || scopes["repository:web:pull"] == 0 || len(scopes) != 2 {
		t.Errorf("asked for %v", scopes)
	}
	// A client that does not know the authority of its certificate does not go on.
	o.Transport = nil
	_, err := Pull(t.Context(), ref, newMemory().begin, o)
	if err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%v", err)
	}
}

type keys struct{}

func (keys) Resolve(authn.Resource) (authn.Authenticator, error) {
	return &authn.Basic{Username: "ann", Password: "secret"}, nil
}

func TestNotFound(t *testing.T) {
	s, o := serve(t), fast(t)
	if _, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
	mustPush(t, s.Host()+"/web:one", sample(1, 2, 10), about(id1), o)
	if _, err := Pull(t.Context(), s.Host()+"/web:two", newMemory().begin, o); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
	img, err := random.Image(10, 1)
	if err != nil {
		t.Fatal(err)
	}
	ref, _ := name.ParseReference(s.Host() + "/web:image")
	if err := remote.Write(ref, img, remote.WithTransport(o.Transport)); err != nil {
		t.Fatal(err)
	}
	if _, err := Pull(t.Context(), s.Host()+"/web:image", newMemory().begin, o); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("an image: %v", err)
	}
}
