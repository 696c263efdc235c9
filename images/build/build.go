// Package build makes an image from a base, one more layer, and changes to the configuration.
//
// The layer is written once, compressed, to a file (Write). The image (New) refers to it and to
// the base's layers, none of which is read before its bytes or its digest are requested. Equal
// input gives equal digests. The package knows neither sandboxes nor stores.
package build

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
)

// Layer is a layer in a file, compressed with gzip.
type Layer struct {
	path   string
	digest v1.Hash
	diffID v1.Hash
	size   int64
	bytes  int64
}

var _ v1.Layer = (*Layer)(nil)

// Write makes the file path of the tar archive that fill writes. On error there
// is none.
func Write(ctx context.Context, path string, fill func(ctx context.Context, w io.Writer) error) (_ *Layer, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	packed, plain := counter{Hash: sha256.New()}, counter{Hash: sha256.New()}
	out := bufio.NewWriterSize(io.MultiWriter(f, &packed), 256<<10)
	// Level and header are part of what must be the same every time.
	zip, err := gzip.NewWriterLevel(out, gzip.BestSpeed)
	if err != nil {
		return nil, err
	}
	if err := fill(ctx, io.MultiWriter(zip, &plain)); err != nil {
		return nil, err
	}
	if err := errors.Join(zip.Close(), out.Flush()); err != nil {
		return nil, fmt.Errorf("write the layer: %w", err)
	}
	return &Layer{path: path, digest: packed.sum(), diffID: plain.sum(), size: packed.n, bytes: plain.n}, nil
}

type counter struct {
	hash.Hash
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return c.Hash.Write(p)
}

func (c *counter) sum() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(c.Sum(nil))}
}

// Bytes is the size of the tar archive.
func (l *Layer) Bytes() int64 { return l.bytes }

// Digest is that of the file.
func (l *Layer) Digest() (v1.Hash, error) { return l.digest, nil }

// DiffID is the digest of the tar archive.
func (l *Layer) DiffID() (v1.Hash, error) { return l.diffID, nil }

// Size is the file's.
func (l *Layer) Size() (int64, error) { return l.size, nil }

// MediaType is OCI's.
func (l *Layer) MediaType() (types.MediaType, error) { return types.OCILayer, nil }

// Compressed opens the file.
func (l *Layer) Compressed() (io.ReadCloser, error) { return os.Open(l.path) }

// Uncompressed opens the tar archive.
func (l *Layer) Uncompressed() (io.ReadCloser, error) {
	f, err := os.Open(l.path)
	if err != nil {
		return nil, err
	}
	zip, err := gzip.NewReader(bufio.NewReaderSize(f, 256<<10))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return struct {
		io.Reader
		io.Closer
	}{zip, f}, nil
}

// Options modify New.
type Options struct {
	Created time.Time // of the image and of its step in the history
	By      string    // what made the layer
	Author  string
	Message string
	Changes []string // instructions, see Change
}

// New is the OCI image of base with layer on top of it.
func New(base v1.Image, layer *Layer, opts Options) (v1.Image, error) {
	cfg, err := base.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("read the base image's configuration: %w", err)
	}
	below, err := base.Layers()
	if err != nil {
		return nil, fmt.Errorf("read the base image's layers: %w", err)
	}
	cfg = cfg.DeepCopy()
	if err := Change(&cfg.Config, opts.Changes); err != nil {
		return nil, err
	}
	created := v1.Time{Time: opts.Created.UTC()}
	cfg.Created = created
	cfg.Author = opts.Author
	// Of the container that some engine made the base in.
	//lint:ignore SA1019 older images have it
	cfg.Container, cfg.DockerVersion = "", ""
	cfg.Config.Hostname, cfg.Config.Domainname, cfg.Config.Image = "", "", ""
	cfg.RootFS.Type = "layers"
	cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, layer.diffID)
	// A base without a history has to have one now: a step for each layer.
	for n := steps(cfg.History); n < len(below); n++ {
		cfg.History = append(cfg.History, v1.History{})
	}
	cfg.History = append(cfg.History, v1.History{
		Created: created, CreatedBy: opts.By, Author: opts.Author, Comment: opts.Message,
	})
	raw, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	img := &image{config: raw}
	for _, l := range below {
		t, err := l.MediaType()
		if err != nil {
			return nil, err
		}
		if name, ok := ociNames[t]; ok {
			l = ociLayer{l, name}
		}
		img.layers = append(img.layers, l)
	}
	img.layers = append(img.layers, layer)
	return img, nil
}

// steps counts those that made a layer.
func steps(list []v1.History) (n int) {
	for _, h := range list {
		if !h.EmptyLayer {
			n++
		}
	}
	return n
}

// image is an OCI image of given layers. Its configuration is known without the
// digests of compressed layers, which may take long to know.
type image struct {
	layers []v1.Layer
	config []byte
}

func (i *image) Layers() ([]v1.Layer, error)         { return i.layers, nil }
func (i *image) MediaType() (types.MediaType, error) { return types.OCIManifestSchema1, nil }
func (i *image) Size() (int64, error)                { return partial.Size(i) }
func (i *image) ConfigName() (v1.Hash, error)        { return partial.ConfigName(i) }
func (i *image) ConfigFile() (*v1.ConfigFile, error) { return partial.ConfigFile(i) }
func (i *image) RawConfigFile() ([]byte, error)      { return i.config, nil }
func (i *image) Digest() (v1.Hash, error)            { return partial.Digest(i) }
func (i *image) RawManifest() ([]byte, error)        { return partial.RawManifest(i) }
func (i *image) LayerByDiffID(id v1.Hash) (v1.Layer, error) {
	return i.find(id, v1.Layer.DiffID)
}

func (i *image) LayerByDigest(id v1.Hash) (v1.Layer, error) {
	if name, err := i.ConfigName(); err == nil && name == id {
		return partial.ConfigLayer(i)
	}
	return i.find(id, v1.Layer.Digest)
}

func (i *image) find(id v1.Hash, of func(v1.Layer) (v1.Hash, error)) (v1.Layer, error) {
	for _, l := range i.layers {
		if got, err := of(l); err != nil || got == id {
			return l, err
		}
	}
	return nil, fmt.Errorf("the image has no layer %s", id)
}

func (i *image) Manifest() (*v1.Manifest, error) {
	name, size, err := v1.SHA256(bytes.NewReader(i.config))
	if err != nil {
		return nil, err
	}
	m := &v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Config: v1.Descriptor{MediaType: types.OCIConfigJSON, Size: size, Digest: name},
	}
	for _, l := range i.layers {
		d, err := partial.Descriptor(l)
		if err != nil {
			return nil, err
		}
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: d.MediaType, Size: d.Size, Digest: d.Digest})
	}
	return m, nil
}

// ociNames are OCI's names of Docker's media types.
var ociNames = map[types.MediaType]types.MediaType{
	types.DockerLayer:             types.OCILayer,
	types.DockerUncompressedLayer: types.OCIUncompressedLayer,
}

// ociLayer is a layer by another name of its media type.
type ociLayer struct {
	v1.Layer
	name types.MediaType
}

func (l ociLayer) MediaType() (types.MediaType, error) { return l.name, nil }
