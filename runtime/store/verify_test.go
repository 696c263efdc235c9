package store

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// TestFlips flips bits all over a store: Verify must name exactly the damaged checkpoints.
func TestFlips(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	names := map[string]string{} // id -> name
	for i, kind := range []string{KindFiles, KindFull, KindFiles} {
		c := sample(uint64(i+1), 4000)
		c.files["shared"] = []byte(strings.Repeat("shared by the first two", 20))
		if i == 2 {
			delete(c.files, "shared")
		}
		k := taken(t, s, of(b, fmt.Sprintf("c%d", i), kind), c)
		names[k.ID] = k.Name
	}
	gone := taken(t, s, of(b, "gone", KindFiles), sample(9, 3000))
	must(t, s.RemoveCheckpoint(ctx, gone.ID))
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); rep.Checkpoints != 3 ||
		len(rep.Damaged)+len(rep.Notes) > 0 {
		t.Fatalf("%+v", rep)
	}
	hurts := map[string][]string{} // chunk -> names of checkpoints
	for id, name := range names {
		for p := range needsOf(t, s, id) {
			hurts[p] = append(hurts[p], name)
		}
	}
	check := func(path string, off int64, want []string) {
		t.Helper()
		restore := flip(t, path, off)
		defer restore()
		rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true}))
		var got []string
		for _, d := range rep.Damaged {
			got = append(got, names[d.Checkpoint.ID])
			if len(d.What) == 0 || d.Checkpoint.Damaged == "" {
				t.Errorf("%s: damaged by nothing", names[d.Checkpoint.ID])
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("byte %d of %s: %v are said to be hurt, %v are (%v)", off, filepath.Base(path), got, want, rep)
		}
		if len(want) == 0 && len(rep.Notes) == 0 {
			t.Errorf("byte %d of %s was not found", off, filepath.Base(path))
		}
		for _, c := range must1(s.Checkpoints(ctx, Filter{})) {
			if (c.Damaged != "") != slices.Contains(got, c.Name) {
				t.Errorf("byte %d of %s: the mark of %s is %q", off, filepath.Base(path), c.Name, c.Damaged)
			}
		}
	}
	step := int64(37)
	if testing.Short() {
		step = 499
	}
	n := 0
	for _, path := range packsOf(t, s) {
		f := must1(os.Open(path))
		r := must1(pack.Open(f))
		blobs := must1(r.Blobs())
		must(t, f.Close())
		for off := int64(0); off < r.Bytes(); off += step {
			want := []string{}
			for _, x := range blobs {
				if off >= x.Off && off < x.Off+int64(x.Stored) {
					want = slices.Clone(hurts[x.ID.String()])
				}
			}
			check(path, off, want)
			n++
		}
		check(path, r.Bytes()-1, nil)
		for _, x := range blobs { // its last byte: the one that only a checksum of its own proves
			check(path, x.Off+int64(x.Stored)-1, slices.Clone(hurts[x.ID.String()]))
			n++
		}
	}
	for id, name := range names {
		path := filepath.Join(s.published(id), ManifestName)
		for off := int64(0); off < must1(os.Stat(path)).Size(); off += step {
			check(path, off, []string{name})
			n++
		}
	}
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged)+len(rep.Notes) > 0 {
		t.Errorf("all is as it was: %+v", rep)
	}
	for _, c := range must1(s.Checkpoints(ctx, Filter{})) {
		if c.Damaged != "" {
			t.Errorf("the mark of %s stayed: %s", c.Name, c.Damaged)
		}
	}
	t.Logf("%d bytes turned", n)
}

func TestVerifyNamesPaths(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	_, list, data := history(t, s)
	at, _, err := s.locate(ctx, pack.Sum(data[2].files["small"]))
	must(t, err)
	path := pack.Path(s.packsDir(), must1(s.packRow(ctx, at.pack)).name)
	restore := flip(t, path, at.blob.Off+3)
	// Without reading, a flipped bit in data is not found.
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged) > 0 || rep.Checkpoints != 3 ||
		rep.Chunks == 0 || rep.Bytes == 0 {
		t.Errorf("%+v", rep)
	}
	var done, total int64
	rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true, Progress: func(d, n int64) { done, total = d, n }}))
	if len(rep.Damaged) != 1 || rep.Damaged[0].Checkpoint.ID != list[2].ID || len(rep.Damaged[0].What) != 1 ||
		!strings.HasPrefix(rep.Damaged[0].What[0], "small: ") {
		t.Fatalf("%+v", rep)
	}
	if done != total || done != rep.Bytes {
		t.Errorf("progress %d of %d, %d read", done, total, rep.Bytes)
	}
	// The mark stays until the data says otherwise.
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged) != 1 {
		t.Errorf("a look without the data took the mark away: %+v", rep)
	}
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{
		IDs: []string{list[0].ID}, ReadData: true,
	})); len(rep.Damaged) != 0 || rep.Checkpoints != 1 {
		t.Errorf("%+v", rep)
	}
	if c := must1(s.Checkpoint(ctx, list[2].ID)); !strings.HasPrefix(c.Damaged, "small: ") {
		t.Errorf("mark %q", c.Damaged)
	}
	restore()
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged) != 0 {
		t.Errorf("%+v", rep)
	}
	if c := must1(s.Checkpoint(ctx, list[2].ID)); c.Damaged != "" {
		t.Errorf("mark %q", c.Damaged)
	}

	// A pack that is gone, with and without reading.
	must(t, os.Rename(path, path+".away"))
	for _, read := range []bool{false, true} {
		rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: read}))
		if len(rep.Damaged) != 1 || rep.Damaged[0].Checkpoint.ID != list[2].ID || len(rep.Damaged[0].What) == 0 {
			t.Errorf("read %v: %+v", read, rep)
		}
	}
	must(t, os.Rename(path+".away", path))
	// A footer counts against its checkpoints until the data is read.
	restore = flip(t, path, must1(os.Stat(path)).Size()-20)
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged) != 1 ||
		rep.Damaged[0].Checkpoint.ID != list[2].ID {
		t.Errorf("%+v", rep)
	}
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); len(rep.Damaged) != 0 || len(rep.Notes) != 1 {
		t.Errorf("%+v", rep)
	}
	restore()
	_, err = s.VerifyAll(ctx, VerifyOptions{IDs: []string{NewID()}})
	wantErr(t, err, fault.ErrNotFound)
	// A chunk that left the index.
	_, err = s.db.Exec("DELETE FROM blobs WHERE id = ?", at.blob.ID[:])
	must(t, err)
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{})); len(rep.Damaged) != 1 ||
		!strings.HasPrefix(rep.Damaged[0].What[0], "small: ") {
		t.Errorf("%+v", rep)
	}
}

func TestReindex(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	_, list, data := history(t, s)
	must(t, s.Pin(ctx, list[1].ID, true))
	must(t, s.Tag(ctx, list[1].ID, "v1"))
	before := rowsOf(t, s)
	if did := must1(s.Reindex(ctx)); did.Packs != 3 || did.Chunks != int64(len(before)) ||
		did.Checkpoints != 0 || len(did.Notes) != 0 {
		t.Errorf("%+v", did)
	}
	if !maps.Equal(before, rowsOf(t, s)) {
		t.Error("the index is not what it was")
	}
	if c := must1(s.Checkpoint(ctx, "box@v1")); !c.Pinned || c.ID != list[1].ID {
		t.Errorf("records that are there stay: %+v", c)
	}
	_, err := s.db.Exec("DELETE FROM blobs WHERE raw % 2 = 0; UPDATE blobs SET off = off + 1, pack = 77")
	must(t, err)
	must1(s.Reindex(ctx))
	if !maps.Equal(before, rowsOf(t, s)) {
		t.Error("the index is not what it was")
	}

	// state.db is lost.
	was := must1(s.Checkpoints(ctx, Filter{}))
	must(t, s.RemoveCheckpoint(ctx, list[0].ID)) // the second one's parent in its manifest
	must(t, s.Close())
	for _, name := range []string{"state.db", "state.db-wal", "state.db-shm"} {
		if err := os.Remove(filepath.Join(root, name)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	s = open(t, root)
	if _, err := s.Sweep(ctx); err != nil {
		t.Fatal(err)
	}
	did := must1(s.Reindex(ctx))
	if did.Packs != 3 || did.Checkpoints != 2 || len(did.Notes) != 1 || !strings.Contains(did.Notes[0], "tags") {
		t.Errorf("%+v", did)
	}
	if !maps.Equal(before, rowsOf(t, s)) {
		t.Error("the index is not what it was")
	}
	now := must1(s.Checkpoints(ctx, Filter{}))
	if len(now) != 2 {
		t.Fatalf("%+v", now)
	}
	for i, c := range now {
		w := was[i]
		w.Spec = must1(canonical(w.Spec)) // as in the manifest
		w.Pinned, w.Tags, w.Added, w.Unchanged, w.Frozen = false, nil, 0, false, 0
		if w.Parent == list[0].ID {
			w.Parent = ""
		}
		if fmt.Sprintf("%+v", c) != fmt.Sprintf("%+v", w) {
			t.Errorf("\n%+v, was\n%+v", c, w)
		}
	}
	same(t, s, list[1].ID, data[1])
	same(t, s, list[2].ID, data[2])
	tidy(t, s)
	if did := must1(s.Reindex(ctx)); did.Checkpoints != 0 || len(did.Notes) != 0 {
		t.Errorf("again: %+v", did)
	}

	// A pack with a damaged footer keeps what the index knows of it.
	paths := packsOf(t, s)
	restore := flip(t, paths[0], must1(os.Stat(paths[0])).Size()-30)
	if did := must1(s.Reindex(ctx)); len(did.Notes) != 2 || !maps.Equal(before, rowsOf(t, s)) {
		t.Errorf("%+v", did)
	}
	restore()
	must(t, os.Rename(paths[0], paths[0]+".away"))
	if did := must1(s.Reindex(ctx)); len(did.Notes) != 1 || did.Packs != 2 ||
		!strings.Contains(did.Notes[0], filepath.Base(paths[0])) {
		t.Errorf("%+v", did)
	}
	must(t, os.Rename(paths[0]+".away", paths[0]))
	if must1(s.Reindex(ctx)); !maps.Equal(before, rowsOf(t, s)) {
		t.Error("the index is not what it was")
	}
}

func TestTags(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b, list, _ := history(t, s)
	other := put(t, s, "other")
	elsewhere := taken(t, s, of(other, "x", KindFiles), sample(5, 100))
	must(t, s.Tag(ctx, list[0].ID, "good"))
	must(t, s.Tag(ctx, list[0].ID, "good"))
	must(t, s.Tag(ctx, list[0].ID, "best"))
	must(t, s.Tag(ctx, elsewhere.ID, "good"))
	must(t, s.Tag(ctx, list[1].ID, "good")) // moves
	for ref, want := range map[string]string{
		"box@good": list[1].ID, "box@best": list[0].ID, "other@good": elsewhere.ID,
	} {
		if c := must1(s.Checkpoint(ctx, ref)); c.ID != want {
			t.Errorf("%s is %s", ref, c.Name)
		}
	}
	if c := must1(s.Checkpoint(ctx, list[0].ID)); !slices.Equal(c.Tags, []string{"best"}) {
		t.Errorf("tags %v", c.Tags)
	}
	wantErr(t, s.Tag(ctx, list[0].ID, "c1"), fault.ErrExists, "c1")
	wantErr(t, s.Tag(ctx, NewID(), "y"), fault.ErrNotFound)
	wantErr(t, s.Tag(ctx, list[0].ID, "a/b"), fault.ErrInvalid)
	wantErr(t, s.Untag(ctx, b.ID, "none"), fault.ErrNotFound)
	must(t, s.Untag(ctx, b.ID, "good"))
	if _, err := s.Checkpoint(ctx, "box@good"); !isErr(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if c := must1(s.Checkpoint(ctx, "other@good")); c.ID != elsewhere.ID {
		t.Error(c)
	}
	must(t, s.Pin(ctx, list[0].ID, true))
	if c := must1(s.Checkpoint(ctx, list[0].ID)); !c.Pinned {
		t.Error("not pinned")
	}
	if must1(s.RemoveUnpinned(ctx, list[0].ID)) || must1(s.Checkpoint(ctx, list[0].ID)).Status != Ready {
		t.Error("a pinned checkpoint is removed")
	}
	must(t, s.Pin(ctx, list[0].ID, false))
	if c := must1(s.Checkpoint(ctx, list[0].ID)); c.Pinned {
		t.Error("still pinned")
	}
	if !must1(s.RemoveUnpinned(ctx, list[0].ID)) || must1(s.RemoveUnpinned(ctx, list[0].ID)) {
		t.Error("a checkpoint that is not pinned is not removed, once")
	}
	_, err := s.Checkpoint(ctx, list[0].ID)
	wantErr(t, err, fault.ErrNotFound)
	wantErr(t, s.Pin(ctx, list[0].ID, true), fault.ErrNotFound)
}

// TestSurveyLongLines: an entry may be longer than a part of a list.
func TestSurveyLongLines(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	for round := range 3 {
		d := must1(s.BeginCheckpoint(ctx, of(b, "", KindFiles)))
		files := map[string][]byte{}
		for i := range 300 {
			files[fmt.Sprintf("f%03d", i)] = fmt.Appendf(nil, "file %d", i)
		}
		files["f100"] = fmt.Appendf(nil, "round %d", round)
		list := must1(entriesOf(ctx, d.Sink(), files))
		long := map[string]string{}
		for i := range 50 {
			long[fmt.Sprintf("user.x%d", i)] = strings.Repeat(string(rune('a'+i%26)), 60<<10)
		}
		list[151].Xattrs, list[152].Xattrs, list[300].Xattrs = long, long, long // the last one too
		must(t, d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
			for _, e := range list {
				if err := fn(e); err != nil {
					return err
				}
			}
			return nil
		}))
		must1(d.Commit(ctx, describe()))
		must(t, d.Close())
	}
	cat := must1(s.loadCatalog(ctx))
	v := newSurvey(cat)
	for _, c := range must1(s.Checkpoints(ctx, Filter{})) {
		n, damage, r, err := v.open(ctx, s, c.ID)
		if err != nil || len(damage) > 0 {
			t.Fatal(err, damage)
		}
		if cuts := must1(r.TreeChunks(ctx, 0)); len(cuts) < 12 {
			t.Fatalf("%d parts are too few to show anything", len(cuts))
		}
		got := map[string]bool{}
		v.each(n, newBitset(v.size()), func(i uint32) { got[cat.ids[i].String()] = true })
		if !maps.Equal(got, needsOf(t, s, c.ID)) {
			t.Errorf("%d chunks, the checkpoint needs %d", len(got), len(needsOf(t, s, c.ID)))
		}
	}
	if did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})); did.Freed != 0 {
		t.Errorf("%+v", did)
	}
}

// TestShunned: a chunk that is known to be damaged is stored anew by the next
// checkpoint that has it, which makes the old one whole again.
func TestShunned(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	c := sample(1, 4000)
	old := taken(t, s, of(b, "old", KindFiles), c)
	path := packsOf(t, s)[0]
	f := must1(os.Open(path))
	r := must1(pack.Open(f))
	for _, blob := range must1(r.Blobs()) {
		flip(t, path, blob.Off+int64(blob.Stored)/2) // and it stays so
	}
	must(t, f.Close())
	rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true}))
	if len(rep.Damaged) != 1 || rep.Damaged[0].Checkpoint.ID != old.ID {
		t.Fatalf("%+v", rep)
	}
	next := taken(t, s, of(b, "next", KindFiles), c)
	if next.Unchanged || next.Added < 4000 {
		t.Errorf("it counts on what is damaged: %+v", next)
	}
	if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); len(rep.Damaged) > 0 {
		t.Errorf("%+v", rep.Damaged)
	}
	for _, c := range must1(s.Checkpoints(ctx, Filter{})) {
		if c.Damaged != "" {
			t.Errorf("%s is still marked: %s", c.Name, c.Damaged)
		}
	}
}
