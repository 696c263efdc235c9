package store

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// naming has manifests name all process images, as those of earlier versions do.
func naming(t *testing.T) {
	maxNamed = 1 << 20
	t.Cleanup(func() { maxNamed = 1 << 10 })
}

// imaged is a content with some small images, and with the others.
func imaged(small int, others map[string][]byte) content {
	c := sample(1, 9000)
	c.images = map[string][]byte{"pages-1.img": block(rand.New(rand.NewPCG(1, 2)), 3*pack.PageSize)}
	for i := range small {
		c.images[fmt.Sprintf("core-%d.img", 1+i)] = fmt.Appendf(nil, "core %d", i)
	}
	for name, data := range others {
		c.images[name] = data
	}
	return c
}

// varied is data that is cut into about n chunks.
func varied(n int) []byte { return block(rand.New(rand.NewPCG(2, 3)), n*256<<10) }

func manifestOf(t *testing.T, s *Store, id string) (Manifest, int) {
	t.Helper()
	r := must1(s.OpenCheckpoint(context.Background(), id))
	defer r.Close()
	return r.Manifest(), int(r.size)
}

// A manifest is at most 2 kB, however many process images there are and of however many chunks, and
// a full checkpoint that changed nothing adds no more than that to the files of the store.
func TestImageListBytes(t *testing.T) {
	for name, x := range map[string]struct {
		data    content
		version int
	}{
		"few":         {imaged(1, nil), Version},
		"many images": {imaged(300, nil), VersionListed},
		"many pieces": {imaged(30, map[string][]byte{
			"tmpfs-dev-1.tar.gz.img": varied(100), "tmpfs-dev-2.tar.gz.img": make([]byte, 256<<20),
		}), VersionListed},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, t.TempDir())
			b := put(t, s, "c")
			first := taken(t, s, of(b, "", KindFull), x.data)
			c := of(b, "", KindFull)
			c.Parent = first.ID
			c.Parent = taken(t, s, c, x.data).ID // which knows what the store has
			before := fileBytes(t, s)
			last := taken(t, s, c, x.data)
			more := fileBytes(t, s) - before
			m, size := manifestOf(t, s, last.ID)
			if size > 2048 || more > 2048 || m.Version != x.version || last.Added > 0 {
				t.Errorf("a manifest of %d bytes, version %d; unchanged it adds %d bytes and %d of packs", size,
					m.Version, more, last.Added)
			}
			if n := m.Processes.Bytes(); n != bytesOf(x.data.images) {
				t.Errorf("%d bytes of images", n)
			}
		})
	}
}

func bytesOf(images map[string][]byte) (n int64) {
	for _, data := range images {
		n += int64(len(data))
	}
	return n
}

// A list of process images comes back, and a change of one image costs some of its parts.
func TestImageLists(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := imaged(600, map[string][]byte{"tmpfs-dev-1.tar.gz.img": varied(60)})
	c := taken(t, s, of(b, "", KindFull), data)
	same(t, s, c.ID, data)
	m, _ := manifestOf(t, s, c.ID)
	if l := m.Processes.Listed; l == nil || l.Depth == 0 || len(l.Chunks) > maxTop || l.Entries != 602 ||
		len(m.Processes.Images) > 0 {
		t.Fatalf("%d images and the list %+v", len(m.Processes.Images), l)
	}
	r := must1(s.OpenCheckpoint(ctx, c.ID))
	list := must1(r.Images(ctx))
	if len(list) != 602 || !slices.IsSortedFunc(list, func(a, b Image) int { return strings.Compare(a.Name, b.Name) }) {
		t.Errorf("%d images", len(list))
	}
	_, err := r.Image(ctx, "core-601.img")
	wantErr(t, err, fault.ErrNotFound)
	must(t, r.Close())

	data.images["core-500.img"] = []byte("another")
	next := taken(t, s, of(b, "", KindFull), data)
	same(t, s, next.ID, data)
	if next.Added > 16<<10 {
		t.Errorf("an image costs %d bytes", next.Added)
	}
	tidy(t, s)
}

// Images that the manifest names, as in earlier versions, are read, and the next checkpoint reuses
// them.
func TestNamedImages(t *testing.T) {
	ctx := context.Background()
	from, to := open(t, t.TempDir()), open(t, t.TempDir())
	b := put(t, from, "c")
	data := imaged(30, map[string][]byte{"tmpfs-dev-1.tar.gz.img": varied(20), "pages-2.img": varied(4)})
	naming(t)
	old := taken(t, from, of(b, "", KindFull), data)
	maxNamed = 1 << 10
	same(t, from, old.ID, data)
	if m, _ := manifestOf(t, from, old.ID); m.Version != Version || len(m.Processes.Images) != 33 ||
		m.Processes.Listed != nil {
		t.Errorf("version %d, %d images", m.Version, len(m.Processes.Images))
	}
	c := of(b, "", KindFull)
	c.Parent = old.ID
	next := taken(t, from, c, data)
	if next.Added > 8<<10 {
		t.Errorf("the same images cost %d bytes", next.Added)
	}
	for _, id := range []string{old.ID, next.ID} {
		must1(pull(ctx, from, to, id, 0))
		same(t, to, id, data)
	}
	must1(to.Reindex(ctx))
	must(t, from.RemoveCheckpoint(ctx, old.ID))
	must1(from.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
	same(t, from, next.ID, data)
	tidy(t, from)
	tidy(t, to)
}

// imageParts are the chunks of the list of process images, and of the lists above it.
func imageParts(t *testing.T, s *Store, id string) []overlay.Chunk {
	t.Helper()
	r := must1(s.OpenCheckpoint(context.Background(), id))
	defer r.Close()
	l := must1(r.listed(context.Background()))
	return append(slices.Clone(l.chunks.lists), l.chunks.lines...)
}

// Each damaged part of a list of images is found, and nothing that the checkpoint needs goes away
// for it.
func TestImageListDamaged(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := imaged(200, nil)
	c := taken(t, s, of(b, "", KindFull), data)
	gone := taken(t, s, of(b, "", KindFull), sample(7, 50_000))
	must(t, s.RemoveCheckpoint(ctx, gone.ID)) // there is something to reclaim
	parts := imageParts(t, s, c.ID)
	if len(parts) < 5 {
		t.Fatalf("%d parts", len(parts))
	}
	partsDamaged(t, s, c, parts, "list of process images", func() { same(t, s, c.ID, data) }, func(r *Reader) {
		_, err := r.Images(ctx)
		wantErr(t, err, fault.ErrCorrupt)
		_, err = r.ImageList(ctx)
		wantErr(t, err, fault.ErrCorrupt)
		_, err = r.Image(ctx, "core-1.img")
		wantErr(t, err, fault.ErrCorrupt)
		dir := filepath.Join(t.TempDir(), "x")
		wantErr(t, r.ExtractImages(ctx, dir), fault.ErrCorrupt)
		if must1(exists(dir)) {
			t.Error("a directory is left there")
		}
	})
	tidy(t, s)
}

// A checkpoint with a list of images travels, and not without a part of the list.
func TestImageListPulled(t *testing.T) {
	ctx := context.Background()
	from, to := open(t, t.TempDir()), open(t, t.TempDir())
	b := put(t, from, "c")
	data := imaged(200, nil)
	c := taken(t, from, of(b, "", KindFull), data)
	pulled(t, from, to, c, imageParts(t, from, c.ID))
	same(t, to, c.ID, data)
	must(t, to.Close())
	must(t, os.Remove(filepath.Join(to.Root(), "state.db")))
	to = open(t, to.Root())
	must1(to.Reindex(ctx))
	same(t, to, c.ID, data)
	tidy(t, to)
}

// A manifest from elsewhere may say anything of its list of images, and the list anything of the images.
func TestHostileImageList(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	c := taken(t, s, of(b, "", KindFull), imaged(200, nil))
	r := must1(s.OpenCheckpoint(ctx, c.ID))
	good, images := r.Manifest(), must1(r.Images(ctx))
	lines := must1(r.listed(ctx)).chunks.lines
	must(t, r.Close())
	line := func(list ...Image) (out []byte) {
		for i := range list {
			out = append(out, must1(list[i].line())...)
		}
		return out
	}
	// forge has the manifest name another list, of which it says what is right.
	forge := func(d *Draft, m *Manifest, data []byte, n int) {
		l := &Tree{
			Entries: int64(n), Bytes: int64(len(data)), Digest: digestOf(data),
			Chunks: Chunks{{Digest: digestOf(data), Len: int64(len(data))}},
		}
		for i := range min(n, len(images)) {
			l.Data += images[i].Bytes
		}
		must(t, d.PutChunk(ctx, digestOf(data), data))
		m.Processes.Listed = l
	}
	edited := func(change func(im *Image)) func(d *Draft, m *Manifest) {
		return func(d *Draft, m *Manifest) {
			im := images[0]
			im.Chunks = slices.Clone(im.Chunks)
			change(&im)
			forge(d, m, line(im), 1)
		}
	}
	says := func(change func(l *Tree)) func(d *Draft, m *Manifest) {
		return func(_ *Draft, m *Manifest) { change(m.Processes.Listed) }
	}
	raw := func(data []byte, n int) func(d *Draft, m *Manifest) {
		return func(d *Draft, m *Manifest) { forge(d, m, data, n) }
	}
	for name, harm := range map[string]func(d *Draft, m *Manifest){
		"images beside it":     func(_ *Draft, m *Manifest) { m.Processes.Images = images[:1] },
		"too shallow":          says(func(l *Tree) { l.Depth = 0 }),
		"deeper than it is":    says(func(l *Tree) { l.Depth++ }),
		"too deep":             says(func(l *Tree) { l.Depth = maxDepth + 1 }),
		"a negative depth":     says(func(l *Tree) { l.Depth = -1 }),
		"bytes":                says(func(l *Tree) { l.Bytes++ }),
		"too many bytes":       says(func(l *Tree) { l.Bytes = maxImageList + 1 }),
		"digest":               says(func(l *Tree) { l.Digest = digestOf([]byte("x")) }),
		"entries":              says(func(l *Tree) { l.Entries-- }),
		"too many entries":     says(func(l *Tree) { l.Entries = maxImages + 1 }),
		"data":                 says(func(l *Tree) { l.Data-- }),
		"more data":            says(func(l *Tree) { l.Data++ }),
		"lines for a list":     says(func(l *Tree) { l.Chunks = slices.Clone(lines[:1]) }),
		"a part twice":         says(func(l *Tree) { l.Chunks = append(l.Chunks, l.Chunks[0]) }),
		"no pieces":            says(func(l *Tree) { l.Chunks = Chunks{} }),
		"more pieces than fit": says(func(l *Tree) { l.Chunks = slices.Repeat(l.Chunks, maxTop+1) }),
		"a part not there":     says(func(l *Tree) { l.Chunks[0].Digest = digestOf([]byte("x")) }),

		"out of order":       raw(line(images[1], images[0]), 2),
		"one twice":          raw(line(images[0], images[0]), 2),
		"one more":           raw(line(images[:3]...), 2),
		"one less":           raw(line(images[:1]...), 2),
		"ends within a line": raw(bytes.TrimSuffix(line(images[:2]...), []byte("\n")), 2),
		"not canonical":      raw(bytes.Replace(line(images[0]), []byte(`:`), []byte(`: `), 1), 1),
		"another member":     raw(bytes.Replace(line(images[0]), []byte(`{`), []byte(`{"x":1,`), 1), 1),
		"an empty line":      raw(append(line(images[0]), '\n'), 1),
		"no list":            raw([]byte("null\n"), 1),
		"a path":             edited(func(im *Image) { im.Name = "../../etc/passwd" }),
		"a digest":           edited(func(im *Image) { im.Digest = "sha256:0" }),
		"a piece not there":  edited(func(im *Image) { im.Chunks[0].Digest = digestOf([]byte("x")) }),
		"no piece":           edited(func(im *Image) { im.Chunks = nil }),
		"length of a piece":  edited(func(im *Image) { im.Chunks[0].Len++ }),
		"pages alone":        edited(func(im *Image) { im.Pages = im.Chunks }),
		"not a recipe":       edited(func(im *Image) { im.Recipe, im.Chunks = im.Chunks, nil }),

		// Each list names the one below it as often as it can: it would be as long as all memory.
		"a list that grows": func(d *Draft, m *Manifest) {
			below := line(images[0])
			for range maxDepth {
				id := pack.Sum(below)
				must(t, d.PutChunk(ctx, id.String(), below))
				rec := append(id[:], 0, 0, 0, 0)
				for i := range 4 {
					rec[32+i] = byte(len(below) >> (8 * i))
				}
				below = bytes.Repeat(rec, 10_000)
			}
			must(t, d.PutChunk(ctx, digestOf(below), below))
			m.Processes.Listed = &Tree{Entries: 1, Data: images[0].Bytes, Bytes: 100,
				Digest: digestOf(nil), Depth: maxDepth,
				Chunks: Chunks{{Digest: digestOf(below), Len: int64(len(below))}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := must1(ParseManifest(must1(good.Encode())))
			m.ID = NewID()
			d := must1(s.BeginCheckpoint(ctx, Checkpoint{
				ID: m.ID, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
			}))
			harm(d, &m)
			m.Version = m.version()
			begin := time.Now()
			_, err := d.CommitAs(ctx, m)
			wantErr(t, err, fault.ErrCorrupt)
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("it took %v", took)
			}
			must(t, d.Abort(ctx, err))
		})
	}
	tidy(t, s)
}

// A list of a million chunks has few in the manifest, and a longer one than can be read is not written.
func TestLongImageList(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	d := must1(s.BeginCheckpoint(ctx, of(b, "", KindFull)))
	im := Image{Name: "tmpfs-dev-1.tar.gz.img", Digest: digestOf(nil)}
	grow := func(n int) {
		for i := range n {
			im.Chunks = append(im.Chunks, overlay.Chunk{Digest: digestOf(fmt.Append(nil,
				len(im.Chunks), i)), Len: 1 << 20})
			im.Bytes += 1 << 20
		}
	}
	grow(200_000)
	l := must1(d.putImageList(ctx, []Image{im}))
	if len(l.Chunks) > maxTop || l.Depth < 2 {
		t.Errorf("%d chunks at depth %d", len(l.Chunks), l.Depth)
	}
	grow(600_000)
	_, err := d.putImageList(ctx, []Image{im})
	wantErr(t, err, fault.ErrUnsupported)
	must(t, d.Abort(ctx, err))
}

func FuzzReadImageList(f *testing.F) {
	im := Image{Name: "a", Digest: digestOf(nil), Bytes: 3, Chunks: Chunks{{Digest: digestOf(nil), Len: 3}}}
	f.Add(must1(im.line()))
	f.Add([]byte("{}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := readImageList(&Tree{Entries: 1, Data: 3}, bytes.NewReader(data))
		if err != nil {
			if !isErr(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if again := must1(list[0].line()); len(list) != 1 || !isPlain(list[0].Name) || list[0].Bytes != 3 ||
			!bytes.Equal(again, data) {
			t.Fatalf("%s\nbecame\n%s", data, again)
		}
	})
}
