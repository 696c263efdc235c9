package overlay

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// layerOf writes a directory as a layer.
func layerOf(t testing.TB, dir string) ([]byte, Layer) {
	t.Helper()
	var out bytes.Buffer
	got, err := WriteLayer(t.Context(), &out, entriesOf(t, dir), &dirSource{dir: dir})
	must(t, err)
	if got.Archive != int64(out.Len()) {
		t.Errorf("%d bytes, the summary says %d", out.Len(), got.Archive)
	}
	return out.Bytes(), got
}

func entriesOf(t testing.TB, dir string) func() iter.Seq2[Entry, error] {
	return func() iter.Seq2[Entry, error] { return DirEntries(t.Context(), dir, WalkOptions{}) }
}

// TestLayerMeansWhatIsSeen: umoci makes of a lower directory and an upperdir,
// each as a layer, the tree that overlayfs shows.
func TestLayerMeansWhatIsSeen(t *testing.T) {
	base := t.TempDir()
	m := Mount{Target: base + "/merged", Upper: base + "/upper", Work: base + "/work", Lower: []string{base + "/lower"}}
	for _, d := range []string{m.Target, m.Upper, m.Work, m.Lower[0]} {
		must(t, os.Mkdir(d, 0o755))
	}
	write := func(p, data string) error {
		return errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(data), 0o644))
	}
	l := m.Lower[0]
	must(t, errors.Join(write(l+"/gone", "x"), write(l+"/dir/gone", "x"), write(l+"/dir/stays", "x"),
		write(l+"/again/old", "x"), write(l+"/tofile/in", "x"),
		write(l+"/todir", "x"), write(l+"/mode", "x"), os.Symlink("nowhere", l+"/link"), write(l+"/deep/a/b/c", "x"),
		write(l+"/one", "linked"), os.Link(l+"/one", l+"/two")))
	must(t, m.Mount())
	defer func() { must(t, Unmount(m.Target, UnmountOptions{})) }()
	r := m.Target
	long := strings.Repeat("n", 120)
	must(t, errors.Join(os.Remove(r+"/gone"), os.Remove(r+"/dir/gone"), os.RemoveAll(r+"/again"),
		write(r+"/again/new", "y"), os.RemoveAll(r+"/tofile"), write(r+"/tofile", "y"),
		os.Remove(r+"/todir"), write(r+"/todir/in", "y"), os.Chmod(r+"/mode", 0o4711), os.Lchown(r+"/mode", 7, 70000),
		os.Chmod(r+"/mode", 0o4711),
		write(r+"/a\nb", ""), write(r+"/"+long+"/"+long, "long"), os.Symlink(strings.Repeat("../", 50)+"x", r+"/far"),
		unix.Mkfifo(r+"/fifo", 0o600),
		unix.Setxattr(r+"/dir", "user.x", []byte("a\x00b"), 0),
		unix.Setxattr(r+"/mode", "security.capability",
			[]byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0),
		write(r+"/same", "linked"), os.Link(r+"/same", r+"/zame"), os.Chown(r+"/same", 3, 4),
		os.Chmod(r+"/same", 0o640),
		write(r+"/hole", "begin"), os.Truncate(r+"/hole", 3<<20), write(r+"/.hidden/.git", "z"),
		unix.Mknod(r+"/sock", unix.S_IFSOCK|0o600, 0),
		os.RemoveAll(r+"/deep/a"), os.Chmod(r, 0o751)))
	f, err := os.OpenFile(r+"/hole", os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("end"), 2<<20)
	must(t, errors.Join(err, f.Close()))
	must(t, errors.Join(touch(r+"/same", -5, 500), touch(r+"/link", 1<<33, 1), touch(r, 7, 8)))

	below, _ := layerOf(t, m.Lower[0])
	above, got := layerOf(t, m.Upper)
	again, _ := layerOf(t, m.Upper)
	if !bytes.Equal(above, again) {
		t.Error("the same upperdir gave two different layers")
	}
	if len(got.Notes) != 1 || !strings.Contains(got.Notes[0], `"sock" is a socket`) {
		t.Errorf("notes %q", got.Notes)
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, b := range [][]byte{below, above} {
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(b)), nil
		}, tarball.WithMediaType(types.OCILayer))
		must(t, err)
		img, err = mutate.AppendLayers(img, layer)
		must(t, err)
	}
	oci, err := layout.Write(base+"/oci", empty.Index)
	must(t, err)
	must(t, oci.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "x"})))
	if out, err := exec.Command("umoci", "raw", "unpack", "--image", base+"/oci:x",
		base+"/rootfs").CombinedOutput(); err != nil {
		t.Fatalf("umoci: %v\n%s", err, out)
	}
	want, have := described(t, r), described(t, base+"/rootfs")
	if want != have {
		t.Errorf("overlayfs shows\n%s\numoci has\n%s", want, have)
	}
}

// described is a tree in words, but for what a layer cannot hold.
func described(t testing.TB, dir string) string {
	t.Helper()
	var b []byte
	must(t, Walk(t.Context(), dir, WalkOptions{}, func(e Entry) error {
		if e.Type == TypeSocket {
			return nil
		}
		if e.Type == TypeFile && e.Hardlink == "" {
			data, err := os.ReadFile(filepath.Join(dir, e.Path))
			must(t, err)
			e.Extents, e.Digest = nil, digestOf(data)
		}
		for name := range e.Xattrs {
			if strings.HasPrefix(name, "trusted.overlay.") || name == "user.rootlesscontainers" {
				delete(e.Xattrs, name)
			}
		}
		if len(e.Xattrs) == 0 {
			e.Xattrs = nil
		}
		b = append(e.AppendJSON(b), '\n')
		return nil
	}))
	return string(b)
}

// TestLayerForms holds the names of marks, and what further names of a file say,
// against archive/tar.
func TestLayerForms(t *testing.T) {
	dir := t.TempDir()
	must(t, errors.Join(os.Mkdir(dir+"/d", 0o755), unix.Setxattr(dir+"/d", "trusted.overlay.opaque", []byte("y"), 0),
		unix.Setxattr(dir+"/d", "trusted.overlay.impure", []byte("y"), 0),
		unix.Mknod(dir+"/d/w", unix.S_IFCHR, 0), os.Link(dir+"/d/w", dir+"/d/x"),
		os.WriteFile(dir+"/f", []byte("1"), 0o600), os.Chown(dir+"/f", 5, 6), os.Link(dir+"/f", dir+"/g"),
		unix.Setxattr(dir+"/f", "user.a=b", []byte("c"), 0)))
	b, got := layerOf(t, dir)
	var list []string
	for tr := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		list = append(list, fmt.Sprintf("%s %c %o %d:%d %d %d", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid,
			h.Size, len(h.PAXRecords)))
	}
	want := "./ 5 755 0:0 0 1, d/ 5 755 0:0 0 1, d/.wh..wh..opq 0 0 0:0 0 0, d/.wh.w 0 0 0:0 0 0, d/.wh.x 0 0 0:0 0 0, f 0 600 5:6 1 1, g 1 600 5:6 0 1"
	if s := strings.Join(list, ", "); s != want {
		t.Errorf("%s\nwant %s", s, want)
	}
	if len(got.Notes) != 1 || !strings.Contains(got.Notes[0], "user.a=b") {
		t.Errorf("notes %q", got.Notes)
	}
}

func TestLayerRefuses(t *testing.T) {
	for name, do := range map[string]func(dir string) error{
		"a file that would be a deletion": func(dir string) error { return os.WriteFile(dir+"/.wh.x", nil, 0o600) },
		"a directory so named":            func(dir string) error { return os.Mkdir(dir+"/.wh..wh..opq", 0o700) },
		"a redirect": func(dir string) error {
			return unix.Setxattr(dir, "trusted.overlay.redirect", []byte("/x"), 0)
		},
		"too many zeros": func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/h", nil, 0o600), os.Truncate(dir+"/h", maxLayerHoles+1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, do(dir))
			_, err := WriteLayer(t.Context(), io.Discard, entriesOf(t, dir), &dirSource{dir: dir})
			if !errors.Is(err, fault.ErrUnsupported) {
				t.Errorf("error %v", err)
			}
		})
	}
}
