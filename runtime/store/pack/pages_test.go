package pack

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// shelf is a store in memory.
type shelf struct {
	chunks map[ID][]byte
	added  int // raw bytes that were new
}

func (s *shelf) add(raw []byte) (ID, error) {
	id := Sum(raw)
	if s.chunks == nil {
		s.chunks = map[ID][]byte{}
	}
	if _, there := s.chunks[id]; !there {
		s.chunks[id] = bytes.Clone(raw)
		s.added += len(raw)
	}
	return id, nil
}

// image puts an image together again, by way of its encoded recipe.
func (s *shelf) image(t testing.TB, p Pages) []byte {
	t.Helper()
	segments, err := DecodeRecipe(EncodeRecipe(p.Segments), p.Size)
	if err != nil {
		t.Fatal(err)
	}
	var b []byte
	for _, x := range segments {
		b = append(b, s.chunks[x.ID][x.Off:x.Off+x.Len]...)
	}
	return b
}

func TestPagesFollowChanges(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 2))
		s := &shelf{}
		var old *PageIndex
		var table []byte
		var parts int
		img := noise(rng.Uint64(), rapid.IntRange(0, 700*PageSize).Draw(rt, "size"))
		for round := range rapid.IntRange(1, 6).Draw(rt, "rounds") {
			p, err := CutPages(iotest.HalfReader(bytes.NewReader(img)), old, s.add)
			if err != nil {
				rt.Fatal(err)
			}
			if !bytes.Equal(s.image(t, p), img) || p.Size != int64(len(img)) {
				rt.Fatalf("round %d: the image differs", round)
			}
			if table = append(table, p.Table...); p.Fresh {
				table, parts = p.Table, 0
			}
			parts++
			if old, err = LoadPageIndex(bytes.NewReader(table), p.Segments, parts); err != nil {
				rt.Fatal(err)
			}
			// Every page of the image is in the index.
			before := s.added
			q, err := CutPages(bytes.NewReader(img), old, s.add)
			if err != nil || s.added != before || !bytes.Equal(s.image(t, q), img) {
				rt.Fatalf("the same image again added %d bytes: %v", s.added-before, err)
			}
			img = bytes.Clone(img)
			for range rng.IntN(20) {
				if len(img) < 2*PageSize {
					break
				}
				a, b := rng.IntN(len(img)/PageSize)*PageSize, rng.IntN(len(img)/PageSize)*PageSize
				switch rng.IntN(4) {
				case 0:
					img[a] ^= 1
				case 1:
					copy(img[a:a+PageSize], img[b:b+PageSize])
				case 2:
					img = append(img[:a:a], img[a+PageSize:]...)
				case 3:
					img = append(img, make([]byte, rng.IntN(2*PageSize))...)
				}
			}
		}
	})
}

func TestPagesCost(t *testing.T) {
	const pages = 4096 // 16 MiB
	img := noise(1, pages*PageSize)
	s := &shelf{}
	p, err := CutPages(bytes.NewReader(img), nil, s.add)
	if err != nil {
		t.Fatal(err)
	}
	if !p.Fresh || len(p.Segments) != pages/chunkPages {
		t.Errorf("fresh %v, %d segments", p.Fresh, len(p.Segments))
	}
	table, parts := p.Table, 1
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 100 {
		x, err := LoadPageIndex(bytes.NewReader(table), p.Segments, parts)
		if err != nil {
			t.Fatal(err)
		}
		changed := map[int]bool{}
		for len(changed) < pages/20 {
			i := rng.IntN(pages)
			changed[i] = true
			img[i*PageSize] += 1 + byte(rng.IntN(200))
			img[i*PageSize+1] += byte(rng.IntN(200))
		}
		before := s.added
		if p, err = CutPages(bytes.NewReader(img), x, s.add); err != nil {
			t.Fatal(err)
		}
		cost := s.added - before + len(p.Table) + len(EncodeRecipe(p.Segments))
		if round == 0 && cost > len(img)*6/100 {
			t.Errorf("5 %% changed at random cost %.2f %%", 100*float64(cost)/float64(len(img)))
		}
		if table = append(table, p.Table...); p.Fresh {
			table, parts = p.Table, 0
		}
		parts++
		// A chunk stays in use for the sake of one page, and its record with it.
		if len(table) > 10*pages*16 || parts > maxTables {
			t.Fatalf("round %d: the table has %d bytes in %d parts", round, len(table), parts)
		}
	}
	if !bytes.Equal(s.image(t, p), img) {
		t.Error("the last image differs")
	}
}

func TestPagesErrors(t *testing.T) {
	s := &shelf{}
	if _, err := CutPages(&failing{10 << 20, errRead}, nil, s.add); err != errRead {
		t.Error(err)
	}
	stop := errors.New("stop")
	if _, err := CutPages(bytes.NewReader(noise(1, 10<<20)), nil, func([]byte) (ID, error) {
		return ID{}, stop
	}); err != stop {
		t.Error(err)
	}
	p, err := CutPages(bytes.NewReader(nil), nil, s.add)
	if err != nil || len(p.Segments) != 0 || len(p.Table) != 0 {
		t.Error(p, err)
	}
	if got, err := DecodeRecipe(EncodeRecipe(nil), 0); err != nil || len(got) != 0 {
		t.Error(got, err)
	}
}

func TestTablesOfOthers(t *testing.T) {
	s := &shelf{}
	p, err := CutPages(bytes.NewReader(noise(1, 20*PageSize)), nil, s.add)
	if err != nil {
		t.Fatal(err)
	}
	for n := range p.Table {
		x, err := LoadPageIndex(bytes.NewReader(p.Table[:n]), p.Segments, 1)
		if whole := n == 0 || n == 33+16*16; whole != (err == nil) || !whole && !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%d of %d bytes: %v, %v", n, len(p.Table), x, err)
		}
	}
	if x, err := LoadPageIndex(bytes.NewReader(append(p.Table, p.Table...)), p.Segments,
		2); err != nil || len(x.hashes) != 20 {
		t.Error("a table twice", err)
	}
	if x, err := LoadPageIndex(bytes.NewReader(p.Table), nil, 1); err != nil || len(x.hashes) != 0 {
		t.Error("no chunk is used", err)
	}
	if _, err := LoadPageIndex(&failing{20, errRead}, p.Segments, 1); !errors.Is(err, errRead) {
		t.Error(err)
	}
}

func TestRecipeIsCanonical(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var segments []Segment
		var size int64
		for range rapid.IntRange(0, 50).Draw(rt, "n") {
			off := rapid.Uint32Range(0, MaxChunk-1).Draw(rt, "off")
			s := Segment{
				ID: Sum([]byte{byte(rapid.IntRange(0, 9).Draw(rt, "id"))}), Off: off,
				Len: rapid.Uint32Range(1, MaxChunk-off).Draw(rt, "len"),
			}
			segments = append(segments, s)
			size += int64(s.Len)
		}
		b := EncodeRecipe(segments)
		got, err := DecodeRecipe(b, size)
		if err != nil {
			rt.Fatal(err)
		}
		for i := range segments {
			if got[i] != segments[i] {
				rt.Fatalf("segment %d: %v, was %v", i, got[i], segments[i])
			}
		}
		for _, wrong := range []int64{size - 1, size + 1, -1} {
			if _, err := DecodeRecipe(b, wrong); !errors.Is(err, fault.ErrCorrupt) {
				rt.Fatalf("%d bytes, told %d: %v", size, wrong, err)
			}
		}
		for n := range b {
			if _, err := DecodeRecipe(b[:n], size); !errors.Is(err, fault.ErrCorrupt) {
				rt.Fatalf("%d of %d bytes: %v", n, len(b), err)
			}
		}
	})
}

// defective panics once so much was read.
type defective struct{ left int }

func (d *defective) Read(p []byte) (int, error) {
	if d.left <= 0 {
		panic("a defect")
	}
	n := min(len(p), d.left)
	d.left -= n
	return n, nil
}

// A panic of the reader is an error, not the end of the data.
func TestCutPagesPanics(t *testing.T) {
	s := &shelf{}
	_, err := CutPages(&defective{left: 5 << 20}, nil, s.add)
	if p := (*guard.Panic)(nil); !errors.As(err, &p) {
		t.Error(err)
	}
}
