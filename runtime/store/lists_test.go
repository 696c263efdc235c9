package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

func init() {
	roles["deep"] = func(ctx context.Context, root string, args []string) error {
		s, err := Open(ctx, root)
		if err != nil {
			return err
		}
		defer s.Close()
		b, err := s.Sandbox(ctx, "box")
		if err == nil {
			_, _, err = treeOf(ctx, s, b, many(3000))
		}
		return err
	}
}

// many returns a list of n directories.
func many(n int) []overlay.Entry {
	list := []overlay.Entry{{Path: ".", Type: overlay.TypeDir}}
	for i := range n {
		list = append(list, overlay.Entry{
			Path: fmt.Sprintf("file-%07d", i), Type: overlay.TypeDir, Mode: 0o755, Mtime: overlay.Time{Sec: int64(i)},
		})
	}
	return list
}

// deep makes a checkpoint with a list of the given depth.
func deep(t *testing.T, s *Store, b Sandbox, depth int) (Checkpoint, []overlay.Entry) {
	t.Helper()
	list := many([]int{100, 3000, 40_000}[depth])
	c, tree, err := treeOf(context.Background(), s, b, list)
	must(t, err)
	if tree.Depth != depth {
		t.Fatalf("depth %d, want %d", tree.Depth, depth)
	}
	return c, list
}

// treeIs holds the list of a checkpoint against entries.
func treeIs(t *testing.T, s *Store, id string, want []overlay.Entry) {
	t.Helper()
	ctx := context.Background()
	r := must1(s.OpenCheckpoint(ctx, id))
	defer r.Close()
	at := 0
	must(t, r.entries(ctx, 0, func(e overlay.Entry) error {
		if at == len(want) || e.Path != want[at].Path || e.Mode != want[at].Mode || e.Mtime != want[at].Mtime {
			t.Fatalf("entry %d is %+v", at, e)
		}
		at++
		return nil
	}))
	if at != len(want) {
		t.Fatalf("%d entries, want %d", at, len(want))
	}
}

// listsOf returns the chunks of the lists above the lines of a checkpoint.
func listsOf(t *testing.T, s *Store, id string) []overlay.Chunk {
	t.Helper()
	r := must1(s.OpenCheckpoint(context.Background(), id))
	defer r.Close()
	return must1(r.list(context.Background(), 0)).lists
}

// A list comes back whatever its depth, and a change of one line costs one part of each level.
func TestDeepLists(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	for depth, version := range []int{Version, VersionDeep, VersionDeep} {
		c, list := deep(t, s, b, depth)
		treeIs(t, s, c.ID, list)
		r := must1(s.OpenCheckpoint(ctx, c.ID))
		m := r.Manifest()
		if m.Version != version || len(m.Files[0].Chunks) > maxTop {
			t.Errorf("version %d, %d chunks at depth %d", m.Version, len(m.Files[0].Chunks), depth)
		}
		must(t, r.Close())
		list[len(list)/2].Mode = 0o700
		next, _, err := treeOf(ctx, s, b, list)
		must(t, err)
		treeIs(t, s, next.ID, list)
		if depth == 2 && next.Added > c.Added/20 {
			t.Errorf("a line costs %d bytes of %d", next.Added, c.Added)
		}
	}
	tidy(t, s)
}

// fileBytes is how long the files of a store are, but for its database.
func fileBytes(t *testing.T, s *Store) (n int64) {
	t.Helper()
	must(t, filepath.WalkDir(s.Root(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), "state.db") {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	}))
	return n
}

// A checkpoint that changed nothing adds at most 2 kB to the files of the store.
func TestUnchangedBytes(t *testing.T) {
	ctx := context.Background()
	for _, n := range []int{10_000, 100_000} {
		data := func(i int) []byte { return fmt.Appendf(nil, "%08d", i%10_000) }
		s := open(t, t.TempDir())
		b := put(t, s, "box")
		var list []overlay.Entry
		for i, e := range many(n) {
			if i > 0 {
				e.Type, e.Size, e.Digest = overlay.TypeFile, 8, digestOf(data(i))
			}
			list = append(list, e)
		}
		take := func() {
			d := must1(s.BeginCheckpoint(ctx, of(b, "", KindFiles)))
			must(t, d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
				for i, e := range list {
					if 0 < i && i <= 10_000 {
						if err := d.PutChunk(ctx, e.Digest, data(i)); err != nil {
							return err
						}
					}
					if err := fn(e); err != nil {
						return err
					}
				}
				return nil
			}))
			must1(d.Commit(ctx, describe()))
			must(t, d.Close())
		}
		take()
		take() // which knows what the store has
		before := fileBytes(t, s)
		take()
		if more := fileBytes(t, s) - before; more > 2048 {
			t.Errorf("with %d files an unchanged checkpoint adds %d bytes", n, more)
		}
		tidy(t, s)
	}
}

// Each part of a list that is damaged is found, and nothing that the checkpoint needs goes away for it.
func TestDeepListDamaged(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	for depth := 1; depth <= 2; depth++ {
		c, list := deep(t, s, b, depth)
		gone, _, err := treeOf(ctx, s, b, slices.Delete(slices.Clone(list), 50, 60))
		must(t, err)
		must(t, s.RemoveCheckpoint(ctx, gone.ID)) // there is something to reclaim
		partsDamaged(t, s, c, listsOf(t, s, c.ID), "list of files 0", func() {
			treeIs(t, s, c.ID, list)
		}, func(r *Reader) {
			_, err := r.Tree(ctx, 0)
			wantErr(t, err, fault.ErrCorrupt)
			_, err = r.TreeChunks(ctx, 0)
			wantErr(t, err, fault.ErrCorrupt)
		})
	}
	tidy(t, s)
}

// partsDamaged damages parts of a list of a checkpoint, one after the other, and removes the
// checkpoint in the end. what is what the list is called, same compares what is restored, and
// reads tries what goes by the list.
func partsDamaged(
	t *testing.T, s *Store, c Checkpoint, parts []overlay.Chunk, what string, same func(), reads func(r *Reader),
) {
	t.Helper()
	ctx := context.Background()
	for _, p := range []overlay.Chunk{parts[0], parts[len(parts)/2], parts[len(parts)-1]} {
		at, ok, err := s.locate(ctx, must1(pack.ParseID(p.Digest)))
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		row := must1(s.packRow(ctx, at.pack))
		mend := flip(t, pack.Path(s.packsDir(), row.name), at.blob.Off+int64(at.blob.Stored)/2)
		wantErr(t, s.VerifyCheckpoint(ctx, c.ID), fault.ErrCorrupt, what, p.Digest[:16])
		r := must1(s.OpenCheckpoint(ctx, c.ID))
		reads(r)
		wantErr(t, r.Chunks(ctx, func(string, int64) error { return nil }), fault.ErrCorrupt)
		must(t, r.Close())
		rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true}))
		if len(rep.Damaged) != 1 || rep.Damaged[0].Checkpoint.ID != c.ID ||
			!strings.HasPrefix(rep.Damaged[0].What[0], what+": ") {
			t.Errorf("%+v", rep)
		}
		_, err = s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})
		wantErr(t, err, fault.ErrCorrupt, "nothing was deleted")
		mend()
		if rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true})); len(rep.Damaged) > 0 {
			t.Fatalf("%+v", rep)
		}
		same()
	}
	must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
	same()
	must(t, s.RemoveCheckpoint(ctx, c.ID))
	must1(s.Reclaim(ctx, ReclaimOptions{}))
	if left := rowsOf(t, s); len(left) > 0 {
		t.Errorf("%d chunks are left", len(left))
	}
}

// A checkpoint with a deep list travels, and not without a part of the list.
func TestDeepListPulled(t *testing.T) {
	ctx := context.Background()
	from, to := open(t, t.TempDir()), open(t, t.TempDir())
	b := put(t, from, "box")
	c, list := deep(t, from, b, 2)
	pulled(t, from, to, c, listsOf(t, from, c.ID))
	treeIs(t, to, c.ID, list)
	must1(to.Reindex(ctx))
	treeIs(t, to, c.ID, list)
	tidy(t, to)
}

// pulled has a store pull a checkpoint, first without the first and without the last of some parts.
func pulled(t *testing.T, from, to *Store, c Checkpoint, list []overlay.Chunk) {
	t.Helper()
	ctx := context.Background()
	parts := map[string]bool{}
	for _, p := range list {
		parts[p.Digest] = true
	}
	var spare []int
	n := 0
	r := must1(from.OpenCheckpoint(ctx, c.ID))
	must(t, r.Chunks(ctx, func(digest string, _ int64) error {
		if n++; parts[digest] {
			spare = append(spare, n)
		}
		return nil
	}))
	must(t, r.Close())
	if len(spare) != len(parts) || len(parts) < 3 {
		t.Fatalf("%d of %d parts are among what the checkpoint needs", len(spare), len(parts))
	}
	for _, i := range []int{spare[0], spare[len(spare)-1]} {
		_, err := pull(ctx, from, to, c.ID, i)
		wantErr(t, err, fault.ErrCorrupt)
		must(t, to.RemoveCheckpoint(ctx, c.ID)) // the record of the failure
	}
	if got := must1(pull(ctx, from, to, c.ID, 0)); got.Digest != c.Digest {
		t.Errorf("digest %s, want %s", got.Digest, c.Digest)
	}
}

// A manifest from elsewhere is checked against its lists.
func TestHostileDeepList(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "box")
	c, _ := deep(t, s, b, 1)
	r := must1(s.OpenCheckpoint(ctx, c.ID))
	good := r.Manifest()
	lines := must1(r.TreeChunks(ctx, 0))
	must(t, r.Close())
	for name, harm := range map[string]func(tree *Tree){
		"too shallow":          func(tree *Tree) { tree.Depth = 0 },
		"deeper than it is":    func(tree *Tree) { tree.Depth++ },
		"too deep":             func(tree *Tree) { tree.Depth = maxDepth + 1 },
		"a negative depth":     func(tree *Tree) { tree.Depth = -1 },
		"bytes":                func(tree *Tree) { tree.Bytes++ },
		"length of a part":     func(tree *Tree) { tree.Chunks[0].Len += listRecord },
		"lines for a list":     func(tree *Tree) { tree.Chunks = slices.Clone(lines[:1]) },
		"a part twice":         func(tree *Tree) { tree.Chunks = append(tree.Chunks, tree.Chunks[0]) },
		"no pieces":            func(tree *Tree) { tree.Chunks = Chunks{} },
		"more pieces than fit": func(tree *Tree) { tree.Chunks = slices.Repeat(tree.Chunks, maxTop+1) },
		"a part not there":     func(tree *Tree) { tree.Chunks[0].Digest = digestOf([]byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			raw := must1(good.Encode())
			m := must1(ParseManifest(raw))
			m.ID = NewID()
			harm(&m.Files[0])
			m.Version = m.version()
			d := must1(s.BeginCheckpoint(ctx, Checkpoint{
				ID: m.ID, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
			}))
			_, err := d.CommitAs(ctx, m)
			wantErr(t, err, fault.ErrCorrupt)
			must(t, d.Abort(ctx, err))
		})
	}
	tidy(t, s)
}

func FuzzReadList(f *testing.F) {
	f.Add([]byte("short"), 1)
	f.Add(make([]byte, 2*listRecord), 2)
	f.Fuzz(func(t *testing.T, data []byte, depth int) {
		id := pack.Sum(data)
		tree := Tree{
			Depth: depth % (maxDepth + 1), Bytes: 100, Chunks: Chunks{{Digest: id.String(), Len: int64(len(data))}},
		}
		l, err := readList(&tree, func(want pack.ID) ([]byte, error) {
			if want != id {
				return nil, fault.ErrCorrupt
			}
			return data, nil
		})
		if err != nil && !errors.Is(err, fault.ErrCorrupt) {
			t.Fatal(err)
		}
		if err == nil && tree.Depth > 0 && checkLines(&tree, l.lines) != nil {
			t.Fatalf("%+v", l)
		}
	})
}
