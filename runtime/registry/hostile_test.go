package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// crafted is an artifact that lies ready to be damaged, and the blobs of it.
type crafted struct {
	m     v1.Manifest
	blobs map[string][]byte
}

func (c *crafted) put(media types.MediaType, data []byte) v1.Descriptor {
	d := remote.Describe(media, data)
	c.blobs[d.Digest.String()] = data
	return d
}

func (c *crafted) raw() []byte { b, _ := json.Marshal(c.m); return b }

func craft(t *testing.T, src *memory) *crafted {
	t.Helper()
	c := &crafted{blobs: map[string][]byte{}}
	var ids []pack.ID
	for d := range src.chunks {
		id, err := pack.ParseID(d)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b pack.ID) int { return bytes.Compare(a[:], b[:]) })
	path := filepath.Join(t.TempDir(), "pack")
	b, err := build(t.Context(), path, ids, src.Chunk, maxNew)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	uses := newBitmap(len(ids))
	for i := range ids {
		uses.set(i)
	}
	p := packRef{c.put(PackType, data), c.put(IndexType, encodeIndex(b.entries))}
	raw, err := encodeArtifact(c.put(ManifestType, []byte(`{"id":"x"}`)), c.put(UsesType, encodeUses([]bitmap{uses})),
		[]packRef{p}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &c.m); err != nil {
		t.Fatal(err)
	}
	return c
}

// serve answers as a registry that has only this.
func (c *crafted) answer(w http.ResponseWriter, r *http.Request) bool {
	last := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	switch {
	case strings.Contains(r.URL.Path, "/manifests/"):
		w.Header().Set("Content-Type", string(types.OCIManifestSchema1))
		_, _ = w.Write(c.raw())
	case c.blobs[last] != nil:
		_, _ = w.Write(c.blobs[last])
	default:
		return false
	}
	return true
}

func TestHostile(t *testing.T) {
	src := sample(1, 20, 500)
	other := sample(2, 20, 500)
	index := func(c *crafted, change func([]entry) []entry) {
		list, err := parseIndex(c.blobs[c.m.Layers[2].Digest.String()], c.m.Layers[1].Size)
		if err != nil {
			panic(err)
		}
		c.m.Layers[2] = c.put(IndexType, encodeIndex(change(list)))
	}
	for name, c := range map[string]struct {
		change func(c *crafted)
		want   error
	}{
		"as it should be": {func(c *crafted) {}, nil},
		"another type":    {func(c *crafted) { c.m.ArtifactType = "application/vnd.other" }, fault.ErrInvalid},
		"a later version": {func(c *crafted) {
			c.m.ArtifactType = "application/vnd.agentbox.checkpoint.v3"
		}, fault.ErrUnsupported},
		"no type":              {func(c *crafted) { c.m.ArtifactType = "" }, fault.ErrUnsupported},
		"schema 1":             {func(c *crafted) { c.m.SchemaVersion = 1 }, fault.ErrCorrupt},
		"an index":             {func(c *crafted) { c.m.MediaType = types.OCIImageIndex }, fault.ErrCorrupt},
		"no layers":            {func(c *crafted) { c.m.Layers = nil }, fault.ErrCorrupt},
		"a pack without index": {func(c *crafted) { c.m.Layers = c.m.Layers[:2] }, fault.ErrCorrupt},
		"twice the same pack": {func(c *crafted) {
			c.m.Layers = append(c.m.Layers, c.m.Layers[1:]...)
		}, fault.ErrCorrupt},
		"twice, in the uses too": {func(c *crafted) {
			c.m.Layers = append(c.m.Layers, c.m.Layers[1:]...)
			c.m.Layers[0] = c.put(UsesType, encodeUses([]bitmap{{0xff, 0xff, 0xf}, {0xff, 0xff, 0xf}}))
		}, fault.ErrCorrupt},
		"too many layers": {func(c *crafted) {
			c.m.Layers = slices.Repeat(c.m.Layers, 2*maxPacks+1)
		}, fault.ErrCorrupt},
		"a layer's media type": {func(c *crafted) { c.m.Layers[1].MediaType = types.OCILayer }, fault.ErrCorrupt},
		"config media type":    {func(c *crafted) { c.m.Config.MediaType = types.OCIConfigJSON }, fault.ErrCorrupt},
		"foreign layer": {func(c *crafted) {
			c.m.Layers[1].URLs = []string{"http://169.254.169.254/"}
		}, fault.ErrCorrupt},
		"a terabyte":    {func(c *crafted) { c.m.Layers[1].Size = 1 << 40 }, fault.ErrCorrupt},
		"negative":      {func(c *crafted) { c.m.Layers[1].Size = -1 }, fault.ErrCorrupt},
		"a huge config": {func(c *crafted) { c.m.Config.Size = maxManifest + 1 }, fault.ErrCorrupt},
		"a huge index": {func(c *crafted) {
			c.m.Layers[2].Size = int64(len(indexMagic) + indexEntry*(maxPackChunks+1))
		}, fault.ErrCorrupt},
		"sha512": {func(c *crafted) {
			c.m.Layers[1].Digest = v1.Hash{Algorithm: "sha512", Hex: strings.Repeat("a", 128)}
		}, fault.ErrCorrupt},
		"config too short": {func(c *crafted) { c.m.Config.Size++ }, fault.ErrCorrupt},
		"config too long":  {func(c *crafted) { c.m.Config.Size-- }, fault.ErrCorrupt},
		"config of other bytes": {func(c *crafted) {
			c.blobs[c.m.Config.Digest.String()] = []byte(`{"id":"y"}`)
		}, fault.ErrCorrupt},
		"pack too short": {func(c *crafted) { c.m.Layers[1].Size++ }, fault.ErrCorrupt},
		"pack of other bytes": {func(c *crafted) {
			b := c.blobs[c.m.Layers[1].Digest.String()]
			b[len(b)/2] ^= 1
		}, fault.ErrCorrupt},
		"no pack at all": {func(c *crafted) {
			c.m.Layers[1] = c.put(PackType, bytes.Repeat([]byte("x"), 1<<20))
		}, fault.ErrCorrupt},
		"uses of other pieces": {func(c *crafted) {
			c.m.Layers[0] = c.put(UsesType, encodeUses([]bitmap{{0xff, 0xff, 0xff}}))
		}, fault.ErrCorrupt},
		"uses too short": {func(c *crafted) {
			c.m.Layers[0] = c.put(UsesType, encodeUses([]bitmap{{0xff, 0xff}}))
		}, fault.ErrCorrupt},
		"uses is none": {func(c *crafted) {
			c.m.Layers[0] = c.put(UsesType, bytes.Repeat([]byte{0}, 11))
		}, fault.ErrCorrupt},
		"index not sorted": {func(c *crafted) {
			index(c, func(l []entry) []entry { l[0], l[1] = l[1], l[0]; return l })
		}, fault.ErrCorrupt},
		"index with a twin": {func(c *crafted) {
			index(c, func(l []entry) []entry { l[1] = l[0]; return l })
		}, fault.ErrCorrupt},
		"index with a lie": {func(c *crafted) {
			index(c, func(l []entry) []entry { l[len(l)-1].id = pack.ID(bytes.Repeat([]byte{255}, 32)); return l })
		}, fault.ErrCorrupt},
		"index of empty ones": {func(c *crafted) {
			index(c, func(l []entry) []entry { l[3].stored = 0; return l })
		}, fault.ErrCorrupt},
		"index over the pack": {func(c *crafted) {
			index(c, func(l []entry) []entry { l[3].stored = 1 << 31; return l })
		}, fault.ErrCorrupt},
		"index is none": {func(c *crafted) {
			c.m.Layers[2] = c.put(IndexType, bytes.Repeat([]byte{0}, len(indexMagic)+20*indexEntry))
		}, fault.ErrCorrupt},
		"the pack of another": {func(c *crafted) {
			c.m.Layers[1] = c.put(PackType, craft(t, other).blobs[craft(t, other).m.Layers[1].Digest.String()])
		}, fault.ErrCorrupt},
		"a huge manifest": {func(c *crafted) {
			c.m.Annotations = map[string]string{"x": strings.Repeat("x", maxArtifact)}
		}, fault.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			s, o := serve(t), fast(t)
			a := craft(t, src)
			c.change(a)
			s.Breaks(a.answer)
			dst := newMemory()
			_, err := Pull(t.Context(), s.Host()+"/web:one", dst.begin, o)
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if c.want == nil {
				src.same(t, dst)
			}
			for d, p := range dst.chunks {
				if !bytes.Equal(src.chunks[d], p) {
					t.Errorf("piece %s came from nowhere", d)
				}
			}
			// A push into such a repository is not disturbed by it.
			s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
				return r.Method == http.MethodGet && a.answer(w, r)
			})
			if _, err := Push(t.Context(), s.Host()+"/web:one", src, about(id1), o); err != nil {
				t.Errorf("push: %v", err)
			}
		})
	}
}

// An artifact that says it is this checkpoint and lacks chunks of it is
// replaced, not tagged.
func TestPushOverHalf(t *testing.T) {
	s, o := serve(t), fast(t)
	src := sample(1, 20, 500)
	mustPush(t, s.Host()+"/web:one", src, about(id1), o)
	half := s.artifact(t, "web", "one")
	more := src.clone()
	more.add([]byte("one more"))
	p := mustPush(t, s.Host()+"/web:one", more, about(id1), o)
	if strings.HasSuffix(p.Reference, half.digest.String()) {
		t.Error("the old artifact was taken for the new one")
	}
	dst := newMemory()
	pullInto(t, s.Host()+"/web:one", dst, o)
	more.same(t, dst)
}

// A digest is held against what comes.
func TestPullByDigest(t *testing.T) {
	s, o := serve(t), fast(t)
	a := craft(t, sample(1, 3, 100))
	s.Breaks(a.answer)
	good := s.Host() + "/web@" + remote.Describe("", a.raw()).Digest.String()
	if _, err := Pull(t.Context(), good, newMemory().begin, o); err != nil {
		t.Errorf("%v", err)
	}
	if _, err := Pull(t.Context(), s.Host()+"/web@sha256:"+strings.Repeat("0", 64), newMemory().begin,
		o); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("%v", err)
	}
}

// The target's errors end the pull.
func TestTargetFails(t *testing.T) {
	s, o := serve(t), fast(t)
	_, _, _ = onePack(t, s, o)
	cause := errors.New("disk full")
	_, err := Pull(t.Context(), s.Host()+"/web:one", func(context.Context, []byte) (Target, error) {
		return broken{newMemory(), cause}, nil
	}, o)
	if !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
}

type broken struct {
	*memory
	err error
}

func (b broken) PutChunk(context.Context, string, []byte) error { return b.err }

func FuzzArtifact(f *testing.F) {
	h := v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("a", 64)}
	raw, err := encodeArtifact(v1.Descriptor{MediaType: ManifestType, Size: 2, Digest: h},
		v1.Descriptor{MediaType: UsesType, Size: 9, Digest: h},
		[]packRef{{
			v1.Descriptor{MediaType: PackType, Size: 100, Digest: h},
			v1.Descriptor{MediaType: IndexType, Size: 44, Digest: h},
		}}, nil, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		a, err := parseArtifact(raw)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrInvalid) &&
				!errors.Is(err, fault.ErrUnsupported) {
				t.Fatal(err)
			}
			return
		}
		if a.uses.Size != usesSize(a.packs) || len(a.packs) > maxPacks {
			t.Fatalf("%s", raw)
		}
	})
}

func FuzzIndex(f *testing.F) {
	f.Add(encodeIndex([]entry{{pack.Sum([]byte("a")), 3}}), encodeUses([]bitmap{{1}}))
	f.Add([]byte(indexMagic), []byte(usesMagic))
	f.Fuzz(func(t *testing.T, index, uses []byte) {
		list, err := parseIndex(index, 1<<30)
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(encodeIndex(list), index) {
			t.Fatal("an index of two forms")
		}
		p := packRef{index: v1.Descriptor{Size: int64(len(index))}}
		if p.chunks() != len(list) {
			t.Fatalf("%d and %d pieces", p.chunks(), len(list))
		}
		maps, err := parseUses(uses, []packRef{p})
		if err != nil {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(encodeUses(maps), uses) {
			t.Fatal("uses of two forms")
		}
		for i := range list {
			_ = maps[0].has(i)
		}
	})
}
