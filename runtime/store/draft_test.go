package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestCommit(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	b := put(t, s, "c")
	parent := NewID()
	for i, kind := range []string{KindFull, KindFiles} {
		for j, size := range []int{0, 1, chunkSize - 1, chunkSize, chunkSize + 1, 5*chunkSize + 17} {
			data := sample(uint64(i*10+j), size)
			c := of(b, fmt.Sprintf("%s-%d", kind, size), kind)
			c.Parent, c.Labels, c.Frozen = parent, map[string]string{"a": "b"}, time.Second
			d, err := s.BeginCheckpoint(ctx, c)
			must(t, err)
			must(t, fill(d, data))
			must(t, os.WriteFile(filepath.Join(d.Dir(), "dump.log"), []byte("scratch"), 0o600))
			must(t, os.Mkdir(filepath.Join(d.Dir(), "work"), 0o700))
			m := describe()
			m.Warnings = []string{"an exec session was left out"}
			done, err := d.Commit(ctx, m)
			must(t, err)
			must(t, d.Abort(ctx, errors.New("late"))) // does nothing any more
			same(t, s, done.ID, data)
			must(t, s.VerifyCheckpoint(ctx, done.ID))

			got, err := s.Checkpoint(ctx, done.ID)
			must(t, err)
			if d := cmp.Diff(done, got, cmp.Transformer("labels", func(m map[string]string) string { return fmt.Sprint(m) })); d != "" {
				t.Errorf("returned and recorded differ: %s", d)
			}
			if got.Status != Ready || got.Files != 7 || got.Frozen != time.Second || got.Parent != parent || !slices.Equal(got.Warnings, m.Warnings) || (got.Processes == 2) != (kind == KindFull) {
				t.Errorf("%+v", got)
			}
			var size int64
			must(t, filepath.WalkDir(s.published(done.ID), func(path string, e os.DirEntry, err error) error {
				must(t, err)
				info, err := e.Info()
				must(t, err)
				if mode := map[bool]os.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; info.Mode().Perm() != mode {
					t.Errorf("%s has mode %o", path, info.Mode().Perm())
				}
				if !e.IsDir() {
					size += info.Size()
				}
				return nil
			}))
			if size != got.Bytes {
				t.Errorf("bytes %d, on disk %d", got.Bytes, size)
			}
			manifest, err := os.ReadFile(filepath.Join(s.published(done.ID), ManifestName))
			must(t, err)
			if digestOf(manifest) != got.Digest {
				t.Error("the digest is not the manifest's")
			}
		}
	}
	tidy(t, s)
	must(t, s.SetFrozen(ctx, must1(s.Checkpoint(ctx, "c@full-1")).ID, 5*time.Millisecond))
	if got := must1(s.Checkpoint(ctx, "c@full-1")); got.Frozen != 5*time.Millisecond {
		t.Error(got.Frozen)
	}
	wantErr(t, s.SetFrozen(ctx, NewID(), 1), fault.ErrNotFound)
}

func must1[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestBeginRefuses(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a, b := put(t, s, "a"), put(t, s, "b")
	done := taken(t, s, of(a, "n", KindFiles), sample(1, 10))
	_, err := s.BeginCheckpoint(ctx, of(a, "n", KindFiles))
	wantErr(t, err, fault.ErrExists, "n", done.ID[:12])
	again := of(a, "", KindFiles)
	again.ID = done.ID
	_, err = s.BeginCheckpoint(ctx, again)
	wantErr(t, err, fault.ErrExists, done.ID)
	taken(t, s, of(b, "n", KindFiles), sample(1, 10)) // the name is the sandbox's

	for _, change := range []func(*Checkpoint){
		func(c *Checkpoint) { c.Name = "../x" }, func(c *Checkpoint) { c.ID = "../../../etc" }, func(c *Checkpoint) { c.SandboxID = "" },
		func(c *Checkpoint) { c.SandboxName = "" }, func(c *Checkpoint) { c.Kind = "" }, func(c *Checkpoint) { c.Parent = "x" }, func(c *Checkpoint) { c.Trigger = "a\nb" },
		func(c *Checkpoint) { c.Trigger = strings.Repeat("t", 257) }, func(c *Checkpoint) { c.Labels = map[string]string{"=": ""} }, func(c *Checkpoint) { c.Spec = []byte("nope") },
	} {
		c := of(a, "", KindFiles)
		change(&c)
		_, err := s.BeginCheckpoint(ctx, c)
		wantErr(t, err, fault.ErrInvalid)
	}
	tidy(t, s)
}

// A name that was free at Begin and is taken at Commit goes to the first.
func TestNameRace(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	a := put(t, s, "a")
	d, err := s.BeginCheckpoint(ctx, of(a, "n", KindFiles))
	must(t, err)
	must(t, fill(d, sample(1, 10)))
	won := taken(t, s, of(a, "n", KindFiles), sample(2, 10))
	_, err = d.Commit(ctx, describe())
	wantErr(t, err, fault.ErrExists, won.ID[:12])
	must(t, d.Abort(ctx, err))
	tidy(t, s)
	if got := must1(s.Checkpoint(ctx, "a@n")); got.ID != won.ID {
		t.Error(got.ID)
	}
}

func TestCommitRefuses(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	for name, x := range map[string]struct {
		kind     string
		prepare  func(*Draft) error
		sentinel error
		words    string
	}{
		"no streams": {KindFiles, func(d *Draft) error { return nil }, fault.ErrInvalid, ArchiveName},
		"one stream": {KindFiles, func(d *Draft) error { w, err := d.FilesWriter(); return errors.Join(err, w.Close()) }, fault.ErrInvalid, TreeName},
		"open stream": {KindFiles, func(d *Draft) error {
			_, err := d.FilesWriter()
			w, err2 := d.TreeWriter()
			return errors.Join(err, err2, w.Close())
		}, fault.ErrInvalid, "not closed"},
		"no images":    {KindFull, func(d *Draft) error { d.CRIUDir(); return fill(d, content{}) }, fault.ErrInvalid, "process images"},
		"no directory": {KindFull, func(d *Draft) error { return fill(d, content{}) }, nil, ImagesName},
		"images":       {KindFiles, func(d *Draft) error { _ = fill(d, content{}); return os.WriteFile(d.CRIUDir()+"/x.img", nil, 0o600) }, fault.ErrInvalid, "files-only"},
		"a symlink": {KindFull, func(d *Draft) error {
			_ = fill(d, sample(1, 10))
			return os.Symlink("/etc/passwd", d.CRIUDir()+"/x.img")
		}, fault.ErrCorrupt, "x.img"},
		"a directory": {KindFull, func(d *Draft) error { _ = fill(d, sample(1, 10)); return os.Mkdir(d.CRIUDir()+"/sub", 0o700) }, fault.ErrCorrupt, "sub"},
		"a fifo":      {KindFull, func(d *Draft) error { _ = fill(d, sample(1, 10)); return unix.Mkfifo(d.CRIUDir()+"/p.img", 0o600) }, fault.ErrCorrupt, "p.img"},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := s.BeginCheckpoint(ctx, of(b, "", x.kind))
			must(t, err)
			must(t, x.prepare(d))
			_, err = d.Commit(ctx, describe())
			wantErr(t, err, x.sentinel, x.words)
			must(t, d.Abort(ctx, err))
			c := must1(s.Checkpoint(ctx, d.ID()))
			if c.Status != Failed || c.Error == "" {
				t.Errorf("%+v", c)
			}
			_, err = d.Commit(ctx, describe())
			wantErr(t, err, fault.ErrState)
			_, err = s.OpenCheckpoint(ctx, d.ID())
			wantErr(t, err, fault.ErrState)
		})
	}
	tidy(t, s)
}

func TestCancelBeforeCommit(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	ctx, cancel := context.WithCancel(context.Background())
	d, err := s.BeginCheckpoint(ctx, of(b, "n", KindFull))
	must(t, err)
	must(t, fill(d, sample(1, 1000)))
	cancel()
	_, err = d.Commit(ctx, describe())
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	must(t, d.Abort(ctx, err)) // a cancelled context does not stop it
	tidy(t, s)
	if c := must1(s.Checkpoint(context.Background(), d.ID())); c.Status != Failed || !strings.Contains(c.Error, "canceled") {
		t.Errorf("%+v", c)
	}
}

func TestAbort(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	secret := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(secret, []byte("secret"), 0o600))
	var last *Draft
	for i := range keptFailures + 3 {
		d, err := s.BeginCheckpoint(ctx, of(b, "", KindFull))
		must(t, err)
		must(t, os.Mkdir(filepath.Join(d.Dir(), "work"), 0o700))
		must(t, os.WriteFile(filepath.Join(d.Dir(), "work", "dump.log"), append(bytes.Repeat([]byte("x"), keptLog), "the end"...), 0o644))
		must(t, os.Symlink(secret, filepath.Join(d.Dir(), "link.log")))
		must(t, unix.Mkfifo(filepath.Join(d.Dir(), "fifo.log"), 0o600))
		w, err := d.FilesWriter()
		must(t, err)
		_, err = w.Write(bytes.Repeat([]byte("data"), chunkSize)) // unfinished streams
		must(t, err)
		must(t, d.Abort(ctx, fmt.Errorf("reason %d", i), "work/dump.log", "link.log", "fifo.log", "../"+filepath.Base(secret), "/etc/passwd", "none.log"))
		must(t, d.Abort(ctx, errors.New("again")))
		_, err = w.Write([]byte("x"))
		wantErr(t, err, nil)
		last = d
	}
	tidy(t, s)
	c := must1(s.Checkpoint(ctx, last.ID()))
	if c.Error != fmt.Sprintf("reason %d", keptFailures+2) {
		t.Errorf("%+v", c)
	}
	logs, err := os.ReadDir(s.FailedDir(last.ID()))
	must(t, err)
	if len(logs) != 1 || logs[0].Name() != "work_dump.log" {
		t.Fatalf("kept %v", logs)
	}
	log, err := os.ReadFile(filepath.Join(s.FailedDir(last.ID()), "work_dump.log"))
	must(t, err)
	if len(log) != keptLog || !bytes.HasSuffix(log, []byte("the end")) {
		t.Errorf("%d bytes kept", len(log))
	}
	if kept, err := os.ReadDir(s.failedDir()); err != nil || len(kept) != keptFailures {
		t.Errorf("%d kept, %v", len(kept), err)
	}
	// Its record can be removed, logs included.
	must(t, s.RemoveCheckpoint(ctx, last.ID()))
	if there := must1(exists(s.FailedDir(last.ID()))); there {
		t.Error("the logs are still there")
	}
}

func TestWriters(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFiles))
	must(t, err)
	w, err := d.FilesWriter()
	must(t, err)
	_, err = d.FilesWriter()
	wantErr(t, err, fault.ErrInvalid)
	must(t, w.Close())
	must(t, w.Close())
	_, err = w.Write([]byte("x"))
	wantErr(t, err, nil)
	must(t, d.Abort(ctx, nil))
	_, err = d.TreeWriter()
	wantErr(t, err, fault.ErrInvalid)
}

// The watcher may see a file at any length, or see it replaced.
func TestWatchImages(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	for _, replace := range []bool{false, true} {
		d, err := s.BeginCheckpoint(ctx, of(b, "", KindFull))
		must(t, err)
		must(t, d.WatchImages())
		must(t, d.WatchImages())
		data := sample(3, 12<<20)
		big := data.images["pages-1.img"]
		if replace {
			must(t, os.WriteFile(filepath.Join(d.CRIUDir(), "other"), nil, 0o600))
			must(t, os.WriteFile(filepath.Join(d.CRIUDir(), "pages-1.img"), bytes.Repeat([]byte("old"), 3<<20), 0o600))
			time.Sleep(5 * watchEvery)
			must(t, os.Remove(filepath.Join(d.CRIUDir(), "other")))
			must(t, os.Remove(filepath.Join(d.CRIUDir(), "pages-1.img")))
		}
		f, err := os.Create(filepath.Join(d.CRIUDir(), "pages-1.img"))
		must(t, err)
		for off := 0; off < len(big); off += 1 << 20 {
			_, err := f.Write(big[off : off+1<<20])
			must(t, err)
			time.Sleep(watchEvery / 2)
		}
		must(t, f.Close())
		delete(data.images, "pages-1.img")
		must(t, fill(d, data))
		data.images["pages-1.img"] = big
		_, err = d.Commit(ctx, describe())
		must(t, err)
		same(t, s, d.ID(), data)
	}
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFull))
	must(t, err)
	must(t, d.WatchImages())
	must(t, d.Abort(ctx, nil))
	tidy(t, s)
}

func TestRemoveCheckpoint(t *testing.T) {
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	var ids []string
	for range 3 {
		c := of(b, "", KindFull)
		if len(ids) > 0 {
			c.Parent = ids[len(ids)-1]
		}
		ids = append(ids, taken(t, s, c, sample(1, 100)).ID)
	}
	must(t, s.SetHead(ctx, b.ID, ids[1], 1))
	must(t, s.RemoveCheckpoint(ctx, ids[1]))
	must(t, s.RemoveCheckpoint(ctx, ids[1]))
	if c := must1(s.Checkpoint(ctx, ids[2])); c.Parent != ids[0] {
		t.Errorf("parent %s, want %s", c.Parent, ids[0])
	}
	if b := must1(s.Sandbox(ctx, b.ID)); b.Head != ids[0] {
		t.Errorf("head %s, want %s", b.Head, ids[0])
	}
	must(t, s.VerifyCheckpoint(ctx, ids[2])) // its manifest is as it was
	_, err := s.Checkpoint(ctx, ids[1])
	wantErr(t, err, fault.ErrNotFound)
	_, err = s.OpenCheckpoint(ctx, ids[1])
	wantErr(t, err, fault.ErrNotFound)
	must(t, s.RemoveCheckpoint(ctx, ids[0]))
	if c := must1(s.Checkpoint(ctx, ids[2])); c.Parent != "" {
		t.Errorf("parent %s", c.Parent)
	}
	wantErr(t, s.RemoveCheckpoint(ctx, "../x"), fault.ErrInvalid)
	tidy(t, s)

	// One that is being made: its commit finds out.
	d, err := s.BeginCheckpoint(ctx, of(b, "", KindFull))
	must(t, err)
	must(t, fill(d, sample(1, 10)))
	must(t, s.RemoveCheckpoint(ctx, d.ID()))
	_, err = d.Commit(ctx, describe())
	wantErr(t, err, nil)
	must(t, d.Abort(ctx, err))
	tidy(t, s)
}

func TestReaderOutlivesCancelAndPartialRead(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 3<<20)
	c := taken(t, s, of(b, "", KindFiles), data)
	r, err := s.OpenCheckpoint(context.Background(), c.ID)
	must(t, err)
	defer r.Close()
	f, err := r.Files(context.Background())
	must(t, err)
	_, err = io.ReadFull(f, make([]byte, 1000))
	must(t, err)
	must(t, f.Close()) // reads on and proves the rest
	wantErr(t, f.Close(), os.ErrClosed)

	ctx, cancel := context.WithCancel(context.Background())
	f, err = r.Files(ctx)
	must(t, err)
	_, err = io.ReadFull(f, make([]byte, 1000))
	must(t, err)
	cancel()
	if err := f.Close(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestManifest(t *testing.T) {
	s := open(t, t.TempDir())
	b := sandbox("c")
	b.Spec = json.RawMessage("{\"z\": 1.50, \"a\": [1, {\"y\":\"<&>\\u2028\", \"b\":null}],\n \"cpus\":1e2}")
	c := taken(t, s, of(b, "n", KindFull), sample(1, 100))
	data, err := os.ReadFile(filepath.Join(s.published(c.ID), ManifestName))
	must(t, err)
	if !bytes.Contains(data, []byte(`"spec":{"a":[1,{"b":null,"y":"<&>\u2028"}],"cpus":1e2,"z":1.50}`)) {
		t.Errorf("not canonical: %s", data)
	}
	m, err := ParseManifest(data)
	must(t, err)
	if m.SandboxName != "c" || m.Name != "n" || m.TCP != "established" || m.Versions.CRIU != "4.1" || len(m.Processes.Images) != 4 || m.Processes.Images[0].Name != "core-1.img" || m.Processes.List[1].Command != "sleep" {
		t.Errorf("%+v", m)
	}
	for from, to := range map[string]string{
		`"version":1`: `"version":0`, `"kind":"full"`: `"kind":"files"`, `"name":"core-1.img"`: `"name":"../../x"`, `"tcp":"established"`: `"tcp":"established","more":1`,
		`"processes":2`: `"processes": 2`, c.ID: "../../etc/passwd", `"entries":7`: `"entries":-7`, `"name":"files.tar.zst"`: `"name":"manifest.json"`, "blake3:": "sha256:", `{"version":1`: `{"version":1,"version":1`,
		`"count":2`: `"count":2.0`, `"kind"`: `"Kind"`,
	} {
		if !bytes.Contains(data, []byte(from)) {
			if from == `"processes":2` {
				continue
			}
			t.Fatalf("no %s in %s", from, data)
		}
		_, err := ParseManifest(bytes.Replace(data, []byte(from), []byte(to), 1))
		wantErr(t, err, fault.ErrCorrupt)
	}
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":1`), []byte(`"version":2`), 1))
	wantErr(t, err, fault.ErrUnsupported)
	for _, bad := range [][]byte{nil, []byte("{}"), []byte("null"), append(slices.Clone(data), '\n'), data[:len(data)-1]} {
		_, err := ParseManifest(bad)
		wantErr(t, err, fault.ErrCorrupt)
	}
}

func TestManifestManaged(t *testing.T) {
	id := strings.Repeat("a", 32)
	digest := digestPrefix + strings.Repeat("0", 64)
	m := Manifest{Version: Version, ID: id, SandboxID: id, Kind: KindFiles, Managed: map[string]Managed{
		"/etc/hosts":    {Mode: 0o600, UID: 7, Data: []byte("\xff\x00\n")},
		"/etc/hostname": {Mode: 0o644},
	}}
	m.Files.Archive = Blob{Name: ArchiveName, Digest: digest}
	m.Files.Tree = Blob{Name: TreeName, Digest: digest}
	data, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseManifest(data)
	if err != nil {
		t.Fatal(err)
	}
	if f := got.Managed["/etc/hosts"]; string(f.Data) != "\xff\x00\n" || f.Mode != 0o600 || f.UID != 7 || len(got.Managed) != 2 {
		t.Errorf("%+v", got.Managed)
	}
	for what, harm := range map[string]func(){
		"a relative path": func() { m.Managed = map[string]Managed{"etc/hosts": {}} },
		"a path with ..":  func() { m.Managed = map[string]Managed{"/etc/../x": {}} },
		"a strange mode":  func() { m.Managed = map[string]Managed{"/x": {Mode: 0o100644}} },
		"too much":        func() { m.Managed = map[string]Managed{"/x": {Data: make([]byte, MaxManaged+1)}} },
	} {
		harm()
		data, err := m.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseManifest(data); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := ParseManifest(bytes.Replace(data, []byte(`"data":""`), []byte(`"data":null`), 1)); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a second form: %v", err)
	}
}
