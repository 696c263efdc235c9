package overlay

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// cpu reports the processor time of one operation beside its wall time, which
// on a busy machine says little.
func cpu(b *testing.B) func() {
	used := func() time.Duration {
		var u unix.Rusage
		must(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	start := used()
	return func() { b.ReportMetric(float64((used()-start).Milliseconds())/float64(b.N), "cpu-ms/op") }
}

func BenchmarkCapture10k(b *testing.B) {
	dir := ext4(b, "3g")
	tenThousand(b, dir)
	defer cpu(b)()
	for b.Loop() {
		if _, err := Capture(context.Background(), dir, io.Discard, CaptureOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkWalk10k(b *testing.B) {
	dir := ext4(b, "3g")
	tenThousand(b, dir)
	for _, digest := range []bool{false, true} {
		b.Run("digest="+strconv.FormatBool(digest), func(b *testing.B) {
			defer cpu(b)()
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
	dir := ext4(b, "3g")
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

// BenchmarkTar10k is the raw tool beside the two above.
func BenchmarkTar10k(b *testing.B) {
	dir := ext4(b, "3g")
	tenThousand(b, dir)
	for b.Loop() {
		cmd := exec.Command("tar", "--xattrs", "--xattrs-include=*", "-C", dir, "-cf", "-", ".")
		cmd.Stdout = &sink{} // a file or /dev/null would let tar skip the reading
		must(b, cmd.Run())
	}
}

type sink struct{}

func (sink) Write(p []byte) (int, error) { return len(p), nil }

func BenchmarkVerify10k(b *testing.B) {
	dir := ext4(b, "3g")
	tenThousand(b, dir)
	_, tree := captureDir(b, dir)
	defer cpu(b)()
	for b.Loop() {
		diffs, err := Verify(context.Background(), dir, bytes.NewReader(tree), CompareOptions{})
		if err != nil || len(diffs) > 0 {
			b.Fatal(diffs, err)
		}
	}
}

func BenchmarkCaptureLarge(b *testing.B) {
	dir := ext4(b, "3g")
	must(b, os.WriteFile(filepath.Join(dir, "f"), bytes.Repeat([]byte("0123456789abcdef"), 16<<20), 0o644))
	b.SetBytes(256 << 20)
	defer cpu(b)()
	for b.Loop() {
		if _, err := Capture(context.Background(), dir, io.Discard, CaptureOptions{}); err != nil {
			b.Fatal(err)
		}
	}
}
