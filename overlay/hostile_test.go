package overlay

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// piece is an entry with its data, as an attacker would write it: the writer
// below checks nothing.
type piece struct {
	entry Entry
	data  string
}

func rootDir() piece         { return piece{entry: Entry{Path: ".", Type: TypeDir, Mode: 0o755}} }
func aDir(path string) piece { return piece{entry: Entry{Path: path, Type: TypeDir, Mode: 0o755}} }
func aFile(p, data string) piece {
	return piece{Entry{Path: p, Type: TypeFile, Mode: 0o644, Size: int64(len(data))}, data}
}
func aLink(p, to string) piece {
	return piece{entry: Entry{Path: p, Type: TypeSymlink, Mode: 0o777, Link: to}}
}
func aHardlink(p, to string) piece {
	return piece{entry: Entry{Path: p, Type: TypeFile, Hardlink: to}}
}

func craft(t tb, pieces ...piece) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tarWriter{w: &b}
	for _, p := range pieces {
		must(t, w.header(&p.entry))
		w.left = int64(len(p.data)) // whatever the header says
		must(t, w.data([]byte(p.data)))
		w.left = 0
	}
	must(t, w.end())
	return b.Bytes()
}

// goTar writes an archive with archive/tar, which knows other tricks.
func goTar(t tb, headers ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		must(t, w.WriteHeader(h))
		_, err := w.Write(make([]byte, h.Size))
		must(t, err)
	}
	must(t, w.Close())
	return b.Bytes()
}

var dotDir = &tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755, Format: tar.FormatPAX}

// withRecords puts extra records before the entry of a file "f".
func withRecords(t tb, records string) []byte {
	t.Helper()
	b := craft(t, rootDir())
	b = b[:len(b)-2*block]
	x := ustar{name: "x", typ: 'x', size: int64(len(records))}
	b = x.append(b)
	b = append(b, records...)
	b = append(b, zeroBlocks[:padding(int64(len(records)))]...)
	f := ustar{name: "f", typ: '0', mode: 0o644}
	b = f.append(b)
	return append(b, zeroBlocks[:]...)
}

func record(key, value string) string {
	w := tarWriter{}
	w.record(key, value)
	return string(w.pax)
}

// sparseArchive has one file "f" with the map as given, and the data after it.
func sparseArchive(t tb, size, mapText, data string) []byte {
	t.Helper()
	b := craft(t, rootDir())
	b = b[:len(b)-2*block]
	rec := record(paxSparseMaj, "1") + record(paxSparseMin, "0") + record(paxSparseNam, "f") +
		record(paxSparseSiz, size)
	x := ustar{name: "x", typ: 'x', size: int64(len(rec))}
	b = x.append(b)
	b = append(b, rec...)
	b = append(b, zeroBlocks[:padding(int64(len(rec)))]...)
	body := mapText + string(zeroBlocks[:padding(int64(len(mapText)))]) + data
	f := ustar{name: "f", typ: '0', mode: 0o644, size: int64(len(body))}
	b = f.append(b)
	b = append(b, body...)
	b = append(b, zeroBlocks[:padding(int64(len(body)))]...)
	return append(b, zeroBlocks[:]...)
}

// resum repairs the checksum of the header block at off.
func resum(b []byte, off int) []byte {
	h := b[off : off+block]
	copy(h[148:156], "        ")
	sum := int64(0)
	for _, c := range h {
		sum += int64(c)
	}
	octal(h[148:155], sum)
	return b
}

func edit(b []byte, off int, s string) []byte {
	b = bytes.Clone(b)
	copy(b[off:], s)
	return resum(b, off/block*block)
}

// hostile are archives that must be refused as corrupt.
func hostile(t tb) map[string][]byte {
	good := craft(t, rootDir(), aFile("a", strings.Repeat("x", 3000)), aDir("d"), aFile("d/f", "y"))
	long := strings.Repeat("n", 256)
	deep := strings.TrimSuffix(strings.Repeat("d/", maxDepth+1), "/")
	xattrs := map[string]string{}
	for i := range 300 {
		xattrs[fmt.Sprintf("user.%d", i)] = strings.Repeat("v", maxXattr)
	}
	rdev := func(typ Type, major, minor uint32) piece {
		return piece{entry: Entry{Path: "f", Type: typ, Major: major, Minor: minor}}
	}
	m := map[string][]byte{
		"empty":                    nil,
		"only the end":             zeroBlocks[:],
		"no root":                  craft(t, aFile("f", "")),
		"root is a file":           edit(craft(t, rootDir()), 156, "0"),
		"root twice":               craft(t, rootDir(), rootDir()),
		"dot dot":                  craft(t, rootDir(), aFile("..", "x")),
		"dot dot slash":            craft(t, rootDir(), aFile("../escape", "x")),
		"dot dot inside":           craft(t, rootDir(), aDir("d"), aFile("d/../../escape", "x")),
		"dot dot directory":        craft(t, rootDir(), aDir("../escape")),
		"dot inside":               craft(t, rootDir(), aDir("d"), aFile("d/./f", "x")),
		"absolute":                 craft(t, rootDir(), aFile("/escape", "x")),
		"double slash":             craft(t, rootDir(), aDir("d"), aFile("d//f", "x")),
		"trailing slash on a file": craft(t, rootDir(), aFile("f/", "x")),
		"empty name":               edit(craft(t, rootDir(), aFile("f", "x")), block, "\x00"),
		"NUL in a path":            withRecords(t, record("path", "a\x00b")),
		"long name":                craft(t, rootDir(), aFile(long, "x")),
		"too deep":                 craft(t, rootDir(), aFile(deep, "x")),
		"path beyond bounds":       withRecords(t, record("path", strings.Repeat("p/", maxPath))),
		"symlink as parent":        craft(t, rootDir(), aLink("d", "/tmp"), aFile("d/escape", "x")),
		"symlink to outside":       craft(t, rootDir(), aLink("d", ".."), aFile("d/escape", "x")),
		"symlink then directory":   craft(t, rootDir(), aLink("d", ".."), aDir("d"), aFile("d/escape", "x")),
		"symlink then file":        craft(t, rootDir(), aLink("f", "../escape"), aFile("f", "x")),
		"file as parent":           craft(t, rootDir(), aFile("d", "x"), aFile("d/f", "x")),
		"fifo as parent": craft(t, rootDir(),
			piece{entry: Entry{Path: "d", Type: TypeFifo}}, aFile("d/f", "x")),
		"parent missing":            craft(t, rootDir(), aFile("d/f", "x")),
		"parent is another":         craft(t, rootDir(), aDir("d"), aFile("dd/f", "x")),
		"left directory entered":    craft(t, rootDir(), aDir("a"), aFile("b", ""), aFile("a/f", "x")),
		"twice":                     craft(t, rootDir(), aFile("f", "x"), aFile("f", "y")),
		"directory twice":           craft(t, rootDir(), aDir("d"), aDir("d")),
		"out of order":              craft(t, rootDir(), aFile("b", "x"), aFile("a", "y")),
		"order of bytes, not tree":  craft(t, rootDir(), aDir("a"), aFile("a.b", ""), aFile("a/b", "y")),
		"hard link outside":         craft(t, rootDir(), aHardlink("f", "../escape")),
		"hard link absolute":        craft(t, rootDir(), aHardlink("f", "/etc/passwd")),
		"hard link to nothing":      craft(t, rootDir(), aHardlink("f", "e")),
		"hard link to itself":       craft(t, rootDir(), aHardlink("f", "f")),
		"hard link forward":         craft(t, rootDir(), aHardlink("f", "g"), aFile("g", "")),
		"hard link to a directory":  craft(t, rootDir(), aDir("d"), aHardlink("f", "d")),
		"hard link to the root":     craft(t, rootDir(), aHardlink("f", ".")),
		"hard link through symlink": craft(t, rootDir(), aLink("e", "/etc"), aHardlink("f", "e/passwd")),
		"hard link to a neighbour":  craft(t, rootDir(), aLink("e", ".."), aHardlink("f", "e/escape")),
		"hard link below a link": craft(t, rootDir(), aDir("d"), aFile("d/x", ""), aLink("e", "d"),
			aHardlink("f", "e/x")),
		"hard link through dot dot": craft(t, rootDir(), aDir("d"), aHardlink("f", "d/../../escape")),
		"hard link through a file":  craft(t, rootDir(), aFile("e", ""), aHardlink("f", "e/x")),
		"hard link with content": edit(craft(t, rootDir(), aFile("e", ""), aHardlink("f", "e")),
			2*block+124, "00000000001\x00"),
		"cut in a header":       good[:block+100],
		"cut in data":           good[:2*block+1000],
		"cut between entries":   good[:block],
		"cut before the end":    good[:len(good)-2*block],
		"half an end":           good[:len(good)-block],
		"end too short":         good[:len(good)-1],
		"garbage after the end": append(bytes.Clone(good), "garbage"...),
		"archive after the end": append(bytes.Clone(good), good...),
		"late garbage":          append(append(bytes.Clone(good), make([]byte, 9000)...), 1),
		"endless zeros":         append(bytes.Clone(good), make([]byte, 2<<20)...),
		"zero block, then more": append(
			append(bytes.Clone(good[:block]), make([]byte, block)...),
			good[block:]...),
		"padding not zero":       func() []byte { b := bytes.Clone(good); b[2*block+3000] = 1; return b }(),
		"checksum":               func() []byte { b := bytes.Clone(good); b[block+10] ^= 1; return b }(),
		"not a tar":              bytes.Repeat([]byte("not a tar archive. "), 500),
		"gzip":                   append([]byte("\x1f\x8b\x08\x00"), make([]byte, 5000)...),
		"old tar":                edit(good, block+257, "\x00\x00\x00\x00\x00\x00\x00\x00"),
		"unknown type":           edit(good, block+156, "9"),
		"no type":                edit(good, block+156, "\x00"),
		"continued file":         edit(good, block+156, "7"),
		"GNU sparse":             edit(good, block+156, "S"),
		"GNU long name":          edit(good, block+156, "L"),
		"global records":         edit(good, block+156, "g"),
		"size not a number":      edit(good, block+124, "zzz"),
		"size in base 256":       edit(good, block+124, "\x80\x00\x00\x00\x00\x00\x00\x00\x00\x00\x0b\xb8"),
		"mode too large":         edit(good, block+100, "0177777\x00"),
		"directory with content": edit(good, 124, "00000000001\x00"),
		"fifo with content": edit(
			edit(craft(t, rootDir(), aFile("f", "")), block+124, "00000001000\x00"),
			block+156, "6"),
		"symlink without target":   craft(t, rootDir(), aLink("f", "")),
		"symlink target too long":  craft(t, rootDir(), aLink("f", strings.Repeat("x", 4096))),
		"symlink target with NUL":  withRecords(t, record("linkpath", "a\x00b")),
		"link target of a file":    withRecords(t, record("linkpath", "e")),
		"device number too large":  edit(craft(t, rootDir(), rdev(TypeBlock, 1, 1)), block+329, "0010000\x00"),
		"minor too large":          edit(craft(t, rootDir(), rdev(TypeBlock, 1, 1)), block+337, "4000000\x00"),
		"uid -1":                   withRecords(t, record("uid", "4294967295")),
		"uid beyond":               withRecords(t, record("uid", "18446744073709551615")),
		"uid negative":             withRecords(t, record("uid", "-2")),
		"gid -1":                   withRecords(t, record("gid", "4294967295")),
		"size negative":            withRecords(t, record("size", "-1")),
		"size enormous":            withRecords(t, record("size", "9223372036854775807")),
		"size beyond int64":        withRecords(t, record("size", "9223372036854775808")),
		"size in another spelling": withRecords(t, record("size", "00")),
		"time no number":           withRecords(t, record("mtime", "soon")),
		"time empty":               withRecords(t, record("mtime", "")),
		"time too fine":            withRecords(t, record("mtime", "1.0000000001")),
		"time in another spelling": withRecords(t, record("mtime", "1.50")),
		"time signed inside":       withRecords(t, record("mtime", "1.-5")),
		"unknown record":           withRecords(t, record("comment", "hello")),
		"unknown record of ours":   withRecords(t, record("AGENTBOX.future", "1")),
		"record twice":             withRecords(t, record("uid", "1")+record("uid", "2")),
		"attribute twice": withRecords(t, record("SCHILY.xattr.user.a", "1")+
			record("AGENTBOX.xattr.dXNlci5h", "2")),
		"attribute without a name": withRecords(t, record("SCHILY.xattr.", "1")),
		"attribute name with NUL":  withRecords(t, record("SCHILY.xattr.user.a\x00b", "1")),
		"attribute name too long":  withRecords(t, record("SCHILY.xattr.user."+long, "1")),
		"attribute name no base64": withRecords(t, record("AGENTBOX.xattr.!", "1")),
		"attribute name spelling":  withRecords(t, record("AGENTBOX.xattr.dXNlci5hYR", "1")), // loose last bits
		"attribute too large":      withRecords(t, record("SCHILY.xattr.user.a", strings.Repeat("v", maxXattr+1))),
		"attributes too large": craft(t, rootDir(),
			piece{entry: Entry{Path: "f", Type: TypeFile, Xattrs: xattrs}}),
		"type of another kind":     withRecords(t, record(paxOwnType, "file")),
		"type of no kind":          withRecords(t, record(paxOwnType, "")),
		"records without length":   withRecords(t, "x uid=1\n"),
		"record length too long":   withRecords(t, "99 uid=1\n"),
		"record length too short":  withRecords(t, "3 uid=1\n"),
		"record length enormous":   withRecords(t, "99999999999999999999 uid=1\n"),
		"record length signed":     withRecords(t, "+8 uid=1\n"),
		"record without newline":   withRecords(t, "8 uid=1x"),
		"record without value":     withRecords(t, "8 uidno\n"),
		"records without an entry": append(withRecords(t, record("uid", "1"))[:3*block], zeroBlocks[:]...),
		"records twice": append(withRecords(t, record("uid", "1"))[:3*block],
			withRecords(t, record("uid", "1"))[block:]...),
		"records empty":       withRecords(t, ""),
		"records enormous":    edit(withRecords(t, record("uid", "1")), block+124, "77777777777\x00"),
		"records promised":    edit(withRecords(t, record("uid", "1")), block+124, "00077777777\x00"),
		"sparse beyond size":  sparseArchive(t, "8192", "1\n4096\n8192\n", string(make([]byte, 8192))),
		"sparse past size":    sparseArchive(t, "8192", "1\n9000\n1\n", "x"),
		"sparse overlapping":  sparseArchive(t, "8192", "2\n0\n4096\n100\n100\n", string(make([]byte, 4196))),
		"sparse unsorted":     sparseArchive(t, "8192", "2\n4096\n10\n0\n10\n", string(make([]byte, 20))),
		"sparse touching":     sparseArchive(t, "8192", "2\n0\n10\n10\n10\n", string(make([]byte, 20))),
		"sparse empty extent": sparseArchive(t, "8192", "2\n0\n0\n10\n10\n", string(make([]byte, 10))),
		"sparse overflow":     sparseArchive(t, "4611686018427387904", "2\n1\n9223372036854775807\n5\n5\n", "x"),
		"sparse sum overflow": sparseArchive(t, "4611686018427387904",
			"2\n0\n4611686018427387000\n4611686018427387001\n5\n", "x"),
		"sparse negative":          sparseArchive(t, "8192", "1\n-1\n10\n", string(make([]byte, 10))),
		"sparse size negative":     sparseArchive(t, "-1", "1\n0\n1\n", "x"),
		"sparse size no number":    sparseArchive(t, "x", "1\n0\n1\n", "x"),
		"sparse too much data":     sparseArchive(t, "8192", "1\n0\n10\n", string(make([]byte, 600))),
		"sparse too little data":   sparseArchive(t, "8192", "1\n0\n1000\n", string(make([]byte, 10))),
		"sparse without holes":     sparseArchive(t, "10", "1\n0\n10\n", string(make([]byte, 10))),
		"sparse count too large":   sparseArchive(t, "8192", "9999999\n0\n1\n", "x"),
		"sparse count promised":    sparseArchive(t, "8192", "1000\n0\n1\n", "x"),
		"sparse map no number":     sparseArchive(t, "8192", "one\n", "x"),
		"sparse map without lines": sparseArchive(t, "8192", strings.Repeat("1", 600), "x"),
		"sparse map missing":       sparseArchive(t, "8192", "", ""),
		"sparse trailing twice":    sparseArchive(t, "8192", "2\n8192\n0\n8192\n0\n", ""),
		"sparse of another name": withRecords(t, record(paxSparseMaj, "1")+record(paxSparseMin, "0")+
			record(paxSparseNam, "../escape")+record(paxSparseSiz, "0")),
		"sparse of another version": withRecords(t, record(paxSparseMaj, "0")+record(paxSparseMin, "1")+
			record(paxSparseNam, "f")+record(paxSparseSiz, "0")),
		"sparse half": withRecords(t, record(paxSparseNam, "f")),
		"archive/tar: dot dot": goTar(t, dotDir, &tar.Header{
			Name: "../escape", Typeflag: tar.TypeReg, Size: 3, Mode: 0o644,
		}),
		"archive/tar: absolute link": goTar(t, dotDir, &tar.Header{
			Name: "f", Typeflag: tar.TypeLink, Linkname: "/etc/passwd",
		}),
		"archive/tar: GNU format": goTar(t, dotDir, &tar.Header{
			Name: strings.Repeat("x", 120), Typeflag: tar.TypeReg, Format: tar.FormatGNU,
		}),
		"archive/tar: global header": goTar(t, &tar.Header{
			Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "x"},
		}),
		"archive/tar: unsorted": goTar(t, dotDir, &tar.Header{Name: "b", Typeflag: tar.TypeReg},
			&tar.Header{Name: "a", Typeflag: tar.TypeReg}),
	}
	return m
}

// arena is a directory in which the target of Apply lies between things that
// must stay as they are.
func arena(t testing.TB) (dir, target string) {
	dir = noDevices(t)
	must(t, os.WriteFile(filepath.Join(dir, "escape"), []byte("precious"), 0o600))
	must(t, os.Mkdir(filepath.Join(dir, "neighbour"), 0o750))
	target = filepath.Join(dir, "target")
	return dir, target
}

// outside is all of the arena but the target.
func outside(t tb, dir string) map[string]string {
	m := peek(t, dir)
	for p := range m {
		if p == "target" || strings.HasPrefix(p, "target/") {
			delete(m, p)
		}
	}
	delete(m, ".") // its time changes when the target is made
	return m
}

func TestHostileArchives(t *testing.T) {
	dir, target := arena(t)
	want := outside(t, dir)
	for name, archive := range hostile(t) {
		t.Run(name, func(t *testing.T) {
			must(t, os.Mkdir(target, 0o755))
			defer os.RemoveAll(target)
			_, err := Apply(context.Background(), bytes.NewReader(archive), target, ApplyOptions{})
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("not refused as corrupt: %v", err)
			}
			t.Log(err)
			if err != nil && len(err.Error()) > 2000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			samePeek(t, "outside", want, outside(t, dir))
		})
	}
}

// TestHarmless has what looks like the archives above and is fine.
func TestHarmless(t *testing.T) {
	for name, archive := range map[string][]byte{
		"only a root":          craft(t, rootDir()),
		"zeros after the end":  append(craft(t, rootDir(), aFile("f", "x")), make([]byte, 9<<10)...),
		"symlink and brother":  craft(t, rootDir(), aLink("d", "/tmp"), aFile("d.x", "x")),
		"hard linked symlink":  craft(t, rootDir(), aLink("d", "/tmp"), aHardlink("e", "d")),
		"dots in names":        craft(t, rootDir(), aFile("...", ""), aFile("..x", ""), aFile(".x", "")),
		"no records":           withRecords(t, record("uid", "0")),
		"all hole":             sparseArchive(t, "8192", "1\n8192\n0\n", ""),
		"hole without its end": sparseArchive(t, "8192", "1\n0\n10\n", "0123456789"),
		"archive/tar": goTar(t, dotDir,
			&tar.Header{
				Name: "a/", Typeflag: tar.TypeDir, Mode: 0o2755, Uid: 5,
				PAXRecords: map[string]string{"SCHILY.xattr.user.x": "1"},
			},
			&tar.Header{Name: "a/" + strings.Repeat("x", 120), Typeflag: tar.TypeReg, Size: 1000, Mode: 0o4755},
			&tar.Header{
				Name: "b", Typeflag: tar.TypeSymlink, Linkname: strings.Repeat("y", 300),
				Mode: 0o777, Format: tar.FormatPAX,
			}),
	} {
		t.Run(name, func(t *testing.T) {
			dir, tree := applyTo(t, t.TempDir(), archive)
			diffs, err := Verify(t.Context(), dir, bytes.NewReader(tree), CompareOptions{})
			if err != nil || len(diffs) > 0 {
				t.Fatal(diffs, err)
			}
		})
	}
}

func TestApplyLimits(t *testing.T) {
	archive := craft(t, rootDir(), aFile("a", "12345"), aFile("b", "67890"))
	for _, opts := range []ApplyOptions{{MaxEntries: 2}, {MaxData: 9}} {
		_, err := Apply(context.Background(), bytes.NewReader(archive), t.TempDir(), opts)
		if !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%+v: %v", opts, err)
		}
	}
	_, err := Apply(context.Background(), bytes.NewReader(archive), t.TempDir(),
		ApplyOptions{MaxEntries: 3, MaxData: 10, Sync: true})
	must(t, err)
}

func TestApplyRefuses(t *testing.T) {
	archive := craft(t, rootDir())
	full := t.TempDir()
	must(t, os.WriteFile(filepath.Join(full, ".x"), nil, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(full, link))
	for _, c := range []struct {
		dir  string
		want error
	}{
		{full, fault.ErrExists},
		{link, unix.ENOTDIR},
		{filepath.Join(full, "none"), os.ErrNotExist},
		{filepath.Join(full, ".x"), unix.ENOTDIR},
	} {
		if _, err := Apply(context.Background(), bytes.NewReader(archive), c.dir,
			ApplyOptions{}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.dir, err, c.want)
		}
	}

	mine := errors.New("mine")
	_, err := Apply(context.Background(), bytes.NewReader(archive), t.TempDir(),
		ApplyOptions{Entry: func(Entry) error { return mine }})
	if err != mine {
		t.Errorf("the caller's error came back as %v", err)
	}
	broken := errors.New("broken disk")
	_, err = Apply(context.Background(), io.MultiReader(bytes.NewReader(archive[:block]), failing{broken}),
		t.TempDir(), ApplyOptions{})
	if !errors.Is(err, broken) || errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a read error came back as %v", err)
	}
	_, err = Apply(context.Background(), bytes.NewReader(craft(t, rootDir(),
		piece{entry: Entry{Path: "f", Type: TypeFifo, Xattrs: map[string]string{"user.x": "1"}}})),
		t.TempDir(), ApplyOptions{})
	if !errors.Is(err, fault.ErrUnsupported) || !strings.Contains(err.Error(), "user.x") {
		t.Errorf("an attribute that a FIFO cannot have: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }
