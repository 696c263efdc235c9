package images

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// record is what is known of an image beside its configuration.
type record struct {
	Version      int           `json:"version"`
	Source       string        `json:"source,omitempty"`
	Manifest     []byte        `json:"manifest_raw,omitempty"`
	ManifestType string        `json:"manifest_type,omitempty"`
	RepoDigests  []string      `json:"repo_digests,omitempty"`
	Platform     string        `json:"platform,omitempty"`
	Layers       []image.Layer `json:"layers"` // bottom first; Dir is left out
	Lower        []string      `json:"lower"`  // diffIDs of what is mounted, top first
	Created      time.Time     `json:"created"`
	Bytes        int64         `json:"bytes"`
	Size         int64         `json:"size,omitempty"`
	Config       image.Config  `json:"config"` // so that Resolve reads one file

	// Records before version 2 had this instead, and the digest of it for the
	// image's digest: they can be started, and that is all.
	Old *struct {
		Version int          `json:"version"`
		Layers  []string     `json:"layers"`
		Config  image.Config `json:"config"`
	} `json:"manifest,omitempty"`
}

const recordVersion = 2

// layerInfo is layers/HEX/layer.json.
type layerInfo struct {
	DiffID   string   `json:"diff_id"`
	Bytes    int64    `json:"bytes"`
	Entries  int64    `json:"entries"`
	Implicit []string `json:"implicit,omitempty"` // directories without an entry of their own
	Opaque   bool     `json:"opaque,omitempty"`   // it hides all layers below
}

type entry struct {
	Digest   string    `json:"digest"`
	Manifest string    `json:"manifest,omitempty"` // its digest where the name was pulled from
	Created  time.Time `json:"created"`
	Builtin  bool      `json:"builtin,omitempty"`
}

type index struct {
	Version int              `json:"version"`
	Names   map[string]entry `json:"names"`
}

const indexVersion = 2

func (s *Store) index() (index, error) {
	idx := index{Version: indexVersion, Names: map[string]entry{}}
	err := readJSON(s.path("index.json"), &idx)
	if errors.Is(err, fs.ErrNotExist) {
		return idx, nil
	}
	if err != nil {
		return idx, err
	}
	switch idx.Version {
	case indexVersion:
	case 1: // names without registries, of images that can only be started
		names := map[string]entry{}
		for n, e := range idx.Names {
			if c, err := s.canonical(n); err == nil && !e.Builtin {
				names[c] = e
			}
		}
		idx = index{Version: indexVersion, Names: names}
	default:
		return idx, fmt.Errorf("%w: %s was written by a newer agentbox", fault.ErrUnsupported, s.path("index.json"))
	}
	if idx.Names == nil {
		idx.Names = map[string]entry{}
	}
	return idx, nil
}

func (s *Store) record(digest string) (record, error) {
	var rec record
	hex, ok := hexOf(digest)
	if !ok {
		return rec, fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, digest)
	}
	err := readJSON(s.path("records", hex+".json"), &rec)
	if errors.Is(err, fs.ErrNotExist) {
		return rec, &fault.Error{Op: "find image", ID: digest,
			Hint: "Pull it again, or import the same files again: equal files have the same digest.",
			Err:  fmt.Errorf("%w: no image has this digest", fault.ErrNotFound)}
	}
	switch {
	case err != nil:
	case rec.Old != nil:
		if b, _ := json.Marshal(rec.Old); digestOf(b) != digest {
			return rec, fmt.Errorf("%w: the record of image %s does not match its digest", fault.ErrCorrupt, digest)
		}
		rec.Config = rec.Old.Config
		for _, d := range rec.Old.Layers {
			rec.Layers = append(rec.Layers, image.Layer{DiffID: d})
			rec.Lower = append(rec.Lower, d)
		}
		slices.Reverse(rec.Lower)
	case rec.Version != recordVersion:
		err = fmt.Errorf("%w: the record of image %s was written by a newer agentbox", fault.ErrUnsupported, digest)
	}
	return rec, err
}

// errOld says that a record is too old for more than a start.
func (r record) errOld(digest string) error {
	if r.Old == nil {
		return nil
	}
	return &fault.Error{
		Op: "read image", ID: digest, Hint: "Import it again.",
		Err: fmt.Errorf("%w: an earlier agentbox imported it", fault.ErrUnsupported),
	}
}

// config reads the configuration, whose digest is the image's.
func (s *Store) config(digest string) ([]byte, error) {
	hex, ok := hexOf(digest)
	if !ok {
		return nil, fmt.Errorf("%w: %q is not an image digest", fault.ErrInvalid, digest)
	}
	b, err := os.ReadFile(s.path("configs", hex+".json"))
	if err == nil && digestOf(b) != digest {
		err = fmt.Errorf("%w: the configuration of image %s does not match its digest", fault.ErrCorrupt, digest)
	}
	return b, err
}

// image reads a record; name is the index entry that it was found by, if any. On error the image
// has what is known.
func (s *Store) image(idx index, name, digest string) (image.Image, error) {
	if name == "" {
		if names := idx.namesOf(digest); len(names) > 0 {
			name = names[0]
		}
	}
	rec, err := s.record(digest)
	if err != nil {
		return image.Image{Name: s.familiar(name), Digest: digest, Created: idx.Names[name].Created}, err
	}
	img := image.Image{Name: s.familiar(name), Digest: digest, RepoDigests: rec.RepoDigests,
		Platform: rec.Platform, Created: rec.Created,
		Bytes: rec.Bytes, Size: rec.Size, Config: rec.Config}
	if e, ok := idx.Names[name]; ok {
		img.Created, img.Builtin = e.Created, e.Builtin
	}
	for _, l := range rec.Layers {
		img.Layers = append(img.Layers, l.DiffID)
	}
	for _, d := range rec.Lower {
		hex, ok := hexOf(d)
		dir := s.path("layers", hex, "diff")
		if fi, err := os.Lstat(dir); !ok || err != nil || !fi.IsDir() || fsx.NoLinks(filepath.Dir(dir), "") != nil {
			return img, &fault.Error{Op: "open image", ID: digest, Hint: "Pull or import the image again.",
				Err: fmt.Errorf("%w: its layer %s is gone", fault.ErrCorrupt, d)}
		}
		img.Lower = append(img.Lower, dir)
	}
	return img, nil
}

// namesOf lists the index entries of a digest.
func (idx index) namesOf(digest string) []string {
	var list []string
	for _, n := range slices.Sorted(maps.Keys(idx.Names)) {
		if idx.Names[n].Digest == digest {
			list = append(list, n)
		}
	}
	return list
}

// parseConfig reads a configuration as images have it.
func parseConfig(raw []byte) (*v1.ConfigFile, image.Config, error) {
	var f v1.ConfigFile
	if err := json.Unmarshal(raw, &f); err != nil {
		return nil, image.Config{}, fmt.Errorf("%w: the image's configuration: %w", fault.ErrInvalid, err)
	}
	if f.OS != "" && f.OS != "linux" {
		return nil, image.Config{}, fmt.Errorf("%w: the image is for %.50q", fault.ErrUnsupported, f.OS)
	}
	c := f.Config
	cfg := image.Config{Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, User: c.User, Workdir: c.WorkingDir,
		StopSignal: c.StopSignal, Labels: c.Labels,
		Volumes: slices.Sorted(maps.Keys(c.Volumes)), ExposedPorts: slices.Sorted(maps.Keys(c.ExposedPorts))}
	if h := c.Healthcheck; h != nil {
		cfg.Healthcheck = &image.Healthcheck{
			Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries,
		}
	}
	return &f, cfg, nil
}

func platformOf(f *v1.ConfigFile) string {
	if f.Architecture == "" {
		return ""
	}
	return strings.TrimSuffix("linux/"+f.Architecture+"/"+f.Variant, "/")
}

func (s *Store) layerInfo(diffID string) (layerInfo, error) {
	var info layerInfo
	hex, ok := hexOf(diffID)
	if !ok {
		return info, fmt.Errorf("%w: %q is not a layer's digest", fault.ErrInvalid, diffID)
	}
	err := readJSON(s.path("layers", hex, "layer.json"), &info)
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.DiffID != diffID {
		err = fmt.Errorf("%w: the layer %s is gone", fault.ErrCorrupt, diffID)
	}
	return info, err
}

// have reports whether a layer is here, whole.
func (s *Store) have(diffID string) bool {
	hex, ok := hexOf(diffID)
	if !ok {
		return false
	}
	if _, err := s.layerInfo(diffID); err != nil {
		return false
	}
	fi, err := os.Lstat(s.path("layers", hex, "diff"))
	return err == nil && fi.IsDir()
}
