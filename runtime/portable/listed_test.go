package portable

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// listed is full, with a manifest that does not name the images.
func listed(t testing.TB) (*memory, Checkpoint) {
	m, c := full(t)
	m.listed = true
	c.Manifest = m.manifest(t, "data")
	return m, c
}

// Images that the manifest does not name come through an archive, by their list.
func TestListedImages(t *testing.T) {
	m, c := listed(t)
	archive := exported(t, c, Options{})
	names, content := members(t, exported(t, c, Options{Compress: None}))
	lines, _ := m.list()
	if names[2] != "agentbox/images.jsonl" || !bytes.Equal(content[names[2]], lines) {
		t.Errorf("%q", names)
	}
	got, f, res := imported(t, archive, OpenOptions{}, ImportOptions{})
	if !maps.EqualFunc(m.images, got.images, bytes.Equal) || res.Images != 3 || !bytes.Equal(f.Manifest, c.Manifest) {
		t.Errorf("%+v, %d images", res, len(got.images))
	}
	m.listed = false // the store has not what its manifest says
	if err := Export(t.Context(), new(bytes.Buffer), c, Options{}); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	m.listed = true
	m.images["more"] = []byte("x")
	if err := Export(t.Context(), new(bytes.Buffer), c, Options{}); !errors.Is(err, fault.ErrCorrupt) {
		t.Error(err)
	}
}

// A list of images is held against the manifest, and the manifest against what can be.
func TestHostileImageList(t *testing.T) {
	m, c := listed(t)
	names, content := members(t, exported(t, c, Options{Compress: None}))
	lines, size := m.list()
	first, rest, _ := bytes.Cut(lines, []byte("\n"))
	// with packs the archive with another list; say: the manifest says of the list what is right.
	with := func(list []byte, say bool, change func(listed map[string]any)) []byte {
		var parts []part
		for _, name := range names {
			p := part{name: name, data: content[name]}
			if strings.HasSuffix(name, "/") {
				p.head.Typeflag = tar.TypeDir
			}
			switch {
			case name == listName && list == nil:
				continue
			case name == listName:
				p.data = list
			case name == manifestName:
				var all map[string]any
				must(t, json.Unmarshal(p.data, &all))
				l := all["processes"].(map[string]any)["listed"].(map[string]any)
				if say {
					l["bytes"], l["digest"] = len(list), sum(list)
				}
				if change != nil {
					change(l)
				}
				data, err := json.Marshal(all)
				must(t, err)
				p.data = data
			}
			parts = append(parts, p)
		}
		return tarOf(t, parts...)
	}
	if _, _, _, err := importBytes(t, with(lines, true, nil), OpenOptions{}, ImportOptions{}); err != nil {
		t.Fatalf("packed anew: %v", err)
	}
	say := func(key string, v any) func(map[string]any) { return func(l map[string]any) { l[key] = v } }
	both := slices.Concat(first, []byte("\n"), lines)
	for name, archive := range map[string][]byte{
		"none":              with(nil, false, nil),
		"another":           with(bytes.Replace(lines, []byte("stats"), []byte("stat5"), 1), false, nil),
		"a longer one":      with(append(slices.Clone(lines), '\n'), false, nil),
		"out of order":      with(slices.Concat(rest, first, []byte("\n")), true, nil),
		"one twice":         with(both, true, func(l map[string]any) { l["entries"], l["data"] = 4, size+9 }),
		"one more":          with(both, true, nil),
		"one less":          with(rest, true, nil),
		"not a list":        with([]byte("]"), true, nil),
		"ends within":       with(lines[:len(lines)-3], true, nil),
		"a path":            with(bytes.Replace(lines, []byte("inventory.img"), []byte("../../../etc/"), 1), true, nil),
		"a negative length": with(bytes.Replace(lines, []byte(`:9}`), []byte(`:-9}`), 1), true, nil),
		"a length":          with(bytes.Replace(lines, []byte(`:9}`), []byte(`:8}`), 1), true, nil),
		"entries":           with(lines, true, say("entries", 2)),
		"no entries":        with(lines, true, say("entries", 0)),
		"too many entries":  with(lines, true, say("entries", maxImages+1)),
		"bytes of images":   with(lines, true, say("data", size+1)),
		"negative bytes":    with(lines, true, say("data", -1)),
		"too long":          with(lines, true, say("bytes", maxManifest+1)),
		"no length":         with(lines, true, say("bytes", 0)),
		"digest":            with(lines, true, say("digest", "x")),
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, _, err := importBytes(t, archive, OpenOptions{},
				ImportOptions{}); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("it was taken: %v", err)
			}
		})
	}
	var all map[string]any
	must(t, json.Unmarshal(c.Manifest, &all))
	all["processes"].(map[string]any)["images"] = []any{map[string]any{"name": "a", "bytes": 0, "digest": sum(nil)}}
	data, err := json.Marshal(all)
	must(t, err)
	if _, err := parseManifest(data); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("a list beside images: %v", err)
	}
}
