package image

import (
	"log/slog"
	"time"
)

// SourceOptions modify all verbs of package images/source. The zero value works.
type SourceOptions struct {
	Platform string `json:"platform"` // OS/ARCH[/VARIANT]; empty: this machine's
	// Config describes registries; nil: what source.LoadConfig finds.
	Config *SourceConfig `json:"-"`
	// Insecure accepts plain HTTP, and certificates of no known authority, from
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
	Scratch  string `json:"-"`
	MaxBytes int64  `json:"max_bytes"` // of all blobs of an image together, as they travel; 0: 64 GiB
	// for all of Write, Tree, Login or Open, and of one Layer's reading; 0: none but that for a connection that stands still
	Timeout time.Duration `json:"timeout_ns"`
	// Progress is called now and then, by several goroutines at once: by Write for
	// each layer, and by Open while it takes an image out of a daemon. A
	// reader of layers counts for itself.
	Progress func(SourceProgress) `json:"-"`
	Log      *slog.Logger         `json:"-"` // nil: none

	// Pause comes before the first retry, and longer ones before the next; 0: half a second.
	Pause time.Duration `json:"-"`
	// Idle is how long a transfer may stand still; 0: a minute.
	Idle time.Duration `json:"-"`
}

// SourceProgress is how far a transfer has got.
type SourceProgress struct {
	Digest string `json:"digest"` // of the layer; empty: of the image in all
	Done   int64  `json:"done"`
	Total  int64  `json:"total"` // 0: not known
	There  bool   `json:"there"` // it was there already
}

// SourceConfig is registries.toml.
type SourceConfig struct {
	Default    string     `toml:"default"` // where names without a registry lie, HOST[:PORT][/PREFIX]; empty: docker.io
	Registries []Registry `toml:"registry"`
}

// Registry is what is to know about one registry.
type Registry struct {
	Name     string   `toml:"name"`     // HOST[:PORT]
	Mirrors  []string `toml:"mirrors"`  // [SCHEME://]HOST[:PORT][/PREFIX]; pulls ask them first, in this order
	Insecure bool     `toml:"insecure"` // plain HTTP, and certificates of no known authority, will do
	CertDir  string   `toml:"cert-dir"` // in place of the certs.d directories
}
