package pack

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// seedPack is a small whole pack; the test that makes seeds wrote it once.
func seedPack(f *testing.F) []byte {
	path, _ := write(f, f.TempDir(), text(1, 700), noise(2, 30))
	b, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	return b
}

func FuzzOpen(f *testing.F) {
	whole := seedPack(f)
	f.Add(whole)
	f.Add(whole[:len(whole)-tailLen])
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := open(bytes.NewReader(b), int64(len(b)))
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		end := int64(len(headMagic))
		if err := r.Each(func(x Blob) error {
			if x.Off != end || x.Stored == 0 || x.Raw > MaxChunk {
				t.Fatalf("%+v at %d", x, end)
			}
			end += int64(x.Stored)
			if raw, err := r.Read(x, nil); err == nil && (Sum(raw) != x.ID || len(raw) != int(x.Raw)) {
				t.Fatalf("piece %s reads as %d bytes of %s", x.ID, len(raw), Sum(raw))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if want := int64(len(b)) - tailLen - r.Count()*recordLen; end != want {
			t.Fatalf("the chunks end at %d, the footer begins at %d", end, want)
		}
	})
}

// FuzzBlob unpacks hostile bytes with lengths of their choice.
func FuzzBlob(f *testing.F) {
	whole := seedPack(f)
	f.Add(whole, int64(8), uint32(100), uint32(700), true)
	f.Fuzz(func(t *testing.T, b []byte, off int64, stored, raw uint32, packed bool) {
		x := Blob{ID: Sum(b), Off: off, Stored: stored, Raw: raw, Packed: packed}
		if _, err := ReadBlob(bytes.NewReader(b), x, nil); !errors.Is(err, fault.ErrCorrupt) && err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzRecipe(f *testing.F) {
	a, b := Sum([]byte("a")), Sum([]byte("b"))
	f.Add(EncodeRecipe([]Segment{{a, 0, 4096}, {b, 4096, 8192}, {a, 8192, 1}}), int64(12289))
	f.Add(EncodeRecipe(nil), int64(0))
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, int64(1))
	f.Fuzz(func(t *testing.T, in []byte, size int64) {
		segments, err := DecodeRecipe(in, size)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		for _, s := range segments {
			if size -= int64(s.Len); s.Len == 0 || s.Off+s.Len > MaxChunk {
				t.Fatalf("%+v", s)
			}
		}
		if size != 0 {
			t.Fatalf("%d bytes off", size)
		}
		if again := EncodeRecipe(segments); !bytes.Equal(again, in) {
			t.Fatalf("%x is written as %x", in, again)
		}
	})
}

func FuzzPageTable(f *testing.F) {
	s := &shelf{}
	p, err := CutPages(bytes.NewReader(noise(1, 20*PageSize)), nil, s.add)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p.Table, EncodeRecipe(p.Segments))
	f.Fuzz(func(t *testing.T, table, recipe []byte) {
		segments, err := DecodeRecipe(recipe, 20*PageSize)
		if err != nil {
			segments = p.Segments
		}
		x, err := LoadPageIndex(bytes.NewReader(table), segments, 1)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		// Whatever the table says, an image cut with it is whole in length.
		q, err := CutPages(bytes.NewReader(noise(1, 20*PageSize)), x, s.add)
		if err != nil {
			t.Fatal(err)
		}
		var n int64
		for _, g := range q.Segments {
			n += int64(g.Len)
		}
		if n != 20*PageSize {
			t.Fatalf("%d bytes", n)
		}
	})
}
