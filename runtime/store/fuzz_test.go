package store

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// Whatever ParseManifest takes has one form only, and names nothing outside
// its directory.
func FuzzParseManifest(f *testing.F) {
	m := describe()
	m.Version, m.ID, m.SandboxID, m.SandboxName, m.Kind = Version, NewID(), NewID(), "c", KindFull
	m.Created = time.Unix(1, 5)
	m.Spec = []byte(`{"b":[1.50,-0,1e3,"\u2028<>"],"a":null}`)
	digest := digestOf(nil)
	two := Chunks{{Digest: digest, Len: 3}, {Digest: digest, Len: 2}}
	tree := Tree{Entries: 2, Data: 7, Bytes: 5, Digest: digest, Chunks: two}
	m.Files, m.Volumes = []Tree{tree}, []Volume{{Name: "vol", Files: tree}}
	m.Processes.Images = []Image{{Name: "a.img", Digest: digest},
		{Name: "b.img", Digest: digest, Bytes: 5, Chunks: two},
		{Name: "pages-1.img", Digest: digest, Bytes: 8192, Recipe: two, Pages: two}}
	full, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	m.Version, m.Processes = VersionListed, &Processes{Listed: &tree}
	listed, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	m.Version = Version
	m.Kind, m.Processes, m.Name, m.Labels, m.Warnings = KindFiles, nil, "n",
		map[string]string{"z": "1", "a": "ä"}, []string{"w"}
	files, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	m.Volumes = []Volume{{Name: "/work", Files: tree}, {Name: "/work", Files: tree, Below: true}}
	workspace, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, data := range [][]byte{full, listed, files, workspace} {
		if _, err := ParseManifest(data); err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"version":3}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseManifest(data)
		if err != nil {
			if !isErr(err, fault.ErrCorrupt) && !isErr(err, fault.ErrUnsupported) {
				t.Fatal(err)
			}
			return
		}
		again, err := m.Encode()
		if err != nil || !bytes.Equal(again, data) {
			t.Fatalf("%s\nbecame\n%s (%v)", data, again, err)
		}
		if !isID(m.ID) || len(m.Files) != 1 {
			t.Fatalf("%+v", m)
		}
		for _, tree := range m.trees() {
			if n, err := tree.Chunks.bytes(); err != nil || n != tree.Bytes && tree.Depth == 0 {
				t.Fatalf("%+v", tree)
			}
		}
		if m.Processes != nil {
			for _, im := range m.Processes.Images {
				if _, err := segments(append(slices.Clone(im.Chunks), im.Recipe...)); !isPlain(im.Name) || err != nil {
					t.Fatal(im.Name, err)
				}
			}
		}
	})
}

// The same, by small changes of what is right, in every run of the tests.
func TestManifestMutations(t *testing.T) {
	t.Run("named", func(t *testing.T) {
		naming(t)
		mutate(t)
	})
	t.Run("listed", mutate)
}

func mutate(t *testing.T) {
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 9000)
	data.volume = map[string][]byte{"v": []byte("x")}
	c := taken(t, s, of(b, "n", KindFull), data)
	good, err := os.ReadFile(filepath.Join(s.published(c.ID), ManifestName))
	must(t, err)
	words := []string{
		"null", "[]", "{}", "0", "-1", "1e3", "9223372036854775807", `""`, `"x"`, "[", "]", ",", `"pieces":[],`,
		`"recipe":null,`, " ", "\\u0041",
	}
	r := rand.New(rand.NewPCG(1, 1))
	for range 20_000 {
		bad := bytes.Clone(good)
		for range 1 + r.IntN(3) {
			at := r.IntN(len(bad))
			switch r.IntN(4) {
			case 0:
				bad[at] ^= 1 << r.IntN(8)
			case 1:
				bad = slices.Delete(bad, at, min(len(bad), at+1+r.IntN(20)))
			case 2:
				bad = slices.Insert(bad, at, []byte(words[r.IntN(len(words))])...)
			case 3:
				from := r.IntN(len(bad))
				bad = slices.Insert(bad, at, bad[from:min(len(bad), from+r.IntN(100))]...)
			}
		}
		m, err := ParseManifest(bad)
		if err != nil {
			if !isErr(err, fault.ErrCorrupt) && !isErr(err, fault.ErrUnsupported) {
				t.Fatalf("%v: %s", err, bad)
			}
			continue
		}
		if again, err := m.Encode(); err != nil || !bytes.Equal(again, bad) {
			t.Fatalf("%s\nbecame\n%s (%v)", bad, again, err)
		}
	}
}

// A manifest from elsewhere may say anything; what it says of its lists is held
// against them, and what is wrong besides comes out when it is read.
func TestHostileManifest(t *testing.T) {
	naming(t)
	ctx := context.Background()
	s := open(t, t.TempDir())
	b := put(t, s, "c")
	data := sample(1, 9000)
	c := taken(t, s, of(b, "", KindFull), data)
	r, err := s.OpenCheckpoint(ctx, c.ID)
	must(t, err)
	good := r.Manifest()
	must(t, r.Close())
	core := slices.IndexFunc(good.Processes.Images, func(im Image) bool { return im.Name == "core-1.img" })
	pages := slices.IndexFunc(good.Processes.Images, func(im Image) bool { return im.Name == "pages-1.img" })
	for name, x := range map[string]struct {
		harm func(m *Manifest)
		late bool // found when it is read
	}{
		"entries":          {func(m *Manifest) { m.Files[0].Entries-- }, false},
		"data":             {func(m *Manifest) { m.Files[0].Data++ }, false},
		"digest of a list": {func(m *Manifest) { m.Files[0].Digest = digestOf([]byte("x")) }, false},
		"another list": {func(m *Manifest) {
			m.Files[0].Chunks = m.Processes.Images[core].Chunks
			m.Files[0].Bytes = 100
		}, false},
		"length of a list": {func(m *Manifest) { m.Files[0].Bytes++; m.Files[0].Chunks[0].Len++ }, false},
		"a piece not there": {func(m *Manifest) {
			m.Processes.Images[core].Chunks[0].Digest = digestOf([]byte("x"))
		}, false},
		"not a recipe": {func(m *Manifest) {
			m.Processes.Images[pages].Recipe = m.Processes.Images[core].Chunks
		}, false},
		"pages not there": {func(m *Manifest) {
			m.Processes.Images[pages].Pages[0].Digest = digestOf([]byte("x"))
		}, false},
		"bytes of pages":  {func(m *Manifest) { m.Processes.Images[pages].Bytes++ }, false},
		"digest of pages": {func(m *Manifest) { m.Processes.Images[pages].Digest = digestOf([]byte("x")) }, true},
		"length of a piece": {func(m *Manifest) {
			m.Processes.Images[core].Chunks[0].Len++
			m.Processes.Images[core].Bytes++
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			raw, err := good.Encode()
			must(t, err)
			m, err := ParseManifest(raw)
			must(t, err)
			m.ID = NewID()
			x.harm(&m)
			d, err := s.BeginCheckpoint(ctx, Checkpoint{
				ID: m.ID, SandboxID: m.SandboxID, SandboxName: m.SandboxName, Kind: m.Kind,
			})
			must(t, err)
			_, err = d.CommitAs(ctx, m)
			if x.late {
				must(t, err)
				must(t, d.Close())
				wantErr(t, s.VerifyCheckpoint(ctx, m.ID), fault.ErrCorrupt)
				r, err := s.OpenCheckpoint(ctx, m.ID)
				must(t, err)
				dir := filepath.Join(t.TempDir(), "x")
				wantErr(t, r.ExtractImages(ctx, dir), fault.ErrCorrupt)
				if must1(exists(dir)) {
					t.Error("what was not right is left there")
				}
				must(t, r.Close())
				must(t, s.RemoveCheckpoint(ctx, m.ID))
				return
			}
			wantErr(t, err, fault.ErrCorrupt)
			must(t, d.Abort(ctx, err))
		})
	}
	same(t, s, c.ID, data)
	tidy(t, s)
}
