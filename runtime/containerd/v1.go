package containerd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/containerd"
	"github.com/containerd/containerd/content"
	cimages "github.com/containerd/containerd/images"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
)

// V1 is an image whose blobs are read from containerd.
func (m Images) V1(ctx context.Context, digest string) (v1.Image, error) {
	ctx = in(ctx, m.b.namespace)
	img, err := m.b.byDigest(ctx, digest)
	if err != nil {
		return nil, err
	}
	core, err := m.core(ctx, img)
	if err != nil {
		return nil, err
	}
	return partial.CompressedToImage(core)
}

// core is an image as its blobs have it.
type core struct {
	m        Images
	ctx      context.Context // go-containerregistry passes none
	manifest ocispec.Manifest
	raw      []byte
	config   []byte
}

func (m Images) core(ctx context.Context, img cimages.Image) (*core, error) {
	c := &core{m: m, ctx: ctx}
	var err error
	store := m.b.client.ContentStore()
	if c.manifest, err = cimages.Manifest(ctx, store, img.Target,
		containerd.NewImage(m.b.client.Client, img).Platform()); err != nil {
		return nil, plain(err)
	}
	if cimages.IsManifestType(img.Target.MediaType) {
		c.raw, err = content.ReadBlob(ctx, store, img.Target)
	} else {
		// Of several platforms; which of them it is the library does not say.
		c.raw, err = json.Marshal(c.manifest)
	}
	if err == nil {
		c.config, err = content.ReadBlob(ctx, store, c.manifest.Config)
	}
	return c, plain(err)
}

func (c *core) RawConfigFile() ([]byte, error) { return c.config, nil }
func (c *core) RawManifest() ([]byte, error)   { return c.raw, nil }
func (c *core) MediaType() (types.MediaType, error) {
	if c.manifest.MediaType == "" {
		return types.OCIManifestSchema1, nil
	}
	return types.MediaType(c.manifest.MediaType), nil
}

func (c *core) LayerByDigest(h v1.Hash) (partial.CompressedLayer, error) {
	for _, l := range c.manifest.Layers {
		if l.Digest.String() == h.String() {
			return &blob{c, l, h}, nil
		}
	}
	return nil, fmt.Errorf("layer %s: %w", h, fault.ErrNotFound)
}

// blob is a layer in containerd's content store.
type blob struct {
	c    *core
	desc ocispec.Descriptor
	hash v1.Hash
}

func (b *blob) Digest() (v1.Hash, error)            { return b.hash, nil }
func (b *blob) Size() (int64, error)                { return b.desc.Size, nil }
func (b *blob) MediaType() (types.MediaType, error) { return types.MediaType(b.desc.MediaType), nil }
func (b *blob) Compressed() (io.ReadCloser, error)  { return b.c.m.open(b.c.ctx, b.desc) }

// open reads a blob.
func (m Images) open(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	at, err := m.b.client.ContentStore().ReaderAt(ctx, d)
	if err = plain(err); errors.Is(err, fault.ErrNotFound) {
		return nil, &fault.Error{
			Err:  fmt.Errorf("layer %s of the image: %w", d.Digest, err),
			Hint: "containerd keeps only its unpacked form (discard_unpacked_layers): pull the image again.",
		}
	}
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{content.NewReader(at), at}, nil
}

// Add writes an image's blobs, but those that are there, and its name.
func (m Images) Add(ctx context.Context, name string, img v1.Image) (out image.Image, err error) {
	full, err := fullName(name)
	if err != nil {
		return out, err
	}
	var made cimages.Image
	err = m.b.leased(ctx, func(ctx context.Context) error {
		raw, err := img.RawManifest()
		if err != nil {
			return err
		}
		config, err := img.RawConfigFile()
		if err != nil {
			return err
		}
		manifest, err := img.Manifest()
		if err != nil {
			return err
		}
		layers, err := img.Layers()
		if err != nil {
			return err
		}
		refs := map[string]string{"containerd.io/gc.ref.content.config": manifest.Config.Digest.String()}
		for n, l := range layers {
			d := manifest.Layers[n].Digest
			refs[fmt.Sprintf("containerd.io/gc.ref.content.l.%d", n)] = d.String()
			if _, err := m.b.client.ContentStore().Info(ctx, digest.Digest(d.String())); err == nil {
				continue
			}
			r, err := l.Compressed()
			if err != nil {
				return err
			}
			_, err = m.blob(ctx, "agentbox-"+d.Hex, string(manifest.Layers[n].MediaType), r, nil)
			if err := errors.Join(err, r.Close()); err != nil {
				return err
			}
		}
		if _, err := m.blob(ctx, "agentbox-"+manifest.Config.Digest.Hex, string(manifest.Config.MediaType),
			bytes.NewReader(config), nil); err != nil {
			return err
		}
		target, err := m.blob(ctx, "agentbox-"+digest.FromBytes(raw).Encoded(), string(manifest.MediaType),
			bytes.NewReader(raw), refs)
		if err != nil {
			return err
		}
		made, err = m.publish(ctx, cimages.Image{Name: full, Target: target})
		return err
	})
	if err != nil {
		return out, err
	}
	return m.describe(in(ctx, m.b.namespace), made)
}
