package overlay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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

// TestCollectLinks moves the names of inodes about, some by way of the
// directories they lie in, which leaves the inodes as they were.
func TestCollectLinks(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	big := bytes.Repeat([]byte("0123456789"), 20_000)
	must(t, os.MkdirAll(src+"/b", 0o755))
	must(t, os.MkdirAll(src+"/m", 0o755))
	must(t, os.WriteFile(src+"/b/f", big, 0o644))
	must(t, os.Link(src+"/b/f", src+"/m/f"))
	must(t, os.Link(src+"/b/f", src+"/n"))
	must(t, unix.Mkfifo(src+"/b/pipe", 0o600))
	must(t, os.Link(src+"/b/pipe", src+"/o"))
	s := newShelf()
	last := ""
	steps := []struct {
		what string
		do   func() error
		read int64 // files read anew
	}{
		{"first", func() error { return nil }, 1},
		{"the first name moves to the end", func() error { return os.Rename(src+"/b", src+"/z") }, 1},
		{"and to the front", func() error { return os.Rename(src+"/z", src+"/a") }, 1},
		{"another name comes first", func() error { return os.Rename(src+"/m", src+"/0") }, 1},
		{"a new first name", func() error { return os.Link(src+"/n", src+"/00") }, 1},
		{"the first name goes", func() error { return os.Remove(src + "/00") }, 1},
		{"a name is replaced by a copy", func() error {
			must(t, os.Remove(src+"/n"))
			return os.WriteFile(src+"/n", big, 0o644)
		}, 2},
		{"two inodes change places", func() error {
			return unix.Renameat2(unix.AT_FDCWD, src+"/n", unix.AT_FDCWD, src+"/0/f", unix.RENAME_EXCHANGE)
		}, 2},
		{"nothing", func() error { return nil }, 0},
	}
	for i, step := range steps {
		must(t, step.do())
		settle(t)
		out := fmt.Sprint(base, "/", i)
		got := collectDir(t, src, out, s, CollectOptions{Cache: last})
		if got.Read > step.read || got.Same != (step.read == 0) {
			t.Errorf("%s: %+v", step.what, got)
		}
		last = out
	}
}

// TestCollectSkip leaves things out, and sees them again when it no longer
// shall, though the directory has not changed.
func TestCollectSkip(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	must(t, os.MkdirAll(src+"/tmp/passing/deep", 0o755))
	must(t, os.WriteFile(src+"/tmp/passing/deep/f", []byte("x"), 0o644))
	must(t, os.WriteFile(src+"/tmp/kept", []byte("kept"), 0o644))
	must(t, os.WriteFile(src+"/tmp/new", []byte("new"), 0o644))
	must(t, os.Link(src+"/tmp/kept", src+"/tmp/a-link"))
	fixed, err := ReadDir(src, "tmp")
	must(t, err)
	fixed.Mtime = Time{5, 6}
	skip := func(path string) bool { return path == "tmp/passing" || path == "tmp/new" || path == "tmp/a-link" }
	wanted := func(opts CaptureOptions) string {
		var b []byte
		opts.Entry = func(e Entry) error { b = append(e.AppendJSON(b), '\n'); return nil }
		_, err := Capture(t.Context(), src, io.Discard, opts)
		must(t, err)
		return string(b)
	}
	settle(t)
	last := ""
	for i, c := range []struct {
		skip  func(string) bool
		fixed map[string]Entry
		same  bool
	}{
		{}, {skip: skip}, {skip: skip, same: true}, {}, {same: true},
		{skip: skip, fixed: map[string]Entry{"tmp": fixed}},
		{skip: skip, fixed: map[string]Entry{"tmp": fixed, "tmp/kept": fixed}, same: true}, {}, {skip: skip}, {},
	} {
		out := fmt.Sprint(base, "/", i)
		got, err := Collect(t.Context(), src, out, nil, CollectOptions{Cache: last, Skip: c.skip, Fixed: c.fixed})
		must(t, err)
		if want, tree := wanted(CaptureOptions{Skip: c.skip, Fixed: c.fixed}),
			collectedTree(t, out, nil); tree != want {
			t.Errorf("%d: not what Capture sees:\n%s", i, differingLines(want, tree))
		}
		if got.Same != c.same {
			t.Errorf("%d: same is %v", i, got.Same)
		}
		last = out
	}
}

// TestCollectRefuses: what has come to stand in the way is refused however well
// the rest is cached.
func TestCollectRefuses(t *testing.T) {
	base := tmpfs(t, "size=50m")
	src := base + "/src"
	smallTree(t, src)
	must(t, os.WriteFile(src+"/a/own", []byte("x"), 0o600))
	settle(t)
	collectDir(t, src, base+"/known", nil, CollectOptions{})
	fails := func(what string, opts CollectOptions, want error) {
		t.Helper()
		opts.Cache = base + "/known"
		_, err := Collect(t.Context(), src, base+"/out", nil, opts)
		if !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}
		if _, err := os.Lstat(base + "/out"); !os.IsNotExist(err) {
			t.Errorf("%s: left behind: %v", what, err)
		}
	}
	for _, p := range []string{"/a/own", "/a/b"} {
		must(t, unix.Mount(src+p, src+p, "", unix.MS_BIND, ""))
		fails("mount of itself on "+p, CollectOptions{}, fault.ErrUnsupported)
		fails("mount of itself on "+p, CollectOptions{Tolerant: true}, fault.ErrUnsupported)
		must(t, unix.Unmount(src+p, 0))
	}
	fails("base too long", CollectOptions{Base: string(make([]byte, maxBase+1))}, fault.ErrInvalid)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Collect(ctx, src, base+"/out", nil, CollectOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := Collect(t.Context(), base+"/none", base+"/out", nil,
		CollectOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	before, err := os.ReadFile(base + "/known")
	must(t, err)
	if _, err := Collect(t.Context(), src, base+"/known", nil, CollectOptions{}); !errors.Is(err, fs.ErrExist) {
		t.Error(err)
	}
	if after, _ := os.ReadFile(base + "/known"); !bytes.Equal(before, after) {
		t.Error("what was there is overwritten")
	}
	disk := t.TempDir()
	smallTree(t, disk+"/src")
	settle(t)
	collectDir(t, disk+"/src", disk+"/known", nil, CollectOptions{})
	if out, err := exec.Command("chattr", "+i", disk+"/src/a/b/c").CombinedOutput(); err != nil {
		t.Fatalf("chattr: %v %s", err, out)
	}
	_, err = Collect(t.Context(), disk+"/src", disk+"/out", nil, CollectOptions{Cache: disk + "/known"})
	if out, err := exec.Command("chattr", "-i", disk+"/src/a/b/c").CombinedOutput(); err != nil {
		t.Fatalf("chattr: %v %s", err, out)
	}
	if !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}
}

// TestCollectBelow: of a directory that an overlay is laid over, what is collected is what the overlay
// has of it. What is mounted in it is not, nor do immutable files matter.
func TestCollectBelow(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	smallTree(t, src)
	must(t, os.MkdirAll(src+"/a/mnt/under", 0o750))
	must(t, os.WriteFile(src+"/a/mnt/file", []byte("of the directory"), 0o600))
	settle(t)
	want := walkTree(t, src)
	must(t, unix.Mount("tmpfs", src+"/a/mnt", "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { must(t, unix.Unmount(src+"/a/mnt", 0)) })
	must(t, os.WriteFile(src+"/a/mnt/file", []byte("mounted"), 0o600))
	must(t, unix.Mount(src+"/a/b", src+"/a/b", "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(src+"/a/b", 0)) })
	for _, set := range []string{"+i", "-i"} {
		if out, err := exec.Command("chattr", set, src+"/a/b/c").CombinedOutput(); err != nil {
			t.Fatalf("chattr: %v %s", err, out)
		}
		if set == "-i" {
			break
		}
		_, err := Collect(t.Context(), src, base+"/out", nil, CollectOptions{Below: true})
		if err != nil {
			t.Error(err)
		} else if got := collectedTree(t, base+"/out", nil); got != want {
			t.Errorf("not what the overlay has:\n%s", differingLines(want, got))
		}
	}
	if _, err := Collect(t.Context(), src, base+"/out2", nil, CollectOptions{Tolerant: true}); !errors.Is(err, fault.ErrUnsupported) {
		t.Errorf("not below anything: %v", err)
	}
}

type badSink struct{ err error }

func (s badSink) Data(context.Context, int64, io.Reader) (string, []Chunk, error) {
	return "", nil, s.err
}

// TestCollectFails breaks off in every way and looks for what is left open.
func TestCollectFails(t *testing.T) {
	base := t.TempDir()
	src := base + "/src"
	must(t, os.Mkdir(src, 0o755))
	for i := range 3000 {
		must(t, os.MkdirAll(fmt.Sprintf("%s/d%02d/e%d", src, i%50, i%4), 0o755))
		must(t, os.WriteFile(
			fmt.Sprintf("%s/d%02d/e%d/%s%d", src, i%50, i%4, strings.Repeat("n", 200), i),
			[]byte("x"), 0o644))
	}
	open := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		must(t, err)
		return len(list)
	}
	before := open()
	full := errors.New("full")
	for _, tolerant := range []bool{false, true} {
		_, err := Collect(t.Context(), src, base+"/out", badSink{full}, CollectOptions{Tolerant: tolerant})
		if !errors.Is(err, full) {
			t.Error(err)
		}
		_, err = Collect(t.Context(), src, base+"/out", badSink{fault.ErrBusy}, CollectOptions{Tolerant: tolerant})
		if !errors.Is(err, fault.ErrBusy) {
			t.Error(err)
		}
		if _, err = Collect(t.Context(), src, base+"/out", badSink{},
			CollectOptions{Tolerant: tolerant}); !errors.Is(err, fault.ErrInvalid) {
			t.Error(err)
		}
	}
	small := tmpfs(t, "size=256k")
	if _, err := Collect(t.Context(), src, small+"/out", nil, CollectOptions{}); !errors.Is(err, unix.ENOSPC) {
		t.Error(err)
	}
	if list, _ := os.ReadDir(small); len(list) > 0 {
		t.Errorf("left behind: %v", list)
	}
	ended := 0
	for d := time.Duration(0); d < 4*time.Millisecond; d += 200 * time.Microsecond {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		_, err := Collect(ctx, src, base+"/out", nil, CollectOptions{})
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if _, there := os.Lstat(base + "/out"); (there == nil) != (err == nil) {
			t.Error(err, there)
		}
		if err != nil {
			ended++
		}
		_ = os.Remove(base + "/out")
	}
	if ended == 0 {
		t.Error("nothing was broken off")
	}
	if after := open(); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

// BenchmarkCollectMillion is run by hand, with TMPDIR on a tmpfs: go test -bench CollectMillion -benchtime 1x.
func BenchmarkCollectMillion(b *testing.B) {
	dir := b.TempDir()
	for i := range 1_000_000 {
		sub := filepath.Join(dir, "src", fmt.Sprintf("d%03d", i/1000))
		if i%1000 == 0 {
			must(b, os.MkdirAll(sub, 0o755))
		}
		must(b, os.WriteFile(filepath.Join(sub, fmt.Sprintf("file-%d", i)), []byte(fmt.Sprint(i)), 0o644))
	}
	settle(b)
	heap := func(done chan struct{}) (most uint64) {
		var m goruntime.MemStats
		for {
			goruntime.ReadMemStats(&m)
			most = max(most, m.HeapInuse)
			select {
			case <-done:
				return most
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	known := ""
	for _, name := range []string{"first", "unchanged"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				done, most := make(chan struct{}), make(chan uint64)
				go func() { most <- heap(done) }()
				start := time.Now()
				got, err := Collect(b.Context(), dir+"/src", dir+"/"+name, nil, CollectOptions{Cache: known})
				must(b, err)
				b.ReportMetric(float64(time.Since(start).Milliseconds()), "wall-ms")
				close(done)
				b.ReportMetric(float64(<-most)/(1<<20), "heap-MB")
				if got.Entries != 1_001_001 || got.Same != (known != "") {
					b.Fatal(got)
				}
			}
		})
		known = dir + "/" + name
	}
}
