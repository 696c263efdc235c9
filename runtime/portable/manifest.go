package portable

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// manifest is what an archive needs to know of the store's manifest. The commit of an
// import reads all of it.
type manifest struct {
	Version     int             `json:"version"`
	ID          string          `json:"id"`
	SandboxID   string          `json:"sandbox_id"`
	SandboxName string          `json:"sandbox_name"`
	Spec        json.RawMessage `json:"spec"`
	ImageDigest string          `json:"image_digest"`
	Created     time.Time       `json:"created"`
	Files       []tree          `json:"files"`
	Volumes     []struct {
		Name  string `json:"name"` // of a workspace: an absolute path
		Files tree   `json:"files"`
		Below bool   `json:"below"` // of the directory that the workspace of that name lay over
	} `json:"volumes"`
	Attached *struct {
		Files tree `json:"files"`
	} `json:"attached"`
	Processes *struct {
		Images []image `json:"images"`
		Listed *tree   `json:"listed"` // what lists them, if the manifest does not
	} `json:"processes"`
}

type tree struct {
	Entries int64  `json:"entries"`
	Data    int64  `json:"data"`
	Bytes   int64  `json:"bytes"`
	Digest  string `json:"digest"`
}

type image struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
	Bytes  int64  `json:"bytes"`
}

const (
	maxManifest = 64 << 20
	maxVolumes  = 64
	maxImages   = 1 << 20
)

func parseManifest(data []byte) (*manifest, error) {
	m := &manifest{}
	d := json.NewDecoder(bytes.NewReader(data))
	if err := d.Decode(m); err != nil {
		return nil, corrupt("%s: %v", manifestName, err)
	}
	if len(m.Files) > 1 {
		return nil, fmt.Errorf("%s: %d layers of files: %w", manifestName, len(m.Files), fault.ErrUnsupported)
	}
	if len(m.Files) != 1 || len(m.Volumes) > maxVolumes || m.Processes != nil && len(m.Processes.Images) > maxImages {
		return nil, corrupt("%s: %d trees, %d volumes", manifestName, len(m.Files), len(m.Volumes))
	}
	left := int64(1 << 62) // so that no sum overflows
	count := func(n int64) error {
		if n < 0 || n > left {
			return errors.New("impossible length")
		}
		left -= n
		return nil
	}
	for i := range m.trees() {
		t := m.tree(i)
		if err := errors.Join(count(t.Entries), count(t.Data), count(t.Bytes)); err != nil || !isDigest(t.Digest) {
			return nil, corrupt("%s: tree %d: %+v", manifestName, i, *t)
		}
	}
	seen := map[string]bool{}
	for _, v := range m.Volumes {
		name := v.Name
		good := plain(name)
		if path.IsAbs(name) {
			good = path.Clean(name) == name && name != "/" && len(name) < unix.PathMax
		}
		if v.Below {
			good, name = seen[name] && path.IsAbs(name), "below "+name
		}
		if !good || seen[name] {
			return nil, corrupt("%s: volume %.64q", manifestName, v.Name)
		}
		seen[name] = true
	}
	if t := m.listed(); t != nil {
		if len(m.Processes.Images) > 0 || t.Entries < 1 || t.Entries > maxImages || t.Bytes < 1 ||
			t.Bytes > maxManifest || count(t.Data) != nil || !isDigest(t.Digest) {
			return nil, corrupt("%s: %d images and a list of them: %+v", manifestName, len(m.Processes.Images), *t)
		}
	}
	if err := checkList(m.images(), count); err != nil {
		return nil, fmt.Errorf("%s: %w", manifestName, err)
	}
	return m, nil
}

func checkList(list []image, count func(n int64) error) error {
	last := ""
	for _, im := range list {
		if !plain(im.Name) || im.Name <= last || count(im.Bytes) != nil || !isDigest(im.Digest) {
			return corrupt("image %.64q", im.Name)
		}
		last = im.Name
	}
	return nil
}

// listed returns the manifest's tree of the list of the images, or nil if it names them itself.
func (m *manifest) listed() *tree {
	if m.Processes == nil {
		return nil
	}
	return m.Processes.Listed
}

// list takes the list of the images, which the manifest proves.
func (m *manifest) list(lines []byte) error {
	want := m.listed()
	h := blake3.New()
	_, _ = h.Write(lines) // never fails
	if got := digest(h); got != want.Digest {
		return corrupt("%s has the digest %s, its manifest says %s", listName, got, want.Digest)
	}
	left := want.Data
	var list []image
	for d := json.NewDecoder(bytes.NewReader(lines)); ; {
		var im image
		err := d.Decode(&im)
		if err == io.EOF {
			break
		}
		if err != nil {
			return corrupt("%s: %v", listName, err)
		}
		if list = append(list, im); int64(len(list)) > want.Entries {
			return corrupt("%s: more than %d images", listName, want.Entries)
		}
	}
	err := checkList(list, func(n int64) error {
		if n < 0 || n > left {
			return errors.New("impossible length")
		}
		left -= n
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: %w", listName, err)
	}
	if int64(len(list)) != want.Entries || left != 0 {
		return corrupt("%s: %d images with %d bytes, its manifest says %d with %d", listName, len(list), want.Data-left,
			want.Entries, want.Data)
	}
	m.Processes.Images = list
	return nil
}

// trees returns the number of trees, the files' included.
func (m *manifest) trees() int {
	n := 1 + len(m.Volumes)
	if m.Attached != nil {
		n++
	}
	return n
}

func (m *manifest) tree(i int) *tree {
	if i == 0 {
		return &m.Files[0]
	}
	if i > len(m.Volumes) {
		return &m.Attached.Files
	}
	return &m.Volumes[i-1].Files
}

// archive is the member that has the content of a tree's files.
func (m *manifest) archive(i int) string {
	if i == 0 {
		return rootfsName
	}
	if i > len(m.Volumes) {
		return attachedName
	}
	switch v := m.Volumes[i-1]; {
	case v.Below:
		return fmt.Sprintf("%s/%d.below.tar", workspacesDir, i)
	case path.IsAbs(v.Name):
		return fmt.Sprintf("%s/%d.tar", workspacesDir, i)
	default:
		return volumesDir + "/" + v.Name + ".tar"
	}
}

func (m *manifest) images() []image {
	if m.Processes == nil {
		return nil
	}
	return m.Processes.Images
}

// total is the bytes of file and image data, for Progress.
func (m *manifest) total() (n int64) {
	for i := range m.trees() {
		n += m.tree(i).Data
	}
	for _, im := range m.images() {
		n += im.Bytes
	}
	return n
}

// plain reports whether name can be the last part of a path, and of a member.
func plain(name string) bool {
	return name != "" && len(name) <= 255 && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

const digestPrefix = "blake3:"

func isDigest(d string) bool {
	hex, ok := strings.CutPrefix(d, digestPrefix)
	return ok && len(hex) == 64 && strings.Trim(hex, "0123456789abcdef") == ""
}

func corrupt(format string, a ...any) error {
	return fmt.Errorf("%w: %s", fault.ErrCorrupt, fmt.Sprintf(format, a...))
}
