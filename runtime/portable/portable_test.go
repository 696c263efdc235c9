package portable

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"filippo.io/age"
	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// An exported checkpoint comes back, however it is packed; and it is packed the same every time.
func TestRoundTrip(t *testing.T) {
	m, c := full(t)
	for _, how := range []string{Zstd, Gzip, None} {
		t.Run(how, func(t *testing.T) {
			var done, total int64
			archive := exported(t, c, Options{Compress: how, Progress: func(d, n int64) { done, total = d, n }})
			if done != total || total == 0 {
				t.Errorf("progress ended at %d of %d", done, total)
			}
			if again := exported(t, c, Options{Compress: how}); !bytes.Equal(archive, again) {
				t.Error("the second export has other bytes")
			}
			done, total = 0, 0
			got, facts, res := imported(t, archive, OpenOptions{Progress: func(d, n int64) {
				done, total = d, n
			}}, ImportOptions{})
			if done != total || total == 0 {
				t.Errorf("progress of the import ended at %d of %d", done, total)
			}
			if !bytes.Equal(facts.Manifest, c.Manifest) {
				t.Errorf("the manifest came back as %s", facts.Manifest)
			}
			if facts.Name != "box" || !slices.Equal(facts.Volumes, []string{"data"}) {
				t.Errorf("facts: %+v", facts)
			}
			for i := range m.trees {
				if !bytes.Equal(got.trees[i], m.trees[i]) {
					t.Errorf("tree %d: %s", i, cmp.Diff(string(m.trees[i]), string(got.trees[i])))
				}
			}
			if !maps.EqualFunc(got.images, m.images, bytes.Equal) {
				t.Errorf("images %d", len(got.images))
			}
			for _, e := range got.entries(t, 0) {
				if e.DataSize() == 0 {
					continue
				}
				a, err := m.Source().Data(t.Context(), e)
				must(t, err)
				b, err := got.Source().Data(t.Context(), e)
				must(t, err)
				x, _ := io.ReadAll(a)
				y, _ := io.ReadAll(b)
				if !bytes.Equal(x, y) || int64(len(x)) != e.DataSize() {
					t.Errorf("%q has other data", e.Path)
				}
			}
			// "gone" and its other name are in deleted.files.
			if res.Trees != 2 || res.Images != 3 || res.Deleted != 2 || len(res.Notes) > 0 {
				t.Errorf("%+v", res)
			}
			// It can be exported again, to the same bytes.
			if again := exported(t, Checkpoint{Manifest: facts.Manifest, Data: got},
				Options{Compress: how}); !bytes.Equal(archive, again) {
				t.Error("the export of the import has other bytes")
			}
		})
	}
}

// An import cuts data as its own store does.
func TestRecut(t *testing.T) {
	m, c := full(t)
	archive := exported(t, c, Options{})
	a, err := Open(t.Context(), bytes.NewReader(archive), OpenOptions{Scratch: t.TempDir()})
	must(t, err)
	defer a.Close()
	got := newMemory(t)
	got.cut = 1000
	_, err = a.Import(t.Context(), got, ImportOptions{})
	must(t, err)
	for i, e := range got.entries(t, 0) {
		old := m.entries(t, 0)[i]
		if e.Path == "big" && len(e.Chunks) != 320 {
			t.Errorf("big has %d pieces", len(e.Chunks))
		}
		e.Chunks, old.Chunks = nil, nil
		if d := cmp.Diff(old, e); d != "" {
			t.Error(d)
		}
	}
	if _, err := a.Import(t.Context(), got, ImportOptions{}); !errors.Is(err, fault.ErrState) {
		t.Errorf("a second import: %v", err)
	}
}

// members of an archive that is not compressed.
func members(t testing.TB, archive []byte) (names []string, content map[string][]byte) {
	t.Helper()
	content = map[string][]byte{}
	for tr := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return names, content
		}
		must(t, err)
		names = append(names, h.Name)
		if h.Size > 1<<30 {
			continue // the one with the hole
		}
		content[h.Name], err = io.ReadAll(tr)
		must(t, err)
	}
}

// The layout is the one that others read, file for file.
func TestLayout(t *testing.T) {
	_, c := full(t)
	c.Lower = func(path string) ([]LowerEntry, error) {
		switch path {
		case "opaque":
			return []LowerEntry{{"sub", true}, {"old", false}, {"new", false}, {"zold", true}}, nil
		case "opaque/sub":
			return []LowerEntry{{"deep2", true}, {"a<b", false}}, nil
		}
		t.Errorf("asked for %q", path)
		return nil, nil
	}
	names, content := members(t, exported(t, c, Options{Compress: None}))
	want := []string{
		"agentbox/version", "agentbox/manifest.json", "agentbox/tree-0.jsonl", "agentbox/tree-1.jsonl", "config.dump",
		"spec.dump", "network.status",
		"deleted.files", "rootfs-diff.tar", "volumes/data.tar", "checkpoint/", "checkpoint/inventory.img",
		"checkpoint/pages-1.img", "stats-dump",
	}
	if d := cmp.Diff(want, names); d != "" {
		t.Error(d)
	}
	var deleted []string
	must(t, json.Unmarshal(content["deleted.files"], &deleted))
	slices.Sort(deleted)
	if d := cmp.Diff([]string{
		"/a/gone2", "/gone", "/opaque/old", "/opaque/sub/a<b", "/opaque/sub/deep2", "/opaque/zold",
	}, deleted); d != "" {
		t.Error(d)
	}
	files, data := members(t, content["rootfs-diff.tar"])
	for _, name := range []string{"gone", "a/gone2", "sock", "./", "."} {
		if slices.Contains(files, name) {
			t.Errorf("%q is in rootfs-diff.tar", name)
		}
	}
	for name, text := range map[string]string{
		"a/file": "content\n", "opaque/sub/deep": "deep", "caf\xe9": "not UTF-8",
	} {
		if string(data[name]) != text {
			t.Errorf("%q has %q", name, data[name])
		}
	}
	for _, name := range []string{"/", "a/", "a/link", "fifo", "char", "opaque/", "z-link", "sparse"} {
		if !slices.Contains(files, name) {
			t.Errorf("%q is not in rootfs-diff.tar: %q", name, files)
		}
	}
	conf, err := parseConfig(content["config.dump"])
	must(t, err)
	spec, err := parseSpec(content["spec.dump"])
	must(t, err)
	f := facts(conf, spec)
	if f.ImageID != strings.Repeat("d", 64) { // by which Podman looks for it
		t.Errorf("the image's id is %q", f.ImageID)
	}
	if f.Image != "localhost/bb:latest" || f.Name != "box" || f.Hostname != "box" || f.Memory != 64<<20 ||
		!slices.Equal(f.Args, []string{"sh", "-c", "true"}) {
		t.Errorf("facts: %+v", f)
	}
}

// Only a recipient can read it.
func TestEncrypted(t *testing.T) {
	m, c := full(t)
	dir := t.TempDir()
	id, err := age.GenerateX25519Identity()
	must(t, err)
	other, err := age.GenerateX25519Identity()
	must(t, err)
	key, wrong := filepath.Join(dir, "key"), filepath.Join(dir, "wrong")
	must(t, os.WriteFile(key, []byte("# mine\n"+id.String()+"\n"), 0o600))
	must(t, os.WriteFile(wrong, []byte(other.String()+"\n"), 0o600))
	ssh, sshPublic := sshKey(t, dir)
	archive := exported(t, c, Options{Recipients: []string{id.Recipient().String(), sshPublic}})
	if bytes.Contains(archive, []byte("agentbox/manifest")) || bytes.HasPrefix(archive, []byte("\x28\xb5\x2f\xfd")) {
		t.Error("it is not encrypted")
	}
	defer func() { must(t, unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)) }()
	for _, path := range []string{key, ssh} {
		must(t, unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0))
		got, _, _ := imported(t, archive, OpenOptions{Identities: path}, ImportOptions{})
		if is, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); err != nil || is != 0 {
			t.Errorf("%s: dumpable %d, %v: the key would be in a core", path, is, err)
		}
		if !bytes.Equal(got.trees[0], m.trees[0]) {
			t.Errorf("%s: another tree", path)
		}
	}
	for _, path := range []string{"", wrong} {
		_, _, _, err := importBytes(t, archive, OpenOptions{Identities: path}, ImportOptions{})
		if !errors.Is(err, fault.ErrDenied) || len(fault.Hint(err)) == 0 {
			t.Errorf("identities %q: %v", path, err)
		}
	}
	for _, at := range []int{len(archive) / 2, len(archive) - 1} {
		bad := bytes.Clone(archive)
		bad[at] ^= 1
		if _, _, _, err := importBytes(t, bad, OpenOptions{Identities: key},
			ImportOptions{}); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("a bit at %d: %v", at, err)
		}
	}
	if err := Export(t.Context(), io.Discard, c,
		Options{Recipients: []string{"nobody"}}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a recipient that is none: %v", err)
	}
	if err := Export(t.Context(), io.Discard, c, Options{Compress: "xz"}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a compression that is none: %v", err)
	}
}

// An archive that was cut off anywhere, or has a bit flipped, is refused.
func TestDamage(t *testing.T) {
	_, c := full(t)
	for _, how := range []string{None, Zstd, Gzip} {
		archive := exported(t, c, Options{Compress: how})
		step := max(1, len(archive)/150)
		for at := 0; at < len(archive); at += step {
			if _, _, _, err := importBytes(t, archive[:at], OpenOptions{},
				ImportOptions{}); !errors.Is(err, fault.ErrCorrupt) {
				t.Errorf("%s cut at %d of %d: %v", how, at, len(archive), err)
			}
		}
		if how == None {
			continue // has no checksum over the others' members, headers and padding
		}
		for at := 0; at < len(archive); at += step {
			bad := bytes.Clone(archive)
			bad[at] ^= 0x10
			m, f, _, err := importBytes(t, bad, OpenOptions{}, ImportOptions{})
			if err == nil && (!bytes.Equal(m.trees[0], c.Data.(*memory).trees[0]) ||
				!bytes.Equal(f.Manifest, c.Manifest)) {
				t.Errorf("%s: a bit at %d went unnoticed", how, at)
			}
			if err != nil && !errors.Is(err, fault.ErrCorrupt) && !errors.Is(err, fault.ErrUnsupported) {
				t.Errorf("%s: a bit at %d: %v", how, at, err)
			}
		}
	}
}

// Errors of the file and of the store are not the archive's.
func TestErrorsOfOthers(t *testing.T) {
	_, c := full(t)
	archive := exported(t, c, Options{})
	broken := errors.New("the disk is on fire")
	for _, at := range []int{0, 10, len(archive) / 2, len(archive) - 1} {
		r := io.MultiReader(bytes.NewReader(archive[:at]), failing{broken})
		a, err := Open(t.Context(), r, OpenOptions{Scratch: t.TempDir()})
		if err == nil {
			_, err = a.Import(t.Context(), newMemory(t), ImportOptions{})
			must(t, a.Close())
		}
		if !errors.Is(err, broken) || errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("at %d: %v", at, err)
		}
	}
	var w limited
	if err := Export(t.Context(), &w, c, Options{}); !errors.Is(err, broken) && !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("a writer that fails: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

type limited int

func (l *limited) Write(p []byte) (int, error) {
	if *l += limited(len(p)); *l > 100 {
		return 0, io.ErrShortWrite
	}
	return len(p), nil
}

// zstded compresses.
func zstded(t testing.TB, data []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	must(t, err)
	defer z.Close()
	return z.EncodeAll(data, nil)
}
