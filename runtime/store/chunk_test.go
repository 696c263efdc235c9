package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// Chunks of a byte are kept at hand within the same bound as others.
func TestTinyChunksAtHand(t *testing.T) {
	p := newChunks(nil)
	ready := make(chan struct{})
	close(ready)
	for i := range uint32(300_000) {
		d := &decoded{ready: ready, data: make([]byte, 1)}
		binary.LittleEndian.PutUint32(d.id[:], i)
		p.decoded[d.id] = p.recent.PushFront(d)
		p.keep(d)
	}
	if n := p.recent.Len(); n != len(p.decoded) || n > maxDecoded/decodedCost || n < 100_000 {
		t.Errorf("%d chunks are at hand, %d are listed", len(p.decoded), n)
	}
}

// A stored chunk is not stored again, and the records say so.
func TestOnlyWhatIsNew(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b, other := put(t, s, "c"), put(t, s, "other")
	data := sample(1, 2<<20)
	first := taken(t, s, of(b, "", KindFiles), data)
	again := taken(t, s, of(other, "", KindFiles), data)
	if !again.Unchanged || again.Added != 0 || len(packsOf(t, s)) != 1 {
		t.Errorf("stored again: %+v", again)
	}
	manifests := func(c Checkpoint) int64 {
		info, err := os.Stat(filepath.Join(s.published(c.ID), ManifestName))
		must(t, err)
		return info.Size()
	}
	if first.Bytes-manifests(first) != again.Bytes-manifests(again) || again.Bytes < 1<<20 {
		t.Errorf("the same needs %d and %d bytes", first.Bytes, again.Bytes)
	}

	// One byte put in at the beginning of a large file moves all of it.
	data.files["dir/big"] = append([]byte("!"), data.files["dir/big"]...)
	moved := taken(t, s, of(b, "", KindFiles), data)
	if moved.Unchanged || moved.Added > 800<<10 || moved.Added < 1<<10 {
		t.Errorf("for one byte more: %d bytes", moved.Added)
	}
	same(t, s, moved.ID, data)

	// Process images: a tenth of the pages change, all numbers of images move.
	pages := sample(2, 8<<20)
	c := of(b, "", KindFull)
	c.Parent = moved.ID
	full := taken(t, s, c, pages)
	next := sample(3, 0)
	big := bytes.Clone(pages.images["pages-1.img"])
	r := rand.New(rand.NewPCG(5, 5))
	for range len(big) / 4096 / 10 {
		copy(big[r.IntN(len(big)/4096)*4096:], block(r, 100))
	}
	next.images["pages-7.img"], next.images["pages-1.img"] = big, pages.images["pages-2.img"]
	c.Parent = full.ID
	second := taken(t, s, c, next)
	if second.Added > full.Added/6 {
		t.Errorf("a tenth of the pages: %d bytes after %d", second.Added, full.Added)
	}
	same(t, s, second.ID, next)
	// Its parent's parent may go: nothing of a pack does.
	must(t, s.RemoveCheckpoint(ctx, full.ID))
	same(t, s, second.ID, next)
	c.Parent = second.ID
	third := taken(t, s, c, next)
	if third.Added > 64<<10 {
		t.Errorf("the same pages again: %d bytes", third.Added)
	}
	same(t, s, third.ID, next)
	tidy(t, s)
}

// Pages that lie in too many places are stored anew.
func TestRecipeTooLong(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	was := maxRecipe
	defer func() { maxRecipe = was }()
	data := sample(1, 4<<20)
	c := of(b, "", KindFull)
	first := taken(t, s, c, data)
	r := rand.New(rand.NewPCG(1, 1))
	for range 300 {
		copy(data.images["pages-1.img"][r.IntN(1024)*4096:], block(r, 50))
	}
	c.Parent = first.ID
	second := taken(t, s, c, data)
	if second.Added > first.Added/2 {
		t.Fatalf("%d bytes after %d", second.Added, first.Added)
	}
	maxRecipe = 3000 // enough for 64 chunks in a row
	third := taken(t, s, c, data)
	if third.Added < first.Added/3 || third.Added < 2*second.Added {
		t.Errorf("%d bytes", third.Added)
	}
	same(t, s, third.ID, data)
	maxRecipe = 100
	_, err := take(context.Background(), s, c, data)
	wantErr(t, err, fault.ErrUnsupported, "recipe")
	maxRecipe = was
	tidy(t, s)
}

// A draft that was not committed is nothing to rely upon.
func TestDraftsSideBySide(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 100_000)
	begin := func() *Draft {
		d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
		must(t, err)
		must(t, fill(d, data))
		return d
	}
	one, two, three := begin(), begin(), begin()
	must(t, one.Abort(ctx, errors.New("no")))
	done, err := two.Commit(ctx, describe())
	must(t, err)
	must(t, two.Close())
	same(t, s, done.ID, data)
	// Chunks that it wrote as well lie there twice, or in the very same pack.
	late, err := three.Commit(ctx, describe())
	must(t, err)
	must(t, three.Close())
	same(t, s, late.ID, data)
	same(t, s, done.ID, data)
	tidy(t, s)
}

// The same chunk in two packs of one name: a draft that fails does not take the pack from
// the one that succeeded.
func TestSamePack(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := content{files: map[string][]byte{}} // one chunk: the list
	begin := func(name string) *Draft {
		d, err := s.BeginCheckpoint(ctx, of(b, name, KindFiles))
		must(t, err)
		must(t, fill(d, data))
		return d
	}
	won, lost, other := begin("n"), begin("n"), begin("m")
	done, err := won.Commit(ctx, describe())
	must(t, err)
	_, err = lost.Commit(ctx, describe())
	wantErr(t, err, fault.ErrExists)
	must(t, lost.Abort(ctx, err))
	must(t, won.Close())
	same(t, s, done.ID, data)
	late, err := other.Commit(ctx, describe())
	must(t, err)
	must(t, other.Close())
	same(t, s, late.ID, data)
	if n := len(packsOf(t, s)); n != 1 {
		t.Errorf("%d packs", n)
	}
	tidy(t, s)
}

// A pack that is gone is not relied upon: its chunks are stored anew, and with
// them the old checkpoints are whole again.
func TestLostPackHeals(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 300_000)
	c := of(b, "", KindFull)
	old := taken(t, s, c, data)
	for what, harm := range map[string]func(path string) error{
		"gone": os.Remove,
		"cut":  func(path string) error { return os.Truncate(path, 100) },
	} {
		for _, path := range packsOf(t, s) {
			must(t, harm(path))
		}
		wantErr(t, s.VerifyCheckpoint(context.Background(), old.ID), fault.ErrCorrupt)
		c.Parent = old.ID
		fresh := taken(t, s, c, data)
		if fresh.Unchanged {
			t.Errorf("%s: it relied upon what is not there", what)
		}
		same(t, s, fresh.ID, data)
		same(t, s, old.ID, data)
	}
}

// treeOf puts a list alone.
func treeOf(ctx context.Context, s *Store, b Sandbox, list []overlay.Entry) (Checkpoint, Tree, error) {
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
	if err != nil {
		return Checkpoint{}, Tree{}, err
	}
	err = d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
		for _, e := range list {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	})
	var c Checkpoint
	if err == nil {
		c, err = d.Commit(ctx, describe())
	}
	tree := d.trees[0]
	tree.Chunks = d.lines[0]
	return c, tree, errors.Join(err, d.Abort(ctx, err))
}

// A list is cut at the ends of lines, and a change of one costs little.
func TestListsAreCut(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	list := []overlay.Entry{{Path: ".", Type: overlay.TypeDir}}
	for i := range 20_000 {
		list = append(list, overlay.Entry{
			Path: fmt.Sprintf("file-%06d", i), Type: overlay.TypeDir, Mode: 0o755, Mtime: overlay.Time{Sec: int64(i)},
		})
	}
	one, tree, err := treeOf(ctx, s, b, list)
	must(t, err)
	if n := tree.Bytes / int64(len(tree.Chunks)); n < 8<<10 || n > 32<<10 {
		t.Errorf("%d bytes in %d pieces", tree.Bytes, len(tree.Chunks))
	}
	r, err := s.OpenCheckpoint(ctx, one.ID)
	must(t, err)
	for i, p := range tree.Chunks {
		raw, err := r.Chunk(ctx, p.Digest)
		must(t, err)
		if raw[len(raw)-1] != '\n' || len(raw) > maxLines || len(raw) < minLines && i < len(tree.Chunks)-1 {
			t.Fatalf("piece %d of %d bytes ends with %q", i, len(raw), raw[len(raw)-1])
		}
	}
	must(t, r.Close())
	list[9000].Mode = 0o700
	list = slices.Delete(list, 100, 101)
	two, _, err := treeOf(ctx, s, b, list)
	must(t, err)
	if two.Added > one.Added/15 {
		t.Errorf("two lines cost %d bytes of %d", two.Added, one.Added)
	}
	// A line longer than any chunk.
	big := overlay.Entry{Path: "z", Type: overlay.TypeDir, Xattrs: map[string]string{}}
	for i := range 60 {
		big.Xattrs[fmt.Sprint("user.", i)] = strings.Repeat(fmt.Sprint(i), 30_000)
	}
	long, tree, err := treeOf(ctx, s, b, append(list, big))
	must(t, err)
	if len(tree.Chunks) < 3 {
		t.Error("not cut")
	}
	must(t, s.VerifyCheckpoint(ctx, long.ID))
}

// pull copies a checkpoint from one store to another, chunk by chunk.
func pull(ctx context.Context, from, to *Store, id string, spare int) (Checkpoint, error) {
	r, err := from.OpenCheckpoint(ctx, id)
	if err != nil {
		return Checkpoint{}, err
	}
	defer r.Close()
	m := r.Manifest()
	d, err := to.BeginCheckpoint(ctx, Checkpoint{
		ID: m.ID, Name: m.Name, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind, Created: m.Created,
	})
	if err != nil {
		return Checkpoint{}, err
	}
	n := 0
	err = r.Chunks(ctx, func(digest string, raw int64) error {
		if n++; n == spare {
			return nil
		}
		b, err := r.Chunk(ctx, digest)
		if err == nil && int64(len(b)) != raw {
			err = fmt.Errorf("%s has %d bytes, not %d", digest, len(b), raw)
		}
		return errors.Join(err, d.PutChunk(ctx, digest, b))
	})
	var c Checkpoint
	if err == nil {
		c, err = d.CommitAs(ctx, m)
	}
	return c, errors.Join(err, d.Abort(ctx, err))
}

func TestCommitAs(t *testing.T) {
	ctx := context.Background()
	from, to := open(t, t.TempDir()), open(t, t.TempDir())
	b := put(t, from, "c")
	data := sample(1, 400_000)
	data.volume = map[string][]byte{"v": []byte("volume")}
	c := taken(t, from, of(b, "n", KindFull), data)
	r, err := from.OpenCheckpoint(ctx, c.ID)
	must(t, err)
	total := 0
	last := ""
	must(t, r.Chunks(ctx, func(digest string, _ int64) error {
		if total++; digest <= last {
			t.Fatal("a chunk out of order, or twice")
		}
		last = digest
		return nil
	}))
	must(t, r.Close())
	for i := 1; i <= total; i++ {
		_, err := pull(ctx, from, to, c.ID, i)
		wantErr(t, err, fault.ErrCorrupt)
		must(t, to.RemoveCheckpoint(ctx, c.ID))
		tidy(t, to)
	}
	got, err := pull(ctx, from, to, c.ID, 0)
	must(t, err)
	if got.Digest != c.Digest || got.Bytes != c.Bytes {
		t.Errorf("%+v\n%+v", got, c)
	}
	same(t, to, c.ID, data)
	// The pages of what came from elsewhere are stored again rather than believed.
	next := of(b, "", KindFull)
	next.Parent = c.ID
	fresh := taken(t, to, next, data)
	same(t, to, fresh.ID, data)
	r, err = to.OpenCheckpoint(ctx, fresh.ID)
	must(t, err)
	defer r.Close()
	d, err := to.BeginCheckpoint(ctx, next)
	must(t, err)
	if k, err := d.knownPages(ctx); err != nil || k.index != nil {
		t.Errorf("%v, %v", k.index, err)
	}
	must(t, d.Abort(ctx, nil))
	tidy(t, to)
}

// A killed process leaves a pack: of a checkpoint that can be completed, of one
// that cannot, or unfinished; and a store without its records keeps them all.
func TestSweepPacks(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	keep := taken(t, s, of(b, "keep", KindFiles), sample(1, 1000))
	lost := taken(t, s, of(b, "lost", KindFull), sample(2, 100_000))
	row := func(q string, args ...any) {
		_, err := s.db.Exec(q, args...)
		must(t, err)
	}
	forget := func(id string) { // as if it had been killed before the transaction
		var num int64
		must(t, s.db.QueryRow("SELECT max(num) FROM packs").Scan(&num))
		row("DELETE FROM packs WHERE num = ?", num)
		row("DELETE FROM blobs WHERE pack = ?", num)
		row("UPDATE checkpoints SET status = 'pending', digest = '', bytes = 0, added = 0 WHERE id = ?", id)
	}
	forget(lost.ID)
	did, err := s.Sweep(ctx)
	must(t, err)
	if len(did) != 1 || !strings.Contains(did[0], "completed") {
		t.Fatal(did)
	}
	same(t, s, lost.ID, sample(2, 100_000))
	if c := must1(s.Checkpoint(ctx, lost.ID)); c.Bytes != lost.Bytes || c.Added != lost.Added ||
		c.Digest != lost.Digest || c.Unchanged {
		t.Errorf("%+v\n%+v", c, lost)
	}
	tidy(t, s)

	// A damaged one is not completed, and its pack is removed, but not while there is a
	// draft or a reader.
	forget(lost.ID)
	stray, err := s.strayPacks(ctx)
	must(t, err)
	path := pack.Path(s.packsDir(), stray[0])
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("damage"), 2000)
	must(t, errors.Join(err, f.Close()))
	r, err := s.OpenCheckpoint(ctx, keep.ID)
	must(t, err)
	did, err = s.Sweep(ctx)
	must(t, err)
	if len(did) != 1 || !strings.Contains(did[0], "discarded") || !must1(exists(path)) {
		t.Fatal(did)
	}
	must(t, os.WriteFile(filepath.Join(s.packsDir(), "tmp-left"), []byte("x"), 0o600))
	did, err = s.Sweep(ctx)
	must(t, err)
	if len(did) != 0 || !must1(exists(path)) {
		t.Fatal(did)
	}
	must(t, r.Close())
	// Nor while there is a checkpoint that state.db does not know: it may be its.
	unknown := NewID()
	must(t, os.Mkdir(s.published(unknown), 0o700))
	did, err = s.Sweep(ctx)
	must(t, err)
	if len(did) != 2 || !must1(exists(path)) {
		t.Fatal(did)
	}
	must(t, os.Remove(s.published(unknown)))
	did, err = s.Sweep(ctx)
	must(t, err)
	if len(did) != 1 || must1(exists(path)) {
		t.Fatal(did)
	}
	tidy(t, s)
	must(t, s.VerifyCheckpoint(ctx, keep.ID))

	// state.db is lost: everything is left for a new index.
	root := s.root
	must(t, s.Close())
	for _, name := range []string{"state.db", "state.db-wal", "state.db-shm"} {
		_ = os.Remove(filepath.Join(root, name))
	}
	s = open(t, root)
	_, err = s.Sweep(ctx)
	must(t, err)
	if n := len(packsOf(t, s)); n != 1 {
		t.Errorf("%d packs are left", n)
	}
}

// Many small files that are new: the index is asked for each, and is quick.
func TestManySmallFiles(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	taken(t, s, of(b, "", KindFiles), sample(1, 10)) // so that there is an index
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
	must(t, err)
	const n = 10_000
	list := make([]overlay.Entry, n+1)
	list[0] = overlay.Entry{Path: ".", Type: overlay.TypeDir}
	start := time.Now()
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			data := make([]byte, 4096)
			for i := w; i < n; i += 2 {
				binary.LittleEndian.PutUint32(data, uint32(i))
				digest, chunks, err := d.Sink().Data(ctx, 4096, bytes.NewReader(data))
				if err != nil || chunks != nil {
					t.Error(err, chunks)
					return
				}
				list[i+1] = overlay.Entry{
					Path: fmt.Sprintf("f%05d", i), Type: overlay.TypeFile, Size: 4096, Digest: digest,
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	must(t, d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
		for _, e := range list {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	}))
	c, err := d.Commit(ctx, describe())
	must(t, err)
	must(t, d.Close())
	t.Logf("sink %v, to the end %v", took, time.Since(start))
	must(t, s.VerifyCheckpoint(ctx, c.ID))
	r, err := s.OpenCheckpoint(ctx, c.ID)
	must(t, err)
	defer r.Close()
	start = time.Now()
	for _, e := range list[1:] {
		f, err := r.Source().Data(ctx, e)
		must(t, err)
		_, err = io.Copy(io.Discard, f)
		must(t, errors.Join(err, f.Close()))
	}
	t.Logf("read again %v", time.Since(start))
}

// A list written by Collect becomes the same list, line by line or entry by entry.
func TestPutCollection(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	dir, memory := t.TempDir(), filepath.Join(t.TempDir(), "memory")
	for i := range 300 {
		must(t, os.WriteFile(fmt.Sprintf("%s/%03d", dir, i), fmt.Appendf(nil, "content %d", i%200), 0o644))
	}
	must(t, os.WriteFile(dir+"/empty", nil, 0o600))
	must(t, os.WriteFile(dir+"/large", sample(1, 4<<20).files["dir/big"], 0o600))
	must(t, os.WriteFile(dir+"/\"digest\":\"\xff", []byte("an odd name"), 0o600))
	must(t, os.WriteFile(dir+"/sparse", []byte("begins"), 0o600))
	must(t, os.Truncate(dir+"/sparse", 1<<20))
	must(t, os.Link(dir+"/000", dir+"/link"))
	must(t, os.Symlink(`,"digest":"blake3:`+strings.Repeat("0", 64), dir+"/symlink"))
	var trees [2]Tree
	var needs [2][]pack.ID
	for i := range trees {
		d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
		must(t, err)
		_ = os.Remove(memory)
		_, err = overlay.Collect(ctx, dir, memory, d.Sink(), overlay.CollectOptions{})
		must(t, err)
		if i == 0 {
			err = d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error { return overlay.Collection(memory, fn) })
		} else {
			_, err = d.PutCollection(ctx, 0, memory, trees[0].Chunks)
		}
		must(t, err)
		trees[i], needs[i] = d.trees[0], slices.Clone(d.need.list())
		c, err := d.Commit(ctx, describe())
		must(t, errors.Join(err, d.Close()))
		if c.Unchanged != (i == 1) {
			t.Errorf("checkpoint %d: unchanged is %v", i, c.Unchanged)
		}
	}
	if !reflect.DeepEqual(trees[0], trees[1]) || !slices.Equal(needs[0], needs[1]) {
		t.Errorf("%+v needs %d chunks, %+v %d", trees[0], len(needs[0]), trees[1], len(needs[1]))
	}
}
