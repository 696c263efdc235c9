package docker

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/enginetest"
	"github.com/agentbox/agentbox/internal/fault"
)

// An image written into the Docker daemon and into Podman's storage comes out of them as the same
// image.
func TestImagesOfDaemons(t *testing.T) {
	d := enginetest.StartDockerd(t, enginetest.DockerdOptions{})
	t.Setenv("DOCKER_HOST", d.Host)
	store := enginetest.Dir(t)
	conf := filepath.Join(store, "storage.conf")
	if err := os.WriteFile(conf, []byte("[storage]\ndriver = \"vfs\"\ngraphroot = \""+store+"/data\"\nrunroot = \""+
		store+"/run\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("CONTAINERS_STORAGE_CONF", conf)
	img, err := random.Image(10_000, 2)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture, cf.Config.Labels = "linux", "amd64", map[string]string{"made": "by us"}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	id, _ := img.ConfigName()
	o := image.SourceOptions{Platform: "linux/amd64", Scratch: t.TempDir()}
	for _, at := range []string{"docker-daemon:", "containers-storage:"} {
		ref, err := reference.Parse(at+"example.com/web:1", "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := source.Write(t.Context(), ref, img, o); err != nil {
			t.Fatal(err)
		}
		byID, err := reference.Parse(at+id.String(), "")
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []reference.Reference{ref, byID} {
			got, err := source.Open(t.Context(), r, o)
			if err != nil {
				t.Errorf("%s: %v", r, err)
				continue
			}
			if c := string(got.Config()); !strings.Contains(c, "by us") {
				t.Errorf("%s: %s", r, c)
			}
			list, _ := img.Layers()
			for i, l := range got.Layers() {
				want, _ := list[i].DiffID()
				rc, err := l.Open(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if _, err = io.Copy(io.Discard, rc); errors.Join(err, rc.Close()) != nil || l.DiffID != want.String() {
					t.Errorf("%s: layer %d: %s, %v", r, i, l.DiffID, err)
				}
			}
			if len(got.Layers()) != len(list) {
				t.Errorf("%s: %d layers", r, len(got.Layers()))
			}
			if err := got.Close(); err != nil {
				t.Error(err)
			}
		}
		none, err := reference.Parse(at+"example.com/none", "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := source.Open(t.Context(), none, o); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s: %v", none, err)
		}
	}
	if out := d.Docker(t, "image", "inspect", "-f", "{{.Id}}", "example.com/web:1"); out != id.String() {
		t.Errorf("the daemon has %s, want %s", out, id)
	}
	t.Setenv("DOCKER_HOST", "unix://"+store+"/none")
	ref, err := reference.Parse("docker-daemon:web", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := source.Open(t.Context(), ref, o); err == nil || len(fault.Hint(err)) == 0 {
		t.Errorf("without a daemon: %v", err)
	}
}
