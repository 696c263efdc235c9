package store

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Version is the manifest version that this package writes as a rule. A manifest with
// what older versions of this package do not know has a later one: VersionAttached
// with files of the host, VersionDeep with a Tree whose Depth is not 0, VersionListed
// with a list of process images in chunks, VersionMessage with a message.
const (
	Version         = 2
	VersionAttached = 3
	VersionDeep     = 4
	VersionListed   = 5
	VersionMessage  = 6
)

// Kinds and states, as in the records.
const (
	KindFiles = "files"
	KindFull  = "full"

	Pending = "pending"
	Ready   = "ready"
	Failed  = "failed"
)

// ManifestName is the one file of a published checkpoint, ImagesName the
// directory of process images in a draft.
const (
	ManifestName = "manifest.json"
	ImagesName   = "criu"
)

const maxManifest = 64 << 20

// Manifest describes a checkpoint completely. At rest it is canonical JSON: members in
// the order below, maps and the spec sorted by key, no white space, nothing escaped that
// need not be. One manifest has exactly one form, and the digest of that form is the
// checkpoint's identity.
//
// The caller of Commit fills in Processes.Count and List, Versions, TCP, Status,
// Warnings, Managed, Effect, the names of Volumes, and Attached except for its tree; the
// store fills in the rest.
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
	Files       []Tree            `json:"files"`     // bottom first; exactly one today
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

	// Effect is the newest entry that the ledger of the sandbox had; empty: none.
	// Later ones are what a restore to here compensates.
	Effect string `json:"effect,omitempty"`

	// Attached are files of the host that belong to the checkpoint; nil: none.
	Attached *Attached `json:"attached,omitempty"`

	// Message is what the checkpoint is, in its maker's words; empty: there are none.
	Message string `json:"message,omitempty"`
}

// Attached are files of the host. The tree, the last of all, has the i-th of them,
// if it was there, under the name i.
type Attached struct {
	// Foreign: the checkpoint was pulled or imported; its paths were chosen on another host.
	Foreign bool           `json:"foreign,omitempty"`
	Paths   []AttachedFile `json:"paths"`
	Files   Tree           `json:"files"`
}

// AttachedFile is one of them.
type AttachedFile struct {
	Path   string `json:"path"` // absolute, without a symlink in it
	Size   int64  `json:"size"`
	Absent bool   `json:"absent,omitempty"` // there was no such file
}

// Volume is a named volume of the engine with what was in it, or a workspace, whose name is its
// absolute path in the sandbox.
type Volume struct {
	Name  string `json:"name"`
	Files Tree   `json:"files"`

	// Below: the files are those of the directory that the workspace of that name lay over.
	Below bool `json:"below,omitempty"`
}

// same reports whether another volume is called the same.
func (v Volume) same(o Volume) bool { return o.Name == v.Name && o.Below == v.Below }

// valid reports whether a volume can be one of a checkpoint's.
func (v Volume) valid(all []Volume) bool {
	switch {
	case v.Workspace():
		return len(v.Name) < unix.PathMax && path.Clean(v.Name) == v.Name && v.Name != "/" && isPrintable(v.Name, "")
	case v.Below:
		return slices.ContainsFunc(all, func(o Volume) bool { return o.Workspace() && o.Name == v.Name })
	}
	return v.Name != "" && len(v.Name) <= 255 && isPrintable(v.Name, "/")
}

// Workspace reports whether it is a workspace.
func (v Volume) Workspace() bool { return strings.HasPrefix(v.Name, "/") && !v.Below }

// Tree is a list of entries: JSON lines in the order of overlay.ComparePaths,
// stored in chunks. The data of its files is in chunks that the entries name.
type Tree struct {
	Entries int64  `json:"entries"`
	Data    int64  `json:"data"`   // bytes of file data
	Bytes   int64  `json:"bytes"`  // of the lines
	Digest  string `json:"digest"` // of the lines
	Chunks  Chunks `json:"pieces"` // of the lines, or of the list that Depth says
	// Depth is how many lists lie between Chunks and the lines: Chunks are those of a
	// list of chunks (see putList), and so on, and those of the last list are the lines.
	Depth int `json:"depth,omitempty"`
}

// Chunks lists the chunks of a stream, front to back. In JSON a chunk is its digest and its length,
// as an array of two.
type Chunks []overlay.Chunk

// MarshalJSON writes the arrays.
func (p Chunks) MarshalJSON() ([]byte, error) {
	b := make([]byte, 0, 2+len(p)*90)
	b = append(b, '[')
	for i, x := range p {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `["`...)
		b = append(b, x.Digest...)
		b = append(b, `",`...)
		b = strconv.AppendInt(b, x.Len, 10)
		b = append(b, ']')
	}
	return append(b, ']'), nil
}

// UnmarshalJSON reads them.
func (p *Chunks) UnmarshalJSON(data []byte) error {
	var list []chunkJSON
	if err := json.Unmarshal(data, &list); err != nil {
		return err
	}
	*p = make(Chunks, len(list))
	for i, x := range list {
		(*p)[i] = overlay.Chunk(x)
	}
	return nil
}

type chunkJSON overlay.Chunk

func (p *chunkJSON) UnmarshalJSON(data []byte) error {
	return json.Unmarshal(data, &[2]any{&p.Digest, &p.Len})
}

// trees are all lists of entries: that of the upperdir, then those of the volumes.
func (m *Manifest) trees() []*Tree {
	var list []*Tree
	for i := range m.Files {
		list = append(list, &m.Files[i])
	}
	for i := range m.Volumes {
		list = append(list, &m.Volumes[i].Files)
	}
	if m.Attached != nil {
		list = append(list, &m.Attached.Files)
	}
	return list
}

// AttachedTree is the number of the tree of Attached.
func (m *Manifest) AttachedTree() int { return len(m.Files) + len(m.Volumes) }

// place names a tree for people, before a path in it.
func (m *Manifest) place(n int) string {
	switch {
	case n == 0:
		return ""
	case n == m.AttachedTree():
		return "attached:"
	}
	if v := m.Volumes[n-1]; v.Below {
		return v.Name + " (below):"
	}
	return m.Volumes[n-1].Name + ":"
}

// Workspace returns the number of the tree of a workspace; 0: there is none of that name.
func (m *Manifest) Workspace(name string) int {
	return 1 + slices.IndexFunc(m.Volumes, func(v Volume) bool { return v.Workspace() && v.Name == name })
}

// Below returns the number of the tree of the directory that the workspace of a tree lay over; 0:
// the tree is of no workspace.
func (m *Manifest) Below(tree int) int {
	if tree < 1 || tree > len(m.Volumes) || !m.Volumes[tree-1].Workspace() {
		return 0
	}
	return 1 + slices.IndexFunc(m.Volumes, func(v Volume) bool {
		return v.Below && v.Name == m.Volumes[tree-1].Name
	})
}

// SameTree reports whether two checkpoints have the same tree n, of the same volume.
func (m *Manifest) SameTree(o *Manifest, n int) bool {
	a, b := m.trees(), o.trees()
	if n >= len(a) || n >= len(b) || m.place(n) != o.place(n) {
		return false
	}
	return a[n].Digest == b[n].Digest
}

func (m *Manifest) version() int {
	if m.Message != "" {
		return VersionMessage
	}
	if m.Processes != nil && m.Processes.Listed != nil {
		return VersionListed
	}
	if slices.ContainsFunc(m.trees(), func(t *Tree) bool { return t.Depth != 0 }) {
		return VersionDeep
	}
	if m.Attached != nil {
		return VersionAttached
	}
	return Version
}

// Managed is a small file that is in the manifest itself.
type Managed struct {
	Mode uint32 `json:"mode"`
	UID  uint32 `json:"uid"`
	GID  uint32 `json:"gid"`
	Data []byte `json:"data"` // base64
}

// Bounds for managed files, volumes and files of the host.
const (
	MaxAttachedFiles = 32
	MaxAttached      = 64 << 20 // bytes of one

	maxVolumes      = 64
	MaxManaged      = 1 << 20 // bytes of one
	maxManagedFiles = 16
	maxImages       = 1 << 20
	maxImage        = 1 << 50 // bytes
)

// Processes describes the process images of a full checkpoint.
type Processes struct {
	Count  int       `json:"count"`
	List   []Process `json:"list"`
	Images []Image   `json:"images"` // sorted by name; none: Listed says them
	// Listed is the list of a longer list of images: its lines are Images, its entries
	// and their data are the images and their bytes.
	Listed *Tree `json:"listed,omitempty"`
}

// Bytes returns the total size of the images.
func (p *Processes) Bytes() (n int64) {
	if p == nil {
		return 0
	}
	if p.Listed != nil {
		return p.Listed.Data
	}
	for i := range p.Images {
		n += p.Images[i].Bytes
	}
	return n
}

// Process is one dumped process, numbered as in the sandbox.
type Process struct {
	Pid     int    `json:"pid"`
	Parent  int    `json:"parent"`
	Command string `json:"command"`
	Stopped bool   `json:"stopped"` // by a signal
}

// Image is one file that CRIU wrote. An ordinary one is its Chunks, one after the other. An
// image of pages is put together by its Recipe (pack.DecodeRecipe) from parts of chunks; Pages
// lists what is on which page (pack.LoadPageIndex).
type Image struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
	Chunks Chunks `json:"pieces,omitempty"`
	Recipe Chunks `json:"recipe,omitempty"`
	Pages  Chunks `json:"pages,omitempty"`
}

// Versions are those of the programs that made the checkpoint.
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
	if m.Files == nil {
		m.Files = []Tree{}
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
	if v.Version > VersionMessage {
		return Manifest{}, &fault.Error{Op: "read", ID: ManifestName,
			Hint: "Use the agentbox that made the checkpoint.",
			Err:  fmt.Errorf("version %d, this agentbox knows %d: %w", v.Version, VersionMessage, fault.ErrUnsupported)}
	}
	if v.Version < Version {
		return bad("version %d", v.Version)
	}
	var m Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return bad("%w", err)
	}
	if err := m.check(); err != nil {
		return bad("%v", err) // not the caller's invalid argument
	}
	if m.Version != m.version() {
		return bad("version %d", m.Version)
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
	if err := errors.Join(checkID("checkpoint", m.ID), checkID("sandbox", m.SandboxID), ValidMessage(m.Message),
		ValidLabels(m.Labels)); err != nil {
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
	if m.Effect != "" {
		if err := checkID("effect", m.Effect); err != nil {
			return err
		}
	}
	if len(m.Files) != 1 {
		return fmt.Errorf("%d trees", len(m.Files))
	}
	if len(m.Volumes) > maxVolumes {
		return fmt.Errorf("%d volumes", len(m.Volumes))
	}
	for i, v := range m.Volumes {
		if !v.valid(m.Volumes) || slices.ContainsFunc(m.Volumes[:i], v.same) {
			return fmt.Errorf("volume %d: name %.64q", i, v.Name)
		}
	}
	if err := m.Attached.check(); err != nil {
		return err
	}
	for i, t := range m.trees() {
		if err := t.check(); err != nil {
			return fmt.Errorf("tree %d: %w", i, err)
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
	return m.Processes.check()
}

func (p *Processes) check() error {
	if t := p.Listed; t != nil {
		if p.Count < 0 || len(p.Images) > 0 || t.Entries > maxImages || t.Bytes > maxImageList {
			return fmt.Errorf("%d processes, %d images and a list of %d, %d bytes long", p.Count,
				len(p.Images), t.Entries, t.Bytes)
		}
		if err := t.check(); err != nil {
			return fmt.Errorf("%s: %w", imageListName, err)
		}
		return nil
	}
	if p.Count < 0 || len(p.Images) == 0 || len(p.Images) > maxImages {
		return fmt.Errorf("%d processes, %d images", p.Count, len(p.Images))
	}
	last := ""
	for i := range p.Images {
		if err := p.Images[i].checkAfter(last); err != nil {
			return err
		}
		last = p.Images[i].Name
	}
	return nil
}

// checkAfter is check for an image that follows the one of a name.
func (im *Image) checkAfter(last string) error {
	if !isPlain(im.Name) || im.Name <= last {
		return fmt.Errorf("image %.300q is not a file name, or not in its place", im.Name)
	}
	if err := im.check(); err != nil {
		return fmt.Errorf("%s: %w", im.Name, err)
	}
	return nil
}

func (a *Attached) check() error {
	if a == nil {
		return nil
	}
	if len(a.Paths) == 0 || len(a.Paths) > MaxAttachedFiles {
		return fmt.Errorf("%d attached files", len(a.Paths))
	}
	if a.Files.Entries > MaxAttachedFiles+1 {
		return fmt.Errorf("%d entries of attached files", a.Files.Entries)
	}
	for i, f := range a.Paths {
		if !path.IsAbs(f.Path) || path.Clean(f.Path) != f.Path || f.Path == "/" || len(f.Path) > 4096 ||
			strings.ContainsRune(f.Path, 0) {
			return fmt.Errorf("attached file %.300q is not a clean absolute path", f.Path)
		}
		if f.Size < 0 || f.Size > MaxAttached || f.Absent && f.Size > 0 {
			return fmt.Errorf("attached file %.300q: length %d", f.Path, f.Size)
		}
		if slices.ContainsFunc(a.Paths[:i], func(o AttachedFile) bool { return o.Path == f.Path }) {
			return fmt.Errorf("attached file %.300q comes twice", f.Path)
		}
	}
	return nil
}

func (t *Tree) check() error {
	// A line has more than two bytes.
	if t.Entries <= 0 || t.Data < 0 || t.Entries > t.Bytes/2 {
		return fmt.Errorf("%d entries, %d bytes of data", t.Entries, t.Data)
	}
	if t.Depth == 0 {
		return checkStream(t.Digest, t.Bytes, t.Chunks)
	}
	if t.Depth < 0 || t.Depth > maxDepth || len(t.Chunks) == 0 || len(t.Chunks) > maxTop {
		return fmt.Errorf("%d pieces at depth %d", len(t.Chunks), t.Depth)
	}
	_, err := t.Chunks.bytes()
	return errors.Join(err, checkDigest(t.Digest, t.Bytes))
}

func (im *Image) check() error {
	if im.Recipe == nil {
		if im.Pages != nil {
			return errors.New("pages without a recipe")
		}
		return checkStream(im.Digest, im.Bytes, im.Chunks)
	}
	if im.Chunks != nil || len(im.Recipe) == 0 || im.Bytes == 0 {
		return errors.New("a recipe and pieces")
	}
	_, err1 := im.Recipe.bytes()
	_, err2 := im.Pages.bytes()
	return errors.Join(checkDigest(im.Digest, im.Bytes), err1, err2)
}

// bytes is the length of the stream.
func (p Chunks) bytes() (n int64, err error) {
	for _, x := range p {
		if x.Len <= 0 || x.Len > pack.MaxChunk {
			return 0, fmt.Errorf("a piece of %d bytes", x.Len)
		}
		if err := checkDigest(x.Digest, x.Len); err != nil {
			return 0, err
		}
		n += x.Len // at most 2^26 times 2^23
	}
	return n, nil
}

func checkStream(digest string, n int64, chunks Chunks) error {
	sum, err := chunks.bytes()
	if err != nil {
		return err
	}
	if sum != n {
		return fmt.Errorf("%d bytes in pieces of %d", n, sum)
	}
	return checkDigest(digest, n)
}

const digestPrefix = "blake3:"

func checkDigest(digest string, n int64) error {
	if len(digest) != len(digestPrefix)+64 || digest[:len(digestPrefix)] != digestPrefix ||
		!isHex(digest[len(digestPrefix):]) {
		return fmt.Errorf("%.80q is not a digest", digest)
	}
	if n < 0 || n > maxImage {
		return fmt.Errorf("length %d", n)
	}
	return nil
}

func sum(h *blake3.Hasher) string { return digestPrefix + hex.EncodeToString(h.Sum(nil)) }

func digestOf(data []byte) string {
	d := blake3.Sum256(data)
	return digestPrefix + hex.EncodeToString(d[:])
}
