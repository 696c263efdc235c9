package overlay

import (
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// This file writes PAX archives and tarread.go reads them. archive/tar does
// not write sparse files, keeps an entry's records below 1 MiB, takes an archive
// that ends before its end marker for a whole one, and costs a multiple of the
// time; the tests use it as the independent reader and writer of this format.

const (
	block = 512

	paxXattr     = "SCHILY.xattr."
	paxOwnType   = "AGENTBOX.type"
	paxOwnXattr  = "AGENTBOX.xattr."
	paxSparseMaj = "GNU.sparse.major"
	paxSparseMin = "GNU.sparse.minor"
	paxSparseNam = "GNU.sparse.name"
	paxSparseSiz = "GNU.sparse.realsize"

	// maxPAX bounds the records of one entry: its attributes, two paths and
	// small change.
	maxPAX = maxXattrs + 4*maxPath + 1<<20
)

var zeroBlocks [2 * block]byte

// tarWriter writes entries one after the other. After header come exactly the
// bytes of data that the entry has, by way of data.
type tarWriter struct {
	w    io.Writer
	n    int64 // bytes written
	left int64 // of the current entry's data
	pad  int64
	head []byte
	pax  []byte
	maps []byte
}

func (t *tarWriter) write(p []byte) error {
	n, err := t.w.Write(p)
	t.n += int64(n)
	if err != nil {
		return fmt.Errorf("write archive: %w", err)
	}
	return nil
}

// header writes all that comes before an entry's data.
func (t *tarWriter) header(e *Entry) error {
	if t.left != 0 {
		return fmt.Errorf("write archive: the entry before %q lacks %d bytes", clip(e.Path), t.left)
	}
	t.pax, t.maps = t.pax[:0], t.maps[:0]
	h := ustar{name: e.Path, mode: e.Mode, mtime: e.Mtime.Sec}
	switch e.Type {
	case TypeDir:
		h.typ = '5'
		h.name += "/"
	case TypeFile:
		h.typ = '0'
		t.left = e.data()
		if e.Extents != nil {
			t.sparse(e)
		}
		h.size = int64(len(t.maps)) + t.left
	case TypeSocket:
		h.typ = '0'
	case TypeSymlink:
		h.typ, h.link = '2', e.Link
	case TypeChar, TypeWhiteout:
		h.typ, h.major, h.minor = '3', e.Major, e.Minor
	case TypeBlock:
		h.typ, h.major, h.minor = '4', e.Major, e.Minor
	case TypeFifo:
		h.typ = '6'
	default:
		return fmt.Errorf("write archive: %q has the type %q: %w", clip(e.Path), e.Type, fault.ErrInvalid)
	}
	if e.Hardlink != "" {
		h.typ, h.link, h.size = '1', e.Hardlink, 0
	} else if e.Type == TypeSocket {
		t.record(paxOwnType, string(TypeSocket))
	}
	if len(h.name) > 100 {
		t.record("path", h.name)
	}
	if len(h.link) > 100 {
		t.record("linkpath", h.link)
	}
	if h.size > maxOctal11 {
		t.record("size", strconv.FormatInt(h.size, 10))
	}
	if h.uid = e.UID; h.uid > maxOctal7 {
		t.record("uid", strconv.FormatUint(uint64(e.UID), 10))
	}
	if h.gid = e.GID; h.gid > maxOctal7 {
		t.record("gid", strconv.FormatUint(uint64(e.GID), 10))
	}
	if e.Mtime.Nsec != 0 || e.Mtime.Sec < 0 || e.Mtime.Sec > maxOctal11 {
		t.record("mtime", formatTime(e.Mtime))
	}
	for _, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
		if strings.ContainsAny(name, "=%") {
			t.record(paxOwnXattr+base64.RawURLEncoding.EncodeToString([]byte(name)), e.Xattrs[name])
		} else {
			t.record(paxXattr+name, e.Xattrs[name])
		}
	}
	t.head = t.head[:0]
	if len(t.pax) > 0 {
		// Readers that know no PAX extract this as a file; a name of its own
		// keeps it from standing for anything.
		x := ustar{name: "PaxHeaders/" + lastBytes(e.Path, 80), typ: 'x', mode: 0o600, size: int64(len(t.pax))}
		t.head = x.append(t.head)
		t.head = append(t.head, t.pax...)
		t.head = append(t.head, zeroBlocks[:padding(int64(len(t.pax)))]...)
	}
	t.head = h.append(t.head)
	t.head = append(t.head, t.maps...)
	t.pad = padding(h.size)
	if t.left == 0 {
		t.head = append(t.head, zeroBlocks[:t.pad]...)
	}
	if cap(t.pax) > 1<<20 {
		t.pax = nil
	}
	return t.write(t.head)
}

// sparse begins a file with holes: the records, and the map that stands before
// the data, as GNU's sparse format 1.0 has it. Readers of it set a file's size
// with an empty last extent when it ends in a hole.
func (t *tarWriter) sparse(e *Entry) {
	t.record(paxSparseMaj, "1")
	t.record(paxSparseMin, "0")
	t.record(paxSparseNam, e.Path)
	t.record(paxSparseSiz, strconv.FormatInt(e.Size, 10))
	list := e.Extents
	if n := len(list); n == 0 || list[n-1].Off+list[n-1].Len < e.Size {
		list = append(slices.Clip(list), Extent{e.Size, 0})
	}
	t.maps = strconv.AppendInt(t.maps, int64(len(list)), 10)
	t.maps = append(t.maps, '\n')
	for _, x := range list {
		t.maps = strconv.AppendInt(t.maps, x.Off, 10)
		t.maps = append(t.maps, '\n')
		t.maps = strconv.AppendInt(t.maps, x.Len, 10)
		t.maps = append(t.maps, '\n')
	}
	t.maps = append(t.maps, zeroBlocks[:padding(int64(len(t.maps)))]...)
}

// data writes the next chunk of the current entry's data.
func (t *tarWriter) data(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if int64(len(p)) > t.left {
		return fmt.Errorf("write archive: %d bytes more than the header says", int64(len(p))-t.left)
	}
	t.left -= int64(len(p))
	if err := t.write(p); err != nil || t.left > 0 {
		return err
	}
	return t.write(zeroBlocks[:t.pad])
}

// end writes the end marker.
func (t *tarWriter) end() error { return t.write(zeroBlocks[:]) }

// record appends "LENGTH KEY=VALUE\n", whose length counts its own digits.
func (t *tarWriter) record(key, value string) {
	n := len(key) + len(value) + 3
	size := n + len(strconv.Itoa(n))
	if n+len(strconv.Itoa(size)) != size {
		size++
	}
	t.pax = strconv.AppendInt(t.pax, int64(size), 10)
	t.pax = append(t.pax, ' ')
	t.pax = append(t.pax, key...)
	t.pax = append(t.pax, '=')
	t.pax = append(t.pax, value...)
	t.pax = append(t.pax, '\n')
}

func padding(n int64) int64 { return -n & (block - 1) }

func lastBytes(s string, n int) string {
	if len(s) > n {
		return s[len(s)-n:]
	}
	return s
}

const (
	maxOctal7  = 1<<21 - 1
	maxOctal11 = 1<<33 - 1
)

// ustar is the part of an entry that fits into its block. Values that do not fit are in the
// records, which come first and win.
type ustar struct {
	name, link   string
	typ          byte
	mode         uint32
	uid, gid     uint32
	size, mtime  int64
	major, minor uint32
}

func (h *ustar) append(dst []byte) []byte {
	at := len(dst)
	dst = append(dst, zeroBlocks[:block]...)
	b := dst[at:]
	copy(b[0:100], h.name)
	octal(b[100:108], int64(h.mode))
	octal(b[108:116], int64(h.uid))
	octal(b[116:124], int64(h.gid))
	octal(b[124:136], h.size)
	octal(b[136:148], h.mtime)
	copy(b[148:156], "        ")
	b[156] = h.typ
	copy(b[157:257], h.link)
	copy(b[257:265], "ustar\x0000")
	octal(b[329:337], int64(h.major))
	octal(b[337:345], int64(h.minor))
	sum := int64(0)
	for _, c := range b {
		sum += int64(c)
	}
	octal(b[148:155], sum)
	return dst
}

// octal fills a field with digits and a NUL, with zero when v does not fit.
func octal(field []byte, v int64) {
	n := len(field) - 1
	if v < 0 || v >= 1<<(3*n) {
		v = 0
	}
	for i := n - 1; i >= 0; i-- {
		field[i] = '0' + byte(v&7)
		v >>= 3
	}
	field[n] = 0
}

// formatTime writes seconds with a fraction; before 1970 sign and fraction
// belong to the whole: half a second before is -0.5, sec -1 and nsec 500000000.
func formatTime(t Time) string {
	sec, nsec, sign := uint64(t.Sec), t.Nsec, ""
	if t.Sec < 0 {
		sign, sec = "-", -sec
		if nsec != 0 {
			sec, nsec = sec-1, 1_000_000_000-nsec
		}
	}
	s := sign + strconv.FormatUint(sec, 10)
	if nsec != 0 {
		s += strings.TrimRight(fmt.Sprintf(".%09d", nsec), "0")
	}
	return s
}
