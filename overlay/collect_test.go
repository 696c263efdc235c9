package overlay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// shelf is a Sink that keeps what it is given by digest, cut in chunks of 64 KiB.
type shelf struct {
	mu     sync.Mutex
	chunks map[string][]byte
	files  int
}

func newShelf() *shelf { return &shelf{chunks: map[string][]byte{}} }

func (s *shelf) Data(_ context.Context, size int64, r io.Reader) (string, []Chunk, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return "", nil, err
	}
	if int64(len(data)) != size || size == 0 {
		return "", nil, fmt.Errorf("%d bytes, want %d", len(data), size)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.files++
	var chunks []Chunk
	for p := data; len(p) > 0; {
		n := min(len(p), 64<<10)
		d := digestOf(p[:n])
		s.chunks[d] = bytes.Clone(p[:n])
		chunks = append(chunks, Chunk{d, int64(n)})
		p = p[n:]
	}
	if len(chunks) == 1 {
		return chunks[0].Digest, nil, nil
	}
	return digestOf(data), chunks, nil
}

// data returns a file's data as it was given.
func (s *shelf) data(t tb, e *Entry) []byte {
	t.Helper()
	if e.data() == 0 {
		return nil
	}
	chunks := e.Chunks
	if chunks == nil {
		chunks = []Chunk{{e.Digest, e.data()}}
	}
	var data []byte
	for _, p := range chunks {
		b, ok := s.chunks[p.Digest]
		if !ok || int64(len(b)) != p.Len {
			t.Fatalf("%q: the sink has no chunk %s of %d bytes", e.Path, p.Digest, p.Len)
		}
		data = append(data, b...)
	}
	return data
}

// collected reads a file cache as JSON lines, without chunks; if a shelf is given it must
// have the data of every file.
func collectedTree(t tb, path string, s *shelf) string {
	t.Helper()
	var b []byte
	must(t, Collection(path, func(e Entry) error {
		if s != nil && e.Type == TypeFile && e.Hardlink == "" {
			if d := s.data(t, &e); digestOf(d) != e.Digest {
				t.Fatalf("%q: the sink has other data", e.Path)
			}
		}
		e.Chunks = nil
		b = append(e.AppendJSON(b), '\n')
		return nil
	}))
	return string(b)
}

func walkTree(t tb, dir string) string {
	t.Helper()
	var b []byte
	must(t, Walk(context.Background(), dir, WalkOptions{Digest: true}, func(e Entry) error {
		b = append(e.AppendJSON(b), '\n')
		return nil
	}))
	return string(b)
}

// differingLines shows where two trees differ.
func differingLines(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	in := func(list []string) map[string]bool {
		m := map[string]bool{}
		for _, s := range list {
			m[s] = true
		}
		return m
	}
	var b strings.Builder
	for _, s := range w {
		if !in(g)[s] {
			fmt.Fprintln(&b, "want", clip(s))
		}
	}
	for _, s := range g {
		if !in(w)[s] {
			fmt.Fprintln(&b, "got ", clip(s))
		}
	}
	return b.String()
}

// collectDir collects dir and holds what came against Walk.
func collectDir(t tb, dir, out string, s *shelf, opts CollectOptions) Collected {
	t.Helper()
	var sink Sink
	if s != nil {
		sink = s
	}
	got, err := Collect(context.Background(), dir, out, sink, opts)
	must(t, err)
	want := walkTree(t, dir)
	tree := collectedTree(t, out, s)
	if tree != want {
		t.Fatalf("not what Walk sees:\n%s", differingLines(want, tree))
	}
	if n := int64(strings.Count(want, "\n")); got.Entries != n {
		t.Fatalf("%d entries counted, there are %d", got.Entries, n)
	}
	return got
}

// settle makes all that was done to dir so far too old to be racy.
func settle(t tb) {
	t.Helper()
	var start, now, granule unix.Timespec
	must(t, unix.ClockGetres(unix.CLOCK_REALTIME_COARSE, &granule))
	must(t, unix.ClockGettime(unix.CLOCK_REALTIME, &start))
	for now.Nano() <= start.Nano()+3*granule.Nano() {
		must(t, unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &now))
		wait := unix.Timespec{Nsec: 1e6}
		_ = unix.Nanosleep(&wait, nil)
	}
}

func TestCollectEverything(t *testing.T) {
	for name, base := range map[string]string{"disk": noDevices(t), "tmpfs": tmpfs(t, "size=100m")} {
		t.Run(name, func(t *testing.T) {
			dir, mem := filepath.Join(base, "src"), t.TempDir()
			must(t, os.Mkdir(dir, 0o755))
			everything(t, dir)
			s := newShelf()
			settle(t)
			before := peek(t, dir)
			got := collectDir(t, dir, mem+"/1", s, CollectOptions{Cache: mem + "/none", Base: "first"})
			if got.Same || got.Read == 0 || got.Read != int64(s.files) {
				t.Errorf("first: %+v, the sink had %d files", got, s.files)
			}
			again := collectDir(t, dir, mem+"/2", s, CollectOptions{Cache: mem + "/1"})
			if !again.Same || again.Read != 0 || again.Summary != got.Summary {
				t.Errorf("again: %+v, first %+v", again, got)
			}
			paranoid := collectDir(t, dir, mem+"/3", s, CollectOptions{Cache: mem + "/2", Paranoid: true})
			if !paranoid.Same || paranoid.Read != got.Read || paranoid.ReadBytes != got.ReadBytes {
				t.Errorf("paranoid: %+v, first %+v", paranoid, got)
			}
			hashed := collectDir(t, dir, mem+"/4", nil, CollectOptions{Cache: mem + "/3", Paranoid: true})
			if !hashed.Same || collectedTree(t, mem+"/4", s) != walkTree(t, dir) {
				t.Errorf("without a sink: %+v", hashed)
			}
			samePeek(t, "collect only reads", before, peek(t, dir))
			base, err := CacheBase(mem+"/1", true)
			if err != nil || base != "first" {
				t.Errorf("base %q, %v", base, err)
			}
		})
	}
}

// BenchmarkCollectUnchanged is what happens while a sandbox stands still. Beside
// it stands what the kernel alone takes to look at as many inodes, with all
// processors, at the same load.
func BenchmarkCollectUnchanged(b *testing.B) {
	dir := b.TempDir()
	src := filepath.Join(dir, "src")
	must(b, os.Mkdir(src, 0o755))
	tenThousand(b, src)
	settle(b)
	_, err := Collect(context.Background(), src, dir+"/known", nil, CollectOptions{})
	must(b, err)
	out := dir + "/out"
	timed := func(b *testing.B, fn func()) {
		best := time.Hour
		defer cpu(b)()
		for b.Loop() {
			start := time.Now()
			fn()
			best = min(best, time.Since(start))
		}
		b.ReportMetric(float64(best.Microseconds())/1000, "best-ms/op")
	}
	b.Run("collect", func(b *testing.B) {
		timed(b, func() {
			_ = os.Remove(out)
			got, err := Collect(context.Background(), src, out, nil, CollectOptions{Cache: dir + "/known", Trust: true})
			if err != nil || !got.Same || got.Entries != 10_101 || got.Read != 0 {
				b.Fatal(got, err)
			}
		})
	})
	b.Run("statx", func(b *testing.B) {
		type file struct {
			dir  int
			name []byte
		}
		var files []file
		for i := range 10_000 {
			if i%100 == 0 {
				fd, err := unix.Open(fmt.Sprintf("%s/d%02d", src, i/100), unix.O_RDONLY|unix.O_DIRECTORY, 0)
				must(b, err)
				defer unix.Close(fd)
				files = append(files, file{fd, nil})
			}
			files = append(files, file{files[len(files)-1].dir, fmt.Appendf(nil, "file-%d\x00", i%100*100+i/100)})
		}
		workers := goruntime.GOMAXPROCS(0)
		timed(b, func() {
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					var st unix.Statx_t
					for _, f := range files[w*len(files)/workers : (w+1)*len(files)/workers] {
						if f.name == nil {
							continue
						}
						if err := statxName(f.dir, &f.name[0], &st); err != nil {
							b.Error(err)
						}
					}
				})
			}
			wg.Wait()
		})
	})
}
