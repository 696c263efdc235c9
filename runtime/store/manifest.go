package store

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"time"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
)

// Version is the manifest version that this package writes.
const Version = 1

// Kinds and states, as in the records.
const (
	KindFiles = "files"
	KindFull  = "full"

	Pending = "pending"
	Ready   = "ready"
	Failed  = "failed"
)

// File names inside a checkpoint.
const (
	ManifestName = "manifest.json"
	ArchiveName  = "files.tar.zst"
	TreeName     = "tree.jsonl.zst"
	ImagesName   = "criu"
)

const maxManifest = 64 << 20

// Manifest says all there is to a checkpoint. At rest it is canonical JSON:
// members in the order below, maps and the spec sorted by key, no white space,
// nothing escaped that need not be. One manifest has exactly one form, and
// the digest of that form is the checkpoint's identity.
//
// Whoever commits fills in Files.Entries, Processes.Count and List, Versions,
// TCP, Status, Warnings and Managed; the store fills in the rest.
type Manifest struct {
	Version     int               `json:"version"`
	ID          string            `json:"id"`
	Name        string            `json:"name"`
	Kind        string            `json:"kind"`
	SandboxID   string            `json:"sandbox_id"`
	SandboxName string            `json:"sandbox_name"`
	Spec        json.RawMessage   `json:"spec"` // of the sandbox
	ImageDigest string            `json:"image_digest"`
	Parent      string            `json:"parent"`
	Created     time.Time         `json:"created"` // UTC
	Labels      map[string]string `json:"labels"`
	Trigger     string            `json:"trigger"`
	Files       Files             `json:"files"`
	Processes   *Processes        `json:"processes"` // null: files only
	Versions    Versions          `json:"versions"`
	TCP         string            `json:"tcp"`
	Status      string            `json:"status"` // the sandbox's, before it was frozen
	Warnings    []string          `json:"warnings"`

	// Managed are the files, by their path in the sandbox, that the backend
	// binds over the root filesystem, such as /etc/hosts.
	Managed map[string]Managed `json:"managed,omitempty"`

	// Volumes are those of the engine that were taken along.
	Volumes []Volume `json:"volumes,omitempty"`
}

// Volume is a named volume of the engine with what was in it.
type Volume struct {
	Name  string `json:"name"`
	Files Files  `json:"files"`
}

// blobs are all streams, those of the upperdir first.
func (m *Manifest) blobs() []*Blob {
	list := []*Blob{&m.Files.Archive, &m.Files.Tree}
	for i := range m.Volumes {
		list = append(list, &m.Volumes[i].Files.Archive, &m.Volumes[i].Files.Tree)
	}
	return list
}

func volumeArchive(i int) string { return fmt.Sprintf("volume-%d.tar.zst", i) }
func volumeTree(i int) string    { return fmt.Sprintf("volume-%d.jsonl.zst", i) }

// Managed is a small file that is in the manifest itself.
type Managed struct {
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Data []byte `json:"data"` // base64
}

// Bounds for managed files and volumes.
const (
	maxVolumes      = 64
	MaxManaged      = 1 << 20 // bytes of one
	maxManagedFiles = 16
)

// Files describes the archive of the upperdir and the list of its entries.
type Files struct {
	Entries int64 `json:"entries"`
	Archive Blob  `json:"archive"`
	Tree    Blob  `json:"tree"`
}

// Blob is one stored file. Digest ("blake3:" and hex) and Bytes are of the
// file as it lies there; Raw is the length of what it decompresses to.
type Blob struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
	Raw    int64  `json:"raw"`
}

// Processes describes the process images of a full checkpoint.
type Processes struct {
	Count  int       `json:"count"`
	List   []Process `json:"list"`
	Images []Image   `json:"images"` // sorted by name
}

// Process is one dumped process, numbered as in the sandbox.
type Process struct {
	Pid     int    `json:"pid"`
	Parent  int    `json:"parent"`
	Command string `json:"command"`
	Stopped bool   `json:"stopped"` // by a signal
}

// Image is one file that CRIU wrote.
type Image struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
}

// Versions tell what made the checkpoint.
type Versions struct {
	CRIU    string `json:"criu"`
	Runtime string `json:"runtime"`
	Kernel  string `json:"kernel"`
}

// Encode returns the canonical form.
func (m Manifest) Encode() ([]byte, error) {
	m.Created = m.Created.UTC().Round(0)
	if m.Labels == nil {
		m.Labels = map[string]string{}
	}
	if m.Warnings == nil {
		m.Warnings = []string{}
	}
	if p := m.Processes; p != nil {
		c := *p
		if c.List == nil {
			c.List = []Process{}
		}
		if c.Images == nil {
			c.Images = []Image{}
		}
		m.Processes = &c
	}
	if m.Managed != nil {
		files := make(map[string]Managed, len(m.Managed))
		for path, f := range m.Managed {
			f.Data = append([]byte{}, f.Data...) // nil would be null
			files[path] = f
		}
		m.Managed = files
	}
	spec, err := canonical(m.Spec)
	if err != nil {
		return nil, fmt.Errorf("spec: %w: %w", fault.ErrInvalid, err)
	}
	m.Spec = spec
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(m); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// canonical sorts the members of free-form JSON. Numbers keep their digits.
func canonical(data []byte) ([]byte, error) {
	if len(data) == 0 {
		return []byte("null"), nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("something follows the JSON value")
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// ParseManifest reads the canonical form and nothing else: what it returns
// encodes to the very same bytes, and its names are safe to open. A version
// this package does not know is ErrUnsupported, all else that is wrong ErrCorrupt.
func ParseManifest(data []byte) (Manifest, error) {
	bad := func(format string, args ...any) (Manifest, error) {
		return Manifest{}, fmt.Errorf("%s: %w: "+format, append([]any{ManifestName, fault.ErrCorrupt}, args...)...)
	}
	if len(data) > maxManifest {
		return bad("longer than %d bytes", maxManifest)
	}
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return bad("%w", err)
	}
	if v.Version > Version {
		return Manifest{}, &fault.Error{Op: "read", ID: ManifestName, Hint: "Use the agentbox that made the checkpoint.",
			Err: fmt.Errorf("version %d, this agentbox knows %d: %w", v.Version, Version, fault.ErrUnsupported)}
	}
	if v.Version != Version {
		return bad("version %d", v.Version)
	}
	var m Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return bad("%w", err)
	}
	if err := m.check(); err != nil {
		return bad("%v", err) // not the caller's invalid argument
	}
	again, err := m.Encode()
	if err != nil {
		return bad("%v", err)
	}
	if !bytes.Equal(again, data) {
		return bad("not in canonical form")
	}
	return m, nil
}

// check holds a manifest against the rules that its readers rely on.
func (m *Manifest) check() error {
	if err := errors.Join(checkID("checkpoint", m.ID), checkID("sandbox", m.SandboxID), ValidLabels(m.Labels)); err != nil {
		return err
	}
	if m.Name != "" {
		if err := ValidName(m.Name); err != nil {
			return err
		}
	}
	if m.Parent != "" {
		if err := checkID("parent", m.Parent); err != nil {
			return err
		}
	}
	if m.Files.Archive.Name != ArchiveName || m.Files.Tree.Name != TreeName || m.Files.Entries < 0 {
		return errors.New("not the files it must name")
	}
	if len(m.Volumes) > maxVolumes {
		return fmt.Errorf("%d volumes", len(m.Volumes))
	}
	for i, v := range m.Volumes {
		if v.Name == "" || len(v.Name) > 255 || !printable(v.Name, "/") || v.Files.Entries < 0 {
			return fmt.Errorf("volume %d: name %.64q, %d entries", i, v.Name, v.Files.Entries)
		}
		if v.Files.Archive.Name != volumeArchive(i) || v.Files.Tree.Name != volumeTree(i) {
			return fmt.Errorf("volume %q: not the files it must name", v.Name)
		}
	}
	for _, b := range m.blobs() {
		if err := checkBlob(b.Digest, b.Bytes); err != nil || b.Raw < 0 {
			return fmt.Errorf("%s: length %d: %w", b.Name, b.Raw, err)
		}
	}
	if len(m.Managed) > maxManagedFiles {
		return fmt.Errorf("%d managed files", len(m.Managed))
	}
	for name, f := range m.Managed {
		if !path.IsAbs(name) || path.Clean(name) != name || name == "/" {
			return fmt.Errorf("managed file %q is not a clean absolute path", name)
		}
		if len(f.Data) > MaxManaged || f.Mode > 0o7777 {
			return fmt.Errorf("managed file %s: length %d, mode %o", name, len(f.Data), f.Mode)
		}
	}
	if (m.Kind == KindFull) != (m.Processes != nil) || m.Kind != KindFull && m.Kind != KindFiles {
		return fmt.Errorf("kind %q does not fit", m.Kind)
	}
	if m.Processes == nil {
		return nil
	}
	if m.Processes.Count < 0 || len(m.Processes.Images) == 0 {
		return errors.New("no process images")
	}
	last := ""
	for _, im := range m.Processes.Images {
		if !isPlain(im.Name) || im.Name <= last {
			return fmt.Errorf("image %q is not a file name, or not in its place", im.Name)
		}
		if err := checkBlob(im.Digest, im.Bytes); err != nil {
			return fmt.Errorf("%s: %w", im.Name, err)
		}
		last = im.Name
	}
	return nil
}

const digestPrefix = "blake3:"

func checkBlob(digest string, n int64) error {
	if len(digest) != len(digestPrefix)+64 || digest[:len(digestPrefix)] != digestPrefix || !isHex(digest[len(digestPrefix):]) {
		return fmt.Errorf("%.80q is not a digest", digest)
	}
	if n < 0 {
		return fmt.Errorf("length %d", n)
	}
	return nil
}

func sum(h *blake3.Hasher) string { return digestPrefix + hex.EncodeToString(h.Sum(nil)) }

func digestOf(data []byte) string {
	d := blake3.Sum256(data)
	return digestPrefix + hex.EncodeToString(d[:])
}
