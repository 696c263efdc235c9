package overlay

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/agentbox/agentbox/internal/fault"
)

// tarReader reads what tarWriter writes. It trusts nothing: every length is
// bounded before memory is taken for it, and what it does not know it refuses,
// because what is skipped silently is lost.
type tarReader struct {
	r    *bufio.Reader
	n    int64 // bytes read
	left int64 // of the current entry's data
	pad  int64
	pax  []byte
	blk  [block]byte
}

func corrupt(format string, a ...any) error {
	return fmt.Errorf("%w: %s", fault.ErrCorrupt, fmt.Sprintf(format, a...))
}

// full reads all of p.
func (t *tarReader) full(p []byte) error {
	n, err := io.ReadFull(t.r, p)
	t.n += int64(n)
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) {
		return corrupt("the archive is cut off at byte %d", t.n)
	}
	if err != nil {
		return fmt.Errorf("read archive: %w", err)
	}
	return nil
}

// data fills p with the current entry's data, of which there must be enough.
func (t *tarReader) data(p []byte) error {
	if int64(len(p)) > t.left {
		return corrupt("an entry has less data than it says")
	}
	t.left -= int64(len(p))
	return t.full(p)
}

// next returns the next entry, checked, and io.EOF after a proper end. All data
// of the entry before must have been read.
func (t *tarReader) next() (Entry, error) {
	if t.left != 0 {
		return Entry{}, corrupt("an entry has more data than it says")
	}
	if err := t.skipPadding(); err != nil {
		return Entry{}, err
	}
	rec := records{}
	typ, size, err := t.block()
	if err != nil {
		return Entry{}, err
	}
	if typ == 0 {
		return Entry{}, t.end()
	}
	if typ == 'x' {
		if size == 0 || size > maxPAX {
			return Entry{}, corrupt("records of %d bytes", size)
		}
		if rec, err = t.records(size); err != nil {
			return Entry{}, err
		}
		if typ, size, err = t.block(); err != nil {
			return Entry{}, err
		}
		if typ == 0 || typ == 'x' {
			return Entry{}, corrupt("records without an entry")
		}
	}
	return t.entry(typ, size, rec)
}

func (t *tarReader) skipPadding() error {
	p := t.blk[:t.pad]
	t.pad = 0
	if err := t.full(p); err != nil {
		return err
	}
	if !bytes.Equal(p, zeroBlocks[:len(p)]) {
		return corrupt("padding that is not zero")
	}
	return nil
}

// block reads a header block into blk. A zero block has type 0.
func (t *tarReader) block() (typ byte, size int64, err error) {
	if err := t.full(t.blk[:]); err != nil {
		return 0, 0, err
	}
	b := &t.blk
	if *b == [block]byte(zeroBlocks[:block]) {
		return 0, 0, nil
	}
	if string(b[257:265]) != "ustar\x0000" {
		return 0, 0, corrupt("no header block at byte %d", t.n-block)
	}
	want, err := parseOctal(b[148:156])
	if err != nil {
		return 0, 0, err
	}
	sum := int64(8 * ' ')
	for i, c := range b {
		if i < 148 || i >= 156 {
			sum += int64(c)
		}
	}
	if sum != want {
		return 0, 0, corrupt("the header block at byte %d fails its checksum", t.n-block)
	}
	if size, err = parseOctal(b[124:136]); err != nil {
		return 0, 0, err
	}
	if b[156] == 0 {
		return 0, 0, corrupt("an entry without a type")
	}
	return b[156], size, nil
}

// end checks all that follows the first zero block: a second one, and then at
// most the zeros that writers of tapes fill their last record with.
func (t *tarReader) end() error {
	if err := t.full(t.blk[:]); err != nil {
		return err
	}
	if t.blk != [block]byte(zeroBlocks[:block]) {
		return corrupt("the end marker is half")
	}
	for fill := 0; ; {
		n, err := t.r.Read(t.blk[:])
		t.n += int64(n)
		if fill += n; fill > 1<<20 || !bytes.Equal(t.blk[:n], zeroBlocks[:n]) {
			return corrupt("something follows the end of the archive")
		}
		if err == io.EOF {
			return io.EOF
		}
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return corrupt("the archive is cut off at byte %d", t.n)
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
	}
}

// records are the known PAX records of one entry.
type records struct {
	text   map[string]string // all but attributes
	xattrs map[string]string
}

func (t *tarReader) records(size int64) (records, error) {
	rec := records{}
	if int64(cap(t.pax)) < size {
		// Grown as bytes really arrive: a header alone takes no memory.
		t.pax = t.pax[:0]
		for int64(len(t.pax)) < size {
			at := len(t.pax)
			n := int(min(size-int64(at), max(64<<10, int64(at))))
			t.pax = append(t.pax, make([]byte, n)...)
			if err := t.full(t.pax[at:]); err != nil {
				return rec, err
			}
		}
	} else {
		t.pax = t.pax[:size]
		if err := t.full(t.pax); err != nil {
			return rec, err
		}
	}
	t.pad = padding(size)
	if err := t.skipPadding(); err != nil {
		return rec, err
	}
	for rest := t.pax; len(rest) > 0; {
		digits, _, ok := bytes.Cut(rest[:min(len(rest), 20)], []byte{' '})
		n, err := parseDecimal(string(digits))
		if !ok || err != nil || n < int64(len(digits))+4 || n > int64(len(rest)) || rest[n-1] != '\n' {
			return rec, corrupt("malformed records")
		}
		key, value, ok := bytes.Cut(rest[len(digits)+1:n-1], []byte{'='})
		if !ok {
			return rec, corrupt("a record without a value")
		}
		rest = rest[n:]
		if err := rec.add(string(key), string(value)); err != nil {
			return rec, err
		}
	}
	if cap(t.pax) > 1<<20 {
		t.pax = nil
	}
	return rec, nil
}

func (rec *records) add(key, value string) error {
	set, name := &rec.text, key
	switch key {
	case "path", "linkpath", "size", "uid", "gid", "mtime", paxOwnType,
		paxSparseMaj, paxSparseMin, paxSparseNam, paxSparseSiz:
	default:
		set = &rec.xattrs
		if rest, ok := strings.CutPrefix(key, paxXattr); ok {
			name = rest
		} else if rest, ok := strings.CutPrefix(key, paxOwnXattr); ok {
			raw, err := base64.RawURLEncoding.Strict().DecodeString(rest)
			if err != nil {
				return corrupt("attribute name %q", clip(rest))
			}
			name = string(raw)
		} else {
			return corrupt("unknown record %q", clip(key))
		}
	}
	if *set == nil {
		*set = make(map[string]string)
	}
	if _, twice := (*set)[name]; twice {
		return corrupt("record %q comes twice", clip(key))
	}
	(*set)[name] = value
	return nil
}

// number returns a decimal record, or else what the block says.
func (rec *records) number(key string, field []byte) (int64, error) {
	if s, ok := rec.text[key]; ok {
		return parseDecimal(s)
	}
	return parseOctal(field)
}

func (t *tarReader) entry(typ byte, size int64, rec records) (Entry, error) {
	var e Entry
	b := &t.blk
	fail := func(err error) (Entry, error) {
		if errors.Is(err, fault.ErrCorrupt) {
			return Entry{}, err
		}
		return Entry{}, corrupt("%v", err)
	}
	e.Path = joinName(text(b[345:500]), text(b[0:100]))
	if s, ok := rec.text["path"]; ok {
		e.Path = s
	}
	link := text(b[157:257])
	if s, ok := rec.text["linkpath"]; ok {
		link = s
	}
	if typ == '5' {
		e.Path = strings.TrimSuffix(e.Path, "/")
	}
	if _, ok := rec.text["size"]; ok {
		var err error
		if size, err = parseDecimal(rec.text["size"]); err != nil {
			return fail(err)
		}
	}
	if _, ok := rec.text["linkpath"]; ok && typ != '1' && typ != '2' {
		return Entry{}, corrupt("%q: a link target for what is no link", clip(e.Path))
	}
	if _, ok := rec.text[paxOwnType]; ok && typ != '0' {
		return Entry{}, corrupt("%q: two types", clip(e.Path))
	}
	if typ == '1' {
		if size != 0 || rec.xattrs != nil {
			return Entry{}, corrupt("%q: a hard link carries nothing of its own", clip(e.Path))
		}
		// Its type is that of what it links to, which only Apply knows.
		e.Type, e.Hardlink = TypeFile, link
		return e, e.checked()
	}
	if err := t.owner(&e, rec); err != nil {
		return fail(err)
	}
	e.Xattrs = rec.xattrs
	var dev bool
	switch typ {
	case '0':
		e.Type = TypeFile
		if s, ok := rec.text[paxOwnType]; ok {
			if e.Type = Type(s); e.Type != TypeSocket || size != 0 {
				return Entry{}, corrupt("%q: type %q with %d bytes", clip(e.Path), clip(s), size)
			}
		}
	case '2':
		e.Type, e.Link, e.Mode = TypeSymlink, link, 0o777
	case '3':
		e.Type, dev = TypeChar, true
	case '4':
		e.Type, dev = TypeBlock, true
	case '5':
		e.Type = TypeDir
	case '6':
		e.Type = TypeFifo
	default:
		return Entry{}, corrupt("%q: unknown type %q", clip(e.Path), string(rune(typ)))
	}
	if dev {
		major, err1 := parseOctal(b[329:337])
		minor, err2 := parseOctal(b[337:345])
		if err := errors.Join(err1, err2); err != nil {
			return fail(err)
		}
		e.Major, e.Minor = uint32(major), uint32(minor)
		if e.Type == TypeChar && major == 0 && minor == 0 {
			e.Type = TypeWhiteout
		}
	}
	if e.Type != TypeFile {
		if size != 0 || rec.text[paxSparseMaj] != "" {
			return Entry{}, corrupt("%q: a %s has no content", clip(e.Path), e.Type)
		}
		return e, e.checked()
	}
	t.left, t.pad = size, padding(size)
	e.Size = size
	if err := t.sparse(&e, rec); err != nil {
		return Entry{}, err
	}
	return e, e.checked()
}

func (e *Entry) checked() error {
	if err := e.check(); err != nil {
		return corrupt("%v", err)
	}
	return nil
}

func (t *tarReader) owner(e *Entry, rec records) error {
	b := &t.blk
	mode, err := parseOctal(b[100:108])
	if err != nil {
		return err
	}
	uid, err := rec.number("uid", b[108:116])
	if err != nil {
		return err
	}
	gid, err := rec.number("gid", b[116:124])
	if err != nil {
		return err
	}
	if mode&^0o7777 != 0 || uid > maxID || gid > maxID {
		return fmt.Errorf("%q: mode %#o, owner %d:%d", clip(e.Path), mode, uid, gid)
	}
	e.Mode, e.UID, e.GID = uint32(mode), uint32(uid), uint32(gid)
	if s, ok := rec.text["mtime"]; ok {
		e.Mtime, err = parseTime(s)
	} else {
		e.Mtime.Sec, err = parseOctal(b[136:148])
	}
	return err
}

// sparse reads the map before the data of a file with holes; see tarWriter.sparse.
func (t *tarReader) sparse(e *Entry, rec records) error {
	major, ok := rec.text[paxSparseMaj]
	if !ok {
		if len(rec.text[paxSparseMin])+len(rec.text[paxSparseNam])+len(rec.text[paxSparseSiz]) > 0 {
			return corrupt("%q: half a sparse file", clip(e.Path))
		}
		return nil
	}
	size, err := parseDecimal(rec.text[paxSparseSiz])
	if err != nil || major != "1" || rec.text[paxSparseMin] != "0" || rec.text[paxSparseNam] != e.Path {
		return corrupt("%q: a sparse file of another kind", clip(e.Path))
	}
	total, used := t.left, int64(0)
	line := func() (int64, error) {
		p, err := t.r.Peek(int(min(20, t.left)))
		if err != nil && err != io.EOF {
			return 0, fmt.Errorf("read archive: %w", err)
		}
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			return 0, corrupt("%q: malformed sparse map", clip(e.Path))
		}
		var digits [20]byte
		if err := t.data(digits[:i+1]); err != nil {
			return 0, err
		}
		used += int64(i) + 1
		return parseDecimal(string(digits[:i]))
	}
	count, err := line()
	if err != nil {
		return err
	}
	if count > maxExtents+1 {
		return corrupt("%q: %d extents", clip(e.Path), count)
	}
	e.Size, e.Extents = size, []Extent{}
	for i := range count {
		off, err := line()
		if err != nil {
			return err
		}
		n, err := line()
		if err != nil {
			return err
		}
		if n == 0 && off == size && i == count-1 {
			break // says that a hole ends the file
		}
		e.Extents = append(e.Extents, Extent{off, n})
	}
	rest := make([]byte, padding(used))
	if err := t.data(rest); err != nil {
		return err
	}
	if !bytes.Equal(rest, zeroBlocks[:len(rest)]) {
		return corrupt("padding that is not zero")
	}
	if err := e.checked(); err != nil {
		return err // before the sum below, which could overflow
	}
	if e.data() != t.left {
		return corrupt("%q: %d bytes of data where the map says %d", clip(e.Path), t.left, e.data())
	}
	t.pad = padding(total)
	return nil
}

// text is a field up to its NUL.
func text(field []byte) string {
	if i := bytes.IndexByte(field, 0); i >= 0 {
		field = field[:i]
	}
	return string(field)
}

func joinName(prefix, name string) string {
	if prefix == "" {
		return name
	}
	return prefix + "/" + name
}

func parseOctal(field []byte) (int64, error) {
	v, n := int64(0), 0
	for ; n < len(field) && field[n] >= '0' && field[n] <= '7'; n++ {
		v = v<<3 | int64(field[n]-'0') // at most 12 digits: 36 bits
	}
	for _, c := range field[n:] {
		if c != 0 && c != ' ' {
			return 0, corrupt("malformed number %q in a header block", field)
		}
	}
	return v, nil
}

// parseDecimal reads a number that is not negative, in its only spelling.
func parseDecimal(s string) (int64, error) {
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil || v < 0 || strconv.FormatInt(v, 10) != s {
		return 0, corrupt("malformed number %q", clip(s))
	}
	return v, nil
}

// parseTime undoes formatTime and takes no other spelling.
func parseTime(s string) (Time, error) {
	whole, frac, _ := strings.Cut(s, ".")
	sec, err := strconv.ParseInt(whole, 10, 64)
	if err != nil || len(frac) > 9 {
		return Time{}, corrupt("malformed time %q", clip(s))
	}
	nsec, err := strconv.ParseUint((frac + "000000000")[:9], 10, 32) // no sign inside
	if err != nil {
		return Time{}, corrupt("malformed time %q", clip(s))
	}
	t := Time{sec, int64(nsec)}
	if whole[0] == '-' && nsec != 0 {
		t = Time{sec - 1, 1_000_000_000 - int64(nsec)}
	}
	if formatTime(t) != s {
		return Time{}, corrupt("malformed time %q", clip(s))
	}
	return t, nil
}
