package store

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// damage changes a file, calls check, and puts the file back.
func damage(t *testing.T, path string, change func([]byte) []byte, check func()) {
	t.Helper()
	good, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, change(append([]byte(nil), good...)), 0o600))
	check()
	must(t, os.WriteFile(path, good, 0o600))
}

// packsOf lists the files of all packs.
func packsOf(t testing.TB, s *Store) (paths []string) {
	t.Helper()
	must(t, s.packFiles(func(name string) error { paths = append(paths, pack.Path(s.packsDir(), name)); return nil }))
	return paths
}

// Every flipped bit and every cut is found, wherever it is, and what it hurts named.
func TestDamageIsFound(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	r := rand.New(rand.NewPCG(1, 1))
	data := content{
		files:  map[string][]byte{"a": block(r, 700), "b": []byte("b")},
		images: map[string][]byte{"pages-1.img": block(r, 4196), "core-1.img": block(r, 50)},
	}
	c := taken(t, s, of(b, "", KindFull), data)
	paths := packsOf(t, s)
	if len(paths) != 1 {
		t.Fatal(paths)
	}
	// The footer is not needed while there is an index; rebuilding the index proves it.
	// All before it is data, except the magic.
	end := 0
	must(t, s.db.QueryRow("SELECT max(off + stored) FROM blobs").Scan(&end))
	manifest := filepath.Join(s.published(c.ID), ManifestName)
	for path, x := range map[string][2]int{paths[0]: {8, end}, manifest: {0, -1}} {
		info, err := os.Stat(path)
		must(t, err)
		size := int(info.Size())
		if x[1] < 0 {
			x[1] = size
		}
		check := func(what string, at int) {
			err := s.VerifyCheckpoint(ctx, c.ID)
			if !isErr(err, fault.ErrCorrupt) || !strings.Contains(err.Error(), c.ID) {
				t.Errorf("%s %s at %d of %d: %v", path, what, at, size, err)
			}
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must(t, err)
		var one [1]byte
		for at := x[0]; at < x[1]; at++ {
			_, err := f.ReadAt(one[:], int64(at))
			must(t, err)
			good := one[0]
			one[0] ^= 1 << (at % 8)
			_, err = f.WriteAt(one[:], int64(at))
			must(t, err)
			check("flipped", at)
			one[0] = good
			_, err = f.WriteAt(one[:], int64(at))
			must(t, err)
		}
		must(t, f.Close())
		for _, at := range []int{0, 1, size / 2, size - 1} {
			damage(t, path, func(b []byte) []byte { return b[:at] }, func() { check("cut", at) })
		}
		damage(t, path, func(b []byte) []byte { return append(b, 0) }, func() { check("longer", size) })
	}
	same(t, s, c.ID, data)
}

// Damage is reported by name, and no reader gets damaged data.
func TestDamageIsNamed(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 900_000)
	data.volume = map[string][]byte{"inside": []byte("a volume's own")}
	c := taken(t, s, of(b, "", KindFull), data)
	path := packsOf(t, s)[0]
	whereIs := func(p []byte) int {
		id := pack.Sum(p)
		at, ok, err := s.locate(ctx, id)
		if err != nil || !ok {
			t.Fatalf("%v, %v", ok, err)
		}
		return int(at.blob.Off)
	}
	pages := data.images["pages-1.img"]
	for name, x := range map[string]struct {
		at    int
		words []string
		read  func(r *Reader) error
	}{
		"file": {whereIs(data.files["small"]), []string{"small: "}, func(r *Reader) error {
			_, err := filesOf(ctx, r, 0)
			return err
		}},
		"two files in one piece": {whereIs(data.files["twin"]), []string{"twin: "}, func(r *Reader) error {
			_, err := filesOf(ctx, r, 0)
			return err
		}},
		"volume": {whereIs(data.volume["inside"]), []string{"vol:inside: "}, func(r *Reader) error {
			_, err := filesOf(ctx, r, 1)
			return err
		}},
		"image": {whereIs(data.images["core-1.img"]), []string{"process image core-1.img: "}, func(r *Reader) error {
			f, err := r.Image(ctx, "core-1.img")
			must(t, err)
			_, err = io.Copy(io.Discard, f)
			wantErr(t, f.Close(), fault.ErrCorrupt)
			return err
		}},
		"pages": {whereIs(pages[64<<10 : 128<<10]), []string{"process image pages-1.img: "}, func(r *Reader) error {
			return r.ExtractImages(ctx, filepath.Join(t.TempDir(), "x"))
		}},
	} {
		damage(t, path, func(b []byte) []byte { b[x.at+3] ^= 4; return b }, func() {
			wantErr(t, s.VerifyCheckpoint(ctx, c.ID), fault.ErrCorrupt,
				append(x.words, "piece blake3:", filepath.Base(path))...)
			r, err := s.OpenCheckpoint(ctx, c.ID)
			must(t, err)
			defer r.Close()
			wantErr(t, x.read(r), fault.ErrCorrupt)
			must(t, r.Verify(ctx, false)) // all is where it should be
			if name == "pages" {
				must(t, r.Close())
			}
		})
	}
	same(t, s, c.ID, data)
}

func TestMissingAndSurplusFiles(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	c := taken(t, s, of(b, "", KindFull), sample(1, 1000))
	dir := s.published(c.ID)
	for path, word := range map[string]string{
		filepath.Join(dir, ManifestName): ManifestName, packsOf(t, s)[0]: "pack",
	} {
		for what, replace := range map[string]func(path string) error{
			"missing": func(string) error { return nil },
			"symlink": func(path string) error { return os.Symlink(path+".was", path) },
			"fifo":    func(path string) error { return unix.Mkfifo(path, 0o600) },
			"dir":     func(path string) error { return os.Mkdir(path, 0o700) },
		} {
			away := filepath.Join(t.TempDir(), "away")
			must(t, os.Rename(path, away))
			must(t, replace(path))
			err := s.VerifyCheckpoint(ctx, c.ID)
			wantErr(t, err, fault.ErrCorrupt, word)
			r, err := s.OpenCheckpoint(ctx, c.ID)
			if err == nil {
				wantErr(t, r.Verify(ctx, false), fault.ErrCorrupt, what[:0])
				must(t, r.Close())
			}
			must(t, os.RemoveAll(path))
			must(t, os.Rename(away, path))
		}
	}
	must(t, os.WriteFile(filepath.Join(dir, "surplus"), nil, 0o600))
	wantErr(t, s.VerifyCheckpoint(ctx, c.ID), fault.ErrCorrupt, "surplus")
	must(t, os.Remove(filepath.Join(dir, "surplus")))
	must(t, s.VerifyCheckpoint(ctx, c.ID))

	// Another checkpoint's directory in its place is not it.
	other := taken(t, s, of(b, "", KindFull), sample(2, 1000))
	must(t, os.Rename(dir, dir+".was"))
	must(t, os.Rename(s.published(other.ID), dir))
	_, err := s.OpenCheckpoint(ctx, c.ID)
	wantErr(t, err, fault.ErrCorrupt, other.ID)
	must(t, os.Rename(dir, s.published(other.ID)))
	// Nor is its own with a manifest that was made to fit.
	must(t, os.Rename(dir+".was", dir))
	damage(t, filepath.Join(dir, ManifestName), func(b []byte) []byte {
		m, err := ParseManifest(b)
		must(t, err)
		m.TCP = "close"
		b, err = m.Encode()
		must(t, err)
		return b
	}, func() {
		_, err := s.OpenCheckpoint(ctx, c.ID)
		wantErr(t, err, fault.ErrCorrupt, ManifestName)
	})
	// A directory that is gone.
	must(t, os.RemoveAll(dir))
	wantErr(t, s.VerifyCheckpoint(ctx, c.ID), fault.ErrCorrupt, "missing")
}

func TestDamagedRecord(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	taken(t, s, of(b, "", KindFiles), sample(1, 10))
	_, err := s.db.Exec("UPDATE sandboxes SET lower = '{'; UPDATE checkpoints SET labels = '['")
	must(t, err)
	_, err = s.Sandboxes(ctx)
	wantErr(t, err, fault.ErrCorrupt, b.ID)
	_, err = s.Checkpoints(ctx, Filter{})
	wantErr(t, err, fault.ErrCorrupt)
}

// small mounts a disk of a few megabytes.
func small(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, unix.Mount("none", dir, "tmpfs", 0, "mode=700,size="+size))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
	return dir
}

func free(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	return int64(st.Bavail) * st.Bsize
}

// A full disk fails the checkpoint at whatever part it hits, gives all the
// room back and is written down; the checkpoints before it stay whole.
func TestNoSpace(t *testing.T) {
	ctx := context.Background()
	dir := small(t, "16m")
	s := open(t, dir)
	b := put(t, s, "c")
	ok := taken(t, s, of(b, "first", KindFull), sample(1, 1<<20))
	before := free(t, dir)
	big := sample(2, 64<<20)
	for name, x := range map[string]content{
		"data":  {files: big.files, images: map[string][]byte{"a.img": nil}},
		"pages": {files: map[string][]byte{"x": nil}, images: map[string][]byte{"pages-1.img": big.files["dir/big"]}},
		"images": {
			files: map[string][]byte{"x": nil}, images: map[string][]byte{"a.img": big.files["dir/big"][:13<<20]},
		},
	} {
		_, err := take(ctx, s, of(b, "second", KindFull), x)
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: %v", name, err)
		}
		if left := drafts(t, s); len(left) > 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
	tidy(t, s)
	if lost := before - free(t, dir); lost > 1<<20 {
		t.Errorf("%d bytes are not free any more", lost)
	}
	list, err := s.Checkpoints(ctx, Filter{All: true})
	must(t, err)
	if len(list) != 4 || list[0].Status != Failed || !strings.Contains(list[0].Error, "no space left") {
		t.Errorf("%+v", list)
	}

	// Not a byte left, for the database either: still an error, still whole.
	filler, err := os.Create(filepath.Join(dir, "filler"))
	must(t, err)
	for {
		if _, err := filler.Write(make([]byte, 4096)); err != nil {
			break
		}
	}
	must(t, filler.Close())
	_, err = take(ctx, s, of(b, "third", KindFull), sample(3, 1<<20))
	if !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	for i := range 1000 { // until the log has no room of its own left
		if err = s.PutSandbox(ctx, sandbox("filler-"+NewID()[:8])); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("after %d: %v", i, err)
			}
			break
		}
	}
	if err == nil {
		t.Error("the database never ran out of room")
	}
	must(t, s.VerifyCheckpoint(ctx, ok.ID))
	must(t, s.Close())
	if s, err = Open(ctx, dir); err != nil { // closing gave the log's room back
		t.Fatal(err)
	}
	must(t, s.RemoveCheckpoint(ctx, ok.ID)) // the way out of a full disk
	must(t, os.Remove(filler.Name()))
	must(t, s.Close())
	s = open(t, dir)
	_, err = s.Sweep(ctx)
	must(t, err)
	tidy(t, s)
	intact(t, s)
	taken(t, s, of(b, "fourth", KindFull), sample(4, 1<<20))
}

// Sweep distinguishes a killed process's leftovers from what is in use.
func TestSweep(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	l, err := s.Lock(ctx, b.ID, "checkpoint", 0)
	must(t, err)
	d, err := s.BeginCheckpoint(ctx, of(b, "n", KindFull))
	must(t, err)
	must(t, fill(d, sample(1, 1000)))
	must(t, os.Mkdir(s.checkpointsDir()+"/tmp-junk", 0o700))
	unknown := NewID()
	must(t, os.Mkdir(s.published(unknown), 0o700))

	did, err := s.Sweep(ctx)
	must(t, err)
	if len(did) != 2 || !strings.Contains(did[0]+did[1], "tmp-junk") || !strings.Contains(did[0]+did[1], unknown) {
		t.Errorf("%q", did)
	}
	c, err := d.Commit(ctx, describe()) // it was held, so it still can
	must(t, err)
	_, err = s.Sweep(ctx)
	must(t, err)
	if !must1(exists(d.Dir())) { // something may be moved out of it yet
		t.Error("the scratch directory was swept before Close")
	}
	l.Unlock()
	did, err = s.Sweep(ctx) // as if it had been killed
	must(t, err)
	if len(did) != 2 || must1(exists(d.Dir())) {
		t.Errorf("%q", did)
	}
	must(t, d.Close())
	must(t, os.Remove(s.published(unknown)))
	if did, err := s.Sweep(ctx); err != nil || len(did) != 0 {
		t.Errorf("%q, %v", did, err)
	}
	must(t, s.VerifyCheckpoint(ctx, c.ID))

	// Published and damaged: not to be completed.
	d, err = s.BeginCheckpoint(ctx, of(b, "m", KindFull))
	must(t, err)
	must(t, fill(d, sample(1, 1000)))
	_, err = d.Commit(ctx, describe())
	must(t, err)
	must(t, d.Close())
	_, err = s.db.Exec("UPDATE checkpoints SET status = 'pending', digest = '' WHERE id = ?", d.ID())
	must(t, err)
	must(t, os.WriteFile(filepath.Join(s.published(d.ID()), ManifestName), []byte("bad"), 0o600))
	did, err = s.Sweep(ctx)
	must(t, err)
	if len(did) != 1 || !strings.Contains(did[0], "discarded") {
		t.Errorf("%q", did)
	}
	if got := must1(s.Checkpoint(ctx, d.ID())); got.Status != Failed || !strings.Contains(got.Error, ManifestName) {
		t.Errorf("%+v", got)
	}
	tidy(t, s)

	// Failures do not pile up.
	for range 3 {
		d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
		must(t, err)
		must(t, d.Abort(ctx, nil))
	}
	_, err = s.db.Exec(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i < 1100) INSERT INTO checkpoints
		(id,name,sandbox_id,sandbox_name,kind,status,error,parent,trigger_name,created,files,processes,bytes,digest,image_digest,labels,frozen,warnings,spec)
		SELECT printf('%032x', i), '', printf('%032x', i), 'c', 'files', 'failed', 'x', '', '', 0, 0, 0, 0, '', '', '{}', 0, '[]', '' FROM n`)
	must(t, err)
	_, err = s.Sweep(ctx)
	must(t, err)
	list, err := s.Checkpoints(ctx, Filter{All: true})
	must(t, err)
	if len(list) != keptRows+1 { // and the ready one
		t.Errorf("%d records are kept", len(list))
	}
}
