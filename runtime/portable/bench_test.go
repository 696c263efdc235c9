package portable

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// 10,000 files of 4 KiB and 64 MiB of memory, there and back.
func BenchmarkExportImport(b *testing.B) {
	m, dir := newMemory(b), b.TempDir()
	data := make([]byte, 4096)
	for i := range 10_000 {
		if i%100 == 0 {
			must(b, os.Mkdir(filepath.Join(dir, fmt.Sprint(i/100)), 0o755))
		}
		_, _ = rand.Read(data[:1024])
		must(b, os.WriteFile(filepath.Join(dir, fmt.Sprint(i/100), fmt.Sprint(i)), data, 0o644))
	}
	m.put(b, dir)
	pages := make([]byte, 64<<20)
	for i := 0; i < len(pages); i += 4096 {
		_, _ = rand.Read(pages[i : i+1024])
	}
	m.images["inventory.img"], m.images["pages-1.img"] = []byte("i"), pages
	c := Checkpoint{Manifest: m.manifest(b), Data: m}
	archive := exported(b, c, Options{})
	b.Run("export", func(b *testing.B) {
		b.SetBytes(104 << 20)
		for b.Loop() {
			must(b, Export(b.Context(), io.Discard, c, Options{}))
		}
		b.ReportMetric(float64(len(archive))/(104<<20), "ratio")
	})
	b.Run("import", func(b *testing.B) {
		b.SetBytes(104 << 20)
		for b.Loop() {
			b.StopTimer()
			got := newMemory(b)
			b.StartTimer()
			a, err := Open(b.Context(), bytes.NewReader(archive), OpenOptions{Scratch: b.TempDir()})
			must(b, err)
			_, err = a.Import(b.Context(), got, ImportOptions{})
			must(b, err)
			must(b, a.Close())
		}
	})
}
