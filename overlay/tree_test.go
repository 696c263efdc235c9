package overlay

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

const (
	rootLine = `{"path":".","type":"dir","mode":"0755","uid":0,"gid":0,"mtime":[0,0]}` + "\n"
	someHash = `blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262`
)

var treeSeeds = []string{
	rootLine,
	rootLine + `{"path":"a","type":"file","mode":"4755","uid":4294967294,"gid":1,"mtime":[-1,999999999],"xattrs":[{"name":"user.a","value":""},{"name_b64":"dXNlci7/","value":"AA=="}],"size":8192,"extents":[[4096,1]],"digest":"` + someHash + "\"}\n" +
		`{"path_b64":"/w==","type":"file","hardlink":"a"}` + "\n",
	rootLine + `{"path":"a\u000ab\"\\","type":"symlink","mode":"0777","uid":0,"gid":0,"mtime":[15000000000,1],"link_b64":"/w=="}` + "\n",
	rootLine + `{"path":"d","type":"dir","mode":"1777","uid":0,"gid":0,"mtime":[0,0]}` + "\n" +
		`{"path":"d/w","type":"whiteout","mode":"0000","uid":0,"gid":0,"mtime":[0,0]}` + "\n" +
		`{"path":"d.x","type":"char","mode":"0600","uid":0,"gid":0,"mtime":[0,0],"dev":[1,3]}` + "\n",
	rootLine + `{"path":"h","type":"file","mode":"0644","uid":0,"gid":0,"mtime":[0,0],"size":1,"extents":[]}` + "\n",
}

func TestReadTreeTakes(t *testing.T) {
	for _, s := range treeSeeds {
		var out bytes.Buffer
		tw := NewTreeWriter(&out)
		must(t, ReadTree(iotest.OneByteReader(strings.NewReader(s)), tw.Write))
		must(t, tw.Close())
		if out.String() != s {
			t.Errorf("read %q, wrote %q", s, out.String())
		}
	}
}

func TestReadTreeRefuses(t *testing.T) {
	file := `{"path":"a","type":"file","mode":"0644","uid":0,"gid":0,"mtime":[0,0],"size":0}` + "\n"
	for name, s := range map[string]string{
		"empty":                "",
		"no newline":           strings.TrimSuffix(rootLine, "\n"),
		"cut":                  rootLine + file[:20],
		"blank line":           rootLine + "\n",
		"no root":              file,
		"root twice":           rootLine + rootLine,
		"twice":                rootLine + file + file,
		"out of order":         rootLine + strings.Replace(file, `"a"`, `"b"`, 1) + file,
		"no directory":         rootLine + strings.Replace(file, `"a"`, `"d/a"`, 1),
		"below a file":         rootLine + file + strings.Replace(file, `"a"`, `"a/a"`, 1),
		"escape":               rootLine + strings.Replace(file, `"a"`, `"../a"`, 1),
		"unknown field":        rootLine + strings.Replace(file, `"size"`, `"x":1,"size"`, 1),
		"other order":          rootLine + strings.Replace(file, `"uid":0,"gid":0`, `"gid":0,"uid":0`, 1),
		"space":                rootLine + strings.Replace(file, `,"uid"`, `, "uid"`, 1),
		"field twice":          rootLine + strings.Replace(file, `"uid":0,`, `"uid":0,"uid":0,`, 1),
		"other escape":         rootLine + strings.Replace(file, `"a"`, `"\u0061"`, 1),
		"case of field":        rootLine + strings.Replace(file, `"uid"`, `"UID"`, 1),
		"not UTF-8":            rootLine + strings.Replace(file, `"a"`, "\"\xff\"", 1),
		"base64 of UTF-8":      rootLine + strings.Replace(file, `"path":"a"`, `"path_b64":"YQ=="`, 1),
		"both names":           rootLine + strings.Replace(file, `"path":"a"`, `"path":"a","path_b64":"/w=="`, 1),
		"mode":                 rootLine + strings.Replace(file, "0644", "7777777", 1),
		"mode not octal":       rootLine + strings.Replace(file, "0644", "0999", 1),
		"mode short":           rootLine + strings.Replace(file, "0644", "644", 1),
		"uid":                  rootLine + strings.Replace(file, `"uid":0`, `"uid":4294967295`, 1),
		"uid float":            rootLine + strings.Replace(file, `"uid":0`, `"uid":0.0`, 1),
		"nanoseconds":          rootLine + strings.Replace(file, `[0,0]`, `[0,1000000000]`, 1),
		"negative nanoseconds": rootLine + strings.Replace(file, `[0,0]`, `[0,-1]`, 1),
		"time of three":        rootLine + strings.Replace(file, `[0,0]`, `[0,0,0]`, 1),
		"size negative":        rootLine + strings.Replace(file, `"size":0`, `"size":-1`, 1),
		"type":                 rootLine + strings.Replace(file, `"file"`, `"door"`, 1),
		"dir with size":        rootLine + strings.Replace(file, `"file"`, `"dir"`, 1),
		"digest":               rootLine + strings.Replace(file, `"size":0`, `"size":0,"digest":"blake3:00"`, 1),
		"digest upper case": rootLine + strings.Replace(file, `"size":0`,
			`"size":0,"digest":"`+strings.ToUpper(someHash)+`"`, 1),
		"extents beyond":      rootLine + strings.Replace(file, `"size":0`, `"size":5,"extents":[[4,2]]`, 1),
		"extents null":        rootLine + strings.Replace(file, `"size":0`, `"size":0,"extents":null`, 1),
		"hard link forward":   rootLine + `{"path":"a","type":"file","hardlink":"b"}` + "\n",
		"hard link with mode": rootLine + file + `{"path":"b","type":"file","hardlink":"a","mode":"0644"}` + "\n",
		"not JSON":            rootLine + "hello\n",
		"array":               rootLine + "[]\n",
		"two on a line":       rootLine + strings.TrimSuffix(file, "\n") + file,
		"null":                "null\n",
		"nested":              strings.Repeat("[", 1<<20) + "\n",
	} {
		err := ReadTree(strings.NewReader(s), func(Entry) error { return nil })
		if !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// endless is a line that never ends, but for a reader without a bound: that one
// shall fail and not eat the machine's memory.
type endless struct{ n int64 }

func (e *endless) Read(p []byte) (int, error) {
	if e.n > 2*maxLine {
		return 0, errors.New("read on and on")
	}
	for i := range p {
		p[i] = ' '
	}
	e.n += int64(len(p))
	return len(p), nil
}

func TestReadTreeBoundsLines(t *testing.T) {
	r := &endless{}
	err := ReadTree(r, func(Entry) error { return nil })
	if !errors.Is(err, fault.ErrCorrupt) || r.n > maxLine+1<<20 {
		t.Errorf("read %d bytes of one line: %v", r.n, err)
	}
	broken := errors.New("broken")
	err = ReadTree(io.MultiReader(strings.NewReader(rootLine), iotest.ErrReader(broken)), func(Entry) error {
		return nil
	})
	if !errors.Is(err, broken) || errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a read error came back as %v", err)
	}
}

func TestTreeWriterRefuses(t *testing.T) {
	tw := NewTreeWriter(io.Discard)
	if err := tw.Close(); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("empty tree: %v", err)
	}
	must(t, tw.Write(Entry{Path: "b", Type: TypeDir}))
	if err := tw.Write(Entry{Path: "a", Type: TypeDir}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("out of order: %v", err)
	}
}

// genEntry makes valid entries with all that JSON could lose.
func genEntry() *rapid.Generator[Entry] {
	name := rapid.Custom(func(t *rapid.T) string {
		s := string(rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "name"))
		return strings.NewReplacer("/", "_", "\x00", "_").Replace(s) + "x" // never "." or ".."
	})
	return rapid.Custom(func(t *rapid.T) Entry {
		e := Entry{
			Path: name.Draw(t, "path"),
			Type: rapid.SampledFrom([]Type{
				TypeDir, TypeFile, TypeSymlink, TypeFifo, TypeSocket, TypeChar, TypeBlock, TypeWhiteout,
			}).Draw(t, "type"),
			Mode:  rapid.Uint32Range(0, 0o7777).Draw(t, "mode"),
			UID:   rapid.Uint32Range(0, maxID).Draw(t, "uid"),
			GID:   rapid.Uint32Range(0, maxID).Draw(t, "gid"),
			Mtime: Time{rapid.Int64().Draw(t, "sec"), rapid.Int64Range(0, 999_999_999).Draw(t, "nsec")},
		}
		if n := rapid.IntRange(0, 3).Draw(t, "xattrs"); n > 0 {
			e.Xattrs = map[string]string{}
			for range n {
				e.Xattrs[name.Draw(t, "attribute")] = string(rapid.SliceOf(rapid.Byte()).Draw(t, "value"))
			}
		}
		switch e.Type {
		case TypeSymlink:
			e.Mode, e.Link = 0o777, name.Draw(t, "link")
		case TypeChar, TypeBlock:
			e.Major = rapid.Uint32Range(1, maxMajor).Draw(t, "major")
			e.Minor = rapid.Uint32Range(0, maxMinor).Draw(t, "minor")
		case TypeFile:
			e.Size = rapid.Int64Range(0, maxFileSize).Draw(t, "size")
			if rapid.Bool().Draw(t, "sparse") && e.Size > 100 {
				e.Extents = []Extent{}
				for off := int64(1); off < 90; off += 20 {
					if rapid.Bool().Draw(t, "extent") {
						e.Extents = append(e.Extents, Extent{off, rapid.Int64Range(1, 9).Draw(t, "len")})
					}
				}
			}
			e.Digest = someHash
		}
		return e
	})
}

func TestEntryJSONIsLossless(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := genEntry().Draw(t, "entry")
		b, err := json.Marshal(e)
		must(t, err)
		if !json.Valid(b) || bytes.ContainsAny(b, "\n") {
			t.Fatalf("not one line of JSON: %q", b)
		}
		var again Entry
		must(t, json.Unmarshal(b, &again))
		if !reflect.DeepEqual(e, again) {
			t.Fatalf("%+v came back as %+v from %s", e, again, b)
		}
		again, err = ParseEntry(e.AppendJSON(nil))
		must(t, err)
		if !reflect.DeepEqual(e, again) {
			t.Fatalf("%+v came back as %+v from its canonical form", e, again)
		}
	})
}

// TestArchiveIsLossless takes entries that no filesystem here could hold
// through the archive's headers.
func TestArchiveIsLossless(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := genEntry().Draw(t, "entry")
		if e.Size > 1000 {
			e.Size, e.Extents = 1000, nil
		}
		e.Digest = ""
		r := tarReader{r: newReader(craft(t, rootDir(), piece{e, strings.Repeat("d", int(e.data()))}))}
		_, err := r.next()
		must(t, err)
		again, err := r.next()
		must(t, err)
		if !reflect.DeepEqual(e, again) {
			t.Fatalf("%+v came back as %+v", e, again)
		}
		must(t, r.data(make([]byte, r.left)))
		if _, err := r.next(); err != io.EOF {
			t.Fatal(err)
		}
	})
}

func TestComparePaths(t *testing.T) {
	sorted := []string{".", "\x01", "a", "a/\x01", "a/b", "a/b/c", "a/b.c", "a\x01", "a.b", "a.b/c", "ab", "b", "\xff"}
	for i, a := range sorted {
		for j, b := range sorted {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := ComparePaths(a, b); got != want {
				t.Errorf("ComparePaths(%q, %q) = %d, want %d", a, b, got, want)
			}
		}
	}
}
