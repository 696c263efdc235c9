package overlay

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/zeebo/blake3"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// A file cache is what Collect writes: every entry of a directory, in the order of
// ComparePaths, with what is needed to recognize its inode. It is not made durable,
// and one that is damaged in any way is not used. All numbers are
// little endian.
//
//	header   16 bytes that name the format, major and minor (uint32) and era (32 bytes) of the filesystem
//	records  see cacheRecord
//	trailer  base, its length (uint32), number of records (uint64), BLAKE3 of header
//	         and records (32 bytes), BLAKE3 of the trailer up to here (32 bytes)
//
// The base comes last so that another can be set without hashing it all again.
const (
	cacheMagic   = "agentbox memory2"
	cacheHeader  = len(cacheMagic) + 8 + len(era{})
	cacheTrailer = 4 + 8 + 32 + 32 // without the base
	maxBase      = 4 << 10
)

// cacheRecord is one entry of a file cache:
//
//	 0 uint32  length of the record
//	 4 uint8   flags
//	 5 uint8   length of the name
//	 6 uint16  depth of the entry: "." has 0
//	 8         inodeKey
//	72 int64   bytes of data of a file; of a further name 0
//	80         last name of the path, a NUL, the canonical JSON of the entry
//
// The NUL lets the kernel read the name where it lies. There is no JSON in a
// record with flagHole.
type cacheRecord []byte

const (
	recordHead = 80
	maxRecord  = recordHead + maxName + 1 + maxLine
)

const (
	// flagUntrusted: the inode may have changed without a change of its key.
	flagUntrusted = 1 << iota
	// flagHole: a name that was there and was left out. The names in a directory
	// that has not changed are those of the records, so none may be missing.
	flagHole
	// flagFurther: a further name of an inode.
	flagFurther
)

// inodeKey holds everything that shows whether an inode is unchanged. The kernel sets the change
// time with every change of content, attributes and names, and no process in a sandbox can set it
// back. It proves nothing about the inode after a power cut: see era.
//
//	ino, size uint64; seconds of mtime and ctime int64; nanoseconds of both uint32;
//	mode (with the type), links, uid, gid, major and minor of a device uint32
type inodeKey [64]byte

func (k *inodeKey) set(st *unix.Statx_t) {
	le := binary.LittleEndian
	le.PutUint64(k[0:], st.Ino)
	le.PutUint64(k[8:], st.Size)
	le.PutUint64(k[16:], uint64(st.Mtime.Sec))
	le.PutUint64(k[24:], uint64(st.Ctime.Sec))
	le.PutUint32(k[32:], st.Mtime.Nsec)
	le.PutUint32(k[36:], st.Ctime.Nsec)
	le.PutUint32(k[40:], uint32(st.Mode))
	le.PutUint32(k[44:], st.Nlink)
	le.PutUint32(k[48:], st.Uid)
	le.PutUint32(k[52:], st.Gid)
	le.PutUint32(k[56:], st.Rdev_major)
	le.PutUint32(k[60:], st.Rdev_minor)
}

func (k *inodeKey) ino() uint64   { return binary.LittleEndian.Uint64(k[0:]) }
func (k *inodeKey) mode() uint32  { return binary.LittleEndian.Uint32(k[40:]) }
func (k *inodeKey) links() uint32 { return binary.LittleEndian.Uint32(k[44:]) }
func (k *inodeKey) rdev() (major, minor uint32) {
	return binary.LittleEndian.Uint32(k[56:]), binary.LittleEndian.Uint32(k[60:])
}
func (k *inodeKey) isDir() bool { return k.mode()&unix.S_IFMT == unix.S_IFDIR }

func (k *inodeKey) ctime() Time {
	return Time{int64(binary.LittleEndian.Uint64(k[24:])), int64(binary.LittleEndian.Uint32(k[36:]))}
}

func (r cacheRecord) flags() byte    { return r[4] }
func (r cacheRecord) nameLen() int   { return int(r[5]) }
func (r cacheRecord) depth() int     { return int(binary.LittleEndian.Uint16(r[6:])) }
func (r cacheRecord) key() *inodeKey { return (*inodeKey)(r[8:72]) }
func (r cacheRecord) data() int64    { return int64(binary.LittleEndian.Uint64(r[72:])) }
func (r cacheRecord) name() []byte   { return r[recordHead : recordHead+r.nameLen()] }
func (r cacheRecord) line() []byte   { return r[recordHead+r.nameLen()+1:] }

// count adds what the record stands for to s.
func (r cacheRecord) count(s *Summary) {
	if r.flags()&flagHole != 0 {
		return
	}
	s.Entries++
	if r.flags()&flagFurther == 0 && r.key().mode()&unix.S_IFMT == unix.S_IFREG {
		s.Files++
		s.Data += r.data()
	}
}

// appendRecord appends the record of e, or of a hole without e, to b.
func appendRecord(b []byte, flags byte, depth int, key *inodeKey, name string, e *Entry) []byte {
	start := len(b)
	var head [recordHead]byte
	head[5] = byte(len(name))
	binary.LittleEndian.PutUint16(head[6:], uint16(depth))
	copy(head[8:], key[:])
	if e != nil {
		binary.LittleEndian.PutUint64(head[72:], uint64(e.data()))
		if e.Hardlink != "" {
			flags |= flagFurther
		}
	}
	head[4] = flags
	b = append(b, head[:]...)
	b = append(b, name...)
	b = append(b, 0)
	if e != nil {
		b = e.AppendJSON(b)
	}
	binary.LittleEndian.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// cacheWriter writes a file cache.
type cacheWriter struct {
	w     io.Writer
	sum   *blake3.Hasher
	buf   []byte
	count uint64
}

// cacheBuffer is small: memory that a process has not touched yet costs more
// than the calls that a larger buffer saves.
const cacheBuffer = 64 << 10

func newCacheWriter(w io.Writer, major, minor uint32) *cacheWriter {
	m := &cacheWriter{w: w, sum: blake3.New(), buf: make([]byte, 0, cacheBuffer+cacheBuffer/2)}
	m.buf = append(m.buf, cacheMagic...)
	m.buf = binary.LittleEndian.AppendUint32(m.buf, major)
	m.buf = binary.LittleEndian.AppendUint32(m.buf, minor)
	in := eraOf(major, minor)
	m.buf = append(m.buf, in[:]...)
	return m
}

// records adds n records as they are.
func (m *cacheWriter) records(p []byte, n int) error {
	m.count += uint64(n)
	m.buf = append(m.buf, p...)
	return m.spill()
}

// entry adds the record of an entry and returns it; it is valid until the next call.
func (m *cacheWriter) entry(flags byte, depth int, key *inodeKey, name string, e *Entry) (cacheRecord, error) {
	if err := m.spill(); err != nil {
		return nil, err
	}
	start := len(m.buf)
	m.buf = appendRecord(m.buf, flags, depth, key, name, e)
	m.count++
	return cacheRecord(m.buf[start:]), nil
}

func (m *cacheWriter) spill() error {
	if len(m.buf) < cacheBuffer {
		return nil
	}
	return m.flush()
}

func (m *cacheWriter) flush() error {
	_, _ = m.sum.Write(m.buf)
	if _, err := m.w.Write(m.buf); err != nil {
		return fmt.Errorf("write file cache: %w", err)
	}
	m.buf = m.buf[:0]
	if cap(m.buf) > 4<<20 {
		m.buf = make([]byte, 0, cacheBuffer+cacheBuffer/2) // one huge entry does not keep the buffer large
	}
	return nil
}

func (m *cacheWriter) finish(base string) error {
	if err := m.flush(); err != nil {
		return err
	}
	t := trailer{base: base, count: m.count, sum: [32]byte(m.sum.Sum(nil))}
	if _, err := m.w.Write(t.append(nil)); err != nil {
		return fmt.Errorf("write file cache: %w", err)
	}
	return nil
}

type trailer struct {
	base  string
	count uint64
	sum   [32]byte // of header and records
}

func (t *trailer) append(b []byte) []byte {
	start := len(b)
	b = append(b, t.base...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(t.base)))
	b = binary.LittleEndian.AppendUint64(b, t.count)
	b = append(b, t.sum[:]...)
	own := blake3.Sum256(b[start:])
	return append(b, own[:]...)
}

// fileCache is an open file cache of which header and trailer are proven.
type fileCache struct {
	trailer
	f            *os.File
	end          int64 // of the records
	major, minor uint32
	era          era
}

func damaged(format string, a ...any) error {
	return fmt.Errorf("file cache: %s: %w", fmt.Sprintf(format, a...), fault.ErrCorrupt)
}

func openCache(path string) (*fileCache, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("file cache %s: %w", path, fault.ErrNotFound)
	case err != nil:
		return nil, fmt.Errorf("file cache: %w", err)
	}
	m := &fileCache{f: f}
	if err := m.begin(); err != nil {
		_ = f.Close()
		return nil, err
	}
	return m, nil
}

func (m *fileCache) begin() error {
	info, err := m.f.Stat()
	if err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() < int64(cacheHeader+cacheTrailer) {
		return damaged("it is cut off")
	}
	head := make([]byte, cacheHeader)
	if _, err := m.f.ReadAt(head, 0); err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	if string(head[:len(cacheMagic)]) != cacheMagic {
		return damaged("another format")
	}
	m.major = binary.LittleEndian.Uint32(head[len(cacheMagic):])
	m.minor = binary.LittleEndian.Uint32(head[len(cacheMagic)+4:])
	m.era = era(head[len(cacheMagic)+8:])
	tail := make([]byte, min(info.Size()-int64(cacheHeader), int64(cacheTrailer+maxBase)))
	if _, err := m.f.ReadAt(tail, info.Size()-int64(len(tail))); err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	rest := tail[len(tail)-cacheTrailer:]
	n := int(binary.LittleEndian.Uint32(rest))
	if n > maxBase || n > len(tail)-cacheTrailer {
		return damaged("its trailer says %d bytes of base", n)
	}
	tail = tail[len(tail)-cacheTrailer-n:]
	m.trailer = trailer{base: string(tail[:n]), count: binary.LittleEndian.Uint64(rest[4:]), sum: [32]byte(rest[12:44])}
	if !bytes.Equal(m.trailer.append(nil), tail) {
		return damaged("its trailer is not what was written")
	}
	m.end = info.Size() - int64(len(tail))
	return nil
}

func (m *fileCache) close() { _ = m.f.Close() }

// verify proves header and records.
func (m *fileCache) verify() error {
	h := blake3.New()
	if _, err := io.CopyBuffer(h, io.NewSectionReader(m.f, 0, m.end), make([]byte, cacheBuffer)); err != nil {
		return fmt.Errorf("file cache: %w", err)
	}
	if !bytes.Equal(h.Sum(nil), m.sum[:]) {
		return damaged("it is not what was written")
	}
	return nil
}

// reader returns a reader of all records.
func (m *fileCache) reader() *recordReader {
	body := io.NewSectionReader(m.f, int64(cacheHeader), m.end-int64(cacheHeader))
	return &recordReader{r: bufio.NewReaderSize(body, cacheBuffer), left: m.count, depth: -1, at: int64(cacheHeader)}
}

// recordReader reads records one after the other. They are proven to have a
// shape that is safe to work with: one name, and no deeper than one level below
// the record before.
type recordReader struct {
	r     *bufio.Reader
	left  uint64
	depth int         // of cur; -1 before the first
	cur   cacheRecord // nil after the last; valid until next
	at    int64       // of cur in the cache
	size  int64       // of cur
	skip  int         // bytes of cur that are still in r
}

func (r *recordReader) next() error {
	if _, err := r.r.Discard(r.skip); err != nil {
		return damaged("%v", err)
	}
	r.at += r.size
	r.cur, r.size, r.skip = nil, 0, 0
	if r.left == 0 {
		if _, err := r.r.Peek(1); err != io.EOF {
			return damaged("there is more than its trailer says")
		}
		return nil
	}
	r.left--
	head, err := r.r.Peek(recordHead)
	if err != nil {
		return damaged("%v", err)
	}
	size := int64(binary.LittleEndian.Uint32(head))
	name, depth := int(head[5]), cacheRecord(head).depth()
	if size < int64(recordHead+name+1) || size > maxRecord || name == 0 ||
		depth > r.depth+1 || depth > maxDepth || (depth == 0) != (r.depth < 0) {
		return damaged("a record of %d bytes at depth %d has no place", size, depth)
	}
	var b []byte
	if size <= int64(r.r.Size()) {
		if b, err = r.r.Peek(int(size)); err != nil {
			return damaged("%v", err)
		}
		r.skip = int(size)
	} else {
		// In steps: what the record says of its size is only believed as far as
		// there is something.
		var long bytes.Buffer
		if n, err := io.CopyN(&long, r.r, size); err != nil {
			return damaged("%d bytes of %d: %v", n, size, err)
		}
		b = long.Bytes()
	}
	rec := cacheRecord(b)
	if !validName(rec.name(), depth) || b[recordHead+name] != 0 ||
		(len(rec.line()) == 0) != (rec.flags()&flagHole != 0) {
		return damaged("a record is named %q", clip(string(rec.name())))
	}
	r.cur, r.size, r.depth = rec, size, depth
	return nil
}

func validName(name []byte, depth int) bool {
	if depth == 0 {
		return string(name) == "."
	}
	return bytes.IndexByte(name, '/') < 0 && bytes.IndexByte(name, 0) < 0 && string(name) != "." && string(name) != ".."
}

// CacheBase returns the Base that the file was written with; with prove once
// the file is known to be whole. One that is not there is ErrNotFound, a damaged
// one and one of another format ErrCorrupt.
func CacheBase(path string, prove bool) (string, error) {
	m, err := openCache(path)
	if err != nil {
		return "", err
	}
	defer m.close()
	if prove {
		err = m.verify()
	}
	return m.base, err
}

// Collection calls fn for every entry that Collect wrote, in the order of
// ComparePaths, digests and chunks included. The file is proven before the first
// call. One that is not there is ErrNotFound, a damaged one ErrCorrupt; an error
// of fn is returned as it is.
func Collection(path string, fn func(Entry) error) error {
	var order orderCheck
	return eachRecord(path, true, func(r cacheRecord) error {
		e, err := r.entry()
		if err == nil {
			err = order.next(&e)
		}
		if err != nil {
			return fmt.Errorf("file cache: %w", err)
		}
		return fn(e)
	})
}

// Line is an entry as it stands in a tree, without its newline.
type Line struct {
	JSON []byte // valid until the next line
	Data int64  // Entry.data; of a further name 0
}

// Digest returns the digest of a file whose data is one chunk. For any other entry it is empty;
// ParseEntry returns more.
func (l Line) Digest() string {
	// No string in canonical JSON has a quote without a backslash before it.
	const before, digest, after = `,"digest":"`, len(digestPrefix) + 64, `"}`
	at := len(l.JSON) - len(after) - digest
	if at < len(before) || string(l.JSON[at-len(before):at]) != before || string(l.JSON[at+digest:]) != after {
		return ""
	}
	return string(l.JSON[at : at+digest])
}

// CollectionLines is Collection without parsing, of what this process wrote
// itself a moment ago: it is not checked for damage.
func CollectionLines(path string, fn func(Line) error) error {
	return eachRecord(path, false, func(r cacheRecord) error { return fn(Line{JSON: r.line(), Data: r.data()}) })
}

// eachRecord calls fn for every record of a file cache that is no hole.
func eachRecord(path string, prove bool, fn func(cacheRecord) error) error {
	m, err := openCache(path)
	if err != nil {
		return err
	}
	defer m.close()
	if prove {
		if err := m.verify(); err != nil {
			return err
		}
	}
	some := false
	for r := m.reader(); ; {
		if err := r.next(); err != nil {
			return err
		}
		if r.cur == nil {
			if !some {
				return damaged("it is empty")
			}
			return nil
		}
		if r.cur.flags()&flagHole != 0 {
			continue
		}
		some = true
		if err := fn(r.cur); err != nil {
			return err
		}
	}
}

// entry parses the JSON of a record and holds it against the rest.
func (r cacheRecord) entry() (Entry, error) {
	e, err := ParseEntry(r.line())
	if err != nil {
		return e, err
	}
	depth := 0
	if e.Path != "." {
		depth = strings.Count(e.Path, "/") + 1
	}
	_, name := splitPath(e.Path)
	if name != string(r.name()) || depth != r.depth() || e.data() != r.data() ||
		(e.Hardlink != "") != (r.flags()&flagFurther != 0) {
		return e, corrupt("record of %q holds %q", clip(string(r.name())), clip(e.Path))
	}
	return e, nil
}
