package pack

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/zeebo/blake3"
	"pgregory.net/rapid"
)

func cutAll(t testing.TB, data []byte, r io.Reader) (list [][]byte) {
	t.Helper()
	if err := Cut(int64(len(data)), r, func(p []byte) error {
		list = append(list, bytes.Clone(p))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(bytes.Join(list, nil), data) {
		t.Fatalf("%d bytes became other ones", len(data))
	}
	return list
}

// TestCutGolden fails when data is cut otherwise than it was: checkpoints
// would share nothing with those made before.
func TestCutGolden(t *testing.T) {
	h := blake3.New()
	for _, data := range [][]byte{
		noise(7, 20<<20), text(8, 10<<20), make([]byte, 5<<20), noise(9, 256<<10), noise(9, 256<<10+1),
	} {
		for _, p := range cutAll(t, data, bytes.NewReader(data)) {
			id := Sum(p)
			_, _ = h.Write(id[:])
		}
	}
	if got := ID(h.Sum(nil)).String(); got != goldenCut {
		t.Errorf("the cuts changed: %s", got)
	}
}

const goldenCut = "blake3:f08843852f7fc74975bdcb1a6fd80549bab9c8eae96990fd936903130c17743c"

func TestCut(t *testing.T) {
	for _, n := range []int{
		0, 1, wholeTo - 1, wholeTo, wholeTo + 1, wholeTo + minCut, 2*wholeTo + minCut - 1, maxCut, 3 * maxCut,
	} {
		for _, data := range [][]byte{noise(uint64(n), n), make([]byte, n)} {
			list := cutAll(t, data, bytes.NewReader(data))
			if n > 0 && n <= wholeTo && len(list) != 1 || n == 0 && len(list) != 0 {
				t.Errorf("%d bytes in %d pieces", n, len(list))
			}
			for i, p := range list {
				if len(p) > maxCut || len(p) < minCut && i < len(list)-1 {
					t.Errorf("%d bytes: chunk %d of %d has %d", n, i, len(list), len(p))
				}
			}
			// How the reader hands it out does not matter.
			again := cutAll(t, data, iotest.DataErrReader(iotest.HalfReader(bytes.NewReader(data))))
			if len(again) != len(list) {
				t.Errorf("%d bytes: %d chunks, then %d", n, len(list), len(again))
			}
		}
	}
}

func TestCutShares(t *testing.T) {
	data := noise(3, 32<<20)
	list := cutAll(t, data, bytes.NewReader(data))
	if avg := len(data) / len(list); avg < 150<<10 || avg > 400<<10 {
		t.Errorf("%d bytes on average", avg)
	}
	have := map[ID]bool{}
	for _, p := range list {
		have[Sum(p)] = true
	}
	moved := append([]byte("a few bytes in front"), data...)
	moved = append(moved[:10<<20], moved[10<<20+5:]...) // and some gone
	var fresh int
	for _, p := range cutAll(t, moved, bytes.NewReader(moved)) {
		if !have[Sum(p)] {
			fresh += len(p)
		}
	}
	if fresh > 4*maxCut {
		t.Errorf("two small edits made %d new bytes of %d", fresh, len(moved))
	}
}

func TestCutErrors(t *testing.T) {
	none := func([]byte) error { return nil }
	for _, size := range []int{1000, 5 << 20} {
		if err := Cut(int64(size), &failing{size / 2, errRead}, none); err != errRead {
			t.Errorf("%d: %v", size, err)
		}
		if err := Cut(int64(size), &failing{size - 1, io.EOF}, none); err != io.ErrUnexpectedEOF {
			t.Errorf("%d: %v", size, err)
		}
		if err := Cut(int64(size), &failing{0, io.EOF}, none); err != io.ErrUnexpectedEOF {
			t.Errorf("%d: %v", size, err)
		}
		stop := errors.New("stop")
		if err := Cut(int64(size), &failing{size, io.EOF}, func([]byte) error { return stop }); err != stop {
			t.Errorf("%d: %v", size, err)
		}
		r := &failing{size + 10, io.EOF}
		n := 0
		if err := Cut(int64(size), r, func(p []byte) error { n += len(p); return nil }); err != nil || n != size {
			t.Errorf("a longer reader: %d of %d, %v", n, size, err)
		}
	}
}

func TestCutAnything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(0, 3<<20).Draw(rt, "n")
		period := rapid.IntRange(1, 1<<20).Draw(rt, "period")
		data := make([]byte, n)
		base := noise(uint64(period), min(period, n))
		for i := 0; i < n; i += len(base) {
			copy(data[i:], base)
		}
		cutAll(t, data, bytes.NewReader(data))
	})
}
