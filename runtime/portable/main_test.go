package portable

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/blake3"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the tests of portable make devices: run them as root")
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func sum(p []byte) string {
	d := blake3.Sum256(p)
	return digestPrefix + hex.EncodeToString(d[:])
}

// memory is a store in memory, as far as a checkpoint goes in and out of it.
type memory struct {
	mu     sync.Mutex
	data   map[string][]byte
	trees  [][]byte
	images map[string][]byte
	dir    string
	cut    int  // bytes of a chunk; 0: 64 KiB
	listed bool // the manifest does not name the images
}

func newMemory(t testing.TB) *memory {
	t.Helper()
	return &memory{data: map[string][]byte{}, images: map[string][]byte{}, dir: t.TempDir()}
}

func (m *memory) Sink() overlay.Sink { return m }

func (m *memory) Data(_ context.Context, size int64, r io.Reader) (string, []overlay.Chunk, error) {
	data, err := io.ReadAll(r)
	if err != nil {
		return "", nil, err
	}
	if int64(len(data)) != size {
		return "", nil, fmt.Errorf("%d bytes, %d were announced", len(data), size)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.cut
	if n == 0 {
		n = 64 << 10
	}
	var chunks []overlay.Chunk
	for p := range slices.Chunk(data, n) {
		chunks = append(chunks, overlay.Chunk{Digest: sum(p), Len: int64(len(p))})
		m.data[sum(p)] = p
	}
	if len(chunks) < 2 {
		chunks = nil
	}
	return sum(data), chunks, nil
}

func (m *memory) PutTree(_ context.Context, n int, each func(func(overlay.Entry) error) error) error {
	var buf bytes.Buffer
	w := overlay.NewTreeWriter(&buf)
	if err := each(w.Write); err != nil {
		return err
	}
	if n != len(m.trees) {
		return fmt.Errorf("tree %d comes when %d are there", n, len(m.trees))
	}
	m.trees = append(m.trees, buf.Bytes()) // Close writes into the same
	err := w.Close()
	m.trees[n] = buf.Bytes()
	return err
}

func (m *memory) CRIUDir() string { return m.dir }

func (m *memory) PutImages(context.Context) error {
	list, err := os.ReadDir(m.dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if m.images[e.Name()], err = os.ReadFile(filepath.Join(m.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Tree(_ context.Context, n int) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m.trees[n])), nil
}

func (m *memory) ImageList(context.Context) (io.ReadCloser, error) {
	if !m.listed {
		return nil, fault.ErrNotFound
	}
	lines, _ := m.list()
	return io.NopCloser(bytes.NewReader(lines)), nil
}

// list is the list of the images, and how much they are.
func (m *memory) list() (lines []byte, size int64) {
	for _, name := range slices.Sorted(mapKeys(m.images)) {
		lines = fmt.Appendf(lines, "{\"name\":%q,\"digest\":%q,\"bytes\":%d}\n", name,
			sum(m.images[name]), len(m.images[name]))
		size += int64(len(m.images[name]))
	}
	return lines, size
}

func (m *memory) Source() overlay.Source { return chunks{m} }

func (m *memory) Image(_ context.Context, name string) (io.ReadCloser, error) {
	data, ok := m.images[name]
	if !ok {
		return nil, fault.ErrNotFound
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

type chunks struct{ m *memory }

func (s chunks) Data(_ context.Context, e overlay.Entry) (io.ReadCloser, error) {
	list := e.Chunks
	if list == nil {
		list = []overlay.Chunk{{Digest: e.Digest}}
	}
	var all []byte
	for _, p := range list {
		data, ok := s.m.data[p.Digest]
		if !ok {
			return nil, fault.ErrCorrupt
		}
		all = append(all, data...)
	}
	return io.NopCloser(bytes.NewReader(all)), nil
}

// put reads a directory into the store.
func (m *memory) put(t testing.TB, dir string) {
	t.Helper()
	must(t, m.PutTree(t.Context(), len(m.trees), func(fn func(overlay.Entry) error) error {
		return walk(t, m, dir, fn)
	}))
}

// walk calls fn for the entries of a directory, whose data it gives to sink.
func walk(t testing.TB, sink overlay.Sink, dir string, fn func(overlay.Entry) error) error {
	return overlay.Walk(t.Context(), dir, overlay.WalkOptions{Digest: true}, func(e overlay.Entry) error {
		if e.Type != overlay.TypeFile || e.Hardlink != "" || e.DataSize() == 0 {
			return fn(e)
		}
		f, err := os.Open(filepath.Join(dir, e.Path))
		if err != nil {
			return err
		}
		defer f.Close()
		spans := e.Extents
		if !e.Sparse() {
			spans = []overlay.Extent{{Len: e.Size}}
		}
		var parts []io.Reader
		for _, x := range spans {
			parts = append(parts, io.NewSectionReader(f, x.Off, x.Len))
		}
		if e.Digest, e.Chunks, err = sink.Data(t.Context(), e.DataSize(), io.MultiReader(parts...)); err != nil {
			return err
		}
		return fn(e)
	})
}

// entries are those of a tree.
func (m *memory) entries(t testing.TB, n int) (list []overlay.Entry) {
	t.Helper()
	must(t, overlay.ReadTree(bytes.NewReader(m.trees[n]), func(e overlay.Entry) error {
		list = append(list, e)
		return nil
	}))
	return list
}

var created = time.Date(2026, 3, 4, 5, 6, 7, 890, time.UTC)

// manifest describes what is in the store; names are of the volumes.
func (m *memory) manifest(t testing.TB, names ...string) []byte {
	t.Helper()
	describe := func(i int) map[string]any {
		var n, size int64
		for _, e := range m.entries(t, i) {
			n++
			size += e.DataSize()
		}
		return map[string]any{
			"entries": n, "data": size, "bytes": len(m.trees[i]), "digest": sum(m.trees[i]), "pieces": []any{},
		}
	}
	spec := map[string]any{
		"image": "bb", "args": []string{"sh", "-c", "true"}, "env": []string{"A=b"}, "workdir": "/", "hostname": "box",
		"network": map[string]any{"mode": "none"}, "resources": map[string]any{"memory": 64 << 20},
	}
	out := map[string]any{
		"version": 2, "id": strings.Repeat("c", 32), "sandbox_id": strings.Repeat("ab", 16),
		"sandbox_name": "box", "spec": spec,
		"image_digest": "sha256:" + strings.Repeat("d", 64), "created": created,
		"files": []any{describe(0)}, "processes": nil,
	}
	var volumes []any
	for i, name := range names {
		volumes = append(volumes, map[string]any{"name": name, "files": describe(1 + i)})
	}
	out["volumes"] = volumes
	if len(m.images) > 0 {
		var images []any
		for _, name := range slices.Sorted(mapKeys(m.images)) {
			images = append(images, map[string]any{
				"name": name, "bytes": len(m.images[name]), "digest": sum(m.images[name]),
			})
		}
		out["processes"] = map[string]any{"count": 1, "images": images}
		if m.listed {
			lines, size := m.list()
			listed := map[string]any{
				"entries": len(images), "data": size, "bytes": len(lines), "digest": sum(lines), "pieces": []any{},
			}
			out["processes"] = map[string]any{"count": 1, "images": []any{}, "listed": listed}
		}
	}
	data, err := json.Marshal(out)
	must(t, err)
	return data
}

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// everything fills a directory with all that an upperdir can have.
func everything(t testing.TB, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, data string) {
		must(t, os.MkdirAll(filepath.Dir(p(name)), 0o755))
		must(t, os.WriteFile(p(name), []byte(data), 0o640))
	}
	write("a/file", "content\n")
	write("a/empty", "")
	write("big", strings.Repeat("0123456789abcdef", 20_000))
	write(".git/config", "x")
	write("a/"+strings.Repeat("n", 200)+"/"+strings.Repeat("m", 150), "long")
	write("caf\xe9", "not UTF-8")
	must(t, unix.Chmod(p("a/file"), 0o4755))
	must(t, os.Lchown(p("a/file"), 12345, 3_000_000_000))
	must(t, unix.Setxattr(p("a/file"), "trusted.mine", []byte{0, 1, 2}, 0))
	must(t, unix.Setxattr(p("a/file"), "security.capability",
		[]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	must(t, os.Link(p("a/file"), p("z-link")))
	must(t, os.Link(p("a/file"), p("a/file2")))
	must(t, os.Symlink("../../etc/passwd", p("a/link")))
	must(t, os.Symlink("/absolute\xff", p("a/link2")))
	must(t, unix.Mkfifo(p("fifo"), 0o600))
	must(t, unix.Mknod(p("char"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	must(t, unix.Mknod(p("block"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 200))))
	must(t, unix.Mknod(p("sock"), unix.S_IFSOCK|0o755, 0))
	must(t, unix.Mknod(p("gone"), unix.S_IFCHR, 0))
	must(t, os.Link(p("gone"), p("a/gone2"))) // as the kernel shares them
	must(t, os.MkdirAll(p("opaque/sub"), 0o700))
	must(t, unix.Setxattr(p("opaque"), "trusted.overlay.opaque", []byte("y"), 0))
	write("opaque/new", "new")
	write("opaque/sub/deep", "deep")
	f, err := os.Create(p("sparse"))
	must(t, err)
	_, err = f.WriteAt([]byte("middle"), 1<<20)
	must(t, err)
	must(t, f.Truncate(1<<40))
	must(t, f.Close())
	for _, name := range []string{"a/file", "big", "opaque", "."} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p(name),
			[]unix.Timespec{{Sec: 1}, {Sec: 1_700_000_000, Nsec: 123_456_789}}, 0))
	}
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p("fifo"), []unix.Timespec{{Sec: 1}, {Sec: -5, Nsec: 7}}, 0))
}

// full is a checkpoint with all that there can be.
func full(t testing.TB) (*memory, Checkpoint) {
	t.Helper()
	m := newMemory(t)
	dir := t.TempDir()
	everything(t, dir)
	m.put(t, dir)
	volume := t.TempDir()
	must(t, os.WriteFile(filepath.Join(volume, "v"), []byte("volume"), 0o600))
	m.put(t, volume)
	m.images["inventory.img"] = []byte("inventory")
	m.images["pages-1.img"] = bytes.Repeat([]byte("p\x00"), 100_000)
	m.images["stats-dump"] = []byte("stats")
	return m, Checkpoint{Manifest: m.manifest(t, "data"), Data: m}
}

func exported(t testing.TB, c Checkpoint, opts Options) []byte {
	t.Helper()
	var buf bytes.Buffer
	must(t, Export(t.Context(), &buf, c, opts))
	return buf.Bytes()
}

func imported(t testing.TB, archive []byte, opts OpenOptions, how ImportOptions) (*memory, Facts, Imported) {
	t.Helper()
	m, f, res, err := importBytes(t, archive, opts, how)
	must(t, err)
	return m, f, res
}

// importBytes also looks that nothing is left of it.
func importBytes(
	t testing.TB, archive []byte, opts OpenOptions, how ImportOptions,
) (m *memory, f Facts, res Imported, err error) {
	t.Helper()
	if opts.Scratch == "" {
		opts.Scratch = t.TempDir()
	}
	m = newMemory(t)
	a, err := Open(t.Context(), bytes.NewReader(archive), opts)
	if err != nil {
		return m, f, res, err
	}
	f = a.Facts()
	res, err = a.Import(t.Context(), m, how)
	err = errors.Join(err, a.Close())
	if left, _ := os.ReadDir(opts.Scratch); len(left) > 0 {
		t.Errorf("left in the scratch directory: %v", left)
	}
	return m, f, res, err
}
