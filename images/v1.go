package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/layer"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/internal/fault"
)

// V1 returns the image of a digest as go-containerregistry has it. Its layers are read from the
// store, and compressed only when their compressed form or its digest is requested; the same
// layer gives the same bytes every time. The image must stay in the store while it is in use; ctx
// ends reads.
func (s *Store) V1(ctx context.Context, digest string) (v1.Image, error) {
	rec, err := s.record(digest)
	if err == nil {
		err = rec.errOld(digest)
	}
	if err != nil {
		return nil, err
	}
	config, err := s.config(digest)
	if err != nil {
		return nil, err
	}
	img := &storedImage{config: config}
	for _, l := range rec.Layers {
		h, err := v1.NewHash(l.DiffID)
		if err != nil {
			return nil, fmt.Errorf("%w: the layer %q: %w", fault.ErrCorrupt, l.DiffID, err)
		}
		img.layers = append(img.layers, &storedLayer{s: s, ctx: ctx, diffID: h})
	}
	return img, nil
}

type storedImage struct {
	config []byte
	layers []v1.Layer

	once     sync.Once
	manifest []byte
	err      error
}

func (i *storedImage) Layers() ([]v1.Layer, error)               { return i.layers, nil }
func (i *storedImage) MediaType() (types.MediaType, error)       { return types.OCIManifestSchema1, nil }
func (i *storedImage) Size() (int64, error)                      { return partial.Size(i) }
func (i *storedImage) ConfigName() (v1.Hash, error)              { return partial.ConfigName(i) }
func (i *storedImage) ConfigFile() (*v1.ConfigFile, error)       { return partial.ConfigFile(i) }
func (i *storedImage) RawConfigFile() ([]byte, error)            { return i.config, nil }
func (i *storedImage) Digest() (v1.Hash, error)                  { return partial.Digest(i) }
func (i *storedImage) Manifest() (*v1.Manifest, error)           { return partial.Manifest(i) }
func (i *storedImage) LayerByDiffID(h v1.Hash) (v1.Layer, error) { return i.layer(h, v1.Layer.DiffID) }

func (i *storedImage) LayerByDigest(h v1.Hash) (v1.Layer, error) {
	if name, err := i.ConfigName(); err == nil && name == h {
		return partial.ConfigLayer(i)
	}
	return i.layer(h, v1.Layer.Digest)
}

func (i *storedImage) layer(h v1.Hash, by func(v1.Layer) (v1.Hash, error)) (v1.Layer, error) {
	for _, l := range i.layers {
		got, err := by(l)
		if err != nil {
			return nil, err
		}
		if got == h {
			return l, nil
		}
	}
	return nil, fmt.Errorf("%w: the image has no layer %s", fault.ErrNotFound, h)
}

// RawManifest needs the digests of the compressed layers.
func (i *storedImage) RawManifest() ([]byte, error) {
	i.once.Do(func() {
		config, err := partial.ConfigLayer(i)
		if err != nil {
			i.err = err
			return
		}
		m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
		add := func(l v1.Layer) v1.Descriptor {
			d, err := partial.Descriptor(l)
			if err != nil {
				i.err = errors.Join(i.err, err)
				return v1.Descriptor{}
			}
			return *d
		}
		m.Config = add(config)
		m.Config.MediaType = types.OCIConfigJSON
		for _, l := range i.layers {
			m.Layers = append(m.Layers, add(l))
		}
		if i.err == nil {
			i.manifest, i.err = json.Marshal(m)
		}
	})
	return i.manifest, i.err
}

// storedLayer is a layer of the store.
type storedLayer struct {
	s      *Store
	ctx    context.Context
	diffID v1.Hash
	mu     sync.Mutex // one digests at a time
}

func (l *storedLayer) DiffID() (v1.Hash, error)            { return l.diffID, nil }
func (l *storedLayer) MediaType() (types.MediaType, error) { return types.OCILayer, nil }

func (l *storedLayer) Digest() (v1.Hash, error) {
	c, err := l.compressed()
	return c.Digest, err
}

func (l *storedLayer) Size() (int64, error) {
	c, err := l.compressed()
	return c.Size, err
}

// Uncompressed is the tar that the layer was unpacked from.
func (l *storedLayer) Uncompressed() (io.ReadCloser, error) {
	dir, err := os.Open(l.s.path("layers", l.diffID.Hex))
	if err != nil {
		return nil, fmt.Errorf("%w: the layer %s: %w", fault.ErrNotFound, l.diffID, err)
	}
	return withClose{layer.Pack(l.ctx, dir), dir}, nil
}

func (l *storedLayer) Compressed() (io.ReadCloser, error) {
	plain, err := l.Uncompressed()
	if err != nil {
		return nil, err
	}
	return withClose{layer.Compress(plain), plain}, nil
}

type withClose struct {
	io.ReadCloser
	also io.Closer
}

func (w withClose) Close() error { return errors.Join(w.ReadCloser.Close(), w.also.Close()) }

// compressed is layers/HEX/gzip.json: what the layer's compressed form is, so
// that it is made only where it is needed.
type compressed struct {
	Digest v1.Hash `json:"digest"`
	Size   int64   `json:"size"`
	How    string  `json:"how"`
}

func (l *storedLayer) compressed() (compressed, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	name := filepath.Join("layers", l.diffID.Hex, "gzip.json")
	var c compressed
	if err := readJSON(l.s.path(name), &c); err == nil && c.How == layer.Compression {
		return c, nil
	}
	r, err := l.Compressed()
	if err != nil {
		return c, err
	}
	c.How = layer.Compression
	c.Digest, c.Size, err = v1.SHA256(r)
	if err = errors.Join(err, r.Close()); err != nil {
		return compressed{}, err
	}
	// Under the lock, because a sweep deletes files in tmp that are not held.
	return c, l.s.locked(func() error { return l.s.writeJSON(name, c) })
}

// Add makes img an image of the store, with the given name unless that is empty. For layers that
// are here already, only the DiffID is requested.
func (s *Store) Add(ctx context.Context, name string, img v1.Image) (image.Image, error) {
	if name != "" {
		canon, err := s.canonical(name)
		if err != nil {
			return image.Image{}, err
		}
		name = canon
	}
	from := made{}
	var err error
	if from.config, err = img.RawConfigFile(); err != nil {
		return image.Image{}, err
	}
	layers, err := img.Layers()
	if err != nil {
		return image.Image{}, err
	}
	for _, l := range layers {
		id, err := l.DiffID()
		if err != nil {
			return image.Image{}, err
		}
		from.layers = append(from.layers, source.Layer{Digest: id.String(), DiffID: id.String(), Size: unknownSize,
			Open: func(context.Context) (io.ReadCloser, error) { return l.Uncompressed() }})
	}
	return s.take(ctx, reference.Reference{}, name, from, image.PullOptions{})
}

// unknownSize is large enough that no bound of a layer's size matters.
const unknownSize = 1 << 50

// made is an image that was made here, as a source.
type made struct {
	config []byte
	layers []source.Layer
}

func (m made) Manifest() (raw []byte, mediaType, digest string) { return nil, "", "" }
func (m made) Config() []byte                                   { return m.config }
func (m made) Layers() []source.Layer                           { return m.layers }
func (m made) Close() error                                     { return nil }
