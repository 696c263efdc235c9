package source

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote/remotetest"
)

func TestPull(t *testing.T) {
	s, o := serve(t), fast(t)
	amd, arm := sample(t, "linux/amd64", 3), sample(t, "linux/arm64/v8", 1)
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: arm, Descriptor: v1.Descriptor{Platform: &v1.Platform{
			OS: "linux", Architecture: "arm64", Variant: "v8",
		}}},
		mutate.IndexAddendum{Add: amd, Descriptor: v1.Descriptor{Platform: &v1.Platform{
			OS: "linux", Architecture: "amd64",
		}}},
		mutate.IndexAddendum{Add: sample(t, "linux/amd64", 1),
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"},
				Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest"}}})
	s.put(t, "web:1", amd)
	s.put(t, "web:all", index)
	s.put(t, "web:nested", mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index}))
	one, _ := amd.Digest()
	many, _ := index.Digest()
	for _, c := range []struct {
		ref, platform string
		want          v1.Image
	}{
		{"web:1", "", amd}, {"web@" + one.String(), "", amd}, {"web:all", "", amd},
		{"web@" + many.String(), "linux/amd64", amd},
		{"web:nested", "", amd}, {"web:all", "linux/arm64", arm}, {"web:x@" + one.String(), "", amd},
	} {
		o.Platform = c.platform
		if c.platform == "" {
			o.Platform = "linux/amd64"
		}
		img, layers, err := pull(t, s.Host()+"/"+c.ref, o)
		if err != nil {
			t.Errorf("%s: %v", c.ref, err)
			continue
		}
		sameImage(t, img, layers, c.want, true)
	}
	for platform, ref := range map[string]string{
		"linux/s390x": "web:all", "linux/arm64": "web:1", "windows/amd64": "web:all",
	} {
		o.Platform = platform
		_, _, err := pull(t, s.Host()+"/"+ref, o)
		if h := fault.Hint(err); !errors.Is(err, fault.ErrUnsupported) ||
			!strings.Contains(err.Error(), "linux/amd64") || len(h) == 0 {
			t.Errorf("%s for %s: %v, %q", ref, platform, err, h)
		}
	}
	o.Platform = "no such"
	if _, _, err := pull(t, s.Host()+"/web:1", o); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
}

// one puts an image of one layer and returns that layer and its bytes.
func one(t *testing.T, s *served) (v1.Image, string, []byte) {
	t.Helper()
	img := sample(t, "linux/amd64", 1)
	s.put(t, "web:1", img)
	l, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	r, err := l[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	d, _ := l[0].Digest()
	return img, d.String(), b
}

// A connection that breaks costs what was not yet there, no more.
func TestCut(t *testing.T) {
	s, o := serve(t), fast(t)
	img, digest, data := one(t, s)
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digest) {
			return false
		}
		remotetest.Cut(w, r, data, len(data)/4+1)
		return true
	})
	got, layers, err := pull(t, s.Host()+"/web:1", o)
	if err != nil {
		t.Fatal(err)
	}
	sameImage(t, got, layers, img, true)
	gets := s.Requests("GET /v2/web/blobs/" + digest)
	if len(gets) != 4 || !strings.Contains(gets[3], " bytes=") {
		t.Errorf("%q", gets)
	}
}

// The beginning that an earlier pull left is continued, and not trusted.
func TestResume(t *testing.T) {
	s, o := serve(t), fast(t)
	_, digest, data := one(t, s)
	img, _, err := pull(t, s.Host()+"/web:1", o)
	if err != nil {
		t.Fatal(err)
	}
	resume := func(have []byte) ([]byte, error) {
		s.breaks(nil)
		r, err := img.Layers()[0].Resume(t.Context(), bytes.NewReader(have))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		return io.ReadAll(r)
	}
	for _, n := range []int{0, 1, 1000, len(data) - 1, len(data)} {
		b, err := resume(data[:n])
		if err != nil || !bytes.Equal(b, data) {
			t.Errorf("from %d: %d bytes, %v", n, len(b), err)
		}
		want := []string{fmt.Sprintf("GET /v2/web/blobs/%s bytes=%d-%d", digest, n, len(data)-1)}
		if n == 0 {
			want[0], _, _ = strings.Cut(want[0], " bytes=")
		}
		if n == len(data) {
			want = nil
		}
		if asked := s.Requests("GET"); fmt.Sprint(asked) != fmt.Sprint(want) {
			t.Errorf("from %d: %q, want %q", n, asked, want)
		}
	}
	for what, have := range map[string][]byte{
		"other bytes": bytes.Repeat([]byte("x"), 100), "too many": append(bytes.Clone(data), 0),
		"all other": bytes.Repeat([]byte("x"), len(data)),
	} {
		if _, err := resume(have); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// cutTo answers with b, and says how long it is.
func cutTo(w http.ResponseWriter, b []byte) {
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, _ = w.Write(b)
}

// Answers that a registry may give, and their outcomes.
func TestBadRegistry(t *testing.T) {
	body := func(status int, b string, header ...string) func(http.ResponseWriter, []byte) {
		return func(w http.ResponseWriter, _ []byte) {
			for i := 0; i < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, b)
		}
	}
	edit := func(old, new string) func(http.ResponseWriter, []byte) {
		return func(w http.ResponseWriter, b []byte) {
			if !bytes.Contains(b, []byte(old)) {
				panic("nothing to edit in " + string(b))
			}
			w.Header().Set("Content-Type", string(types.DockerManifestSchema2))
			_, _ = w.Write(bytes.Replace(b, []byte(old), []byte(new), 1))
		}
	}
	const manifest, config, layer = "manifest", "config", "layer"
	for name, c := range map[string]struct {
		at     string
		answer func(http.ResponseWriter, []byte)
		want   error
		says   string
		hint   string
	}{
		"unknown": {
			manifest, body(404, `{"errors":[{"code":"MANIFEST_UNKNOWN"}]}`), fault.ErrNotFound,
			"MANIFEST_UNKNOWN", "Check",
		},
		"401":             {manifest, body(401, ""), fault.ErrDenied, "401", "image login"},
		"403":             {manifest, body(403, "evil\x1b[2J"), fault.ErrDenied, "403", "image login"},
		"429":             {manifest, body(429, ""), fault.ErrBusy, "429", "later"},
		"429, much later": {manifest, body(429, "", "Retry-After", "21600"), fault.ErrBusy, "429", "6h"},
		"500":             {manifest, body(500, ""), fault.ErrBusy, "500", "later"},
		"503":             {layer, body(503, ""), fault.ErrBusy, "503", "later"},
		"no such layer":   {layer, body(404, ""), fault.ErrNotFound, "404", ""},
		"schema 1": {manifest, body(200, `{"schemaVersion":1,"fsLayers":[]}`, "Content-Type",
			string(types.DockerManifestSchema1Signed)), fault.ErrUnsupported, "schema 1", "old Docker"},
		"no JSON":       {manifest, body(200, `<html>`), fault.ErrCorrupt, "manifest", ""},
		"huge manifest": {manifest, body(200, strings.Repeat(" ", maxManifest+1)), fault.ErrCorrupt, "more than", ""},
		"index as well": {manifest, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(append([]byte(`{"manifests":[],`), b[1:]...))
		}, fault.ErrCorrupt, "as well", ""},
		"an artifact": {
			manifest, edit(string(types.DockerConfigJSON), "application/vnd.other"), fault.ErrInvalid, "no image", "",
		},
		"foreign layer": {
			manifest, edit(string(types.DockerLayer), string(types.DockerForeignLayer)),
			fault.ErrUnsupported, "layer 1", "",
		},
		"terabytes": {manifest, edit(`"size":4`, `"size":4444444444444`), fault.ErrDenied, "more than", ""},
		"negative":  {manifest, edit(`"size":4`, `"size":-4`), fault.ErrCorrupt, "bytes", ""},
		"two digests": {
			manifest, edit(`"layers":[`,
				`"layers":[{"mediaType":"application/vnd.docker.image.rootfs.diff.tar.gzip","size":3,"digest":"`+
					digestA+`"},`), fault.ErrCorrupt, "2 layers", "",
		},
		"config cut": {config, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(b[:len(b)-1])
		}, fault.ErrCorrupt, "in place of", ""},
		"other config": {config, edit(`"true"`, `"evil"`), fault.ErrCorrupt, "those of", ""},
		"config too big": {config, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(append(b, ' '))
		}, fault.ErrCorrupt, "in place of", ""},
		"layer cut": {layer, func(w http.ResponseWriter, b []byte) {
			cutTo(w, b[:len(b)-1])
		}, fault.ErrCorrupt, "in place of", ""},
		"layer cut, chunked": {layer, func(w http.ResponseWriter, b []byte) {
			w.(http.Flusher).Flush()
			_, _ = w.Write(b[:len(b)/2])
		}, fault.ErrCorrupt, "too early", ""},
		"layer too big": {layer, func(w http.ResponseWriter, b []byte) {
			cutTo(w, append(b, 0))
		}, fault.ErrCorrupt, "in place of", ""},
		"layer too big, chunked": {layer, func(w http.ResponseWriter, b []byte) {
			_, _ = w.Write(append(b, 0))
		}, fault.ErrCorrupt, "more than", ""},
		"wrong bytes": {layer, func(w http.ResponseWriter, b []byte) {
			b[len(b)/2] ^= 1
			cutTo(w, b)
		}, fault.ErrCorrupt, "those of", ""},
		"to this machine": {
			layer, body(307, "", "Location", "http://169.254.169.254/x"), fault.ErrDenied, "169.254", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, o := serve(t), fast(t)
			img, digest, data := one(t, s)
			conf, _ := img.RawConfigFile()
			raw, _ := img.RawManifest()
			id, _ := img.ConfigName()
			var fired atomic.Bool
			s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
				var b []byte
				switch {
				case c.at == manifest && strings.Contains(r.URL.Path, "/manifests/"):
					b = raw
				case c.at == config && strings.HasSuffix(r.URL.Path, id.String()):
					b = conf
				case c.at == layer && strings.HasSuffix(r.URL.Path, digest):
					b = data
				default:
					return false
				}
				fired.Store(true)
				c.answer(w, bytes.Clone(b))
				return true
			})
			_, _, err := pull(t, s.Host()+"/web:1", o)
			hints := strings.Join(fault.Hint(err), " ")
			if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.says) ||
				strings.ContainsRune(fmt.Sprint(err), 0x1b) || !strings.Contains(hints, c.hint) {
				t.Errorf("%v (hint %q), want %v", err, hints, c.want)
			}
			if !fired.Load() {
				t.Error("the fault did not fire")
			}
		})
	}
}

// A digest is held against what comes, also of an index.
func TestWrongDigest(t *testing.T) {
	s, o := serve(t), fast(t)
	img, _, _ := one(t, s)
	raw, _ := img.RawManifest()
	other := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{
		Add: sample(t, "linux/amd64", 2), Descriptor: v1.Descriptor{Platform: &v1.Platform{
			OS: "linux", Architecture: "amd64",
		}},
	})
	s.put(t, "web:all", other)
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/sha256:") {
			_, _ = w.Write(raw)
			return true
		}
		return false
	})
	for _, ref := range []string{"web@" + digestA, "web:all"} {
		if _, _, err := pull(t, s.Host()+"/"+ref, o); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", ref, err)
		}
	}
}

func TestCancelledAndLate(t *testing.T) {
	s, o := serve(t), fast(t)
	_, digest, data := one(t, s)
	entered, leave := make(chan struct{}, 10), make(chan struct{})
	defer close(leave)
	s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, digest) {
			return false
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(data)))
		_, _ = w.Write(data[:100])
		w.(http.Flusher).Flush()
		entered <- struct{}{}
		select {
		case <-leave:
		case <-r.Context().Done():
		}
		return true
	})
	open := func(o image.SourceOptions) Image {
		img, err := Open(t.Context(), mustParse(t, s.Host()+"/web:1"), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { img.Close() })
		return img
	}
	img := open(o)
	ctx, cancel := context.WithCancel(t.Context())
	r, err := img.Layers()[0].Open(ctx)
	if err != nil {
		t.Fatal(err)
	}
	go func() { <-entered; cancel() }()
	if _, err := io.ReadAll(r); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	r.Close()

	late := o
	late.Timeout = 100 * time.Millisecond
	if _, err := read(t, open(late).Layers()[0]); !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), "100ms") {
		t.Errorf("late: %v", err)
	}
	still := o
	still.Idle = 20 * time.Millisecond
	if _, err := read(t, open(still).Layers()[0]); err == nil || !strings.Contains(err.Error(), "stood still") ||
		len(fault.Hint(err)) == 0 {
		t.Errorf("standing still: %v", err)
	}
}

// A registry may keep its blobs elsewhere. Permissions of the registry do not hold there.
func TestElsewhere(t *testing.T) {
	store := newServed()
	store.StartTLS()
	t.Cleanup(store.Close)
	_, port, _ := strings.Cut(strings.TrimPrefix(store.URL, "https://"), ":")
	for name, start := range map[string]func(*served){"plain": func(s *served) { s.Start() }, "tls": func(s *served) {
		s.StartTLS()
	}} {
		t.Run(name, func(t *testing.T) {
			s, o := newServed(), fast(t)
			start(s)
			t.Cleanup(s.Close)
			img, digest, data := one(t, s)
			store.breaks(func(w http.ResponseWriter, r *http.Request) bool { _, _ = w.Write(data); return true })
			s.breaks(func(w http.ResponseWriter, r *http.Request) bool {
				if !strings.HasSuffix(r.URL.Path, digest) {
					return false
				}
				http.Redirect(w, r, "https://localhost:"+port+"/"+digest+"?signature=secret",
					http.StatusTemporaryRedirect)
				return true
			})
			o.Insecure = true
			if _, _, err := pull(t, s.Host()+"/web:1", o); !errors.Is(err, fault.ErrDenied) ||
				!strings.Contains(err.Error(), "certificate") || len(store.Requests("")) > 0 {
				t.Errorf("%v, %q", err, store.Requests(""))
			}
			o.Config = &image.SourceConfig{Registries: []image.Registry{{Name: "localhost:" + port, Insecure: true}}}
			got, layers, err := pull(t, s.Host()+"/web:1", o)
			if err != nil {
				t.Fatal(err)
			}
			sameImage(t, got, layers, img, true)

			store.breaks(func(w http.ResponseWriter, r *http.Request) bool { panic(http.ErrAbortHandler) })
			if _, _, err := pull(t, s.Host()+"/web:1", o); err == nil || strings.Contains(err.Error(), "secret") ||
				!strings.Contains(err.Error(), digest) {
				t.Errorf("%v", err)
			}
		})
	}
}
