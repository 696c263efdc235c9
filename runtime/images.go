package runtime

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"github.com/agentbox/agentbox/images/image"
)

// ImageService is the part of Service that pulls, stores and pushes images: in agentbox's
// own store or in the engine's, depending on the backend.
type ImageService interface {
	// PullImage fetches an image, or finds it here, as the pull policy says. Package
	// images/source documents references.
	PullImage(ctx context.Context, ref string, opts image.PullOptions) (Image, error)
	// PushImage writes an image to the reference to; empty: to the registry in the
	// image's own name.
	PushImage(ctx context.Context, ref, to string, opts image.SourceOptions) (PushedImage, error)
	// source: a tarball, a directory, "-" is not one
	ImportImage(ctx context.Context, name, source string) (Image, error)
	ImportImageFrom(ctx context.Context, name string, r io.Reader) (Image, error)
	Images(ctx context.Context) ([]Image, error)
	InspectImage(ctx context.Context, ref string) (ImageDetails, error)
	TagImage(ctx context.Context, ref, name string) error
	RemoveImage(ctx context.Context, name string) error
	// PruneImages removes the images without a name, or with all every image, except
	// those that a sandbox or a checkpoint needs.
	PruneImages(ctx context.Context, all bool) (PrunedImages, error)
	// VerifyImage reads an image's files again; damage is ErrCorrupt.
	VerifyImage(ctx context.Context, ref string) (Image, error)
	// Commit makes an image from a sandbox, or from a checkpoint (SANDBOX@CHECKPOINT or
	// its id): the layers of its image and one more. It freezes the sandbox as a
	// files-only checkpoint does.
	Commit(ctx context.Context, ref, to string, opts CommitOptions) (Committed, error)
}

// Image is the documented JSON of `agentbox image ls`; it only ever grows.
type Image struct {
	Name        string    `json:"name"`
	Digest      string    `json:"digest"` // of its configuration: identifies it, whatever its source
	Created     time.Time `json:"created"`
	Bytes       int64     `json:"bytes"` // unpacked
	Builtin     bool      `json:"builtin"`
	Platform    string    `json:"platform,omitempty"`
	RepoDigests []string  `json:"repo_digests"` // REPOSITORY@DIGEST, where to pull it again
	Layers      int       `json:"layers"`
	Size        int64     `json:"size,omitempty"` // of its layers as pulled
	Damaged     string    `json:"damaged,omitempty"`
}

// ImageDetails is the documented JSON of `agentbox image inspect`; it only ever grows.
type ImageDetails struct {
	Image
	Names          []string        `json:"names"`
	Source         string          `json:"source,omitempty"` // the reference it was pulled from
	ManifestDigest string          `json:"manifest_digest,omitempty"`
	ManifestType   string          `json:"manifest_type,omitempty"`
	Config         image.Config    `json:"config"`
	LayerList      []image.Layer   `json:"layer_list"` // bottom first
	History        []image.History `json:"history"`    // the oldest first
	Manifest       json.RawMessage `json:"manifest,omitempty"`
	RawConfig      json.RawMessage `json:"raw_config,omitempty"`
	UsedBy         []string        `json:"used_by"` // sandboxes and checkpoints that need it
}

// PushedImage is the documented JSON of `agentbox image push`.
type PushedImage struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"` // of its manifest there
}

// PrunedImages is the documented JSON of `agentbox image prune`.
type PrunedImages struct {
	Removed []Image `json:"removed"`
	Freed   int64   `json:"freed"` // bytes
}

// CommitOptions modify Commit.
type CommitOptions struct {
	Author  string `json:"author"`
	Message string `json:"message"`
	// instructions of a Dockerfile: CMD, ENTRYPOINT, ENV, LABEL, USER, WORKDIR, EXPOSE, VOLUME, STOPSIGNAL
	Changes []string            `json:"changes"`
	Created time.Time           `json:"created"` // zero: the checkpoint's, or now
	Source  image.SourceOptions `json:"source"`
}

// Committed is the documented JSON of `agentbox commit`; it only ever grows.
type Committed struct {
	Reference string `json:"reference"`
	Digest    string `json:"digest"` // of the image's configuration
	// digest of its manifest; none for an image that stays on this host
	Manifest    string   `json:"manifest,omitempty"`
	Base        string   `json:"base"`        // digest of the image below
	Layer       string   `json:"layer"`       // digest of the layer's tar archive
	LayerBytes  int64    `json:"layer_bytes"` // unpacked
	LayerSize   int64    `json:"layer_size"`  // compressed
	Sandbox     string   `json:"sandbox"`     // its id
	SandboxName string   `json:"sandbox_name"`
	Checkpoint  string   `json:"checkpoint,omitempty"` // its id; none for the present state of a sandbox
	Notes       []string `json:"notes"`                // what an image cannot contain and was left out
}

// LabelForeign is the label of images that were made from a foreign checkpoint.
const LabelForeign = "agentbox.foreign"
