package overlay

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Type is what kind of thing an entry is.
type Type string

// The types of entries.
const (
	TypeDir      Type = "dir"
	TypeFile     Type = "file"
	TypeSymlink  Type = "symlink"
	TypeFifo     Type = "fifo"
	TypeSocket   Type = "socket"
	TypeChar     Type = "char"
	TypeBlock    Type = "block"
	TypeWhiteout Type = "whiteout" // a character device 0:0: the name is deleted in the layers below
)

// Time is a point in time as inodes keep it, in seconds and nanoseconds since
// 1970. One int64 of nanoseconds would end in 2262, and ext4 does not.
type Time struct {
	Sec  int64
	Nsec int64 // 0 to 999999999, also before 1970
}

// Extent is a run of a file's bytes that holds data.
type Extent struct {
	Off, Len int64
}

// Entry is one entry of an upperdir.
//
// An entry with Hardlink set is a further name of an inode listed before it;
// it carries nothing but Path, Type and Hardlink.
type Entry struct {
	Path     string // relative to the upperdir; "." is the upperdir itself
	Type     Type
	Mode     uint32 // permission, set-id and sticky bits: & 07777; always 0777 for a symlink
	UID, GID uint32
	Mtime    Time
	Xattrs   map[string]string // all namespaces, values of any bytes; nil when there are none
	Link     string            // a symlink's target
	Major    uint32            // char and block
	Minor    uint32
	Hardlink string // the first path of the group, in the order of ComparePaths

	Size int64 // bytes, of a file
	// Extents are the parts of a file that hold data; the rest are holes. Nil
	// means no holes: all of it is data. They are sorted, apart by at least
	// one byte, not empty, within Size, and as fine as the filesystem tells
	// (SEEK_DATA, SEEK_HOLE: its blocks).
	Extents []Extent
	// Digest is "blake3:" and 64 hex digits over the data, that is the
	// extents one after the other; for a file without holes that is its
	// content. Empty when not asked for.
	Digest string
	// Chunks is how the stored data is cut, front to back. Nil: it is one chunk, whose digest is
	// Digest. Comparisons ignore it.
	Chunks []Chunk
}

// Chunk is a run of a file's data that is stored by itself.
type Chunk struct {
	Digest string // "blake3:" and 64 hex digits
	Len    int64  // bytes
}

// Sparse reports whether a file has holes.
func (e *Entry) Sparse() bool { return e.Extents != nil }

// data returns how many bytes of data a file has.
func (e *Entry) data() int64 {
	if e.Extents == nil {
		return e.Size
	}
	var n int64
	for _, x := range e.Extents {
		n += x.Len
	}
	return n
}

// spans returns the extents of a file, also of one without holes.
func (e *Entry) spans() []Extent {
	if e.Extents == nil && e.Size > 0 {
		return []Extent{{0, e.Size}}
	}
	return e.Extents
}

// Summary counts what went through.
type Summary struct {
	Entries int64 // all of them, "." included
	Files   int64 // regular files, further hard links not counted
	Data    int64 // bytes of file data, holes not counted
	Archive int64 // bytes of tar written or read
}

func (s *Summary) add(e *Entry) {
	s.Entries++
	if e.Type == TypeFile && e.Hardlink == "" {
		s.Files++
		s.Data += e.data()
	}
}

// The bounds of what is handled at all. Capture refuses what lies beyond with
// ErrUnsupported, so that whatever it wrote Apply and ReadTree will take.
const (
	maxPath     = 64 << 10 // bytes of a path
	maxDepth    = 2100     // more than a path that a system call takes can have; each level costs Apply a descriptor
	maxName     = 255      // bytes of one name in a path
	maxXattrs   = 16 << 20 // bytes of all names and values of one entry
	maxXattr    = 64 << 10 // bytes of one value, the kernel's own bound
	maxExtents  = 1 << 20  // of one file
	maxChunks   = 1 << 20  // of one file
	maxFileSize = 1 << 62
	maxID       = 1<<32 - 2 // 2^32-1 means "leave as it is" to chown
	maxMajor    = 1<<12 - 1
	maxMinor    = 1<<20 - 1
)

// ComparePaths orders paths as every stream of entries is ordered: a directory
// before what is in it, that before the directory's next sibling, siblings by
// the bytes of their names. "." is first.
func ComparePaths(a, b string) int {
	if a == b {
		return 0
	}
	if a == "." {
		return -1
	}
	if b == "." {
		return 1
	}
	n := min(len(a), len(b))
	i := 0
	for i < n && a[i] == b[i] {
		i++
	}
	switch {
	case i == len(a):
		return -1
	case i == len(b):
		return 1
	case a[i] == '/':
		return -1
	case b[i] == '/':
		return 1
	case a[i] < b[i]:
		return -1
	}
	return 1
}

// checkPath tells why p cannot be the path of an entry.
func checkPath(p string) error {
	if p == "." {
		return nil
	}
	if len(p) > maxPath {
		return fmt.Errorf("path of %d bytes, at most %d are handled", len(p), maxPath)
	}
	if strings.IndexByte(p, 0) >= 0 {
		return fmt.Errorf("path %q has a NUL", clip(p))
	}
	depth := 0
	for rest := p; ; {
		name, tail, more := strings.Cut(rest, "/")
		switch {
		case name == "":
			return fmt.Errorf("path %q is absolute or has an empty name", clip(p))
		case name == "." || name == "..":
			return fmt.Errorf("path %q has %q in it", clip(p), name)
		case len(name) > maxName:
			return fmt.Errorf("path %q has a name of %d bytes, at most %d are handled", clip(p), len(name), maxName)
		}
		if depth++; depth > maxDepth {
			return fmt.Errorf("path %q is more than %d levels deep", clip(p), maxDepth)
		}
		if !more {
			return nil
		}
		rest = tail
	}
}

// clip keeps messages readable when a hostile tree chose the name.
func clip(s string) string {
	const most = 200
	if len(s) <= most {
		return s
	}
	return s[:most/2] + "..." + s[len(s)-most/2:]
}

// splitPath returns the parent ("." at the top) and the last name.
func splitPath(p string) (parent, name string) {
	i := strings.LastIndexByte(p, '/')
	if i < 0 {
		return ".", p
	}
	return p[:i], p[i+1:]
}

func joinPath(parent, name string) string {
	if parent == "." {
		return name
	}
	return parent + "/" + name
}

// check tells why e cannot be an entry: it is held against what was read from
// an archive or a tree before anything is believed or done.
func (e *Entry) check() error {
	if err := checkPath(e.Path); err != nil {
		return err
	}
	bad := func(format string, a ...any) error {
		return fmt.Errorf("%q: %s", clip(e.Path), fmt.Sprintf(format, a...))
	}
	switch e.Type {
	case TypeDir, TypeFile, TypeSymlink, TypeFifo, TypeSocket, TypeChar, TypeBlock, TypeWhiteout:
	default:
		return bad("unknown type %q", clip(string(e.Type)))
	}
	if e.Path == "." && e.Type != TypeDir {
		return bad("the upperdir itself must be a directory, not a %s", e.Type)
	}
	if e.Hardlink != "" {
		return e.checkHardlink(bad)
	}
	if e.Mode&^0o7777 != 0 {
		return bad("mode %#o has bits that are no permissions", e.Mode)
	}
	if e.UID > maxID || e.GID > maxID {
		return bad("owner %d:%d does not exist", e.UID, e.GID)
	}
	if e.Mtime.Nsec < 0 || e.Mtime.Nsec > 999_999_999 {
		return bad("modification time has %d nanoseconds", e.Mtime.Nsec)
	}
	if e.Type == TypeSymlink {
		if e.Mode != 0o777 {
			return bad("a symlink has mode 0777, not %#o", e.Mode)
		}
		if e.Link == "" || len(e.Link) >= unix.PathMax || strings.IndexByte(e.Link, 0) >= 0 {
			return bad("impossible link target %q", clip(e.Link))
		}
	} else if e.Link != "" {
		return bad("a %s has no link target", e.Type)
	}
	switch e.Type {
	case TypeChar, TypeBlock:
		if e.Major > maxMajor || e.Minor > maxMinor {
			return bad("impossible device %d:%d", e.Major, e.Minor)
		}
		if e.Type == TypeChar && e.Major == 0 && e.Minor == 0 {
			return bad("a character device 0:0 is a whiteout")
		}
	default:
		if e.Major != 0 || e.Minor != 0 {
			return bad("a %s has no device number", e.Type)
		}
	}
	if e.Type != TypeFile && (e.Size != 0 || e.Extents != nil || e.Digest != "" || e.Chunks != nil) {
		return bad("a %s has no content", e.Type)
	}
	if err := e.checkExtents(bad); err != nil {
		return err
	}
	if err := e.checkChunks(bad); err != nil {
		return err
	}
	return e.checkXattrs(bad)
}

func (e *Entry) checkHardlink(bad func(string, ...any) error) error {
	if err := checkPath(e.Hardlink); err != nil {
		return bad("hard link: %v", err)
	}
	if e.Type == TypeDir {
		return bad("a directory cannot be a hard link")
	}
	if ComparePaths(e.Hardlink, e.Path) >= 0 {
		return bad("hard link to %q, which does not come before it", clip(e.Hardlink))
	}
	if e.Mode != 0 || e.UID != 0 || e.GID != 0 || e.Mtime != (Time{}) || e.Xattrs != nil || e.Link != "" ||
		e.Major != 0 || e.Minor != 0 || e.Size != 0 || e.Extents != nil || e.Digest != "" || e.Chunks != nil {
		return bad("a hard link carries nothing of its own")
	}
	return nil
}

func (e *Entry) checkChunks(bad func(string, ...any) error) error {
	if e.Chunks == nil {
		return nil
	}
	if len(e.Chunks) < 2 || len(e.Chunks) > maxChunks {
		return bad("%d pieces, 2 to %d are possible", len(e.Chunks), maxChunks)
	}
	left := e.data()
	for _, p := range e.Chunks {
		if p.Len <= 0 || p.Len > left || !validDigest(p.Digest) {
			return bad("piece %q of %d bytes does not fit", clip(p.Digest), p.Len)
		}
		left -= p.Len
	}
	if left != 0 {
		return bad("its pieces lack %d bytes", left)
	}
	return nil
}

func (e *Entry) checkExtents(bad func(string, ...any) error) error {
	if e.Size < 0 || e.Size > maxFileSize {
		return bad("impossible size %d", e.Size)
	}
	if len(e.Extents) > maxExtents {
		return bad("%d extents, at most %d are handled", len(e.Extents), maxExtents)
	}
	end := int64(-1) // of the extent before
	for _, x := range e.Extents {
		if x.Off <= end || x.Len <= 0 {
			return bad("extent %d+%d is empty, out of order or touches the one before", x.Off, x.Len)
		}
		if x.Off > e.Size || x.Len > e.Size-x.Off {
			return bad("extent %d+%d lies beyond the size %d", x.Off, x.Len, e.Size)
		}
		end = x.Off + x.Len
	}
	if e.Extents != nil && e.data() == e.Size {
		return bad("extents without a hole between them")
	}
	return nil
}

func (e *Entry) checkXattrs(bad func(string, ...any) error) error {
	if e.Xattrs != nil && len(e.Xattrs) == 0 {
		return bad("empty set of attributes")
	}
	total := 0
	for name, value := range e.Xattrs {
		if name == "" || len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
			return bad("impossible attribute name %q", clip(name))
		}
		if len(value) > maxXattr {
			return bad("attribute %q of %d bytes, at most %d are possible", clip(name), len(value), maxXattr)
		}
		total += len(name) + len(value)
	}
	if total > maxXattrs {
		return bad("attributes of %d bytes, at most %d are handled", total, maxXattrs)
	}
	return nil
}
