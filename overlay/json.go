package overlay

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

// The JSON of an entry is one line with a fixed order of fields, so that equal
// trees have equal bytes. A string that is not UTF-8 stands, in base64, in the
// field of the same name with "_b64" behind it; attribute values are always in
// base64.
//
//	{"path":"a","type":"file","mode":"0644","uid":0,"gid":0,"mtime":[1700000000,1],
//	 "xattrs":[{"name":"user.x","value":"MQ=="}],"size":8192,"extents":[[0,4096]],"digest":"blake3:...",
//	 "pieces":[["blake3:...",4000],["blake3:...",96]]}
//	{"path":"b","type":"file","hardlink":"a"}

// AppendJSON appends the canonical JSON of e to b, without a newline.
func (e *Entry) AppendJSON(b []byte) []byte {
	b = append(b, '{')
	b = appendName(b, "path", e.Path)
	b = append(b, `,"type":`...)
	b = appendString(b, string(e.Type))
	if e.Hardlink != "" {
		b = append(b, ',')
		b = appendName(b, "hardlink", e.Hardlink)
		return append(b, '}')
	}
	b = append(b, `,"mode":"`...)
	for shift := 9; shift >= 0; shift -= 3 {
		b = append(b, '0'+byte(e.Mode>>shift&7))
	}
	b = append(b, `","uid":`...)
	b = strconv.AppendUint(b, uint64(e.UID), 10)
	b = append(b, `,"gid":`...)
	b = strconv.AppendUint(b, uint64(e.GID), 10)
	b = append(b, `,"mtime":`...)
	b = appendPair(b, e.Mtime.Sec, e.Mtime.Nsec)
	if len(e.Xattrs) > 0 {
		b = append(b, `,"xattrs":[`...)
		for i, name := range slices.Sorted(maps.Keys(e.Xattrs)) {
			if i > 0 {
				b = append(b, ',')
			}
			b = append(b, '{')
			b = appendName(b, "name", name)
			b = append(b, `,"value":"`...)
			b = base64.StdEncoding.AppendEncode(b, []byte(e.Xattrs[name]))
			b = append(b, `"}`...)
		}
		b = append(b, ']')
	}
	switch e.Type {
	case TypeSymlink:
		b = append(b, ',')
		b = appendName(b, "link", e.Link)
	case TypeChar, TypeBlock:
		b = append(b, `,"dev":`...)
		b = appendPair(b, int64(e.Major), int64(e.Minor))
	case TypeFile:
		b = append(b, `,"size":`...)
		b = strconv.AppendInt(b, e.Size, 10)
		if e.Extents != nil {
			b = append(b, `,"extents":[`...)
			for i, x := range e.Extents {
				if i > 0 {
					b = append(b, ',')
				}
				b = appendPair(b, x.Off, x.Len)
			}
			b = append(b, ']')
		}
		if e.Digest != "" {
			b = append(b, `,"digest":`...)
			b = appendString(b, e.Digest)
		}
		if e.Chunks != nil {
			b = append(b, `,"pieces":[`...)
			for i, x := range e.Chunks {
				if i > 0 {
					b = append(b, ',')
				}
				b = append(b, '[')
				b = appendString(b, x.Digest)
				b = append(b, ',')
				b = strconv.AppendInt(b, x.Len, 10)
				b = append(b, ']')
			}
			b = append(b, ']')
		}
	}
	return append(b, '}')
}

// MarshalJSON returns the canonical JSON.
func (e Entry) MarshalJSON() ([]byte, error) { return e.AppendJSON(nil), nil }

func appendPair(b []byte, x, y int64) []byte {
	b = append(b, '[')
	b = strconv.AppendInt(b, x, 10)
	b = append(b, ',')
	b = strconv.AppendInt(b, y, 10)
	return append(b, ']')
}

func appendName(b []byte, field, s string) []byte {
	b = append(b, '"')
	b = append(b, field...)
	if utf8.ValidString(s) {
		b = append(b, `":`...)
		return appendString(b, s)
	}
	b = append(b, `_b64":"`...)
	b = base64.StdEncoding.AppendEncode(b, []byte(s))
	return append(b, '"')
}

// appendString writes UTF-8 with the fewest escapes that JSON allows.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < 0x20:
			b = append(b, `\u00`...)
			b = append(b, hex[c>>4], hex[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// ParseEntry reads the canonical JSON of an entry and nothing else: any other
// spelling, an unknown field or an impossible value is ErrCorrupt.
func ParseEntry(line []byte) (Entry, error) {
	p := lineParser{rest: line}
	e := p.entry()
	if p.bad || len(p.rest) > 0 {
		return Entry{}, corrupt("entry is not in canonical form: %q", clip(string(line)))
	}
	if err := e.check(); err != nil {
		return Entry{}, corrupt("entry %v", err)
	}
	if e.Digest != "" && !validDigest(e.Digest) {
		return Entry{}, corrupt("entry %q: digest %q", clip(e.Path), clip(e.Digest))
	}
	// The parser need not know what is canonical: what was read is written
	// again and must be the same bytes.
	if !bytes.Equal(e.AppendJSON(make([]byte, 0, len(line))), line) {
		return Entry{}, corrupt("entry %q is not in canonical form", clip(e.Path))
	}
	return e, nil
}

// lineParser reads what AppendJSON writes, in its order. Once something is not
// as expected, bad stays set and the results mean nothing.
type lineParser struct {
	rest []byte
	bad  bool
}

func (p *lineParser) entry() (e Entry) {
	p.expect("{")
	e.Path = p.name("path")
	p.expect(`,"type":`)
	e.Type = Type(p.str())
	if p.skip(",\"hardlink") {
		e.Hardlink = p.nameAfterField()
		p.expect("}")
		return e
	}
	p.expect(`,"mode":`)
	mode, err := strconv.ParseUint(p.str(), 8, 32)
	p.bad = p.bad || err != nil
	e.Mode = uint32(mode)
	p.expect(`,"uid":`)
	e.UID = p.uint32()
	p.expect(`,"gid":`)
	e.GID = p.uint32()
	p.expect(`,"mtime":`)
	e.Mtime.Sec, e.Mtime.Nsec = p.pair()
	if p.skip(`,"xattrs":[`) {
		e.Xattrs = make(map[string]string)
		for more := true; more && !p.bad; more = p.skip(",") {
			p.expect("{")
			name := p.name("name")
			p.expect(`,"value":`)
			e.Xattrs[name] = p.base64()
			p.expect("}")
		}
		p.expect("]")
	}
	switch e.Type {
	case TypeSymlink:
		p.expect(",")
		e.Link = p.name("link")
	case TypeChar, TypeBlock:
		p.expect(`,"dev":`)
		major, minor := p.pair()
		e.Major, e.Minor = uint32(major), uint32(minor)
	case TypeFile:
		p.expect(`,"size":`)
		e.Size = p.int()
		if p.skip(`,"extents":[`) {
			e.Extents = []Extent{}
			for more := !p.skip("]"); more && !p.bad; {
				var x Extent
				x.Off, x.Len = p.pair()
				e.Extents = append(e.Extents, x)
				if more = p.skip(","); !more {
					p.expect("]")
				}
			}
		}
		if p.skip(`,"digest":`) {
			e.Digest = p.str()
		}
		if p.skip(`,"pieces":[`) {
			for more := true; more && !p.bad; more = p.skip(",") {
				var x Chunk
				p.expect("[")
				x.Digest = p.str()
				p.expect(",")
				x.Len = p.int()
				p.expect("]")
				e.Chunks = append(e.Chunks, x)
			}
			p.expect("]")
		}
	}
	p.expect("}")
	return e
}

func (p *lineParser) skip(s string) bool {
	if len(p.rest) < len(s) || string(p.rest[:len(s)]) != s {
		return false
	}
	p.rest = p.rest[len(s):]
	return true
}

func (p *lineParser) expect(s string) {
	if !p.skip(s) {
		p.bad, p.rest = true, nil
	}
}

// name reads a field that is a string or, with _b64 behind its name, any bytes.
func (p *lineParser) name(field string) string {
	p.expect(`"`)
	p.expect(field)
	return p.nameAfterField()
}

func (p *lineParser) nameAfterField() string {
	if p.skip(`_b64":`) {
		return p.base64()
	}
	p.expect(`":`)
	return p.str()
}

// quoted returns what stands between two quotes, escapes and all.
func (p *lineParser) quoted() (raw []byte, escapes bool) {
	p.expect(`"`)
	for i := 0; i < len(p.rest); i++ {
		switch p.rest[i] {
		case '\\':
			escapes = true
			i++
		case '"':
			raw, p.rest = p.rest[:i], p.rest[i+1:]
			return raw, escapes
		}
	}
	p.bad, p.rest = true, nil
	return nil, false
}

func (p *lineParser) str() string {
	raw, escapes := p.quoted()
	if !escapes {
		return string(raw)
	}
	s := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); i++ {
		c := raw[i]
		if c == '\\' {
			i++ // quoted never ends on a backslash
			switch c = raw[i]; c {
			case '"', '\\':
			case 'u':
				if len(raw) < i+5 {
					p.bad = true
					return ""
				}
				v, err := strconv.ParseUint(string(raw[i+1:i+5]), 16, 8)
				if err != nil { // among them an escape inside of this one
					p.bad = true
					return ""
				}
				c, i = byte(v), i+4
			default:
				p.bad = true
				return ""
			}
		}
		s = append(s, c)
	}
	return string(s)
}

func (p *lineParser) base64() string {
	raw, _ := p.quoted()
	b, err := base64.StdEncoding.AppendDecode(nil, raw)
	p.bad = p.bad || err != nil
	return string(b)
}

func (p *lineParser) int() int64 {
	n := 0
	for n < len(p.rest) && n < 20 && (p.rest[n] == '-' || p.rest[n] >= '0' && p.rest[n] <= '9') {
		n++
	}
	v, err := strconv.ParseInt(string(p.rest[:n]), 10, 64)
	p.bad = p.bad || err != nil
	p.rest = p.rest[n:]
	return v
}

func (p *lineParser) uint32() uint32 {
	v := p.int()
	p.bad = p.bad || v < 0 || v > math.MaxUint32
	return uint32(v)
}

func (p *lineParser) pair() (x, y int64) {
	p.expect("[")
	x = p.int()
	p.expect(",")
	y = p.int()
	p.expect("]")
	return x, y
}

// UnmarshalJSON reads an entry inside of other JSON, where it need not be
// canonical: encoding/json itself respells what MarshalJSON returns.
func (e *Entry) UnmarshalJSON(b []byte) error {
	var w wireEntry
	if err := json.Unmarshal(b, &w); err != nil {
		return corrupt("entry: %v", err)
	}
	got := Entry{
		Path: w.Path + string(w.PathB64), Type: w.Type, Hardlink: w.Hardlink + string(w.HardlinkB64),
		UID: w.UID, GID: w.GID, Mtime: Time{w.Mtime[0], w.Mtime[1]},
		Link: w.Link + string(w.LinkB64), Major: w.Dev[0], Minor: w.Dev[1],
		Size: w.Size, Digest: w.Digest,
	}
	if w.Mode != "" {
		mode, err := strconv.ParseUint(w.Mode, 8, 32)
		if err != nil {
			return corrupt("entry: mode %q", clip(w.Mode))
		}
		got.Mode = uint32(mode)
	}
	if w.Extents != nil {
		got.Extents = make([]Extent, len(w.Extents))
		for i, x := range w.Extents {
			got.Extents[i] = Extent{x[0], x[1]}
		}
	}
	for _, x := range w.Chunks {
		got.Chunks = append(got.Chunks, Chunk(x))
	}
	if len(w.Xattrs) > 0 {
		got.Xattrs = make(map[string]string, len(w.Xattrs))
		for _, x := range w.Xattrs {
			got.Xattrs[x.Name+string(x.NameB64)] = string(x.Value)
		}
	}
	if err := got.check(); err != nil {
		return corrupt("entry %v", err)
	}
	*e = got
	return nil
}

type wireEntry struct {
	Path        string      `json:"path"`
	PathB64     []byte      `json:"path_b64"`
	Type        Type        `json:"type"`
	Hardlink    string      `json:"hardlink"`
	HardlinkB64 []byte      `json:"hardlink_b64"`
	Mode        string      `json:"mode"`
	UID         uint32      `json:"uid"`
	GID         uint32      `json:"gid"`
	Mtime       [2]int64    `json:"mtime"`
	Xattrs      []wireXattr `json:"xattrs"`
	Link        string      `json:"link"`
	LinkB64     []byte      `json:"link_b64"`
	Dev         [2]uint32   `json:"dev"`
	Size        int64       `json:"size"`
	Extents     [][2]int64  `json:"extents"`
	Digest      string      `json:"digest"`
	Chunks      []wireChunk `json:"pieces"`
}

// wireChunk is a digest and a length, as an array of two.
type wireChunk Chunk

// UnmarshalJSON reads the array.
func (p *wireChunk) UnmarshalJSON(b []byte) error {
	return json.Unmarshal(b, &[2]any{&p.Digest, &p.Len})
}

type wireXattr struct {
	Name    string `json:"name"`
	NameB64 []byte `json:"name_b64"`
	Value   []byte `json:"value"`
}

const digestPrefix = "blake3:"

func validDigest(d string) bool {
	if len(d) != len(digestPrefix)+64 || d[:len(digestPrefix)] != digestPrefix {
		return false
	}
	for _, c := range []byte(d[len(digestPrefix):]) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
