package store

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

func init() {
	roles["reclaim"] = reclaimOnce
	roles["draft"] = draftMany
}

func reclaimOnce(ctx context.Context, root string, args []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	_, err = s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})
	if err == nil && len(args) > 0 {
		err = sayMemory()
	}
	return err
}

// some picks files out of a small universe, so that checkpoints share chunks in
// every combination.
func some(r *rand.Rand) content {
	c := content{files: map[string][]byte{}}
	for range 1 + r.IntN(6) {
		k := r.IntN(12)
		c.files[fmt.Sprintf("f%d", r.IntN(8))] = block(rand.New(rand.NewPCG(uint64(k), 9)), 500+k*3000)
	}
	if r.IntN(4) == 0 {
		c.files["big"] = block(rand.New(rand.NewPCG(uint64(r.IntN(3)), 10)), 600<<10)
	}
	return c
}

// draftMany makes and removes checkpoints, reads each one back, and leaves a few.
func draftMany(ctx context.Context, root string, args []string) error {
	s, err := Open(ctx, root)
	if err != nil {
		return err
	}
	defer s.Close()
	seed, _ := strconv.Atoi(args[0])
	rounds, _ := strconv.Atoi(args[1])
	b, err := s.Sandbox(ctx, "box"+args[0])
	if err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(uint64(seed), 3))
	var mine []Checkpoint
	for i := range rounds {
		want := some(r)
		c, err := take(ctx, s, of(b, "", KindFiles), want)
		if err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		rd, err := s.OpenCheckpoint(ctx, c.ID)
		if err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		got, err := filesOf(ctx, rd, 0)
		if err := errors.Join(err, rd.Close()); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
		if !equalFiles(got, want.files) {
			return fmt.Errorf("round %d: other files came back", i)
		}
		if mine = append(mine, c); len(mine) > 3 {
			k := r.IntN(len(mine))
			if err := s.RemoveCheckpoint(ctx, mine[k].ID); err != nil {
				return err
			}
			mine = append(mine[:k], mine[k+1:]...)
		}
	}
	return nil
}

// needsOf is what a checkpoint needs, found out by its Reader.
func needsOf(t testing.TB, s *Store, id string) map[string]bool {
	t.Helper()
	r, err := s.OpenCheckpoint(context.Background(), id)
	must(t, err)
	defer r.Close()
	set := map[string]bool{}
	must(t, r.Chunks(context.Background(), func(d string, _ int64) error { set[d] = true; return nil }))
	return set
}

// rowsOf is the index as it is, chunks by what is known of them.
func rowsOf(t testing.TB, s *Store) map[string]string {
	t.Helper()
	rows, err := s.db.Query("SELECT id, name, off, stored, raw, packed FROM blobs LEFT JOIN packs ON pack = num")
	must(t, err)
	defer rows.Close()
	m := map[string]string{}
	for rows.Next() {
		var id []byte
		var name sql.NullString
		var off, stored, raw, packed int64
		must(t, rows.Scan(&id, &name, &off, &stored, &raw, &packed))
		m[pack.ID(id).String()] = fmt.Sprintf("%s %d %d %d %d", name.String, off, stored, raw, packed)
	}
	must(t, rows.Err())
	return m
}

// stateOf is every file below packs/ and checkpoints/.
func stateOf(t testing.TB, s *Store) map[string]string {
	t.Helper()
	m := map[string]string{}
	for _, dir := range []string{s.packsDir(), s.checkpointsDir()} {
		must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			b, err := os.ReadFile(path)
			m[path] = string(b)
			return err
		}))
	}
	return m
}

func packsSize(t testing.TB, s *Store) (n int64) {
	for _, p := range packsOf(t, s) {
		info, err := os.Stat(p)
		must(t, err)
		n += info.Size()
	}
	return n
}

func history(t testing.TB, s *Store) (b Sandbox, list []Checkpoint, data []content) {
	t.Helper()
	b = put(t, s, "box")
	first := sample(1, 300<<10)
	second := sample(2, 5000)
	second.files["dir/big"] = first.files["dir/big"] // a chunk of the first one's pack
	third := sample(3, 20000)
	third.volume = map[string][]byte{"v": block(rand.New(rand.NewPCG(7, 7)), 3000)}
	for i, c := range []content{first, second, third} {
		kind := KindFull
		if i == 1 {
			kind = KindFiles
			c.images = nil
		}
		k := of(b, fmt.Sprintf("c%d", i), kind)
		if i > 0 {
			k.Parent = list[i-1].ID
		}
		list, data = append(list, taken(t, s, k, c)), append(data, c)
	}
	return b, list, data
}

func TestReclaim(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	_, list, data := history(t, s)
	if did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})); did.Freed != 0 || did.Deleted+did.Rewritten != 0 ||
		did.Before != packsSize(t, s) {
		t.Fatalf("nothing was to be freed: %+v", did)
	}
	// The first pack is half in use, the third not at all.
	must(t, s.RemoveCheckpoint(ctx, list[0].ID))
	must(t, s.RemoveCheckpoint(ctx, list[2].ID))
	before := stateOf(t, s)
	plan := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9, DryRun: true}))
	if !maps.Equal(before, stateOf(t, s)) {
		t.Fatal("a dry run changed something")
	}
	if none := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1, DryRun: true})); none.Deleted != 1 ||
		none.Rewritten != 0 || none.Freed >= plan.Freed {
		t.Errorf("without a limit: %+v", none)
	}
	var last, total int64
	did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9, Progress: func(d, n int64) { last, total = d, n }}))
	if did.Deleted != 1 || did.Rewritten == 0 || did.After != packsSize(t, s) || did.Before-did.After != did.Freed ||
		last != total || total == 0 {
		t.Errorf("%+v, %d of %d", did, last, total)
	}
	if did.Freed != plan.Freed || did.Deleted != plan.Deleted || did.Rewritten != plan.Rewritten ||
		did.Chunks != plan.Chunks {
		t.Errorf("planned %+v, done %+v", plan, did)
	}
	same(t, s, list[1].ID, data[1])
	tidy(t, s)
	need, have := needsOf(t, s, list[1].ID), rowsOf(t, s)
	if len(need) != len(have) {
		t.Errorf("%d chunks are needed, %d are there", len(need), len(have))
	}
	for id := range have {
		if !need[id] {
			t.Errorf("piece %s is there and not needed", id)
		}
	}
	if again := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})); again.Freed != 0 || again.Rewritten != 0 {
		t.Errorf("again: %+v", again)
	}
	// Deleted chunks are stored again when they come back.
	b := must1(s.Sandbox(ctx, "box"))
	back := taken(t, s, of(b, "back", KindFull), data[0])
	same(t, s, back.ID, data[0])
	must(t, s.RemoveCheckpoint(ctx, back.ID))
	must(t, s.RemoveCheckpoint(ctx, list[1].ID))
	if did := must1(s.Reclaim(ctx, ReclaimOptions{})); did.After != 0 || len(packsOf(t, s)) != 0 {
		t.Errorf("an empty store: %+v, %v", did, packsOf(t, s))
	}
}

func TestReclaimRefuses(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	_, list, data := history(t, s)
	must(t, s.RemoveCheckpoint(ctx, list[0].ID))
	r := must1(s.OpenCheckpoint(ctx, list[2].ID))
	m := r.Manifest()
	must(t, r.Close())
	var at place
	id := must1(pack.ParseID(m.Volumes[0].Files.Chunks[0].Digest))
	at, _, err := s.locate(ctx, id)
	must(t, err)
	row := must1(s.packRow(ctx, at.pack))
	for what, hurt := range map[string]struct {
		path string
		off  int64
	}{
		"manifest": {filepath.Join(s.published(list[2].ID), ManifestName), 50},
		"list":     {pack.Path(s.packsDir(), row.name), at.blob.Off + 1},
	} {
		restore := flip(t, hurt.path, hurt.off)
		before, index := stateOf(t, s), rowsOf(t, s)
		_, err := s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})
		wantErr(t, err, fault.ErrCorrupt, list[2].ID)
		if hints := fault.Hint(err); len(hints) == 0 {
			t.Error("no hint")
		}
		if !maps.Equal(before, stateOf(t, s)) || !maps.Equal(index, rowsOf(t, s)) {
			t.Errorf("%s: something was deleted", what)
		}
		restore()
	}
	for _, w := range []float64{-1, 2} {
		_, err := s.Reclaim(ctx, ReclaimOptions{MaxWaste: w})
		wantErr(t, err, fault.ErrInvalid)
	}
	// A reader is open all the time.
	r = must1(s.OpenCheckpoint(ctx, list[1].ID))
	_, err = s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9, Wait: 20 * time.Millisecond})
	wantErr(t, err, fault.ErrBusy)
	must(t, r.Close())
	if n := must1(s.Removed(ctx)); n == 0 {
		t.Error("what could not be freed is forgotten")
	}
	if did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9})); did.Freed == 0 {
		t.Errorf("%+v", did)
	}
	if n := must1(s.Removed(ctx)); n != 0 {
		t.Errorf("%d bytes are freed and still count", n)
	}
	same(t, s, list[1].ID, data[1])
	same(t, s, list[2].ID, data[2])
}

// TestReclaimKeepsDamaged: a pack is not deleted while a chunk in it that is
// needed cannot be copied.
func TestReclaimKeepsDamaged(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	_, list, _ := history(t, s)
	must(t, s.RemoveCheckpoint(ctx, list[0].ID))
	r := must1(s.OpenCheckpoint(ctx, list[1].ID))
	must(t, r.Close())
	big := pack.Sum(must1(os.ReadFile("/dev/null")))
	for id := range needsOf(t, s, list[1].ID) {
		at, _, err := s.locate(ctx, must1(pack.ParseID(id)))
		must(t, err)
		if at.pack == 1 { // in the first one's pack
			big = at.blob.ID
		}
	}
	at, ok, err := s.locate(ctx, big)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	row := must1(s.packRow(ctx, at.pack))
	path := pack.Path(s.packsDir(), row.name)
	restore := flip(t, path, at.blob.Off+at.blob.Off%7)
	did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
	if len(did.Notes) != 1 {
		t.Errorf("%+v", did)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatal("the pack is gone", err)
	}
	restore()
	must(t, s.VerifyCheckpoint(ctx, list[1].ID))
	must(t, s.VerifyCheckpoint(ctx, list[2].ID))
	must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
	tidy(t, s)
}

// flip turns a bit in a file and returns what turns it back.
func flip(t testing.TB, path string, off int64) (restore func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	b := make([]byte, 1)
	_, err = f.ReadAt(b, off)
	must(t, err)
	_, err = f.WriteAt([]byte{b[0] ^ 0x10}, off)
	must(t, err)
	return func() {
		_, err := f.WriteAt(b, off)
		must(t, err)
		must(t, f.Close())
	}
}

// TestReclaimBesideDrafts: processes draft, read and remove while space is
// reclaimed over and over.
func TestReclaimBesideDrafts(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	rounds := 40
	if testing.Short() {
		rounds = 10
	}
	var cmds []*exec.Cmd
	var outs []*bytes.Buffer
	for i := range 3 {
		put(t, s, fmt.Sprintf("box%d", i))
		cmd := helper(t, "draft", root, strconv.Itoa(i), strconv.Itoa(rounds))
		out := &bytes.Buffer{}
		cmd.Stderr = out
		must(t, cmd.Start())
		cmds, outs = append(cmds, cmd), append(outs, out)
	}
	done := make(chan error, len(cmds))
	for i, cmd := range cmds {
		go func() {
			err := cmd.Wait()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, outs[i])
			}
			done <- err
		}()
	}
	var runs, rewritten int
	for left := len(cmds); left > 0; {
		select {
		case err := <-done:
			if left--; err != nil {
				t.Error(err)
			}
			continue
		default:
		}
		did, err := s.Reclaim(ctx, ReclaimOptions{MaxWaste: 0.01})
		if err != nil {
			t.Errorf("reclaim %d: %v", runs, err)
		}
		runs, rewritten = runs+1, rewritten+did.Rewritten
	}
	if runs < 3 || rewritten < 3 {
		t.Errorf("only %d runs, %d packs rewritten", runs, rewritten)
	}
	rep := must1(s.VerifyAll(ctx, VerifyOptions{ReadData: true}))
	if rep.Checkpoints != 9 || len(rep.Damaged)+len(rep.Notes) > 0 {
		t.Errorf("%+v", rep)
	}
	tidy(t, s)
	intact(t, s)
	t.Logf("%d runs, %d packs rewritten", runs, rewritten)
}

func TestUsage(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	_, list, data := history(t, s)
	must(t, s.RemoveCheckpoint(ctx, list[0].ID))
	stored := map[string]int64{}
	var raw, all int64
	rows := must1(s.db.Query("SELECT id, stored, raw FROM blobs"))
	for rows.Next() {
		var id []byte
		var st, rw int64
		must(t, rows.Scan(&id, &st, &rw))
		stored[pack.ID(id).String()] = st
		raw += rw
	}
	must(t, rows.Close())
	for _, p := range packsOf(t, s) {
		all += must1(os.Stat(p)).Size()
	}
	u := must1(s.Usage(ctx))
	if u.Stored != all || u.Raw != raw || u.Packs != 3 || u.Chunks != int64(len(stored)) || len(u.Checkpoints) != 2 {
		t.Fatalf("%+v; the packs have %d bytes, the chunks %d", u, all, raw)
	}
	var logical int64
	for _, c := range data[1:] {
		for _, m := range []map[string][]byte{c.files, c.volume, c.images} {
			for _, b := range m {
				logical += int64(len(b))
			}
		}
	}
	for _, b := range data[1].images {
		logical -= int64(len(b)) // it has files only
	}
	if u.Logical != logical {
		t.Errorf("logical %d, want %d", u.Logical, logical)
	}
	sets := []map[string]bool{
		needsOf(t, s, u.Checkpoints[0].Checkpoint.ID), needsOf(t, s, u.Checkpoints[1].Checkpoint.ID),
	}
	var both int64
	for i, x := range u.Checkpoints {
		manifest := must1(os.Stat(filepath.Join(s.published(x.Checkpoint.ID), ManifestName))).Size()
		needs, unique := manifest, manifest
		for id := range sets[i] {
			if needs += stored[id]; !sets[1-i][id] {
				unique += stored[id]
			}
		}
		if x.Needs != needs || x.Unique != unique || x.Needs != x.Checkpoint.Bytes || x.Unread {
			t.Errorf("%s: needs %d (%d recorded), unique %d; want %d and %d", x.Checkpoint.Name, x.Needs,
				x.Checkpoint.Bytes, x.Unique, needs, unique)
		}
		both += unique
		if i == 0 {
			both += needs - unique
		}
	}
	z := must1(s.Sizes(ctx))
	if got := z.Of([]string{list[1].ID, list[2].ID}); got != both {
		t.Errorf("both need %d, want %d", got, both)
	}
	if got := z.Of([]string{list[2].ID}); got != u.Checkpoints[0].Needs {
		t.Errorf("one needs %d, want %d", got, u.Checkpoints[0].Needs)
	}
	// One removed meanwhile takes nothing, and the sizes of the others are still known.
	if got := z.Of([]string{list[0].ID, list[2].ID}); got != u.Checkpoints[0].Needs {
		t.Errorf("with one that was removed, %d, want %d", got, u.Checkpoints[0].Needs)
	}
	if got, want := z.IDs(), []string{
		u.Checkpoints[0].Checkpoint.ID, u.Checkpoints[1].Checkpoint.ID,
	}; !slices.Equal(got, want) {
		t.Errorf("sizes of %v, want %v", got, want)
	}
	// Waste is what a reclaim frees, to the byte.
	did := must1(s.Reclaim(ctx, ReclaimOptions{MaxWaste: 1e-9}))
	// Packs that are put together save the frame of one.
	if u.Waste == 0 || did.Freed < u.Waste || did.Freed > u.Waste+int64(did.Rewritten)*pack.Overhead {
		t.Errorf("waste %d, freed %d", u.Waste, did.Freed)
	}
	if after := must1(s.Usage(ctx)); after.Waste != 0 || after.Stored != did.After {
		t.Errorf("%+v", after)
	}
}
