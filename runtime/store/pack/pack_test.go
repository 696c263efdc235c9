package pack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// noise returns n bytes that do not compress; text some that do.
func noise(seed uint64, n int) []byte {
	b := make([]byte, n+8)
	r := rand.NewPCG(seed, 1)
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b[:n]
}

func text(seed uint64, n int) []byte {
	b := noise(seed, n)
	for i := range b {
		b[i] = "etaoin shrdlu\n--"[b[i]&15]
	}
	for i := 64; i+64 <= n; i += 128 {
		copy(b[i:i+64], b[:64])
	}
	return b
}

// write makes a pack of the chunks and moves it to its name.
func write(t testing.TB, dir string, chunks ...[]byte) (string, Info) {
	t.Helper()
	w, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	for _, p := range chunks {
		if err := w.Add(Sum(p), p); err != nil {
			t.Fatal(err)
		}
	}
	info, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, info.Name)
	if err := os.Rename(info.Temp, path); err != nil {
		t.Fatal(err)
	}
	return path, info
}

func openFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// readAll is everything in a pack.
func readAll(f *os.File) (map[ID][]byte, error) {
	r, err := Open(f)
	if err != nil {
		return nil, err
	}
	blobs, err := r.Blobs()
	if err != nil {
		return nil, err
	}
	got := map[ID][]byte{}
	for _, b := range blobs {
		if got[b.ID], err = r.Read(b, nil); err != nil {
			return nil, err
		}
	}
	return got, nil
}

func TestRoundTrip(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(rt, "pieces")
		want := map[ID][]byte{}
		var chunks [][]byte
		for i := range n {
			size := rapid.OneOf(rapid.IntRange(1, 100), rapid.IntRange(1, 300<<10)).Draw(rt, "size")
			p := noise(uint64(i), size)
			if rapid.Bool().Draw(rt, "text") {
				p = text(uint64(i), size)
			}
			if rapid.IntRange(0, 9).Draw(rt, "again") == 0 && i > 0 {
				p = chunks[i-1]
			}
			want[Sum(p)] = p
			chunks = append(chunks, p)
		}
		path, info := write(t, dir, chunks...)
		defer os.Remove(path)
		f := openFile(t, path)
		r, err := Open(f)
		if err != nil {
			rt.Fatal(err)
		}
		st, _ := f.Stat()
		if r.Name() != info.Name || r.Bytes() != st.Size() || info.Bytes != st.Size() ||
			r.Count() != int64(len(want)) || len(info.Blobs) != len(want) {
			rt.Fatalf("name %s, %d bytes, %d pieces; written %s, %d, %d; the file has %d", r.Name(), r.Bytes(),
				r.Count(), info.Name, info.Bytes, len(info.Blobs), st.Size())
		}
		blobs, err := r.Blobs()
		if err != nil {
			rt.Fatal(err)
		}
		for i, b := range blobs {
			if b != info.Blobs[i] {
				rt.Fatalf("piece %d: read %v, written %v", i, b, info.Blobs[i])
			}
		}
		got, err := readAll(f)
		if err != nil {
			rt.Fatal(err)
		}
		for id, p := range want {
			if !bytes.Equal(got[id], p) {
				rt.Fatalf("piece %s differs", id)
			}
		}
	})
}

func TestStoredForms(t *testing.T) {
	big := text(1, MaxChunk)
	_, info := write(t, t.TempDir(), big, noise(2, MaxChunk), noise(3, 1), text(4, 4000))
	packed := map[ID]bool{Sum(big): true, Sum(text(4, 4000)): true}
	for _, b := range info.Blobs {
		if b.Packed != packed[b.ID] {
			t.Errorf("piece of %d bytes: packed %v (%d stored)", b.Raw, b.Packed, b.Stored)
		}
		if !b.Packed && b.Stored != b.Raw {
			t.Errorf("piece of %d bytes takes %d", b.Raw, b.Stored)
		}
	}
}

// TestFlips changes every byte of a pack, one after the other.
func TestFlips(t *testing.T) {
	path, _ := write(t, t.TempDir(), text(1, 700), noise(2, 300), text(3, 2000), noise(4, 1),
		bytes.Repeat([]byte{0}, 5000))
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := readAll(f); err != nil {
		t.Fatal(err)
	}
	for i := range whole {
		for _, mask := range []byte{1, 0x80, 0xff} {
			if _, err := f.WriteAt([]byte{whole[i] ^ mask}, int64(i)); err != nil {
				t.Fatal(err)
			}
			if _, err := readAll(f); !errors.Is(err, fault.ErrCorrupt) {
				t.Fatalf("byte %d of %d with %#x turned: %v", i, len(whole), mask, err)
			}
		}
		if _, err := f.WriteAt(whole[i:i+1], int64(i)); err != nil {
			t.Fatal(err)
		}
	}
	for n := range whole {
		if _, err := open(bytes.NewReader(whole[:n]), int64(n)); !errors.Is(err, fault.ErrCorrupt) {
			t.Fatalf("the first %d of %d bytes: %v", n, len(whole), err)
		}
	}
	if _, err := open(bytes.NewReader(append(whole, 0)), int64(len(whole)+1)); !errors.Is(err, fault.ErrCorrupt) {
		t.Fatalf("a byte more: %v", err)
	}
}

func TestReadBlobHostile(t *testing.T) {
	bomb := zstdOf(t, make([]byte, MaxChunk))
	id := Sum([]byte("x"))
	for name, b := range map[string]Blob{
		"none":           {ID: id, Off: 8},
		"too large":      {ID: id, Off: 8, Stored: MaxChunk + 1, Raw: MaxChunk + 1},
		"packed, larger": {ID: id, Off: 8, Stored: 10, Raw: 10, Packed: true},
		"before":         {ID: id, Off: -1, Stored: 1, Raw: 1},
		"in the head":    {ID: id, Off: 7, Stored: 1, Raw: 1},
		"overflow":       {ID: id, Off: 1<<63 - 1, Stored: 1, Raw: 1},
		"behind":         {ID: id, Off: 1 << 40, Stored: 1, Raw: 1},
		"a bomb":         {ID: id, Off: 8, Stored: uint32(len(bomb)), Raw: uint32(len(bomb) + 1), Packed: true},
		"not it":         {ID: id, Off: 8, Stored: 3, Raw: 3},
	} {
		if _, err := ReadBlob(bytes.NewReader(append([]byte(headMagic), bomb...)), b,
			nil); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func zstdOf(t *testing.T, p []byte) []byte {
	dir := t.TempDir()
	path, info := write(t, dir, p)
	b := info.Blobs[0]
	whole, err := os.ReadFile(path)
	if err != nil || !b.Packed {
		t.Fatal(err, b)
	}
	return whole[b.Off:][:b.Stored]
}

func TestAddFromMany(t *testing.T) {
	dir := t.TempDir()
	w, err := Create(dir)
	if err != nil {
		t.Fatal(err)
	}
	var g sync.WaitGroup
	for k := range 8 {
		g.Go(func() {
			buf := make([]byte, 0, 64<<10)
			for i := range 100 {
				buf = append(buf[:0], text(uint64((k*37+i)%200), 1000+i%7*9000)...)
				id := Sum(buf)
				if err := w.Add(id, buf); err != nil || !w.Has(id) {
					t.Errorf("add: %v", err)
				}
				clear(buf) // it is ours again
			}
		})
	}
	g.Wait()
	chunks, _ := w.Stats()
	info, err := w.Finish()
	if err != nil || len(info.Blobs) != chunks {
		t.Fatalf("%d chunks, %d in the pack: %v", chunks, len(info.Blobs), err)
	}
	if got, err := readAll(openFile(t, info.Temp)); err != nil || len(got) != chunks {
		t.Fatalf("%d chunks, %d read: %v", chunks, len(got), err)
	}
	if err := w.Add(Sum([]byte("x")), []byte("x")); !errors.Is(err, fault.ErrState) {
		t.Errorf("add after the end: %v", err)
	}
	if _, err := w.Finish(); !errors.Is(err, fault.ErrState) {
		t.Errorf("finish again: %v", err)
	}
}

func TestWriterLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	w, _ := Create(dir)
	if info, err := w.Finish(); err != nil || info.Temp != "" || info.Name != "" {
		t.Errorf("an empty pack: %+v, %v", info, err)
	}
	w, _ = Create(dir)
	if err := errors.Join(w.Add(Sum(nil), nil), w.Add(ID{},
		make([]byte, MaxChunk+1))); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("impossible chunks: %v", err)
	}
	p := noise(1, 100<<10)
	if err := w.Add(Sum(p), p); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Abort(), w.Abort()); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := Create(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}

func TestAddStored(t *testing.T) {
	dir := t.TempDir()
	path, info := write(t, dir, text(1, 5000), noise(2, 5000))
	whole, _ := os.ReadFile(path)
	w, _ := Create(dir)
	defer w.Abort()
	for _, b := range info.Blobs {
		stored := bytes.Clone(whole[b.Off:][:b.Stored])
		stored[len(stored)/2] ^= 4
		if err := w.AddStored(b, stored); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("a damaged chunk (packed %v): %v", b.Packed, err)
		}
		stored[len(stored)/2] ^= 4
		if err := w.AddStored(b, stored); err != nil {
			t.Fatal(err)
		}
	}
	again, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(openFile(t, again.Temp))
	if err != nil || !bytes.Equal(got[Sum(text(1, 5000))], text(1, 5000)) ||
		!bytes.Equal(got[Sum(noise(2, 5000))], noise(2, 5000)) {
		t.Fatalf("%d chunks: %v", len(got), err)
	}
}

func TestIDs(t *testing.T) {
	id := Sum([]byte("agentbox"))
	if got, err := ParseID(id.String()); err != nil || got != id {
		t.Fatalf("%s -> %s, %v", id, got, err)
	}
	s := id.String()
	for _, bad := range []string{
		"", s[:70], s + "0", "sha256:" + s[7:], "BLAKE3:" + s[7:], s[:70] + "G", s[:70] + "A", s[:70] + "/",
	} {
		if _, err := ParseID(bad); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	// The empty input's digest is known from BLAKE3's specification.
	if got := Sum(nil).String(); got != "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262" {
		t.Error(got)
	}
}

type failing struct {
	n   int
	err error
}

func (r *failing) Read(p []byte) (int, error) {
	if r.n <= 0 {
		return 0, r.err
	}
	n := min(len(p), r.n)
	r.n -= n
	return n, nil
}

var errRead = errors.New("the reader's")
var _ io.Reader = (*failing)(nil)
