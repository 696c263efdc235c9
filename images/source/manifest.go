package source

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/platforms"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
)

// Bounds for what is read into memory. Registries themselves refuse manifests
// of more than 4 MiB.
const (
	maxManifest = 4 << 20
	maxConfig   = 8 << 20
	maxLayers   = 1024
	maxNesting  = 4 // of an index in an index
	maxImage    = 64 << 30
)

// place is where manifests and blobs come from by digest.
type place interface {
	// manifest reads the manifest or index that d describes, proven.
	manifest(ctx context.Context, d v1.Descriptor) ([]byte, error)
	// small reads a blob into memory, proven.
	small(ctx context.Context, d v1.Descriptor) ([]byte, error)
	// layer makes the functions that read a blob.
	layer(d v1.Descriptor) Layer
}

// opened is the Image that Open returns.
type opened struct {
	raw           []byte
	media, digest string
	config        []byte
	layers        []Layer
	close         func() error
}

func (i *opened) Manifest() ([]byte, string, string) { return i.raw, i.media, i.digest }
func (i *opened) Config() []byte                     { return i.config }
func (i *opened) Layers() []Layer                    { return i.layers }
func (i *opened) Close() error                       { return i.close() }

// document is a manifest or an index.
type document struct {
	SchemaVersion int             `json:"schemaVersion"`
	MediaType     types.MediaType `json:"mediaType"`
	ArtifactType  string          `json:"artifactType"`
	Config        *v1.Descriptor  `json:"config"`
	Layers        []v1.Descriptor `json:"layers"`
	Manifests     []v1.Descriptor `json:"manifests"`
}

// resolve makes an image out of a manifest, or of the one that an index has for
// the platform. said is the media type that came with raw, if any did.
func resolve(ctx context.Context, from place, raw []byte, said string, opts image.SourceOptions) (*opened, error) {
	want, err := wanted(opts.Platform)
	if err != nil {
		return nil, err
	}
	for range maxNesting {
		doc, err := parseDocument(raw, types.MediaType(said))
		if err != nil {
			return nil, err
		}
		if doc.Manifests == nil {
			return want.image(ctx, from, raw, doc, opts)
		}
		d, err := want.choose(doc.Manifests)
		if err != nil {
			return nil, err
		}
		if raw, err = from.manifest(ctx, d); err != nil {
			return nil, err
		}
		said = string(d.MediaType)
	}
	return nil, fmt.Errorf("%w: an index in an index, %d times", fault.ErrUnsupported, maxNesting)
}

// parseDocument reads a manifest or an index. Its Manifests are not nil if it is
// an index.
func parseDocument(raw []byte, said types.MediaType) (*document, error) {
	d := &document{}
	if err := json.Unmarshal(raw, d); err != nil {
		return nil, fmt.Errorf("its manifest: %w: %w", fault.ErrCorrupt, err)
	}
	if d.MediaType == "" {
		d.MediaType = said
	}
	switch {
	case d.SchemaVersion == 1:
		return nil, &fault.Error{Hint: "Pull it with an old Docker and push it again: manifests of schema 1 cannot be proven.",
			Err: fmt.Errorf("%w: its manifest is of Docker's schema 1", fault.ErrUnsupported)}
	case d.SchemaVersion != 2:
		return nil, fmt.Errorf("%w: its manifest is of schema %d", fault.ErrCorrupt, d.SchemaVersion)
	case d.Manifests != nil && (d.Layers != nil || d.Config != nil):
		// which of the two it is, others may see differently
		return nil, fmt.Errorf("%w: its manifest is an index as well", fault.ErrCorrupt)
	case d.MediaType.IsIndex() != (d.Manifests != nil) && (d.MediaType.IsIndex() || d.MediaType.IsImage()):
		return nil, fmt.Errorf("%w: its manifest is not what its type says, %s", fault.ErrCorrupt, d.MediaType)
	case d.Manifests != nil:
		if d.MediaType == "" {
			d.MediaType = types.OCIImageIndex
		}
		return d, nil
	case d.Config == nil || d.Config.MediaType != types.OCIConfigJSON && d.Config.MediaType != types.DockerConfigJSON:
		what := d.ArtifactType
		if what == "" && d.Config != nil {
			what = string(d.Config.MediaType)
		}
		return nil, fmt.Errorf("%w: it is no image (but of type %.80q)", fault.ErrInvalid, what)
	}
	if !d.MediaType.IsImage() {
		d.MediaType = types.OCIManifestSchema1
		if d.Config.MediaType == types.DockerConfigJSON {
			d.MediaType = types.DockerManifestSchema2
		}
	}
	return d, nil
}

// platform is the one that is looked for.
type platform struct {
	spec     ocispec.Platform
	match    platforms.MatchComparer
	explicit bool
}

func wanted(s string) (platform, error) {
	if s == "" {
		p := platforms.DefaultSpec()
		return platform{p, platforms.Only(p), false}, nil
	}
	p, err := platforms.Parse(s)
	if err != nil {
		return platform{}, &fault.Error{
			Hint: "A platform is OS/ARCHITECTURE[/VARIANT], for example linux/arm64.",
			Err:  fmt.Errorf("%w: %w", fault.ErrInvalid, err),
		}
	}
	return platform{p, platforms.OnlyStrict(p), true}, nil
}

// choose finds the manifest for the platform in an index.
func (p platform) choose(list []v1.Descriptor) (v1.Descriptor, error) {
	var found []v1.Descriptor
	var others []string
	for _, d := range list {
		switch {
		case !d.MediaType.IsImage() && !d.MediaType.IsIndex() || d.Annotations["vnd.docker.reference.type"] != "":
		case d.Platform == nil: // its configuration will tell
			if len(list) == 1 || d.MediaType.IsIndex() {
				found = append(found, d)
			}
		case p.match.Match(spec(d.Platform)):
			found = append(found, d)
		default:
			others = append(others, platforms.Format(spec(d.Platform)))
		}
	}
	if len(found) == 0 {
		slices.Sort(others)
		return v1.Descriptor{}, p.lacks(strings.Join(slices.Compact(others[:min(len(others), 40)]), ", "))
	}
	slices.SortStableFunc(found, func(a, b v1.Descriptor) int {
		switch {
		case a.Platform == nil || b.Platform == nil:
			return 0
		case p.match.Less(spec(a.Platform), spec(b.Platform)):
			return -1
		case p.match.Less(spec(b.Platform), spec(a.Platform)):
			return 1
		}
		return 0
	})
	return found[0], checkDescriptor(found[0])
}

// lacks is the error for an image of other platforms only.
func (p platform) lacks(has string) error {
	if has == "" {
		has = "no other"
	}
	return &fault.Error{Hint: "Another platform than this machine's is chosen with --platform; its programs run here only through an emulator (binfmt_misc).",
		Err: fmt.Errorf("%w: the image is not there for %s, but for %.400s", fault.ErrUnsupported,
			platforms.Format(p.spec), has)}
}

func spec(p *v1.Platform) ocispec.Platform {
	return platforms.Normalize(ocispec.Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant})
}

func checkDescriptor(d v1.Descriptor) error {
	if d.Digest.Algorithm != "sha256" || len(d.Digest.Hex) != 64 {
		return fmt.Errorf("its manifest: %w: digests other than sha256 (%.20s)", fault.ErrUnsupported, d.Digest)
	}
	if d.Size < 0 {
		return fmt.Errorf("its manifest: %w: %s has %d bytes", fault.ErrCorrupt, d.Digest, d.Size)
	}
	return nil
}

const dockerZstd types.MediaType = "application/vnd.docker.image.rootfs.diff.tar.zstd"

// layerTypes are those of which a store knows how to make a tar.
var layerTypes = []types.MediaType{types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer,
	types.DockerUncompressedLayer,
	dockerZstd, "application/vnd.docker.image.rootfs.diff.tar"}

// image checks a manifest and reads its configuration.
func (p platform) image(
	ctx context.Context, from place, raw []byte, doc *document, opts image.SourceOptions,
) (*opened, error) {
	if len(doc.Layers) > maxLayers {
		return nil, fmt.Errorf("%w: it has %d layers", fault.ErrUnsupported, len(doc.Layers))
	}
	total := doc.Config.Size
	for i, d := range append([]v1.Descriptor{*doc.Config}, doc.Layers...) {
		if err := checkDescriptor(d); err != nil {
			return nil, err
		}
		if i == 0 {
			continue
		}
		if !slices.Contains(layerTypes, d.MediaType) {
			return nil, fmt.Errorf("%w: its layer %d is of type %.100q", fault.ErrUnsupported, i, string(d.MediaType))
		}
		total += d.Size // 1024 sizes cannot overflow unless one of them is too large
		if err := checkSize(max(d.Size, total), opts); err != nil {
			return nil, err
		}
	}
	if doc.Config.Size > maxConfig {
		return nil, fmt.Errorf("%w: its configuration has %d bytes", fault.ErrCorrupt, doc.Config.Size)
	}
	config, err := from.small(ctx, *doc.Config)
	if err != nil {
		return nil, fmt.Errorf("its configuration: %w", err)
	}
	diffs, err := p.diffIDs(config)
	if err != nil {
		return nil, err
	}
	if len(diffs) != len(doc.Layers) {
		return nil, fmt.Errorf("%w: its manifest has %d layers, its configuration %d", fault.ErrCorrupt,
			len(doc.Layers), len(diffs))
	}
	img := &opened{
		raw: raw, media: string(doc.MediaType), digest: remote.Describe("", raw).Digest.String(), config: config,
		close: func() error { return nil },
	}
	for i, d := range doc.Layers {
		l := from.layer(d)
		l.Digest, l.Size, l.MediaType, l.DiffID = d.Digest.String(), d.Size, string(d.MediaType), diffs[i]
		img.layers = append(img.layers, l)
	}
	return img, nil
}

// checkSize holds the size of an image against its bound.
func checkSize(n int64, opts image.SourceOptions) error {
	limit := opts.MaxBytes
	if limit == 0 {
		limit = maxImage
	}
	if n > limit {
		return &fault.Error{Hint: "If it is no bomb, bring it here in another way, such as oci:DIR, and import its files.",
			Err: fmt.Errorf("%w: the image has more than the %d bytes that are allowed", fault.ErrDenied, limit)}
	}
	return nil
}

// diffIDs reads them out of a configuration, and whether that is for the
// platform.
func (p platform) diffIDs(config []byte) ([]string, error) {
	var c struct {
		v1.Platform
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		} `json:"rootfs"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		return nil, fmt.Errorf("its configuration: %w: %w", fault.ErrCorrupt, err)
	}
	for _, d := range c.RootFS.DiffIDs {
		if !reference.Digest().MatchString(d) {
			return nil, fmt.Errorf("its configuration: %w: %.100q is no diff_id", fault.ErrCorrupt, d)
		}
	}
	// Images made from scratch by hand may not say.
	if c.OS != "" && c.Architecture != "" && !p.match.Match(spec(&c.Platform)) {
		return nil, p.lacks(platforms.Format(spec(&c.Platform)))
	}
	return c.RootFS.DiffIDs, nil
}
