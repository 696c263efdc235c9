package registry

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"
	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/internal/remote/remotetest"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served is a registry on this host.
type served struct{ *remotetest.Registry }

func serve(t *testing.T, opts ...ggcr.Option) *served {
	t.Helper()
	return &served{remotetest.Serve(t, opts...)}
}

// blob reads a blob out of the registry.
func (s *served) blob(t *testing.T, repo, digest string) []byte {
	t.Helper()
	return s.read(t, "/v2/"+repo+"/blobs/"+digest)
}

func (s *served) read(t *testing.T, path string) []byte {
	t.Helper()
	resp, err := http.Get(s.URL + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s: %d %s %v", path, resp.StatusCode, b, err)
	}
	http.DefaultClient.CloseIdleConnections()
	return b
}

// memory is a checkpoint and a target in memory.
type memory struct {
	chunks map[string][]byte
	puts   int
	begun  []byte
}

func newMemory() *memory { return &memory{chunks: map[string][]byte{}} }

func (m *memory) add(p []byte) { m.chunks[pack.Sum(p).String()] = p }

func (m *memory) Chunks(_ context.Context, fn func(string, int64) error) error {
	for d, p := range m.chunks { // in a random order
		if err := fn(d, int64(len(p))); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Chunk(_ context.Context, d string) ([]byte, error) {
	p, ok := m.chunks[d]
	if !ok {
		return nil, fmt.Errorf("no piece %s", d)
	}
	return p, nil
}

func (m *memory) Missing(_ context.Context, ds []string) (out []string, _ error) {
	for _, d := range ds {
		if _, ok := m.chunks[d]; !ok {
			out = append(out, d)
		}
	}
	return out, nil
}

func (m *memory) PutChunk(_ context.Context, d string, raw []byte) error {
	if pack.Sum(raw).String() != d {
		return fmt.Errorf("piece %s has the bytes of %s", d, pack.Sum(raw))
	}
	if m.chunks[d] != nil {
		return fmt.Errorf("piece %s is put twice", d)
	}
	m.chunks[d] = bytes.Clone(raw)
	m.puts++
	return nil
}

func (m *memory) begin(_ context.Context, manifest []byte) (Target, error) {
	m.begun = manifest
	return m, nil
}

func (m *memory) clone() *memory {
	c := newMemory()
	maps.Copy(c.chunks, m.chunks)
	return c
}

func (m *memory) bytes() (n int64) {
	for _, p := range m.chunks {
		n += int64(len(p))
	}
	return n
}

// sample makes n chunks of about size bytes each, every other one compressible.
func sample(seed uint64, n, size int) *memory {
	m := newMemory()
	r := rand.New(rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}))
	for i := range n {
		p := make([]byte, 1+size/2+r.IntN(size))
		for k := range p {
			p[k] = byte(r.Uint32())
			if i%2 == 0 {
				p[k] = "abcd"[p[k]%4]
			}
		}
		m.add(p)
	}
	return m
}

func (m *memory) same(t *testing.T, o *memory) {
	t.Helper()
	if a, b := slices.Sorted(maps.Keys(m.chunks)), slices.Sorted(maps.Keys(o.chunks)); !slices.Equal(a, b) {
		t.Fatalf("%d chunks and %d chunks, not the same", len(a), len(b))
	}
	for d, p := range m.chunks {
		if !bytes.Equal(p, o.chunks[d]) {
			t.Fatalf("piece %s differs", d)
		}
	}
}

const (
	id1 = "1111111111112222"
	id2 = "2222222222223333"
	id3 = "3333333333334444"
)

func about(id string, ancestors ...string) About {
	return About{ID: id, Manifest: []byte(`{"version":2,"id":"` + id + `"}`), Ancestors: ancestors,
		Annotations: map[string]string{"org.opencontainers.image.title": id}}
}

// fast are options that do not wait.
func fast(t *testing.T) Options {
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	return Options{Transport: tr, Scratch: t.TempDir(), pause: time.Millisecond}
}

func mustPush(t *testing.T, ref string, m *memory, a About, o Options) Pushed {
	t.Helper()
	p, err := Push(t.Context(), ref, m, a, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func pullInto(t *testing.T, ref string, m *memory, o Options) Pulled {
	t.Helper()
	p, err := Pull(t.Context(), ref, m.begin, o)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(p.Manifest, m.begun) {
		t.Fatalf("begin was given %q, the manifest is %q", m.begun, p.Manifest)
	}
	empty(t, o.Scratch)
	return p
}

func empty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Fatalf("left in the scratch directory: %v, %v", left, err)
	}
}

func (s *served) artifact(t *testing.T, repo, ref string) *artifact {
	t.Helper()
	a, err := parseArtifact(s.read(t, "/v2/"+repo+"/manifests/"+ref))
	if err != nil {
		t.Fatal(err)
	}
	return a
}
