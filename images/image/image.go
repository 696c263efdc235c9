// Package image has the words that images are spoken of in: what an image is, and
// how one is pulled and pushed. It does nothing. The store of images, a backend's
// images and the Service share it, so that a program which only calls a Service
// needs neither the store (package images) nor the registries (package images/source).
package image

import (
	"encoding/json"
	"time"
)

// Image is a resolved image.
type Image struct {
	Name        string   // as people write it, "debian:12"; empty when no name has it any more
	Digest      string   // its identity: "sha256:" and 64 hex digits, of its configuration
	RepoDigests []string // whole references REPOSITORY@DIGEST, which mean the same on every machine
	Platform    string   // "linux/amd64"
	Created     time.Time
	Bytes       int64 // unpacked
	Size        int64 // of its layers as they were pulled; 0 when it was imported
	Builtin     bool
	Layers      []string // diffIDs, bottom first
	Lower       []string // absolute directories, top first
	Config      Config
	Damaged     string // why List's caller cannot use it; empty: it is whole as far as a look tells
}

// Config is what an image says about the processes that run in it.
type Config struct {
	Entrypoint   []string          `json:"entrypoint,omitempty"`
	Cmd          []string          `json:"cmd,omitempty"`
	Env          []string          `json:"env,omitempty"`
	User         string            `json:"user,omitempty"`
	Workdir      string            `json:"workdir,omitempty"`
	StopSignal   string            `json:"stop_signal,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	Volumes      []string          `json:"volumes,omitempty"`
	ExposedPorts []string          `json:"exposed_ports,omitempty"`
	Healthcheck  *Healthcheck      `json:"healthcheck,omitempty"`
}

// Healthcheck is shown, never run.
type Healthcheck struct {
	Test        []string      `json:"test,omitempty"` // NONE, CMD ARG... or CMD-SHELL LINE
	Interval    time.Duration `json:"interval,omitempty"`
	Timeout     time.Duration `json:"timeout,omitempty"`
	StartPeriod time.Duration `json:"start_period,omitempty"`
	Retries     int           `json:"retries,omitempty"`
}

// Details is all that the store knows of an image.
type Details struct {
	Image
	Names          []string        // all that mean it, as people write them
	Source         string          // the reference it came from, canonical; empty: an import
	Manifest       json.RawMessage // as its source had it; empty: an import
	ManifestType   string          // media type
	ManifestDigest string
	RawConfig      json.RawMessage
	LayerList      []Layer // bottom first
	History        []History
}

// Layer is one layer of an image.
type Layer struct {
	DiffID    string `json:"diff_id"`
	Digest    string `json:"digest,omitempty"`     // as it was pulled
	MediaType string `json:"media_type,omitempty"` // as it was pulled
	Size      int64  `json:"size,omitempty"`       // as it was pulled
	Bytes     int64  `json:"bytes"`                // unpacked
	Entries   int64  `json:"entries"`
	Dir       string `json:"dir"`
}

// History is one step of how an image was made, the oldest first.
type History struct {
	Created   time.Time `json:"created,omitzero"`
	CreatedBy string    `json:"created_by,omitempty"`
	Author    string    `json:"author,omitempty"`
	Comment   string    `json:"comment,omitempty"`
	Empty     bool      `json:"empty_layer,omitempty"` // it made no layer
	Bytes     int64     `json:"bytes"`                 // of its layer, unpacked
	DiffID    string    `json:"diff_id,omitempty"`
}

// Progress is how far an import or a pull has got.
type Progress struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"` // unpacked

	// For each layer of a pull:
	Layer string `json:"layer"` // the blob's digest; empty for an import
	Stage Stage  `json:"stage"`
	Done  int64  `json:"done"`  // bytes of the blob
	Total int64  `json:"total"` // its size
}

// Stage is where a layer of a pull stands.
type Stage string

// A layer waits, is downloaded and unpacked at once, and is done; or it was
// there already.
const (
	StageWaiting Stage = "waiting"
	StagePulling Stage = "pulling"
	StageDone    Stage = "done"
	StagePresent Stage = "present"
)

// Policy says when Pull asks the source.
type Policy string

// The zero Policy is PullMissing.
const (
	PullAlways  Policy = "always"
	PullMissing Policy = "missing"
	PullNever   Policy = "never"
)

// PullOptions modify Pull. The zero value works.
type PullOptions struct {
	Policy   Policy         `json:"policy"`
	Source   SourceOptions  `json:"source"`   // its Progress and Scratch are the store's to set
	Parallel int            `json:"parallel"` // layers at a time; 0: 3
	Progress func(Progress) `json:"-"`        // called by one goroutine at a time
}
