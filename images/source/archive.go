package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	distribution "github.com/distribution/reference"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
)

// refName is what an index calls an image; Docker and containerd write the
// whole name into the other one, and the tag into this.
const (
	refName        = "org.opencontainers.image.ref.name"
	containerdName = "io.containerd.image.name"
)

// openLayout opens an image of an OCI layout, a directory or an archive.
func openLayout(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (img *opened, err error) {
	var fsys files
	if ref.Transport == reference.OCI {
		root, err := os.OpenRoot(ref.Path)
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", fault.ErrNotFound, err)
		}
		if err != nil {
			return nil, err
		}
		fsys = dirFiles{root}
	} else if fsys, err = openTar(ctx, ref.Path, opts); err != nil {
		return nil, err
	}
	return closing(fsys, func() (*opened, error) {
		raw, err := readSmall(fsys, "index.json", maxManifest)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, &fault.Error{Hint: "A root filesystem is dir:DIR, an archive of `docker save` docker-archive:FILE.",
				Err: fmt.Errorf("%w: it is no OCI image layout, there is no index.json in it", fault.ErrInvalid)}
		}
		if err != nil {
			return nil, err
		}
		doc, err := parseDocument(raw, types.OCIImageIndex)
		if err != nil {
			return nil, err
		}
		d, err := among(ref, doc.Manifests)
		if err != nil {
			return nil, err
		}
		if d == nil {
			return resolve(ctx, blobs{fsys}, raw, string(types.OCIImageIndex), opts)
		}
		if raw, err = (blobs{fsys}).manifest(ctx, *d); err != nil {
			return nil, err
		}
		return resolve(ctx, blobs{fsys}, raw, string(d.MediaType), opts)
	})
}

// closing closes fsys with the image, or at once if there is none.
func closing(fsys files, open func() (*opened, error)) (*opened, error) {
	img, err := open()
	if err != nil {
		return nil, errors.Join(err, fsys.Close())
	}
	img.close = fsys.Close
	return img, nil
}

// among finds what the reference calls an image in the index of a layout. Nil:
// it does not say, and the platform decides.
func among(r reference.Reference, list []v1.Descriptor) (*v1.Descriptor, error) {
	var names []string
	var found []v1.Descriptor
	for _, d := range list {
		n := d.Annotations[refName]
		if n != "" {
			names = append(names, n)
		}
		if r.Tag != "" && (n == r.Tag || d.Annotations[containerdName] == r.Tag) ||
			r.Digest != "" && d.Digest.String() == r.Digest {
			found = append(found, d)
		}
	}
	slices.Sort(names)
	names = slices.Compact(names)
	switch {
	case len(found) > 0:
		return &found[0], checkDescriptor(found[0])
	case r.Tag != "" || r.Digest != "":
		return nil, &fault.Error{
			Hint: "There are: " + some(names) + ".", Err: fmt.Errorf("%w: there is no such image", fault.ErrNotFound),
		}
	case len(names) > 1:
		return nil, &fault.Error{
			Hint: "Write one of them behind the path: " + some(names) + ".",
			Err:  fmt.Errorf("%w: there is more than one image", fault.ErrInvalid),
		}
	}
	return nil, nil
}

// some is a list that fits on a screen.
func some(names []string) string {
	const most = 20
	s := strings.Join(names[:min(len(names), most)], ", ")
	if len(names) > most {
		s += fmt.Sprintf(" and %d more", len(names)-most)
	}
	return s
}

// saved is an image in the manifest.json of `docker save`.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// openArchive opens an image of an archive as `docker save` makes it.
func openArchive(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (*opened, error) {
	t, err := openTar(ctx, ref.Path, opts)
	if err != nil {
		return nil, err
	}
	return savedImage(ctx, t, ref, opts)
}

// savedImage finds the image that ref names in the archive, which is closed
// with it.
func savedImage(ctx context.Context, t *tarFiles, ref reference.Reference, opts image.SourceOptions) (*opened, error) {
	return closing(t, func() (*opened, error) {
		raw, err := readSmall(t, "manifest.json", maxManifest)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, &fault.Error{Hint: "An archived OCI layout is oci-archive:FILE; an archive of a root filesystem is brought in with `agentbox image import`.",
				Err: fmt.Errorf("%w: it is no archive of `docker save`, there is no manifest.json in it (which may lie at its end)", fault.ErrInvalid)}
		}
		if err != nil {
			return nil, err
		}
		var list []saved
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, fmt.Errorf("its manifest.json: %w: %w", fault.ErrCorrupt, err)
		}
		s, err := savedAs(ref, list)
		if err != nil {
			return nil, err
		}
		return s.image(ctx, t, opts)
	})
}

// savedAs finds what the reference names.
func savedAs(r reference.Reference, list []saved) (*saved, error) {
	var names []string
	for i, s := range list {
		for _, t := range s.RepoTags {
			names = append(names, t)
			n, err := distribution.ParseNormalizedNamed(t)
			if err == nil && r.Name != "" && distribution.TagNameOnly(n).String() == r.Name+":"+r.Tag {
				return &list[i], nil
			}
		}
	}
	slices.Sort(names)
	switch {
	case len(list) == 1 && (r.Name == "" || r.Transport != reference.DockerArchive): // a daemon gave what it was asked for
		return &list[0], nil
	case r.Name == "" && len(list) > 0:
		return nil, &fault.Error{
			Hint: "Write one of them behind the path: " + some(names) + ".",
			Err:  fmt.Errorf("%w: there is more than one image", fault.ErrInvalid),
		}
	}
	return nil, &fault.Error{
		Hint: "There are: " + some(names) + ".", Err: fmt.Errorf("%w: there is no such image", fault.ErrNotFound),
	}
}

// image proves a saved image as far as it can be: the configuration by its
// file's name, where that is a digest, and the layers by the configuration.
func (s *saved) image(ctx context.Context, t *tarFiles, opts image.SourceOptions) (*opened, error) {
	want, err := wanted(opts.Platform)
	if err != nil {
		return nil, err
	}
	config, err := readSmall(t, s.Config, maxConfig)
	if err != nil {
		return nil, fmt.Errorf("its configuration: %w: %w", fault.ErrCorrupt, err)
	}
	named := "sha256:" + strings.TrimPrefix(strings.TrimSuffix(path.Base(s.Config), ".json"), "sha256:")
	conf := remote.Describe(types.DockerConfigJSON, config)
	if reference.Digest().MatchString(named) && named != conf.Digest.String() {
		return nil, fmt.Errorf("its configuration: %w: its bytes are those of %s, not of %s",
			fault.ErrCorrupt, conf.Digest, named)
	}
	diffs, err := want.diffIDs(config)
	if err != nil {
		return nil, err
	}
	if len(diffs) != len(s.Layers) || len(diffs) > maxLayers {
		return nil, fmt.Errorf("%w: its manifest has %d layers, its configuration %d", fault.ErrCorrupt,
			len(s.Layers), len(diffs))
	}
	img := &opened{config: config, media: string(types.DockerManifestSchema2)}
	manifest := v1.Manifest{SchemaVersion: 2, MediaType: types.DockerManifestSchema2, Config: conf}
	total := int64(0)
	for i, name := range s.Layers {
		l, err := savedLayer(ctx, t, name, diffs[i])
		if err != nil {
			return nil, fmt.Errorf("its layer %d: %w", i+1, err)
		}
		if total += l.Size; checkSize(total, opts) != nil {
			return nil, checkSize(total, opts)
		}
		h, err := v1.NewHash(l.Digest)
		if err != nil {
			return nil, err
		}
		manifest.Layers = append(manifest.Layers, v1.Descriptor{
			MediaType: types.MediaType(l.MediaType), Size: l.Size, Digest: h,
		})
		img.layers = append(img.layers, l)
	}
	if img.raw, err = json.Marshal(manifest); err != nil {
		return nil, err
	}
	img.digest = remote.Describe("", img.raw).Digest.String()
	return img, nil
}

// savedLayer is a layer under a name of the archive. Most are tars, whose digest
// is the diff_id; compressed ones are read once for theirs.
func savedLayer(ctx context.Context, t *tarFiles, name, diff string) (Layer, error) {
	r, size, err := t.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: it is not in the archive (%.100q)", fault.ErrCorrupt, name)
	}
	if err != nil {
		return Layer{}, err
	}
	defer r.Close()
	var magic [4]byte
	if _, err := io.ReadFull(r, magic[:]); err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return Layer{}, err
	}
	l := Layer{Digest: diff, Size: size, MediaType: string(types.DockerUncompressedLayer), DiffID: diff}
	if p := packed(magic[:]); p != "" {
		l.MediaType = string(types.DockerLayer)
		if p == "zstd" {
			l.MediaType = string(dockerZstd)
		}
		if l.Digest, _, err = sumOf(ctx, t, name); err != nil {
			return Layer{}, err
		}
	}
	l.Open = func(ctx context.Context) (io.ReadCloser, error) {
		r, size, err := t.open(name)
		if err != nil {
			return nil, err
		}
		return prove(&watchedReader{ctx: ctx, r: r}, r, l.Digest, size), nil
	}
	return l, nil
}
