// Package source knows the places that images come from and go to.
//
// A Reference names an image at a place: a registry, a directory or a file, the
// Docker daemon, Podman's storage, or a distribution to be bootstrapped. Open
// finds the image there for one platform, Write puts one there. The package
// knows no store and no sandbox: what it gives are bytes, and it believes none
// of them before they are proven. A manifest is proven by its digest, where the
// reference or an index has one, a configuration and a layer by the manifest or,
// in archives that have none, by the configuration.
//
// Registries are configured by registries.toml (see image.SourceConfig); credentials are
// those of `docker login` and `podman login`.
package source

import (
	"context"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// Image is an image for one platform. Use it by one goroutine, its layers by
// many.
type Image interface {
	// Manifest is what the source has for the platform; of an archive without one,
	// it is made up.
	Manifest() (raw []byte, mediaType, digest string)
	// Config is the raw JSON of the configuration, whose sha256 is the identity of
	// the image.
	Config() []byte
	// Layers are as many as the configuration has diff_ids, the bottom first.
	Layers() []Layer
	Close() error
}

// Layer is a layer of an Image, and valid until that is closed.
type Layer struct {
	Digest    string // of the bytes that Open gives
	Size      int64  // their number
	MediaType string // says how they are compressed
	DiffID    string // digest of the tar; nothing here proves it
	// Open gives the bytes. A transfer that breaks is resumed inside. At EOF
	// number and digest are proven; until then they are only bytes.
	Open func(ctx context.Context) (io.ReadCloser, error)
	// Resume is Open, but the first bytes are read from have (to its end), what an
	// earlier try left, and only the rest is asked for. If it then turns out
	// that these were others, the error is fault.ErrCorrupt, as if they
	// were the source's; forget them and Open. Nil where nothing travels.
	Resume func(ctx context.Context, have io.Reader) (io.ReadCloser, error)
}

// Open finds the image that ref names. References of Dir and Bootstrap are
// trees of files, not images: see Tree.
func Open(ctx context.Context, ref reference.Reference, opts image.SourceOptions) (Image, error) {
	open := map[reference.Transport]func(context.Context, reference.Reference, image.SourceOptions) (*opened, error){
		reference.Docker:            openRegistry,
		reference.DockerDaemon:      openDaemon,
		reference.DockerArchive:     openArchive,
		reference.OCI:               openLayout,
		reference.OCIArchive:        openLayout,
		reference.ContainersStorage: openPodman,
	}[ref.Transport]
	if open == nil {
		return nil, fmt.Errorf("%s: %w: it is a tree of files, not an image", ref, fault.ErrInvalid)
	}
	img, err := open(ctx, ref, opts)
	if err != nil {
		return nil, &fault.Error{Op: "open image", ID: ref.Familiar(), Err: err}
	}
	return img, nil
}
