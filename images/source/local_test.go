package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
)

// skopeo runs it on a policy that accepts everything.
func skopeo(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("skopeo", append([]string{
		"--insecure-policy", "--override-os=linux", "--override-arch=amd64",
	}, args...)...)
	cmd.Env = append(os.Environ(), "TMPDIR="+t.TempDir())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("skopeo %q: %v: %s (scripts/install-deps.sh --test installs it)", args, err, stderr.String())
	}
	return string(out)
}

// Written images can be read again, by skopeo too; and skopeo's copies can be read.
func TestLocal(t *testing.T) {
	o := fast(t)
	// An image of Docker's types would be translated.
	img := mutate.ConfigMediaType(
		mutate.MediaType(sample(t, "linux/amd64", 0), types.OCIManifestSchema1),
		types.OCIConfigJSON)
	for range 3 {
		l, err := random.Layer(20_000, types.OCILayer)
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	want, _ := img.Digest()
	for _, to := range []string{"oci:DIR:v1", "oci-archive:DIR.tar:v1", "docker-archive:DIR.tar:example.com/web:v1"} {
		t.Run(strings.Split(to, ":")[0], func(t *testing.T) {
			o.Scratch = t.TempDir()
			ref := strings.Replace(to, "DIR", filepath.Join(t.TempDir(), "x"), 1)
			digest, err := Write(t.Context(), mustParse(t, ref), img, o)
			if err != nil || digest != want.String() {
				t.Fatalf("%s, %v", digest, err)
			}
			got, layers, err := pull(t, ref, o)
			if err != nil {
				t.Fatal(err)
			}
			exact := !strings.HasPrefix(to, "docker-archive")
			sameImage(t, got, layers, img, exact)
			var seen struct{ Digest string }
			if err := json.Unmarshal([]byte(skopeo(t, "inspect", ref)), &seen); err != nil ||
				exact && seen.Digest != digest {
				t.Errorf("skopeo sees %s, want %s (%v)", seen.Digest, digest, err)
			}
			for _, copied := range []string{
				"oci:COPY:v1", "oci-archive:COPY.tar:v1", "docker-archive:COPY.tar:web:v1",
			} {
				copied = strings.Replace(copied, "COPY", filepath.Join(t.TempDir(), "c"), 1)
				skopeo(t, "copy", ref, copied)
				got, layers, err := pull(t, copied, o)
				if err != nil {
					t.Fatalf("%s: %v", copied, err)
				}
				if c, _ := img.RawConfigFile(); exact == strings.HasPrefix(copied, "docker-archive") &&
					bytes.Equal(c, got.Config()) {
					sameImage(t, got, layers, img, false)
				}
				if len(layers) != 3 {
					t.Errorf("%s: %d layers", copied, len(layers))
				}
			}
			if left, err := os.ReadDir(o.Scratch); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// A layout keeps its other images; a tag moves; a write that fails changes nothing.
func TestLayoutKeeps(t *testing.T) {
	o := fast(t)
	dir := filepath.Join(t.TempDir(), "layout")
	a, b, c := sample(t, "linux/amd64", 1), sample(t, "linux/amd64", 1), sample(t, "linux/amd64", 2)
	write := func(tag string, img v1.Image) error {
		_, err := Write(t.Context(), mustParse(t, "oci:"+dir+":"+tag), img, o)
		return err
	}
	has := func(tag string, want v1.Image) {
		t.Helper()
		got, layers, err := pull(t, "oci:"+dir+":"+tag, o)
		if err != nil {
			t.Fatal(err)
		}
		sameImage(t, got, layers, want, false)
		if _, media, _ := got.Manifest(); media != string(types.OCIManifestSchema1) {
			t.Errorf("a manifest of type %s in a layout", media)
		}
	}
	if err := errors.Join(write("a", a), write("b", b)); err != nil {
		t.Fatal(err)
	}
	if err := write("a", broken{c}); err == nil {
		t.Fatal("a broken image was written")
	}
	has("a", a)
	if err := write("a", c); err != nil {
		t.Fatal(err)
	}
	has("a", c)
	has("b", b)
	got, _, err := pull(t, "oci:"+dir+":b", o)
	if err != nil {
		t.Fatal(err)
	}
	_, _, digest := got.Manifest()
	has("@"+digest, b)
	for ref, want := range map[string]error{
		"oci:" + dir: fault.ErrInvalid, "oci:" + dir + ":x": fault.ErrNotFound, "oci:" + dir + "x": fault.ErrNotFound,
	} {
		_, _, err := pull(t, ref, o)
		if !errors.Is(err, want) || want == fault.ErrInvalid &&
			!strings.Contains(strings.Join(fault.Hint(err), ""), "a, b") {
			t.Errorf("%s: %v, %q", ref, err, fault.Hint(err))
		}
	}
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if strings.HasPrefix(d.Name(), ".") {
			t.Errorf("left: %s", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	// A directory of something else is not littered.
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "mine"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), mustParse(t, "oci:"+other), a, o); !errors.Is(err, fault.ErrExists) {
		t.Error(err)
	}
	// Nor is a device replaced by a file.
	fifo := filepath.Join(other, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(t.Context(), mustParse(t, "oci-archive:"+fifo), a, o); !errors.Is(err, fault.ErrExists) {
		t.Error(err)
	}
	if _, err := Write(t.Context(), mustParse(t, "dir:"+other), a, o); !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}
}

// broken is an image whose configuration is not what its manifest says.
type broken struct{ v1.Image }

func (b broken) RawConfigFile() ([]byte, error) { return []byte("{}"), nil }

// Damage in a layout is found, and nothing outside of it is read.
func TestBadLayout(t *testing.T) {
	img := sample(t, "linux/amd64", 1)
	conf, _ := img.ConfigName()
	list, _ := img.Layers()
	layer, _ := list[0].Digest()
	blob := func(dir, hex string) string { return filepath.Join(dir, "blobs/sha256", hex) }
	edit := func(path string, change func([]byte) []byte) {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, change(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		damage func(dir string)
		want   error
	}{
		"layer flipped": {func(dir string) {
			edit(blob(dir, layer.Hex), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		}, fault.ErrCorrupt},
		"layer cut": {func(dir string) {
			edit(blob(dir, layer.Hex), func(b []byte) []byte { return b[:len(b)-1] })
		}, fault.ErrCorrupt},
		"layer longer": {func(dir string) {
			edit(blob(dir, layer.Hex), func(b []byte) []byte { return append(b, 0) })
		}, fault.ErrCorrupt},
		"layer gone": {func(dir string) { _ = os.Remove(blob(dir, layer.Hex)) }, fault.ErrCorrupt},
		"config":     {func(dir string) { edit(blob(dir, conf.Hex), bytes.ToUpper) }, fault.ErrCorrupt},
		"index is none": {func(dir string) {
			edit(dir+"/index.json", func([]byte) []byte { return []byte("[]") })
		}, fault.ErrCorrupt},
		"no index": {func(dir string) { _ = os.Remove(dir + "/index.json") }, fault.ErrInvalid},
		"no image": {func(dir string) {
			edit(dir+"/index.json", func([]byte) []byte { return []byte(`{"schemaVersion":2,"manifests":[]}`) })
		}, fault.ErrUnsupported},
		"a FIFO for a layer": {func(dir string) {
			_ = os.Remove(blob(dir, layer.Hex))
			if err := unix.Mkfifo(blob(dir, layer.Hex), 0o600); err != nil {
				t.Fatal(err)
			}
		}, fault.ErrInvalid},
		"a symlink to outside": {func(dir string) {
			out := filepath.Join(t.TempDir(), "out")
			if err := os.Rename(blob(dir, layer.Hex), out); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(out, blob(dir, layer.Hex)); err != nil {
				t.Fatal(err)
			}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			o := fast(t)
			ref := "oci:" + filepath.Join(t.TempDir(), "l")
			if _, err := Write(t.Context(), mustParse(t, ref), img, o); err != nil {
				t.Fatal(err)
			}
			c.damage(ref[4:])
			if _, _, err := pull(t, ref, o); err == nil || !errors.Is(err, c.want) && c.want != nil {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

// tarOf makes an archive; values that begin with "->" are symlinks.
func tarOf(t *testing.T, files ...string) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := 0; i < len(files); i += 2 {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: files[i], Size: int64(len(files[i+1])), Mode: 0o644}
		to, link := strings.CutPrefix(files[i+1], "->")
		if link {
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, to, 0
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if !link {
			if _, err := io.WriteString(w, files[i+1]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func sum(b string) string { return remote.Describe("", []byte(b)).Digest.String() }

// Archives as the versions of Docker made them, and malformed ones.
func TestArchives(t *testing.T) {
	layer := string(tarOf(t, "etc/os-release", "ID=x"))
	diff := sum(layer)
	config := `{"os":"linux","architecture":"amd64","rootfs":{"type":"layers","diff_ids":["` +
		diff + `","` + diff + `"]}}`
	id := sum(config)[7:]
	packed := func(b []byte) []byte {
		var buf bytes.Buffer
		w := gzip.NewWriter(&buf)
		if _, err := w.Write(b); err != nil || w.Close() != nil {
			t.Fatal(err)
		}
		return buf.Bytes()
	}
	zlayer := string(packed([]byte(layer)))
	old := tarOf(t, "a/layer.tar", layer, "b/layer.tar", "->../a/layer.tar", id+".json", config,
		"manifest.json", `[{"Config":"`+id+`.json","RepoTags":["web:1"],"Layers":["a/layer.tar","b/layer.tar"]}]`)
	two := tarOf(t, "l", layer, "c", config, "manifest.json",
		`[{"Config":"c","RepoTags":["web:1"],"Layers":["l","l"]},{"Config":"c","RepoTags":["web:2"],"Layers":["l","l"]}]`)
	for name, c := range map[string]struct {
		data  []byte
		ref   string // behind the path
		want  error
		layer string
	}{
		"of Docker 20": {old, "", nil, layer},
		"by name":      {old, ":web:1", nil, layer},
		"packed":       {packed(old), "", nil, layer},
		"another name": {old, ":web:2", fault.ErrNotFound, ""},
		"which of two": {two, "", fault.ErrInvalid, ""},
		"the second":   {two, ":web:2", nil, layer},
		"packed layers": {tarOf(t, "l.tar.gz", zlayer, "c", config, "manifest.json",
			`[{"Config":"c","Layers":["l.tar.gz","l.tar.gz"]}]`), "", nil, zlayer},
		"a layer of others": {tarOf(t, "l", layer+"x", "c", config, "manifest.json",
			`[{"Config":"c","Layers":["l","l"]}]`), "", fault.ErrCorrupt, ""},
		"a config of others": {tarOf(t, "l", layer, id+".json", config+" ", "manifest.json",
			`[{"Config":"`+id+`.json","Layers":["l","l"]}]`), "", fault.ErrCorrupt, ""},
		"no layer": {
			tarOf(t, "c", config, "manifest.json", `[{"Config":"c","Layers":["l","l"]}]`), "", fault.ErrCorrupt, "",
		},
		"one layer too few": {
			tarOf(t, "l", layer, "c", config, "manifest.json", `[{"Config":"c","Layers":["l"]}]`),
			"", fault.ErrCorrupt, "",
		},
		"no config": {tarOf(t, "manifest.json", `[{"Config":"c","Layers":[]}]`), "", fault.ErrCorrupt, ""},
		"symlinks in a circle": {tarOf(t, "l", "->m", "m", "->l", "c", config, "manifest.json",
			`[{"Config":"c","Layers":["l","l"]}]`), "", fault.ErrCorrupt, ""},
		"to the host": {tarOf(t, "l", "->/etc/passwd", "c", config, "manifest.json",
			`[{"Config":"c","Layers":["l","l"]}]`), "", fault.ErrCorrupt, ""},
		"none":           {tarOf(t, "etc/passwd", ""), "", fault.ErrInvalid, ""},
		"no tar":         {[]byte(strings.Repeat("no tar ", 200)), "", fault.ErrCorrupt, ""},
		"cut":            {old[:700], "", fault.ErrCorrupt, ""},
		"packed and cut": {packed(old)[:100], "", fault.ErrCorrupt, ""},
		"a bomb":         {packed(make([]byte, 2<<20)), "", fault.ErrDenied, ""},
		"empty":          {nil, "", fault.ErrInvalid, ""},
	} {
		t.Run(name, func(t *testing.T) {
			o := fast(t)
			o.MaxBytes = 1 << 20
			path := filepath.Join(t.TempDir(), "a.tar")
			if err := os.WriteFile(path, c.data, 0o600); err != nil {
				t.Fatal(err)
			}
			img, layers, err := pull(t, "docker-archive:"+path+c.ref, o)
			if !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if err != nil {
				return
			}
			if string(img.Config()) != config || len(layers) != 2 || string(layers[0]) != c.layer ||
				string(layers[1]) != c.layer {
				t.Errorf("%s, %d layers", img.Config(), len(layers))
			}
			if m, media, _ := img.Manifest(); media != string(types.DockerManifestSchema2) ||
				!bytes.Contains(m, []byte(id)) {
				t.Errorf("%s: %s", media, m)
			}
		})
	}
	// A pipe cannot be read twice.
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- os.WriteFile(fifo, old, 0) }()
	_, layers, err := pull(t, "docker-archive:"+fifo, fast(t))
	if e := <-done; err != nil || e != nil || len(layers) != 2 {
		t.Errorf("%d layers, %v, %v", len(layers), err, e)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, mustParse(t, "docker-archive:"+fifo), fast(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("nobody writes: %v", err)
	}
	if _, _, err := pull(t, "docker-archive:/no/such", fast(t)); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
}

// Names are kept in memory, and compress well.
func TestArchiveOfNames(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "a.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for i := range 40 {
		if err := w.WriteHeader(&tar.Header{
			Name: fmt.Sprint(i) + strings.Repeat("n", 1_000_000), Format: tar.FormatPAX,
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), mustParse(t, "oci-archive:"+f.Name()), fast(t)); !errors.Is(err,
		fault.ErrUnsupported) || !strings.Contains(err.Error(), "names") {
		t.Error(err)
	}
}

// A small archive that unpacks to a large one leaves some of the disk free.
func TestArchiveBomb(t *testing.T) {
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, unix.MNT_DETACH) })
	bomb := filepath.Join(t.TempDir(), "bomb.tar.gz")
	f, err := os.Create(bomb)
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	if _, err := z.Write(make([]byte, 60<<20)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	o := fast(t)
	o.Scratch = small
	if _, err := Open(t.Context(), mustParse(t, "docker-archive:"+bomb), o); !errors.Is(err, unix.ENOSPC) ||
		!strings.Contains(err.Error(), "kept free") {
		t.Error(err)
	}
}
