package pack

import (
	"bytes"
	"math/rand/v2"
	"strconv"
	"testing"
)

func BenchmarkCut(b *testing.B) {
	data := noise(1, 256<<20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if err := Cut(int64(len(data)), bytes.NewReader(data), func(p []byte) error {
			Sum(p)
			return nil
		}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCutPages: a first image, and one of which 5 % of the pages changed.
func BenchmarkCutPages(b *testing.B) {
	img := noise(1, 1<<30)
	sum := func(p []byte) (ID, error) { return Sum(p), nil }
	b.Run("first", func(b *testing.B) {
		b.SetBytes(int64(len(img)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := CutPages(bytes.NewReader(img), nil, sum); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("second", func(b *testing.B) {
		first, err := CutPages(bytes.NewReader(img), nil, sum)
		if err != nil {
			b.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(1, 2))
		for range len(img) / PageSize / 20 {
			img[rng.IntN(len(img)/PageSize)*PageSize]++
		}
		b.SetBytes(int64(len(img)))
		b.ReportAllocs()
		var added int
		for b.Loop() {
			x, err := LoadPageIndex(bytes.NewReader(first.Table), first.Segments, 1)
			if err != nil {
				b.Fatal(err)
			}
			added = 0
			p, err := CutPages(bytes.NewReader(img), x, func(p []byte) (ID, error) {
				added += len(p)
				return Sum(p), nil
			})
			if err != nil {
				b.Fatal(err)
			}
			added += len(p.Table) + len(EncodeRecipe(p.Segments))
		}
		b.ReportMetric(100*float64(added)/float64(len(img)), "%added")
	})
}

func BenchmarkWrite(b *testing.B) {
	for name, chunk := range map[string]func(uint64, int) []byte{"noise": noise, "text": text} {
		for _, size := range []int{4 << 10, 64 << 10, 1 << 20} {
			b.Run(name+"/"+strconv.Itoa(size>>10)+"KiB", func(b *testing.B) {
				var chunks [][]byte
				var ids []ID
				for i := range 128 << 20 / size / 4 {
					chunks = append(chunks, chunk(uint64(i), size))
					ids = append(ids, Sum(chunks[i]))
				}
				b.SetBytes(int64(len(chunks) * size))
				for b.Loop() {
					w, err := Create(b.TempDir())
					if err != nil {
						b.Fatal(err)
					}
					for i, p := range chunks {
						if err := w.Add(ids[i], p); err != nil {
							b.Fatal(err)
						}
					}
					if _, err := w.Finish(); err != nil {
						b.Fatal(err)
					}
					_ = w.Abort()
				}
			})
		}
	}
}

func BenchmarkOpen(b *testing.B) {
	var chunks [][]byte
	for i := range 100000 {
		chunks = append(chunks, noise(uint64(i), 16))
	}
	path, _ := write(b, b.TempDir(), chunks...)
	f := openFile(b, path)
	for b.Loop() {
		if _, err := Open(f); err != nil {
			b.Fatal(err)
		}
	}
}
