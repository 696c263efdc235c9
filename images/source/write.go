package source

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/internal/remote"
)

// Write puts img where ref says and returns the digest of its manifest there, of
// img's own where manifests are not kept:
// into a registry, an oci: directory (other images stay), an oci-archive: or
// docker-archive: file (which is replaced), the Docker daemon or Podman's
// storage. Nothing shows of it before all of it is there.
func Write(
	ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions,
) (digest string, err error) {
	ctx, cancel := bounded(ctx, opts.Timeout)
	defer cancel()
	write := map[reference.Transport]func(context.Context, reference.Reference, v1.Image, image.SourceOptions) (v1.Hash,
		error){
		reference.Docker:            push,
		reference.OCI:               writeLayout,
		reference.OCIArchive:        writeLayoutArchive,
		reference.DockerArchive:     writeArchive,
		reference.DockerDaemon:      loadDaemon,
		reference.ContainersStorage: loadPodman,
	}[ref.Transport]
	switch {
	case write == nil:
		err = fmt.Errorf("%w: images are not written there", fault.ErrUnsupported)
	case ref.Digest != "":
		err = fmt.Errorf("%w: what is written gets its digest from its content", fault.ErrInvalid)
	}
	var h v1.Hash
	if err == nil {
		h, err = write(ctx, ref, img, opts)
	}
	if err != nil {
		return "", &fault.Error{Op: "write image", ID: ref.Familiar(), Err: err}
	}
	return h.String(), nil
}

// atOnce is how many layers travel side by side.
const atOnce = 3

// push writes to a registry: layers, configuration, manifest.
func push(ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions) (v1.Hash, error) {
	list, err := endpoints(ref, opts, transport.PushScope)
	if err != nil {
		return v1.Hash{}, err
	}
	e := list[0]
	c, err := e.connect(ctx)
	if err != nil {
		return v1.Hash{}, err
	}
	defer e.close()
	m, blobs, err := parts(img)
	if err != nil {
		return v1.Hash{}, err
	}
	g, within := guard.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, l := range blobs {
		g.Go(func() error {
			desc, err := partial.Descriptor(l)
			if err != nil {
				return err
			}
			w := &watchedLayer{Layer: l, ctx: within, desc: *desc, report: opts.Progress}
			err = c.Retry(within, func() error {
				if within.Err() != nil {
					return context.Cause(within)
				}
				return c.Pusher.Upload(within, c.Repo, w)
			})
			if err == nil && !w.sent && opts.Progress != nil {
				opts.Progress(image.SourceProgress{
					Digest: desc.Digest.String(), Done: desc.Size, Total: desc.Size, There: true,
				})
			}
			if err != nil {
				return e.keys.blame(c.Explain(fmt.Errorf("push %s: %w", desc.Digest, err)))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return v1.Hash{}, err
	}
	err = c.Retry(ctx, func() error { return c.Pusher.Put(ctx, c.Repo.Tag(ref.Tag), m) })
	return remote.Describe("", m.raw).Digest, e.keys.blame(c.Explain(err))
}

// rawManifest is a manifest alone: with an image, the library pushes layers.
type rawManifest struct {
	raw   []byte
	media types.MediaType
}

func (m rawManifest) RawManifest() ([]byte, error)        { return m.raw, nil }
func (m rawManifest) MediaType() (types.MediaType, error) { return m.media, nil }

// parts takes an image apart: the manifest, and the blobs that it names, each
// once, the configuration last.
func parts(img v1.Image) (m rawManifest, blobs []v1.Layer, err error) {
	if m.media, err = img.MediaType(); err != nil {
		return m, nil, err
	}
	if m.raw, err = img.RawManifest(); err != nil {
		return m, nil, err
	}
	var means v1.Manifest
	if err := json.Unmarshal(m.raw, &means); err != nil {
		return m, nil, err
	}
	if blobs, err = img.Layers(); err != nil {
		return m, nil, err
	}
	config, err := partial.ConfigLayer(img)
	if err != nil {
		return m, nil, err
	}
	blobs = append(slices.Clone(blobs), config)
	if len(blobs) != len(means.Layers)+1 {
		return m, nil, fmt.Errorf("%w: its manifest has %d layers, %d are there", fault.ErrCorrupt,
			len(means.Layers), len(blobs)-1)
	}
	seen := map[v1.Hash]bool{}
	var once []v1.Layer
	for i, d := range append(slices.Clone(means.Layers), means.Config) {
		if h, err := blobs[i].Digest(); err != nil || h != d.Digest {
			return m, nil, errors.Join(err, fmt.Errorf("%w: its manifest names %s, %s is there",
				fault.ErrCorrupt, d.Digest, h))
		}
		if !seen[d.Digest] {
			once = append(once, blobs[i])
		}
		seen[d.Digest] = true
	}
	return m, once, nil
}

// watchedLayer reports how much of it was read.
type watchedLayer struct {
	v1.Layer
	ctx    context.Context
	desc   v1.Descriptor
	report func(image.SourceProgress)
	sent   bool
}

// Compressed implements v1.Layer.
func (w *watchedLayer) Compressed() (io.ReadCloser, error) {
	r, err := w.Layer.Compressed()
	if err != nil {
		return nil, err
	}
	w.sent = true
	watched := &watchedReader{ctx: w.ctx, r: r}
	if w.report != nil {
		watched.report = func(n int64) {
			w.report(image.SourceProgress{Digest: w.desc.Digest.String(), Done: n, Total: w.desc.Size})
		}
	}
	return struct {
		io.Reader
		io.Closer
	}{watched, r}, nil
}

// sink takes the files of a layout.
type sink interface {
	put(name string, size int64, r io.Reader) error
}

// putImage writes the blobs of an image, the manifest last, and describes it.
func putImage(ctx context.Context, to sink, img v1.Image, tag string, opts image.SourceOptions) (v1.Descriptor, error) {
	m, blobs, err := parts(img)
	if err != nil {
		return v1.Descriptor{}, err
	}
	for _, l := range blobs {
		d, err := partial.Descriptor(l)
		if err != nil {
			return v1.Descriptor{}, err
		}
		r, err := (&watchedLayer{Layer: l, ctx: ctx, desc: *d, report: opts.Progress}).Compressed()
		if err != nil {
			return v1.Descriptor{}, err
		}
		p := prove(r, r, d.Digest.String(), d.Size)
		if err := errors.Join(to.put(blobName(d.Digest), d.Size, p), p.Close()); err != nil {
			return v1.Descriptor{}, err
		}
	}
	raw, err := ociManifest(m)
	if err != nil {
		return v1.Descriptor{}, err
	}
	conf, err := img.ConfigFile()
	if err != nil {
		return v1.Descriptor{}, err
	}
	desc := remote.Describe(types.OCIManifestSchema1, raw)
	desc.Platform = conf.Platform()
	if tag != "" {
		desc.Annotations = map[string]string{refName: tag}
	}
	return desc, to.put(blobName(desc.Digest), desc.Size, bytes.NewReader(raw))
}

// ociManifest translates a manifest of Docker's types, which many readers of
// layouts do not look at. The blobs stay the same.
func ociManifest(m rawManifest) ([]byte, error) {
	if m.media == types.OCIManifestSchema1 {
		return m.raw, nil
	}
	var all v1.Manifest
	if err := json.Unmarshal(m.raw, &all); err != nil {
		return nil, err
	}
	all.MediaType, all.Config.MediaType = types.OCIManifestSchema1, types.OCIConfigJSON
	for i, l := range all.Layers {
		switch l.MediaType {
		case types.DockerLayer:
			all.Layers[i].MediaType = types.OCILayer
		case types.DockerUncompressedLayer:
			all.Layers[i].MediaType = types.OCIUncompressedLayer
		case dockerZstd:
			all.Layers[i].MediaType = types.OCILayerZStd
		}
	}
	return json.Marshal(all)
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

const layoutFile = `{"imageLayoutVersion":"1.0.0"}`

// writeLayoutArchive writes an OCI layout of one image as a tar archive.
func writeLayoutArchive(
	ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions,
) (h v1.Hash, err error) {
	err = replaceFile(ref.Path, func(f *os.File) error {
		w := tarSink{tar.NewWriter(f)}
		if err := w.put("oci-layout", int64(len(layoutFile)), strings.NewReader(layoutFile)); err != nil {
			return err
		}
		d, err := putImage(ctx, w, img, ref.Tag, opts)
		if err != nil {
			return err
		}
		h = d.Digest
		b, err := json.Marshal(v1.IndexManifest{
			SchemaVersion: 2, MediaType: types.OCIImageIndex, Manifests: []v1.Descriptor{d},
		})
		if err != nil {
			return err
		}
		return errors.Join(w.put("index.json", int64(len(b)), strings.NewReader(string(b))), w.Close())
	})
	return h, err
}

type tarSink struct{ *tar.Writer }

func (t tarSink) put(name string, size int64, r io.Reader) error {
	if err := t.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644, Format: tar.FormatPAX,
	}); err != nil {
		return err
	}
	_, err := io.Copy(t, r)
	return err
}

// writeArchive writes what `docker load` takes.
func writeArchive(
	ctx context.Context, ref reference.Reference, img v1.Image, opts image.SourceOptions,
) (v1.Hash, error) {
	err := replaceFile(ref.Path, func(f *os.File) error { return saveTo(ctx, f, ref, img, opts) })
	if err != nil {
		return v1.Hash{}, err
	}
	return img.Digest()
}

// saveTo writes an archive as `docker save` makes it.
func saveTo(ctx context.Context, w io.Writer, ref reference.Reference, img v1.Image, opts image.SourceOptions) error {
	var as name.Reference
	var err error
	if ref.Name == "" {
		h, err := img.ConfigName()
		if err != nil {
			return err
		}
		// A digest is what the library writes without a name.
		if as, err = name.NewDigest("image@" + h.String()); err != nil {
			return err
		}
	} else if as, err = name.NewTag(ref.Name + ":" + ref.Tag); err != nil {
		return err
	}
	n := int64(0)
	return tarball.Write(as, img, writerFunc(func(p []byte) (int, error) {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		m, err := w.Write(p)
		if n += int64(m); opts.Progress != nil {
			opts.Progress(image.SourceProgress{Done: n})
		}
		return m, err
	}))
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
