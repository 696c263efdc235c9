package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestDeep goes as deep as a path can be, and one too deep.
func TestDeep(t *testing.T) {
	base := t.TempDir()
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	descend := func(levels int) {
		fd, err := unix.Open(src, unix.O_PATH, 0)
		must(t, err)
		for range levels {
			if err := unix.Mkdirat(fd, "d", 0o755); err != unix.EEXIST {
				must(t, err)
			}
			next, err := unix.Openat(fd, "d", unix.O_PATH, 0)
			must(t, err)
			must(t, unix.Close(fd))
			fd = next
		}
		must(t, unix.Close(fd))
	}
	descend(maxDepth - 1)
	archive, tree := captureDir(t, src)
	dst, applied := applyTo(t, base, archive)
	if !bytes.Equal(tree, applied) || strings.Count(string(tree), "\n") != maxDepth {
		t.Error("not the same tree")
	}
	diffs, err := Verify(t.Context(), dst, bytes.NewReader(tree), CompareOptions{})
	if err != nil || len(diffs) > 0 {
		t.Error(diffs, err)
	}
	descend(maxDepth + 5)
	_, err = Capture(t.Context(), src, io.Discard, CaptureOptions{})
	if !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}
}

// TestManyNames has one directory with very many entries. The time must stay
// linear and the memory small.
func TestManyNames(t *testing.T) {
	const names = 200_000
	base := tmpfs(t, "size=1g,nr_inodes=0")
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	dir, err := unix.Open(src, unix.O_DIRECTORY, 0)
	must(t, err)
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(names) {
		fd, err := unix.Openat(dir, fmt.Sprintf("a-name-of-common-length-%d", i),
			unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o644)
		must(t, err)
		must(t, unix.Close(fd))
	}
	must(t, unix.Close(dir))
	peak := watchMemory()
	pr, pw := io.Pipe()
	dst := filepath.Join(base, "dst")
	must(t, os.Mkdir(dst, 0o755))
	go func() {
		_, err := Capture(context.Background(), src, pw, CaptureOptions{})
		pw.CloseWithError(err)
	}()
	sum, err := Apply(t.Context(), pr, dst, ApplyOptions{})
	must(t, err)
	used := peak()
	if sum.Entries != names+1 || sum.Files != names {
		t.Errorf("%+v", sum)
	}
	if used > 150<<20 {
		t.Errorf("capture and apply of %d names took %d MiB", names, used>>20)
	}
	t.Logf("peak %d MiB", used>>20)
}

// watchMemory samples the heap until the returned function tells its peak.
func watchMemory() func() uint64 {
	goruntime.GC()
	stop, done := make(chan struct{}), make(chan uint64)
	go func() {
		var peak uint64
		var m goruntime.MemStats
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			goruntime.ReadMemStats(&m)
			peak = max(peak, m.HeapInuse+m.StackInuse)
			select {
			case <-tick.C:
			case <-stop:
				done <- peak
				return
			}
		}
	}()
	return func() uint64 { close(stop); return <-done }
}

// TestHugeSparse has a file of 10 GiB of which little is data.
func TestHugeSparse(t *testing.T) {
	base := t.TempDir()
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	f, err := os.Create(filepath.Join(src, "huge"))
	must(t, err)
	for i := range int64(10) {
		_, err := f.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 100_000), i<<30+i*4096)
		must(t, err)
	}
	must(t, f.Truncate(10<<30))
	must(t, f.Close())
	start := time.Now()
	peak := watchMemory()
	archive, tree := captureDir(t, src)
	if len(archive) > 2<<20 {
		t.Errorf("the archive has %d bytes", len(archive))
	}
	dst, _ := applyTo(t, base, archive)
	diffs, err := Verify(t.Context(), dst, bytes.NewReader(tree), CompareOptions{})
	if err != nil || len(diffs) > 0 {
		t.Error(diffs, err)
	}
	samePeek(t, "applied", peek(t, src), peek(t, dst))
	if used := peak(); used > 100<<20 {
		t.Errorf("took %d MiB", used>>20)
	}
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("took %v", d)
	}
}

// TestLargeIsStreamed bounds the memory by less than a file's size.
func TestLargeIsStreamed(t *testing.T) {
	base := tmpfs(t, "size=1g")
	src, dst := filepath.Join(base, "src"), filepath.Join(base, "dst")
	must(t, os.Mkdir(src, 0o755))
	must(t, os.Mkdir(dst, 0o755))
	f, err := os.Create(filepath.Join(src, "f"))
	must(t, err)
	chunk := bytes.Repeat([]byte("large "), 1<<20)
	for range 50 {
		_, err := f.Write(chunk)
		must(t, err)
	}
	must(t, f.Close())
	peak := watchMemory()
	pr, pw := io.Pipe()
	go func() {
		_, err := Capture(context.Background(), src, pw, CaptureOptions{})
		pw.CloseWithError(err)
	}()
	_, err = Apply(t.Context(), pr, dst, ApplyOptions{})
	must(t, err)
	if used := peak(); used > 60<<20 {
		t.Errorf("300 MiB of file took %d MiB of memory", used>>20)
	}
	if out, err := exec.Command("cmp", filepath.Join(src, "f"), filepath.Join(dst, "f")).CombinedOutput(); err != nil {
		t.Errorf("%s", out)
	}
}

// TestPreallocated has space that was never written: the content is what counts.
func TestPreallocated(t *testing.T) {
	base := t.TempDir()
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	f, err := os.Create(filepath.Join(src, "f"))
	must(t, err)
	must(t, unix.Fallocate(int(f.Fd()), 0, 0, 1<<20))
	_, err = f.WriteAt([]byte("x"), 500_000)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	for range 2 { // before and after it was read
		archive, tree := captureDir(t, src)
		dst, _ := applyTo(t, base, archive)
		diffs, err := Verify(t.Context(), dst, bytes.NewReader(tree), CompareOptions{})
		if err != nil || len(diffs) > 0 {
			t.Error(diffs, err)
		}
		want, err := os.ReadFile(filepath.Join(src, "f"))
		must(t, err)
		got, err := os.ReadFile(filepath.Join(dst, "f"))
		must(t, err)
		if !bytes.Equal(want, got) {
			t.Error("other content")
		}
	}
}
