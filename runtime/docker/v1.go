package docker

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
	"sync"
	"time"

	dockerimage "github.com/docker/docker/api/types/image"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/guard"
)

// V1 is an image of the daemon. Its layers are saved when one of them is first
// read; until then nothing travels.
func (i Images) V1(ctx context.Context, digest string) (v1.Image, error) {
	got, err := i.b.api.ImageInspect(ctx, digest)
	if err != nil {
		return nil, i.b.explain(ctx, err)
	}
	steps, err := i.b.api.ImageHistory(ctx, digest)
	if err != nil {
		return nil, i.b.explain(ctx, err)
	}
	cfg, err := configFile(got, steps)
	if err != nil {
		return nil, err
	}
	info, err := i.b.info(ctx, false)
	if err != nil {
		return nil, err
	}
	s := &download{b: i.b, id: got.ID, store: imageStore(info)}
	s.once = sync.OnceValues(func() (v1.Image, error) { return s.save(ctx) })
	img := &daemonImage{download: s, cfg: cfg}
	for _, d := range cfg.RootFS.DiffIDs {
		img.layers = append(img.layers, &daemonLayer{s, d})
	}
	return img, nil
}

// configFile makes a configuration of the daemon's description. It is equivalent to the
// original, but not byte for byte.
func configFile(got dockerimage.InspectResponse, steps []dockerimage.HistoryResponseItem) (*v1.ConfigFile, error) {
	cfg := &v1.ConfigFile{
		Architecture: got.Architecture, Variant: got.Variant, OS: got.Os, OSVersion: got.OsVersion, Author: got.Author,
		RootFS: v1.RootFS{Type: "layers"},
	}
	created, err := time.Parse(time.RFC3339Nano, got.Created)
	if err == nil {
		cfg.Created = v1.Time{Time: created}
	}
	// The names are those of the specification on both sides.
	raw, err := json.Marshal(got.Config)
	if err == nil {
		err = json.Unmarshal(raw, &cfg.Config)
	}
	if err != nil {
		return nil, fmt.Errorf("configuration of image %s: %w", got.ID, err)
	}
	for _, l := range got.RootFS.Layers {
		d, err := v1.NewHash(l)
		if err != nil {
			return nil, fmt.Errorf("layers of image %s: %w", got.ID, err)
		}
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, d)
	}
	full := 0
	for _, s := range slices.Backward(steps) {
		h := v1.History{
			Created: v1.Time{Time: time.Unix(s.Created, 0).UTC()}, CreatedBy: s.CreatedBy, Comment: s.Comment,
			EmptyLayer: s.Size == 0,
		}
		if !h.EmptyLayer {
			full++
		}
		cfg.History = append(cfg.History, h)
	}
	if full != len(cfg.RootFS.DiffIDs) {
		cfg.History = nil // it is unknown which of the steps made which layer
	}
	return cfg, nil
}

// download is the output of `docker save` for an image.
type download struct {
	b     *Backend
	id    string
	store bool // the id is the digest of its manifest, not of its configuration
	once  func() (v1.Image, error)
}

func (s *download) save(ctx context.Context) (v1.Image, error) {
	r, err := s.b.api.ImageSave(ctx, []string{s.id})
	if err != nil {
		return nil, s.b.explain(ctx, err)
	}
	defer r.Close()
	f, err := os.CreateTemp(s.b.root, "save-")
	if err != nil {
		return nil, err
	}
	// It ends with the last descriptor: there is no call that ends the use of an image.
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	n, err := io.Copy(f, r)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("save image %s: %w", s.id, err), f.Close())
	}
	return tarball.Image(func() (io.ReadCloser, error) { return io.NopCloser(io.NewSectionReader(f, 0, n)), nil }, nil)
}

// daemonImage knows its configuration without its layers.
type daemonImage struct {
	*download
	cfg    *v1.ConfigFile
	layers []v1.Layer
}

func (i *daemonImage) Layers() ([]v1.Layer, error)         { return i.layers, nil }
func (i *daemonImage) ConfigFile() (*v1.ConfigFile, error) { return i.cfg.DeepCopy(), nil }
func (i *daemonImage) MediaType() (types.MediaType, error) { return types.DockerManifestSchema2, nil }
func (i *daemonImage) Size() (int64, error)                { return partial.Size(i) }
func (i *daemonImage) Digest() (v1.Hash, error)            { return partial.Digest(i) }
func (i *daemonImage) RawManifest() ([]byte, error)        { return partial.RawManifest(i) }
func (i *daemonImage) Manifest() (*v1.Manifest, error)     { return full(i, v1.Image.Manifest) }
func (i *daemonImage) RawConfigFile() ([]byte, error)      { return full(i, v1.Image.RawConfigFile) }
func (i *daemonImage) ConfigName() (v1.Hash, error) {
	if i.store {
		return full(i, v1.Image.ConfigName)
	}
	return v1.NewHash(i.id)
}
func (i *daemonImage) LayerByDigest(h v1.Hash) (v1.Layer, error) {
	return i.by(h, v1.Image.LayerByDigest)
}
func (i *daemonImage) LayerByDiffID(h v1.Hash) (v1.Layer, error) {
	return i.by(h, v1.Image.LayerByDiffID)
}

func (i *daemonImage) by(h v1.Hash, find func(v1.Image, v1.Hash) (v1.Layer, error)) (v1.Layer, error) {
	img, err := i.once()
	if err != nil {
		return nil, err
	}
	return find(img, h)
}

func full[T any](i *daemonImage, ask func(v1.Image) (T, error)) (none T, err error) {
	img, err := i.once()
	if err != nil {
		return none, err
	}
	return ask(img)
}

// daemonLayer is a layer that the daemon has.
type daemonLayer struct {
	*download
	diffID v1.Hash
}

func (l *daemonLayer) DiffID() (v1.Hash, error)             { return l.diffID, nil }
func (l *daemonLayer) MediaType() (types.MediaType, error)  { return types.OCILayer, nil }
func (l *daemonLayer) Digest() (v1.Hash, error)             { return layerOf(l, v1.Layer.Digest) }
func (l *daemonLayer) Size() (int64, error)                 { return layerOf(l, v1.Layer.Size) }
func (l *daemonLayer) Compressed() (io.ReadCloser, error)   { return layerOf(l, v1.Layer.Compressed) }
func (l *daemonLayer) Uncompressed() (io.ReadCloser, error) { return layerOf(l, v1.Layer.Uncompressed) }

func layerOf[T any](l *daemonLayer, ask func(v1.Layer) (T, error)) (none T, err error) {
	img, err := l.once()
	if err != nil {
		return none, err
	}
	layer, err := img.LayerByDiffID(l.diffID)
	if err != nil {
		return none, err
	}
	return ask(layer)
}

// Add loads an image into the daemon. It transfers only those layers that did not come from
// there.
func (i Images) Add(ctx context.Context, name string, img v1.Image) (image.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	info, err := i.b.info(ctx, false)
	if err != nil {
		return image.Image{}, err
	}
	r, w := io.Pipe()
	defer r.Close()
	// Containerd takes no archive with gaps.
	guard.Go(func() {
		w.CloseWithError(guard.Do(func() error { return writeArchive(w, img, imageStore(info)) }))
	})
	id, err := i.loaded(ctx, r)
	if err != nil {
		return image.Image{}, fmt.Errorf("load the image into the Docker daemon: %w", err)
	}
	if name == "" {
		return i.ResolveDigest(ctx, id)
	}
	if err := i.Tag(ctx, id, name); err != nil {
		return image.Image{}, err
	}
	return i.Resolve(ctx, name)
}

// writeArchive writes an image as `docker save` does; unless it is to be whole,
// without the layers that the daemon has.
func writeArchive(w io.Writer, img v1.Image, whole bool) error {
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	out := tar.NewWriter(w)
	put := func(name string, size int64, r io.Reader) error {
		if err := out.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		_, err := io.Copy(out, r)
		return err
	}
	list := []string{}
	for n, l := range layers {
		name := fmt.Sprintf("layer-%d.tar.gz", n)
		list = append(list, name)
		if _, there := l.(*daemonLayer); there && !whole {
			continue
		}
		size, err := l.Size()
		if err != nil {
			return err
		}
		r, err := l.Compressed()
		if err != nil {
			return err
		}
		if err := errors.Join(put(name, size, r), r.Close()); err != nil {
			return err
		}
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "Layers": list}})
	if err != nil {
		return err
	}
	return errors.Join(put("config.json", int64(len(config)), bytes.NewReader(config)),
		put("manifest.json", int64(len(manifest)), bytes.NewReader(manifest)), out.Close())
}
