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
// Registries are configured by registries.toml (see Config); credentials are
// those of `docker login` and `podman login`.
package source

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// Options modify all verbs of this package. The zero value works.
type Options struct {
	Platform string `json:"platform"` // OS/ARCH[/VARIANT]; empty: this machine's
	// Config tells of registries; nil: what LoadConfig finds.
	Config *Config `json:"-"`
	// Insecure accepts plain HTTP, and certificates that nobody vouches for, from
	// the registry that the reference names.
	Insecure bool `json:"insecure"`
	// CertDir has *.crt (authorities), *.cert and *.key (ours) for the registry that
	// the reference names; empty: the certs.d directories, see docs/images.md.
	CertDir string `json:"cert_dir"`
	// AuthFile has credentials in the form of docker's config.json; empty: that of
	// Docker, then that of Podman. Login and Logout write it.
	AuthFile string `json:"auth_file"`
	// Scratch is a directory for what has to lie on disk meanwhile, as large as
	// the image; empty: the system's for temporary files. Nothing stays there.
	Scratch  string        `json:"-"`
	MaxBytes int64         `json:"max_bytes"`  // of all blobs of an image together, as they travel; 0: 64 GiB
	Timeout  time.Duration `json:"timeout_ns"` // for all of Write, Tree, Login or Open, and of one Layer's reading; 0: none but that for a connection that stands still
	// Progress is called now and then, by several goroutines at once: by Write for
	// each layer, and by Open while it takes an image out of a daemon. Who reads
	// layers counts himself.
	Progress func(Progress) `json:"-"`
	Log      *slog.Logger   `json:"-"` // nil: none

	// For tests.
	pause time.Duration // before the first retry; 0: half a second
	idle  time.Duration // how long a transfer may stand still; 0: a minute
}

// Progress tells how far a transfer is.
type Progress struct {
	Digest string `json:"digest"` // of the layer; empty: of the image in all
	Done   int64  `json:"done"`
	Total  int64  `json:"total"` // 0: not known
	There  bool   `json:"there"` // it was there already
}

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
func Open(ctx context.Context, ref Reference, opts Options) (Image, error) {
	open := map[Transport]func(context.Context, Reference, Options) (*image, error){
		Docker: openRegistry, DockerDaemon: openDaemon, DockerArchive: openArchive, OCI: openLayout, OCIArchive: openLayout, ContainersStorage: openPodman,
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
