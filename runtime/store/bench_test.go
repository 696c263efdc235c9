package store

import (
	"context"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// BenchmarkCheckpoint is Begin to Commit of 10,000 files of 4 KiB and 256 MB
// of process images. commit-ms is the part during which the sandbox stands
// frozen for the store alone.
func BenchmarkCheckpoint(b *testing.B) {
	for _, watch := range []bool{false, true} {
		name := "plain"
		if watch {
			name = "watched"
		}
		b.Run(name, func(b *testing.B) { benchCheckpoint(b, watch) })
	}
}

func benchCheckpoint(b *testing.B, watch bool) {
	ctx := context.Background()
	s := open(b, b.TempDir())
	box := put(b, s, "c")
	r := rand.NewChaCha8([32]byte{})
	page := make([]byte, 1<<20)
	_, _ = r.Read(page)
	file := make([]byte, 4096)
	_, _ = r.Read(file[:2048]) // half of it compresses
	b.ReportAllocs()
	var commit float64
	for range b.N {
		d, err := s.BeginCheckpoint(ctx, of(box, "", KindFull))
		must(b, err)
		if watch {
			must(b, d.WatchImages())
		}
		dumped := make(chan error, 1)
		go func() {
			f, err := os.Create(filepath.Join(d.CRIUDir(), "pages-1.img"))
			for i := 0; i < 256 && err == nil; i++ {
				_, err = f.Write(page)
			}
			for i := 0; i < 40 && err == nil; i++ {
				err = os.WriteFile(filepath.Join(d.CRIUDir(), "small-"+NewID()+".img"), file, 0o600)
			}
			dumped <- err
			_ = f.Close()
		}()
		w, err := d.FilesWriter()
		must(b, err)
		for i := range 10_000 {
			file[0], file[1] = byte(i), byte(i>>8)
			_, err := w.Write(file)
			must(b, err)
		}
		must(b, w.Close())
		w, err = d.TreeWriter()
		must(b, err)
		must(b, w.Close())
		must(b, <-dumped)
		b.StopTimer()
		before := b.Elapsed()
		b.StartTimer()
		_, err = d.Commit(ctx, describe())
		must(b, err)
		b.StopTimer()
		commit += float64((b.Elapsed() - before).Microseconds()) / 1000
		must(b, s.RemoveCheckpoint(ctx, d.ID()))
		b.StartTimer()
	}
	b.ReportMetric(commit/float64(b.N), "commit-ms/op")
}

// BenchmarkOpen is what every command pays.
func BenchmarkOpen(b *testing.B) {
	root := b.TempDir()
	open(b, root)
	for range b.N {
		s, err := Open(context.Background(), root)
		must(b, err)
		must(b, s.Close())
	}
}

// BenchmarkStream is the archive's way in and out again, per core count.
func BenchmarkStream(b *testing.B) {
	ctx := context.Background()
	s := open(b, b.TempDir())
	box := put(b, s, "c")
	data := sample(1, 64<<20)
	b.Run("write", func(b *testing.B) {
		b.SetBytes(int64(len(data.files)))
		for range b.N {
			d, err := s.BeginCheckpoint(ctx, of(box, "", KindFiles))
			must(b, err)
			w, err := d.FilesWriter()
			must(b, err)
			_, err = w.Write(data.files)
			must(b, err)
			must(b, w.Close())
			must(b, d.Abort(ctx, nil))
		}
	})
	b.Run("read", func(b *testing.B) {
		c := taken(b, s, of(box, "", KindFiles), data)
		r, err := s.OpenCheckpoint(ctx, c.ID)
		must(b, err)
		defer r.Close()
		b.SetBytes(int64(len(data.files)))
		for range b.N {
			f, err := r.Files(ctx)
			must(b, err)
			_, err = io.Copy(io.Discard, f)
			must(b, err)
			must(b, f.Close())
		}
	})
}
