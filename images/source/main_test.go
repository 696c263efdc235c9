package source

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	ggcrremote "github.com/google/go-containerregistry/pkg/v1/remote"
	"go.uber.org/goleak"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/remote/remotetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// served is a registry on this host.
type served struct{ *remotetest.Registry }

func newServed() *served { return &served{remotetest.New()} }

func serve(t *testing.T) *served {
	t.Helper()
	return &served{remotetest.Serve(t)}
}

// breaks installs a fault, and forgets what was asked before.
func (s *served) breaks(f remotetest.Fault) {
	s.Breaks(f)
	s.Forget()
}

// fast are options that do not wait, and know nothing of this machine.
func fast(t *testing.T) image.SourceOptions {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	return image.SourceOptions{
		Platform: "linux/amd64", Config: &image.SourceConfig{}, Scratch: dir, Pause: time.Millisecond,
		Idle: 10 * time.Second, AuthFile: dir + "/config.json",
	}
}

// sample is an image of some layers for a platform.
func sample(t *testing.T, platform string, layers int64) v1.Image {
	t.Helper()
	img, err := random.Image(40_000, layers)
	if err != nil {
		t.Fatal(err)
	}
	conf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	conf = conf.DeepCopy()
	p, err := v1.ParsePlatform(platform)
	if err != nil {
		t.Fatal(err)
	}
	conf.OS, conf.Architecture, conf.Variant = p.OS, p.Architecture, p.Variant
	conf.Config.Cmd = []string{"true"}
	img, err = mutate.ConfigFile(img, conf)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// put stores an image or an index as the library does.
func (s *served) put(t *testing.T, ref string, what any) {
	t.Helper()
	r, err := name.ParseReference(s.Host() + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	tr := s.Client().Transport
	switch w := what.(type) {
	case v1.Image:
		err = ggcrremote.Write(r, w, ggcrremote.WithTransport(tr))
	case v1.ImageIndex:
		err = ggcrremote.WriteIndex(r, w, ggcrremote.WithTransport(tr))
	default:
		err = fmt.Errorf("%T", what)
	}
	if err != nil {
		t.Fatal(err)
	}
}

const digestA = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func mustParse(t *testing.T, s string) reference.Reference {
	t.Helper()
	r, err := reference.Parse(s, "")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// pull opens an image and reads all of it.
func pull(t *testing.T, ref string, o image.SourceOptions) (Image, [][]byte, error) {
	t.Helper()
	img, err := Open(t.Context(), mustParse(t, ref), o)
	if err != nil {
		return nil, nil, err
	}
	t.Cleanup(func() { img.Close() })
	var all [][]byte
	for _, l := range img.Layers() {
		b, err := read(t, l)
		if err != nil {
			return img, all, err
		}
		all = append(all, b)
	}
	return img, all, nil
}

func read(t *testing.T, l Layer) ([]byte, error) {
	t.Helper()
	r, err := l.Open(t.Context())
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// same holds what was read against the image that it should be. Archives may
// have other manifests and unpacked layers.
func sameImage(t *testing.T, got Image, layers [][]byte, want v1.Image, exact bool) {
	t.Helper()
	conf, err := want.RawConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(conf, got.Config()) {
		t.Errorf("the configuration is %s, want %s", got.Config(), conf)
	}
	list, err := want.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != len(layers) {
		t.Fatalf("%d layers, want %d", len(layers), len(list))
	}
	for i, l := range list {
		open := l.Uncompressed
		if strings.HasSuffix(got.Layers()[i].MediaType, "gzip") {
			open = l.Compressed
		}
		r, err := open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		r.Close()
		if err != nil || !bytes.Equal(b, layers[i]) {
			t.Errorf("layer %d has other bytes (%v)", i, err)
		}
		if d, _ := l.DiffID(); d.String() != got.Layers()[i].DiffID {
			t.Errorf("layer %d has the diff_id %s", i, got.Layers()[i].DiffID)
		}
	}
	if exact {
		raw, err := want.RawManifest()
		if err != nil {
			t.Fatal(err)
		}
		d, _ := want.Digest()
		if m, _, digest := got.Manifest(); !bytes.Equal(m, raw) || digest != d.String() {
			t.Errorf("the manifest is %s, %s", digest, m)
		}
	}
}
