package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/zeebo/blake3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// weighed makes a checkpoint of what the store has, with the index cache that is there and
// without one.
func weighed(t *testing.T, s *Store, c Checkpoint, data content) (with, without int64) {
	t.Helper()
	with = taken(t, s, c, data).Bytes
	must(t, s.dropIndexCaches())
	return with, taken(t, s, c, data).Bytes
}

// An index cache says what the index says, and a damaged one is not used.
func TestIndexCache(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 300_000)
	c := of(b, "", KindFull)
	c.Created = time.Unix(1e9, 1) // as long in every manifest
	path := s.indexCachePath(b.ID)
	taken(t, s, c, data)
	taken(t, s, c, data)
	good, err := os.ReadFile(path)
	must(t, err)
	if l := must1(parseIndexCache(good)); l.chunks < 5 || l.bytes < 300_000 || len(l.packs) != 1 {
		t.Fatalf("an index cache of %d chunks with %d bytes in %d packs", l.chunks, l.bytes, len(l.packs))
	}
	if with, without := weighed(t, s, c, data); with != without {
		t.Errorf("%d bytes with an index cache, %d without", with, without)
	}
	want := taken(t, s, c, data).Bytes
	for at := 0; at < len(good); at += 37 {
		bad := bytes.Clone(good)
		bad[at] ^= 1
		for what, b := range map[string][]byte{"flipped": bad, "cut": good[:at]} {
			must(t, os.WriteFile(path, b, 0o600))
			if got := taken(t, s, c, data); got.Bytes != want {
				t.Errorf("%s at %d: %d bytes, not %d", what, at, got.Bytes, want)
			}
		}
	}
}

// A chunk that left the index is not counted on, even by a process that cached it.
func TestIndexCacheAfterReclaim(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data, c := sample(1, 300_000), of(b, "", KindFiles)
	gone := []Checkpoint{taken(t, s, c, data), taken(t, s, c, data)}
	r, err := s.OpenCheckpoint(ctx, gone[1].ID)
	must(t, err)
	var list []overlay.Entry
	must(t, r.entries(ctx, 0, func(e overlay.Entry) error { list = append(list, e); return nil }))
	must(t, r.Close())
	for _, c := range gone {
		must(t, s.RemoveCheckpoint(ctx, c.ID))
	}
	if _, _, err = treeOf(ctx, s, b, list); err != nil { // all is still there
		t.Fatal(err)
	}
	rows, err := s.Checkpoints(ctx, Filter{})
	must(t, err)
	must(t, s.RemoveCheckpoint(ctx, rows[0].ID))
	_, err = s.Reclaim(ctx, ReclaimOptions{})
	must(t, err)
	if _, _, err = treeOf(ctx, s, b, list); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("pieces that are gone: %v", err)
	}
}

// smallFiles is a list of files that have a number each as data.
type smallFiles struct {
	list  []overlay.Entry // those without a digest were not given to a Sink yet
	made  int
	given uint64
}

func newSmallFiles(n int) *smallFiles {
	f := &smallFiles{}
	f.add(n)
	return f
}

func (f *smallFiles) add(n int) {
	for range n {
		f.list = append(f.list, overlay.Entry{
			Path: fmt.Sprintf("f%07d", f.made), Type: overlay.TypeFile, Mode: 0o644, Size: 8,
		})
		f.made++
	}
}

// change gives n files, spread over the list, other data.
func (f *smallFiles) change(n int) {
	for i := range n {
		f.list[(i*len(f.list)/n+int(f.given)*7)%len(f.list)].Digest = ""
	}
}

// draft makes one of the files, with all but the commit done.
func (f *smallFiles) draft(t testing.TB, s *Store, c Checkpoint) *Draft {
	t.Helper()
	ctx := context.Background()
	d, err := s.BeginCheckpoint(ctx, c)
	must(t, err)
	for i := range f.list {
		if e := &f.list[i]; e.Digest == "" {
			e.Digest, _, err = d.Sink().Data(ctx, e.Size,
				bytes.NewReader(binary.LittleEndian.AppendUint64(nil, f.given)))
			must(t, err)
			f.given++
		}
	}
	must(t, d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
		if err := fn(overlay.Entry{Path: ".", Type: overlay.TypeDir, Mode: 0o755}); err != nil {
			return err
		}
		for _, e := range f.list {
			if err := fn(e); err != nil {
				return err
			}
		}
		return nil
	}))
	return d
}

func (f *smallFiles) commit(t testing.TB, s *Store, c Checkpoint) Checkpoint {
	t.Helper()
	d := f.draft(t, s, c)
	done := must1(d.Commit(context.Background(), describe()))
	must(t, d.Close())
	return done
}

// compared returns what the index cache makes of the files; nil: nothing, and all is asked for.
func (f *smallFiles) compared(t *testing.T, s *Store, c Checkpoint) []byte {
	t.Helper()
	ctx := context.Background()
	list := slices.Clone(f.list)
	d := f.draft(t, s, c)
	defer func() { must(t, d.Abort(ctx, nil)); f.list = list }() // what was given is gone
	old, err := readIndexCache(s.indexCachePath(c.SandboxID))
	must(t, err)
	_, next, err := d.compare(ctx, d.need.list(), old)
	switch {
	case errors.Is(err, errIndexCache):
		return nil
	case err == nil && next == nil:
		return old.encode()
	}
	must(t, err)
	return next.encode()
}

// asked is what the index cache of files that are all in the store is without another.
func (f *smallFiles) asked(t *testing.T, s *Store, c Checkpoint) []byte {
	t.Helper()
	ctx := context.Background()
	d := f.draft(t, s, c)
	defer func() { must(t, d.Abort(ctx, nil)) }()
	must(t, s.dropIndexCaches())
	_, next, err := d.stored(ctx, d.need.list())
	must(t, err)
	return next.encode()
}

// An index cache is small, however many files there are and whatever becomes of them, and
// each commit makes use of it.
func TestIndexCacheIsBounded(t *testing.T) {
	for _, n := range []int{1000, 10_000, 50_000} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			s := open(t, t.TempDir())
			c := of(put(t, s, "c"), "", KindFiles)
			f := newSmallFiles(n)
			for step, change := range []func(){
				func() {},
				func() {},
				func() { f.change(10) },
				func() { f.change(20) },
				func() {},
				func() { f.list = slices.Delete(f.list, n/2, n/2+40) },
				func() { f.add(n / 4) },
				func() { f.change(20) },
			} {
				change()
				if step > 0 && f.compared(t, s, c) == nil {
					t.Errorf("step %d: the index cache is of no use", step)
				}
				f.commit(t, s, c)
				if info := must1(os.Stat(s.indexCachePath(c.SandboxID))); info.Size() > 4<<10 {
					t.Errorf("step %d: an index cache of %d bytes", step, info.Size())
				}
			}
			f.change(n / 2) // more than a sketch can say
			if f.compared(t, s, c) != nil {
				t.Error("an index cache is used for files that are nearly all others")
			}
			f.commit(t, s, c)
			if f.compared(t, s, c) == nil {
				t.Error("there is no index cache after that")
			}
		})
	}
}

// Whatever changes, an index cache that was made of another is what it is without one, and
// the checkpoint has as many bytes.
func TestIndexCacheFollows(t *testing.T) {
	s := open(t, t.TempDir())
	c, c2 := of(put(t, s, "c"), "", KindFiles), of(put(t, s, "other"), "", KindFiles)
	c.Created = time.Unix(1e9, 1) // as long in every manifest
	f, other := newSmallFiles(500), newSmallFiles(500)
	other.given = 1 << 32
	other.commit(t, s, c2)
	f.commit(t, s, c)
	first := slices.Clone(f.list)
	r := rand.New(rand.NewPCG(1, 1))
	for round := range 40 {
		for range r.IntN(30) {
			switch i := r.IntN(len(f.list)); r.IntN(5) {
			case 0:
				f.list[i].Digest = ""
			case 1: // back to what is not in the index cache any more
				if i < len(first) {
					f.list[i].Digest = first[i].Digest
				}
			case 2: // from elsewhere
				f.list[i].Digest = other.list[r.IntN(500)].Digest
			case 3:
				f.add(2)
			case 4:
				f.list = slices.Delete(f.list, i, i+1)
			}
		}
		with := f.commit(t, s, c)
		got := must1(os.ReadFile(s.indexCachePath(c.SandboxID)))
		if f.compared(t, s, c) == nil {
			t.Errorf("round %d: the index cache is of no use", round)
		}
		if !bytes.Equal(got, f.asked(t, s, c)) {
			t.Errorf("round %d: the index cache is another when all is asked for", round)
		}
		if without := f.commit(t, s, c); with.Bytes != without.Bytes {
			t.Errorf("round %d: %d bytes with an index cache, %d without", round, with.Bytes, without.Bytes)
		}
	}
}

// A chunk that no Sink was given and the store does not have is found missing.
func TestIndexCacheMissesChunks(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c := of(put(t, s, "c"), "", KindFiles)
	f := newSmallFiles(1000)
	f.commit(t, s, c)
	f.list[500].Digest = digestOf([]byte("given to nothing"))
	for range 2 {
		d := f.draft(t, s, c)
		_, err := d.Commit(ctx, describe())
		wantErr(t, err, fault.ErrCorrupt, "is not in the store")
		must(t, d.Abort(ctx, err))
		if left := must1(filepath.Glob(filepath.Join(s.cacheDir(), "*"+indexCacheNew))); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// A pack that vanished, with a chunk that the index cache has, is noticed.
func TestIndexCacheMissesPacks(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c := of(put(t, s, "c"), "", KindFiles)
	f := newSmallFiles(1000)
	f.commit(t, s, c)
	first := ""
	must(t, s.packFiles(func(name string) error { first = name; return nil }))
	f.list[500].Digest = ""
	f.commit(t, s, c)
	path := ""
	must(t, s.packFiles(func(name string) error {
		if name != first {
			path = pack.Path(s.packsDir(), name)
		}
		return nil
	}))
	f.list[501].Digest = "" // its lines go from that pack, the data stays
	f.commit(t, s, c)
	must(t, os.Rename(path, path+".away"))
	list := slices.Clone(f.list)
	for _, changed := range []int{0, 1} {
		f.change(changed)
		d := f.draft(t, s, c)
		_, err := d.Commit(ctx, describe())
		wantErr(t, err, fault.ErrCorrupt, "is not in the store")
		must(t, d.Abort(ctx, err))
		f.list = slices.Clone(list)
	}
	must(t, os.Rename(path+".away", path))
	f.commit(t, s, c)
}

// An index cache of the format before this one, and one of something else, are as good as none.
func TestIndexCacheOfSomethingElse(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c, c2 := of(put(t, s, "c"), "", KindFiles), of(put(t, s, "other"), "", KindFiles)
	c.Created = time.Unix(1e9, 1) // as long in every manifest
	f, other := newSmallFiles(1000), newSmallFiles(1000)
	other.given = 1 << 32
	other.commit(t, s, c2)
	want := f.commit(t, s, c)
	path := s.indexCachePath(c.SandboxID)
	good := must1(os.ReadFile(path))

	// The one before listed the chunks, with their packs and sizes.
	missing := must1(pack.ParseID(digestOf([]byte("given to nothing"))))
	former := append([]byte("agentbox ledger1"), missing[:]...)
	former = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(former, 1), 100)
	sum := blake3.Sum256(former)
	former = append(former, sum[:]...)
	long := append(good[:len(good)-indexCacheSum:len(good)-indexCacheSum], make([]byte, maxIndexCache)...)
	sum = blake3.Sum256(long)
	long = append(long, sum[:]...)
	empty := (&indexCache{}).encode()
	alike := must1(parseIndexCache(good)) // its sketch has what is missing, its sum has not
	alike.cells.flip(keyOf(&missing))
	for what, data := range map[string][]byte{"former": former,
		"of another": must1(os.ReadFile(s.indexCachePath(c2.SandboxID))),
		"of nothing": empty, "sketch of more": alike.encode(), "long": long, "no bytes": nil} {
		must(t, os.WriteFile(path, data, 0o600))
		list := slices.Clone(f.list)
		list[7].Digest = missing.String()
		if _, _, err := treeOf(ctx, s, Sandbox{
			ID: c.SandboxID, Name: c.SandboxName, ImageDigest: c.ImageDigest, Spec: c.Spec,
		}, list); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: a chunk that is not there: %v", what, err)
		}
		if got := f.commit(t, s, c); got.Bytes != want.Bytes {
			t.Errorf("%s: %d bytes, not %d", what, got.Bytes, want.Bytes)
		}
		if what != "sketch of more" && !bytes.Equal(must1(os.ReadFile(path)), good) {
			t.Errorf("%s: it stays", what)
		}
	}
}

// A commit does not bring back what was dropped after it had read it, and writes no
// index cache that is too large.
func TestIndexCacheDroppedMeanwhile(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c := of(put(t, s, "c"), "", KindFiles)
	f := newSmallFiles(100)
	f.commit(t, s, c)
	f.change(3)
	d := f.draft(t, s, c)
	_, next, err := d.stored(ctx, d.need.list())
	must(t, err)
	must(t, s.dropIndexCaches())
	d.keep(next)
	d.claim()
	for num := range int64(maxIndexCache) {
		next.packs[num] = 1 // more than have room
	}
	d.keep(next)
	must(t, d.Abort(ctx, nil))
	if left := must1(filepath.Glob(filepath.Join(s.cacheDir(), "*"+indexCacheSuffix+"*"))); len(left) > 0 {
		t.Errorf("there is %v", left)
	}
}

// Two drafts store the same chunk; one of them has it in a pack where the index does not look for
// it.
func TestIndexCacheOfTwins(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	c, c2 := of(put(t, s, "c"), "", KindFiles), of(put(t, s, "other"), "", KindFiles)
	f, other := newSmallFiles(100), newSmallFiles(150)
	d, d2 := f.draft(t, s, c), other.draft(t, s, c2)
	must1(d.Commit(ctx, describe()))
	must(t, d.Close())
	must1(d2.Commit(ctx, describe()))
	must(t, d2.Close())
	if _, err := readIndexCache(s.indexCachePath(c2.SandboxID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an index cache: %v", err)
	}
	for range 2 {
		other.commit(t, s, c2)
		if l := must1(readIndexCache(s.indexCachePath(c2.SandboxID))); len(l.packs) != 2 {
			t.Errorf("pieces in %d packs", len(l.packs))
		}
	}
}

// A sketch lists what two sets differ in, or says that it cannot.
func TestSketch(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 1))
	failed := 0
	for n := range 1000 {
		var a, b sketch
		for range 300 {
			key := r.Uint64()
			a.flip(key)
			b.flip(key)
		}
		var want []uint64
		for i := range n {
			key := r.Uint64()
			want = append(want, key)
			if i%3 == 0 {
				a.flip(key)
			} else {
				b.flip(key)
			}
		}
		slices.Sort(want)
		a.combine(&b)
		got, ok := a.keys()
		switch {
		case ok && !slices.Equal(got, want):
			t.Errorf("%d keys: %d others", n, len(got))
		case !ok && n < 180:
			failed++
		case ok && n > len(a):
			t.Errorf("%d keys in %d cells", n, len(a))
		}
	}
	if failed > 2 {
		t.Errorf("%d of 180 sketches say nothing", failed)
	}
}

// Chunks whose ids begin alike are not confused.
func TestSketchAlike(t *testing.T) {
	ids := make([]pack.ID, 4)
	for i := range ids {
		ids[i][0], ids[i][31] = 1, byte(i)
	}
	var a, b sketch
	a.flipAll(ids[:2])
	if a != b {
		t.Error("two that are alike are not the same as none") // which is why there is a sum
	}
	if sumOf(ids[:2], nil, nil) == sumOf(nil, nil, nil) || sumOf(ids, ids[1:2], nil) != sumOf(ids[2:], nil, ids[:1]) ||
		sumOf(ids[1:3], ids[1:2], ids[3:]) != sumOf(ids[2:], nil, nil) {
		t.Error("sums of lists")
	}
}

// A chunk known to be damaged is not counted on, although checkpoints that were not
// verified since have it, and an index cache does. Stored anew, it heals them.
func TestDamagedIsNotCountedOn(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data, c := sample(1, 300_000), of(b, "", KindFiles)
	one, two := taken(t, s, c, data), taken(t, s, c, data)
	r, err := s.OpenCheckpoint(ctx, two.ID)
	must(t, err)
	var list []overlay.Entry
	digest := ""
	must(t, r.entries(ctx, 0, func(e overlay.Entry) error {
		if list = append(list, e); dataBytes(&e) > 0 && e.Chunks == nil {
			digest = e.Digest
		}
		return nil
	}))
	must(t, r.Close())
	id, err := pack.ParseID(digest)
	must(t, err)
	at, _, err := s.locate(ctx, id)
	must(t, err)
	row, err := s.packRow(ctx, at.pack)
	must(t, err)
	flip(t, pack.Path(s.packsDir(), row.name), at.blob.Off)

	if rep := must1(s.VerifyAll(ctx, VerifyOptions{IDs: []string{one.ID}, ReadData: true})); len(rep.Damaged) != 1 {
		t.Fatalf("verify: %+v", rep)
	}
	if _, _, err := treeOf(ctx, s, b, list); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a checkpoint of what is damaged: %v", err)
	}
	d, err := s.BeginCheckpoint(ctx, c)
	must(t, err)
	if missing, err := d.Missing(ctx, []string{digest}); err != nil || len(missing) != 1 {
		t.Errorf("a pull would fetch %v, %v", missing, err)
	}
	must(t, d.Abort(ctx, nil))
	taken(t, s, c, data)
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); len(rep.Damaged) > 0 {
		t.Errorf("still damaged: %+v", rep.Damaged)
	}
}
