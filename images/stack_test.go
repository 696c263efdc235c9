package images

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/overlay"
)

// mounted mounts an image as a sandbox's backend does.
func mounted(t *testing.T, img image.Image) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{"upper", "work", "merged"} {
		ok(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	m := overlay.Mount{Lower: img.Lower, Upper: dir + "/upper", Work: dir + "/work", Target: dir + "/merged"}
	ok(t, m.Mount())
	t.Cleanup(func() { _ = unix.Unmount(m.Target, unix.MNT_DETACH) })
	return m.Target
}

// listing describes a tree: everything but the number of a directory's links,
// and the top directory, which an upperdir covers.
func listing(t *testing.T, dir string) string {
	t.Helper()
	cmd := exec.Command("sh", "-ec",
		`find . -mindepth 1 -printf '%P|%y|%m|%U:%G|%T@|%l|%n|%s\n' | sed '/|d|/s/|[0-9]*|[0-9]*$//' | sort
find . -type f -print0 | sort -z | xargs -0r sha256sum; find . \( -type c -o -type b \) -exec stat -c '%n %t %T' {} + | sort
find . -mindepth 1 -print0 | sort -z | xargs -0r getfattr -hd -m - -e hex | grep -v overlay`)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	return string(out)
}

func sameListing(t *testing.T, got, want string) {
	t.Helper()
	x, y := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(x), len(y)) {
		if i >= len(x) || i >= len(y) || x[i] != y[i] {
			t.Fatalf("differs at line %d:\nwant %q\ngot  %q", i, x[min(i, len(x)-1)], y[min(i, len(y)-1)])
		}
	}
}

// layered is an image in which layers hide, replace and complete each other.
func layered(t testing.TB) []source.Layer {
	at := func(e ent, sec int64) ent { e.Format, e.ModTime = tar.FormatPAX, time.Unix(sec, 987654321); return e }
	d := func(name string, mode, sec int64) ent {
		return at(ent{tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: mode}, ""}, sec)
	}
	f := func(name, data string, sec int64) ent { return at(ent{tar.Header{Name: name}, data}, sec) }
	base := archive(t,
		d("etc", 0o755, 100), f("etc/passwd", "root", 101), f("etc/gone", "x", 102), d("etc/conf.d", 0o2770, 103),
		f("etc/conf.d/a", "a", 104),
		d("var", 0o755, 105), d("var/cache", 0o700, 106), f("var/cache/x", "x", 107), d("var/lib", 0o755, 108),
		f("var/lib/y", "y", 109),
		at(ent{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}, ""}, 110),
		at(ent{tar.Header{
			Name: "bin/su", Mode: 0o4755, Uid: 3, PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v"},
		}, "su"}, 111),
		at(ent{tar.Header{Name: "bin/su2", Typeflag: tar.TypeLink, Linkname: "bin/su"}, ""}, 111),
		at(ent{tar.Header{Name: "lnk", Typeflag: tar.TypeSymlink, Linkname: "etc", Uid: 5}, ""}, 112),
		d("srv", 0o755, 113), f("srv/file", "f", 114), f("bin/old", "o", 115),
		d("bin", 0o755, 115), d("dev", 0o755, 116),
	)
	second := archive(t,
		f("etc/.wh.gone", "", 200), d("etc", 0o711, 201), // with an entry
		f("etc/conf.d/b", "b", 202), // without one: the directory stays as it was
		d("var", 0o755, 203), d("var/cache", 0o755, 204), f("var/cache/.wh..wh..opq", "", 205),
		f("var/cache/new", "n", 206),
		f(".wh.srv", "", 207),
	)
	third := archive(t,
		d("srv", 0o500, 300), f("srv/again", "again", 301), // a whited out directory comes back
		f("var/lib/.wh.y", "", 302), d("var/lib", 0o755, 303), d("var", 0o755, 304),
		d("lnk2", 0o755, 305), f(".wh.lnk", "", 306),
		f("bin/.wh.old", "", 307), d("bin", 0o755, 308), f("etc/passwd", "root2", 309), d("etc", 0o755, 310),
	)
	fourth := archive(t, d("lnk", 0o755, 400), f("lnk/in", "in", 401), d("lnk2/deep", 0o755, 403),
		d("lnk2/deep/er", 0o755, 404), f("lnk2/deep/er/f", "x", 402))
	return []source.Layer{blob(t, "gzip", base), blob(t, "zstd", second), blob(t, "", third), blob(t, "gzip", fourth)}
}

// An image mounted from the store is the tree that umoci makes of it.
func TestUmoci(t *testing.T) {
	s := store(t)
	layers := layered(t)
	img, err := take(t, s, "x", layers...)
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	if len(img.Lower) != len(layers)+1 {
		t.Errorf("no layer puts the implicit directories right: %v", img.Lower)
	}
	out, err := s.V1(ctx, img.Digest)
	ok(t, err)
	tmp := t.TempDir()
	ref, err := reference.Parse("oci:"+tmp+"/layout:x", "")
	ok(t, err)
	_, err = source.Write(ctx, ref, out, image.SourceOptions{})
	ok(t, err)
	if msg, err := exec.Command("umoci", "unpack", "--image", tmp+"/layout:x",
		tmp+"/bundle").CombinedOutput(); err != nil {
		t.Fatalf("umoci: %v %s", err, msg)
	}
	sameListing(t, listing(t, mounted(t, img)), listing(t, tmp+"/bundle/rootfs"))
}

func TestOpaqueLayer(t *testing.T) {
	s := store(t)
	img, err := take(t, s, "x", blob(t, "", rootfs(t, "1")),
		blob(t, "", archive(t, ent{tar.Header{Name: ".wh..wh..opq"}, ""}, ent{tar.Header{Name: "only"}, ""})),
		blob(t, "", archive(t, ent{tar.Header{Name: "top"}, ""})))
	ok(t, err)
	list, err := os.ReadDir(mounted(t, img))
	if err != nil || len(list) != 2 || len(img.Lower) != 2 || len(img.Layers) != 3 {
		t.Errorf("%v %v %+v", list, err, img)
	}
}

// The deepest image that Docker makes, in a root of a long name; and what the
// second sandbox of an image costs.
func TestDeep(t *testing.T) {
	root := filepath.Join(t.TempDir(), strings.Repeat("long-name-", 20))
	s, err := Open(root)
	ok(t, err)
	var layers []source.Layer
	for i := range 127 {
		layers = append(layers, blob(t, "", archive(t, ent{tar.Header{Name: fmt.Sprint("f", i)}, "x"},
			ent{tar.Header{Name: "same"}, fmt.Sprint(i)})))
	}
	img, err := take(t, s, "deep", layers...)
	ok(t, err)
	dir := mounted(t, img)
	list, err := os.ReadDir(dir)
	ok(t, err)
	if b, err := os.ReadFile(dir + "/same"); len(list) != 128 || string(b) != "126" {
		t.Errorf("%d entries, %q %v", len(list), b, err)
	}
	best := time.Hour
	for range 20 {
		start := time.Now()
		if _, err := s.Pull(ctx, "deep", image.PullOptions{}); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(start))
	}
	t.Logf("found again in %v", best)
	if best > 5*time.Millisecond {
		t.Error("that is slow")
	}
}
