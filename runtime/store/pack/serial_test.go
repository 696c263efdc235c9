package pack

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestSerial holds the packs that are streamed against those that are files.
func TestSerial(t *testing.T) {
	chunks := [][]byte{text(1, 70_000), noise(2, 5000), {7}, text(3, MaxChunk)}
	stream := func() ([]byte, Info) {
		var out bytes.Buffer
		s, err := NewSerial(&out)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range chunks {
			if b, err := s.Add(Sum(p), p); err != nil || b.Off+int64(b.Stored) != s.Size() {
				t.Fatalf("%+v in %d bytes: %v", b, s.Size(), err)
			}
		}
		info, err := s.Finish()
		if err != nil || info.Bytes != int64(out.Len()) {
			t.Fatalf("%d bytes of %d: %v", info.Bytes, out.Len(), err)
		}
		return out.Bytes(), info
	}
	data, info := stream()
	if again, _ := stream(); !bytes.Equal(data, again) {
		t.Error("the same chunks are other bytes")
	}
	path := filepath.Join(t.TempDir(), info.Name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f := openFile(t, path)
	if r, err := Open(f); err != nil || r.Name() != info.Name || r.Bytes() != info.Bytes {
		t.Fatalf("as a file: %v", err)
	}
	got, err := readAll(f)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range chunks {
		if !bytes.Equal(got[Sum(p)], p) {
			t.Errorf("the chunk of %d bytes comes back as %d", len(p), len(got[Sum(p)]))
		}
	}
}

func TestSerialErrors(t *testing.T) {
	s, err := NewSerial(&bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Finish(); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a pack without chunks: %v", err)
	}
	if _, err := s.Add(Sum([]byte("a")), []byte("b")); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("another chunk than its id's: %v", err)
	}
	for _, n := range []int{0, MaxChunk + 1} {
		if _, err := s.Add(ID{}, make([]byte, n)); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("a chunk of %d bytes: %v", n, err)
		}
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	if _, err := NewSerial(full); err == nil {
		t.Error("a full disk goes unnoticed")
	}
}
