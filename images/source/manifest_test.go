package source

import (
	"context"
	"errors"
	"io"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// anything gives the same for every digest.
type anything struct{ doc, config []byte }

func (a anything) manifest(context.Context, v1.Descriptor) ([]byte, error) { return a.doc, nil }
func (a anything) small(context.Context, v1.Descriptor) ([]byte, error)    { return a.config, nil }
func (a anything) layer(v1.Descriptor) Layer {
	return Layer{Open: func(context.Context) (io.ReadCloser, error) { return nil, io.EOF }}
}

// An image is sound, whatever a registry sends.
func FuzzResolve(f *testing.F) {
	const manifest = `{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":2,"digest":"` + digestA + `"},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","size":3,"digest":"` + digestA + `"}]}`
	const config = `{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":["` + digestA + `"]}}`
	const index = `{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","size":3,"digest":"` + digestA + `","platform":{"os":"linux","architecture":"amd64"}}]}`
	f.Add([]byte(manifest), []byte(config), []byte(manifest))
	f.Add([]byte(index), []byte(config), []byte(manifest))
	f.Add([]byte(index), []byte(config), []byte(index))
	f.Fuzz(func(t *testing.T, raw, config, doc []byte) {
		img, err := resolve(t.Context(), anything{doc, config}, raw, string(types.OCIManifestSchema1),
			image.SourceOptions{Platform: "linux/amd64"})
		if err != nil {
			for _, known := range []error{fault.ErrCorrupt, fault.ErrInvalid, fault.ErrUnsupported, fault.ErrDenied} {
				if errors.Is(err, known) {
					return
				}
			}
			t.Fatal(err)
		}
		total := int64(0)
		for _, l := range img.Layers() {
			total += l.Size
			if l.Size < 0 || !reference.Digest().MatchString(l.Digest) ||
				!reference.Digest().MatchString(l.DiffID) || l.Open == nil {
				t.Fatalf("%+v", l)
			}
		}
		if total < 0 || total > maxImage {
			t.Fatal(total)
		}
	})
}
