package overlay

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/fault"
)

// The JSON of an entry is one line with a fixed order of fields, so that equal
// trees have equal bytes. A string that is not UTF-8 stands, in base64, in the
// field of the same name with "_b64" behind it; attribute values are always in
// base64.
//
//	{"path":"a","type":"file","mode":"0644","uid":0,"gid":0,"mtime":[1700000000,1],
//	 "xattrs":[{"name":"user.x","value":"MQ=="}],"size":8192,"extents":[[0,4096]],"digest":"blake3:..."}
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

// wireEntry is what encoding/json reads; canonical order is checked apart.
type wireEntry struct {
	Path        *string     `json:"path"`
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
	Extents     []wirePair  `json:"extents"`
	Digest      string      `json:"digest"`
}

type wireXattr struct {
	Name    string `json:"name"`
	NameB64 []byte `json:"name_b64"`
	Value   []byte `json:"value"`
}

type wirePair [2]int64

// ParseEntry reads the canonical JSON of an entry and nothing else: any other
// spelling, an unknown field or an impossible value is ErrCorrupt.
func ParseEntry(line []byte) (Entry, error) {
	e, err := parseEntry(line)
	if err != nil {
		return Entry{}, err
	}
	// What was read is written again and must be the same bytes: this finds
	// unknown and repeated fields, other orders and other spellings at once.
	if !bytes.Equal(e.AppendJSON(make([]byte, 0, len(line))), line) {
		return Entry{}, fmt.Errorf("%w: entry %q is not in canonical form", fault.ErrCorrupt, clip(e.Path))
	}
	return e, nil
}

func parseEntry(line []byte) (Entry, error) {
	var w wireEntry
	if err := json.Unmarshal(line, &w); err != nil {
		return Entry{}, fmt.Errorf("%w: entry: %v", fault.ErrCorrupt, err)
	}
	e := Entry{
		Path: string(w.PathB64), Type: w.Type, Hardlink: w.Hardlink + string(w.HardlinkB64),
		UID: w.UID, GID: w.GID, Mtime: Time{w.Mtime[0], w.Mtime[1]},
		Link: w.Link + string(w.LinkB64), Major: w.Dev[0], Minor: w.Dev[1],
		Size: w.Size, Digest: w.Digest,
	}
	if w.Path != nil {
		e.Path = *w.Path
	}
	if w.Mode != "" {
		mode, err := strconv.ParseUint(w.Mode, 8, 32)
		if err != nil {
			return Entry{}, fmt.Errorf("%w: entry: mode %q", fault.ErrCorrupt, clip(w.Mode))
		}
		e.Mode = uint32(mode)
	}
	if w.Extents != nil {
		e.Extents = make([]Extent, len(w.Extents))
		for i, x := range w.Extents {
			e.Extents[i] = Extent{x[0], x[1]}
		}
	}
	if len(w.Xattrs) > 0 {
		e.Xattrs = make(map[string]string, len(w.Xattrs))
		for _, x := range w.Xattrs {
			e.Xattrs[x.Name+string(x.NameB64)] = string(x.Value)
		}
	}
	if err := e.check(); err != nil {
		return Entry{}, fmt.Errorf("%w: entry: %v", fault.ErrCorrupt, err)
	}
	if e.Digest != "" && !validDigest(e.Digest) {
		return Entry{}, fmt.Errorf("%w: entry %q: digest %q", fault.ErrCorrupt, clip(e.Path), clip(e.Digest))
	}
	return e, nil
}

// UnmarshalJSON reads an entry inside of other JSON, where it need not be
// canonical: encoding/json itself respells what MarshalJSON returns.
func (e *Entry) UnmarshalJSON(b []byte) error {
	got, err := parseEntry(b)
	if err != nil {
		return err
	}
	*e = got
	return nil
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
