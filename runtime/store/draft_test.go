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
	"github.com/agentbox/agentbox/overlay"
)

func TestCommit(t *testing.T) {
	ctx := context.Background()
	root := t.TempDir()
	s := open(t, root)
	b := put(t, s, "c")
	parent := NewID()
	packed := int64(0)
	for i, kind := range []string{KindFull, KindFiles} {
		for j, size := range []int{0, 1, 4096, 4097, 300_000, 3<<20 + 17} {
			data := sample(uint64(i*10+j), size)
			if j%2 == 1 {
				data.volume = map[string][]byte{"v": []byte("volume"), "w": data.files["dir/big"]}
			}
			c := of(b, fmt.Sprintf("%s-%d", kind, size), kind)
			c.Parent, c.Labels, c.Frozen = parent, map[string]string{"a": "b"}, time.Second
			d, err := s.BeginCheckpoint(ctx, c)
			must(t, err)
			must(t, fill(d, data))
			must(t, os.WriteFile(filepath.Join(d.Dir(), "dump.log"), []byte("scratch"), 0o600))
			wantErr(t, d.Close(), fault.ErrState)
			m := describe()
			m.Warnings = []string{"an exec session was left out"}
			if data.volume != nil {
				m.Volumes = []Volume{{Name: "vol"}}
			}
			done, err := d.Commit(ctx, m)
			must(t, err)
			if !must1(exists(filepath.Join(d.Dir(), "dump.log"))) {
				t.Error("the scratch directory is gone before Close")
			}
			if j == 0 {
				must(t, d.Abort(ctx, errors.New("late"))) // is Close now
			}
			must(t, d.Close())
			must(t, d.Close())
			same(t, s, done.ID, data)

			got, err := s.Checkpoint(ctx, done.ID)
			must(t, err)
			if d := cmp.Diff(done, got, cmp.Transformer("labels", func(m map[string]string) string {
				return fmt.Sprint(m)
			})); d != "" {
				t.Errorf("returned and recorded differ: %s", d)
			}
			if got.Status != Ready || got.Files != 6 || got.Frozen != time.Second || got.Parent != parent ||
				!slices.Equal(got.Warnings, m.Warnings) || (got.Processes == 2) != (kind == KindFull) ||
				got.Unchanged || got.Added == 0 {
				t.Errorf("%+v", got)
			}
			packed += got.Added
			entries, err := os.ReadDir(s.published(done.ID))
			must(t, err)
			if len(entries) != 1 || entries[0].Name() != ManifestName {
				t.Errorf("published: %v", entries)
			}
			manifest, err := os.ReadFile(filepath.Join(s.published(done.ID), ManifestName))
			must(t, err)
			if digestOf(manifest) != got.Digest {
				t.Error("the digest is not the manifest's")
			}
		}
	}
	tidy(t, s)
	// All of what was added lies there, owner-only.
	must(t, filepath.WalkDir(s.packsDir(), func(path string, e os.DirEntry, err error) error {
		must(t, err)
		info, err := e.Info()
		must(t, err)
		if mode := map[bool]os.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; info.Mode().Perm() != mode {
			t.Errorf("%s has mode %o", path, info.Mode().Perm())
		}
		if !e.IsDir() {
			packed -= info.Size()
		}
		return nil
	}))
	if packed != 0 {
		t.Errorf("the records say %d bytes more than there are", packed)
	}
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
		func(c *Checkpoint) { c.Name = "../x" }, func(c *Checkpoint) {
			c.ID = "../../../etc"
		}, func(c *Checkpoint) { c.SandboxID = "" },
		func(c *Checkpoint) { c.SandboxName = "" }, func(c *Checkpoint) { c.Kind = "" }, func(c *Checkpoint) {
			c.Parent = "x"
		}, func(c *Checkpoint) { c.Trigger = "a\nb" },
		func(c *Checkpoint) { c.Trigger = strings.Repeat("t", 257) }, func(c *Checkpoint) {
			c.Labels = map[string]string{"=": ""}
		}, func(c *Checkpoint) { c.Spec = []byte("nope") },
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
	files := sample(1, 10)
	tree := func(d *Draft) error { return putFiles(ctx, d, 0, files.files) }
	entry := func(d *Draft, list ...overlay.Entry) error {
		return d.PutTree(ctx, 0, func(fn func(overlay.Entry) error) error {
			for _, e := range list {
				if err := fn(e); err != nil {
					return err
				}
			}
			return nil
		})
	}
	top := overlay.Entry{Path: ".", Type: overlay.TypeDir}
	stranger := digestOf([]byte("nobody has this"))
	for name, x := range map[string]struct {
		kind     string
		prepare  func(*Draft) error
		sentinel error
		words    string
	}{
		"no tree": {KindFiles, func(d *Draft) error { return nil }, fault.ErrInvalid, "trees"},
		"wrong tree": {KindFiles, func(d *Draft) error {
			return putFiles(ctx, d, 1, files.files)
		}, fault.ErrInvalid, "tree 0"},
		"a tree more": {KindFiles, func(d *Draft) error {
			return errors.Join(tree(d), putFiles(ctx, d, 1, files.files))
		}, fault.ErrInvalid, "2 trees"},
		"twice": {KindFiles, func(d *Draft) error {
			return errors.Join(tree(d), tree(d))
		}, fault.ErrInvalid, "once"},
		"empty tree": {KindFiles, func(d *Draft) error { return entry(d) }, fault.ErrInvalid, "no entries"},
		"out of order": {KindFiles, func(d *Draft) error {
			return entry(d, top, overlay.Entry{Path: "b", Type: overlay.TypeDir},
				overlay.Entry{Path: "a", Type: overlay.TypeDir})
		}, fault.ErrInvalid, "after"},
		"unknown piece": {KindFiles, func(d *Draft) error {
			return entry(d, top, overlay.Entry{Path: "a", Type: overlay.TypeFile, Size: 3, Digest: stranger})
		}, fault.ErrCorrupt, stranger},
		"no digest": {KindFiles, func(d *Draft) error {
			return entry(d, top, overlay.Entry{Path: "a", Type: overlay.TypeFile, Size: 3})
		}, fault.ErrCorrupt, "digest"},
		"no images": {KindFull, func(d *Draft) error {
			d.CRIUDir()
			return errors.Join(tree(d), d.PutImages(ctx))
		}, fault.ErrInvalid, "process images"},
		"images unput": {KindFull, tree, fault.ErrInvalid, "process images"},
		"no directory": {KindFull, func(d *Draft) error {
			return errors.Join(tree(d), d.PutImages(ctx))
		}, nil, ImagesName},
		"images": {KindFiles, func(d *Draft) error {
			return errors.Join(tree(d), os.WriteFile(d.CRIUDir()+"/x.img", nil, 0o600), d.PutImages(ctx))
		}, fault.ErrInvalid, "files-only"},
		"a symlink": {KindFull, func(d *Draft) error {
			return errors.Join(tree(d), os.Symlink("/etc/passwd", d.CRIUDir()+"/x.img"), d.PutImages(ctx))
		}, fault.ErrCorrupt, "x.img"},
		"a directory": {KindFull, func(d *Draft) error {
			return errors.Join(tree(d), os.Mkdir(d.CRIUDir()+"/sub", 0o700), d.PutImages(ctx))
		}, fault.ErrCorrupt, "sub"},
		"a fifo": {KindFull, func(d *Draft) error {
			return errors.Join(tree(d), unix.Mkfifo(d.CRIUDir()+"/pages-1.img", 0o600), d.PutImages(ctx))
		}, fault.ErrCorrupt, "pages-1.img"},
		"foreign bytes": {KindFiles, func(d *Draft) error {
			return errors.Join(tree(d), d.PutChunk(ctx, stranger, []byte("something else")))
		}, fault.ErrCorrupt, stranger},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := s.BeginCheckpoint(ctx, of(b, "", x.kind))
			must(t, err)
			if err = x.prepare(d); err == nil {
				_, err = d.Commit(ctx, describe())
			}
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
	if c := must1(s.Checkpoint(context.Background(), d.ID())); c.Status != Failed ||
		!strings.Contains(c.Error, "canceled") {
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
		must(t, os.WriteFile(filepath.Join(d.Dir(), "work", "dump.log"),
			append(bytes.Repeat([]byte("x"), keptLog), "the end"...), 0o644))
		must(t, os.Symlink(secret, filepath.Join(d.Dir(), "link.log")))
		must(t, unix.Mkfifo(filepath.Join(d.Dir(), "fifo.log"), 0o600))
		// an unfinished pack
		_, err = entriesOf(ctx, d.Sink(), map[string][]byte{"a": bytes.Repeat([]byte(fmt.Sprint(i)), 4<<20)})
		must(t, err)
		must(t, d.Abort(ctx, fmt.Errorf("reason %d", i), "work/dump.log", "link.log", "fifo.log",
			"../"+filepath.Base(secret), "/etc/passwd", "none.log"))
		must(t, d.Abort(ctx, errors.New("again")))
		_, _, err = d.Sink().Data(ctx, 1, strings.NewReader("x"))
		wantErr(t, err, fault.ErrState)
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

	// A checkpoint that is being made: its commit finds out.
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
	c := taken(t, s, of(b, "", KindFull), data)
	r, err := s.OpenCheckpoint(context.Background(), c.ID)
	must(t, err)
	defer r.Close()
	f, err := r.Image(context.Background(), "pages-1.img")
	must(t, err)
	_, err = io.ReadFull(f, make([]byte, 1000))
	must(t, err)
	must(t, f.Close()) // reads on and proves the rest
	wantErr(t, f.Close(), os.ErrClosed)

	ctx, cancel := context.WithCancel(context.Background())
	f, err = r.Image(ctx, "pages-1.img")
	must(t, err)
	_, err = io.ReadFull(f, make([]byte, 1000))
	must(t, err)
	cancel()
	if err := f.Close(); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestManifest(t *testing.T) {
	naming(t)
	s := open(t, t.TempDir())
	b := sandbox("c")
	b.Spec = json.RawMessage("{\"z\": 1.50, \"a\": [1, {\"y\":\"<&>\\u2028\", \"b\":null}],\n \"cpus\":1e2}")
	c := taken(t, s, of(b, "n", KindFull), sample(1, 9000))
	data, err := os.ReadFile(filepath.Join(s.published(c.ID), ManifestName))
	must(t, err)
	if !bytes.Contains(data, []byte(`"spec":{"a":[1,{"b":null,"y":"<&>\u2028"}],"cpus":1e2,"z":1.50}`)) {
		t.Errorf("not canonical: %s", data)
	}
	m, err := ParseManifest(data)
	must(t, err)
	if m.SandboxName != "c" || m.Name != "n" || m.TCP != "established" || m.Versions.CRIU != "4.1" ||
		len(m.Processes.Images) != 5 || m.Processes.Images[0].Name != "core-1.img" ||
		m.Processes.List[1].Command != "sleep" {
		t.Errorf("%+v", m)
	}
	for from, to := range map[string]string{
		`"version":2`: `"version":0`, `"kind":"full"`: `"kind":"files"`, `"name":"core-1.img"`: `"name":"../../x"`,
		`"tcp":"established"`: `"tcp":"established","more":1`,
		c.ID:                  "../../etc/passwd", `"entries":6`: `"entries":-6`, `"files":[{`: `"files":[],"x":[{`,
		`"data":`: `"data":-`, `,"recipe":`: `,"pieces":[],"recipe":`, `"pages":[[`: `"pages":[["blake3:0",1],[`,
		"blake3:": "sha256:", `{"version":2`: `{"version":2,"version":2`,
		`"count":2`: `"count":2.0`, `"kind"`: `"Kind"`,
	} {
		if !bytes.Contains(data, []byte(from)) {
			t.Fatalf("no %s in %s", from, data)
		}
		_, err := ParseManifest(bytes.Replace(data, []byte(from), []byte(to), 1))
		wantErr(t, err, fault.ErrCorrupt)
	}
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":7`), 1))
	wantErr(t, err, fault.ErrUnsupported)
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":6`), 1)) // it has no message
	wantErr(t, err, fault.ErrCorrupt)
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":5`), 1)) // it names its images
	wantErr(t, err, fault.ErrCorrupt)
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":4`), 1)) // it has no deep list
	wantErr(t, err, fault.ErrCorrupt)
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":3`), 1)) // it has no host files
	wantErr(t, err, fault.ErrCorrupt)
	_, err = ParseManifest(bytes.Replace(data, []byte(`"version":2`), []byte(`"version":1`), 1))
	wantErr(t, err, fault.ErrCorrupt)
	for _, bad := range [][]byte{
		nil, []byte("{}"), []byte("null"), append(slices.Clone(data), '\n'), data[:len(data)-1],
	} {
		_, err := ParseManifest(bad)
		wantErr(t, err, fault.ErrCorrupt)
	}
}

func TestManifestAttached(t *testing.T) {
	id, digest := strings.Repeat("a", 32), digestPrefix+strings.Repeat("0", 64)
	tree := Tree{Entries: 1, Bytes: 2, Digest: digest, Chunks: Chunks{{Digest: digest, Len: 2}}}
	parse := func(paths ...AttachedFile) (Manifest, error) {
		m := Manifest{
			Version: VersionAttached, ID: id, SandboxID: id, Kind: KindFiles, Files: []Tree{tree},
			Attached: &Attached{Paths: paths, Files: tree},
		}
		data, err := m.Encode()
		must(t, err)
		return ParseManifest(data)
	}
	good := AttachedFile{Path: "/srv/a b", Size: 7}
	m, err := parse(good, AttachedFile{Path: "/x", Absent: true})
	must(t, err)
	if len(m.Attached.Paths) != 2 || m.Attached.Paths[0] != good || m.AttachedTree() != 1 || len(m.trees()) != 2 {
		t.Errorf("%+v", m.Attached)
	}
	many := make([]AttachedFile, MaxAttachedFiles+1)
	for i := range many {
		many[i].Path = fmt.Sprint("/", i)
	}
	for _, bad := range [][]AttachedFile{nil, many, {good, good}, {{Path: "a"}}, {{Path: "/"}}, {{Path: "/a/../b"}},
		{{Path: "/a/"}}, {{Path: "/a\x00"}}, {{Path: "/" + strings.Repeat("a", 4096)}},
		{{Path: "/a", Size: -1}}, {{Path: "/a", Size: MaxAttached + 1}}, {{Path: "/a", Size: 1, Absent: true}}} {
		_, err := parse(bad...)
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
	m.Files = []Tree{{Entries: 1, Bytes: 2, Digest: digest, Chunks: Chunks{{Digest: digest, Len: 2}}}}
	data, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseManifest(data)
	if err != nil {
		t.Fatal(err)
	}
	if f := got.Managed["/etc/hosts"]; string(f.Data) != "\xff\x00\n" || f.Mode != 0o600 || f.UID != 7 ||
		len(got.Managed) != 2 {
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
	if _, err := ParseManifest(bytes.Replace(data, []byte(`"data":""`), []byte(`"data":null`),
		1)); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a second form: %v", err)
	}
}
