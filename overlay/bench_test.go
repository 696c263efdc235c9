package overlay

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func BenchmarkCapture10k(b *testing.B) {
	dir := b.TempDir()
	tenThousand(b, dir)
	for b.Loop() {
		if _, err := Capture(context.Background(), dir, io.Discard, CaptureOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWalk10k(b *testing.B) {
	dir := b.TempDir()
	tenThousand(b, dir)
	for _, digest := range []bool{false, true} {
		b.Run("digest="+strconv.FormatBool(digest), func(b *testing.B) {
			for b.Loop() {
				err := Walk(context.Background(), dir, WalkOptions{Digest: digest}, func(Entry) error { return nil })
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkApply10k(b *testing.B) {
	dir := b.TempDir()
	src := filepath.Join(dir, "src")
	must(b, os.Mkdir(src, 0o755))
	tenThousand(b, src)
	archive, _ := captureDir(b, src)
	dst := filepath.Join(dir, "dst")
	for b.Loop() {
		b.StopTimer()
		must(b, os.RemoveAll(dst))
		must(b, os.Mkdir(dst, 0o755))
		b.StartTimer()
		if _, err := Apply(context.Background(), bytes.NewReader(archive), dst, ApplyOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkVerify10k(b *testing.B) {
	dir := b.TempDir()
	tenThousand(b, dir)
	_, tree := captureDir(b, dir)
	for b.Loop() {
		diffs, err := Verify(context.Background(), dir, bytes.NewReader(tree), CompareOptions{})
		if err != nil || len(diffs) > 0 {
			b.Fatal(diffs, err)
		}
	}
}

func BenchmarkCaptureLarge(b *testing.B) {
	dir := b.TempDir()
	must(b, os.WriteFile(filepath.Join(dir, "f"), bytes.Repeat([]byte("0123456789abcdef"), 16<<20), 0o644))
	b.SetBytes(256 << 20)
	for b.Loop() {
		if _, err := Capture(context.Background(), dir, io.Discard, CaptureOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}
