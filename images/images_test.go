package images

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/internal/failpoint"
	"github.com/agentbox/agentbox/internal/fault"
)

// The test binary is also the other process of the tests that need one.
func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make devices and foreign owners: run them as root")
		os.Exit(1)
	}
	if root := os.Getenv("IMAGES_TEST_ROOT"); root != "" {
		s, err := Open(root)
		var img image.Image
		if err == nil {
			if src := os.Getenv("IMAGES_TEST_SOURCE"); src != "" {
				img, err = s.Import(ctx, "killed", src)
			} else if ref := os.Getenv("IMAGES_TEST_PULL"); ref != "" {
				img, err = s.Pull(ctx, ref, insecure)
			} else if rm := os.Getenv("IMAGES_TEST_REMOVE"); rm != "" {
				err = s.Remove(ctx, rm, nil)
			} else {
				img, err = s.Resolve(ctx, "busybox")
			}
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(img.Digest)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

var ctx = context.Background()

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func store(t testing.TB) *Store {
	t.Helper()
	s, err := Open(t.TempDir())
	ok(t, err)
	return s
}

// other runs this test binary as another process on the same root.
func other(root string, env ...string) (string, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(append(os.Environ(), "IMAGES_TEST_ROOT="+root), env...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

type ent struct {
	tar.Header
	data string
}

func archive(t testing.TB, list ...ent) []byte {
	t.Helper()
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	for _, e := range list {
		if e.Mode == 0 {
			e.Mode = 0o644
		}
		e.Size = int64(len(e.data))
		ok(t, tw.WriteHeader(&e.Header))
		_, err := io.WriteString(tw, e.data)
		ok(t, err)
	}
	ok(t, tw.Close())
	return buf.Bytes()
}

func rootfs(t testing.TB, content string) []byte {
	return archive(t, ent{tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}, ""},
		ent{tar.Header{Name: "etc/f", ModTime: time.Unix(7, 0)}, content},
		ent{tar.Header{Name: "usr/bin/sh", Mode: 0o755}, "#!"},
		ent{tar.Header{Name: "bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"}, ""})
}

// leftovers fails the test when the store holds anything that no image needs.
func leftovers(t *testing.T, s *Store, layers int) {
	t.Helper()
	tmp, err := os.ReadDir(s.path("tmp"))
	ok(t, err)
	if len(tmp) > 0 {
		t.Errorf("left in tmp: %v", tmp)
	}
	have, err := os.ReadDir(s.path("layers"))
	ok(t, err)
	if len(have) != layers {
		t.Errorf("layers: %v, want %d", have, layers)
	}
}

func TestBusybox(t *testing.T) {
	s := store(t)
	start := time.Now()
	img, err := s.Resolve(ctx, "busybox")
	ok(t, err)
	t.Logf("made in %v: %s, %d bytes", time.Since(start), img.Digest, img.Bytes)
	if img.Name != "busybox" || !img.Builtin || len(img.Lower) != 1 || img.Bytes < 500_000 ||
		!slices.Equal(img.Config.Cmd, []string{"sh"}) || len(img.Config.Env) != 1 {
		t.Errorf("%+v", img)
	}
	out, err := exec.Command("chroot", img.Lower[0], "/bin/sh", "-c",
		"id -un; cd /; ls -d tmp root home var etc proc sys dev; stat -c %a /tmp /root; awk 'BEGIN{print 6*7}'").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "root\n") || !strings.HasSuffix(string(out), "1777\n700\n42\n") {
		t.Errorf("%v\n%s", err, out)
	}
	ok(t, s.Verify(ctx, img.Digest))
	for _, ref := range []string{
		"busybox:latest", img.Digest, img.Digest[:20], img.Digest[7:15], "busybox@" + img.Digest,
	} {
		again, err := s.Resolve(ctx, ref)
		if err != nil || again.Digest != img.Digest || again.Name != "busybox" {
			t.Errorf("%s: %+v %v", ref, again, err)
		}
	}
	old := unix.Umask(0o077)
	second := store(t)
	img2, err := second.Resolve(ctx, "busybox")
	unix.Umask(old)
	ok(t, err)
	if img2.Digest != img.Digest {
		t.Error("another root, another digest")
	}
	// A layer deleted by hand is made again; a changed file is found.
	ok(t, os.RemoveAll(img.Lower[0]))
	if _, err := s.ResolveDigest(ctx, img.Digest); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("without its files: %v", err)
	}
	_, err = s.Resolve(ctx, "busybox")
	ok(t, err)
	ok(t, s.Verify(ctx, img.Digest))
	ok(t, os.WriteFile(img.Lower[0]+"/etc/hosts", []byte("x"), 0o644))
	if err := s.Verify(ctx, img.Digest); !errors.Is(err, fault.ErrCorrupt) {
		t.Errorf("changed: %v", err)
	}
}

func TestBusyboxMissing(t *testing.T) {
	if _, err := findBusybox([]string{"/nowhere"}); !errors.Is(err, fault.ErrUnsupported) ||
		!strings.Contains(fault.Hint(err)[0], "busybox-static") {
		t.Error(err)
	}
	dynamic, err := exec.LookPath("ls")
	ok(t, err)
	if _, err := findBusybox([]string{dynamic}); err == nil || !strings.Contains(err.Error(), "dynamically") {
		t.Error(err)
	}
	if p, err := findBusybox(append([]string{dynamic}, busyboxPaths...)); err != nil || p == dynamic {
		t.Error(p, err)
	}
}

func TestBusyboxAtOnce(t *testing.T) {
	root := t.TempDir()
	var wg sync.WaitGroup
	var digests [6]string
	for i := range digests {
		wg.Go(func() {
			out, err := other(root)
			if err != nil {
				t.Errorf("%v: %s", err, out)
			}
			digests[i] = out
		})
	}
	wg.Wait()
	s, err := Open(root)
	ok(t, err)
	for range 4 {
		wg.Go(func() {
			if img, err := s.Resolve(ctx, "busybox"); err != nil || img.Digest != digests[0] {
				t.Errorf("%s %v", img.Digest, err)
			}
		})
	}
	wg.Wait()
	for _, d := range digests {
		if d != digests[0] || d == "" {
			t.Errorf("%q", digests)
		}
	}
	leftovers(t, s, 1)
	ok(t, s.Verify(ctx, digests[0]))
}

func TestImport(t *testing.T) {
	s := store(t)
	tarball := rootfs(t, "one")
	img, err := s.ImportFrom(ctx, "one", bytes.NewReader(tarball))
	ok(t, err)
	if img.Name != "one" || img.Builtin || img.Bytes != 5 || !slices.Equal(img.Config.Cmd, []string{"sh"}) {
		t.Errorf("%+v", img)
	}
	// The same files again: another name, plain or compressed, another day.
	file := filepath.Join(t.TempDir(), "x.tar")
	ok(t, os.WriteFile(file, tarball, 0o600))
	for _, tool := range []string{"", "gzip", "zstd", "bzip2", "xz"} {
		f := file
		if tool != "" {
			out, err := exec.Command(tool, "-kc", file).Output()
			if err != nil {
				t.Logf("without %s: %v", tool, err)
				continue
			}
			f = file + "." + tool
			ok(t, os.WriteFile(f, out, 0o600))
			for _, cut := range []int{len(out) / 2, len(out) - 3} {
				if _, err := s.ImportFrom(ctx, "cut", bytes.NewReader(out[:cut])); !errors.Is(err, fault.ErrInvalid) {
					t.Errorf("%s, cut at %d: %v", tool, cut, err)
				}
			}
			bad := bytes.Clone(out)
			bad[len(bad)/2] ^= 0xff
			if _, err := s.ImportFrom(ctx, "bad", bytes.NewReader(bad)); !errors.Is(err, fault.ErrInvalid) {
				t.Errorf("%s, damaged: %v", tool, err)
			}
		}
		two, err := s.Import(ctx, "other/name:v1"+tool, f)
		if err != nil || two.Digest != img.Digest || two.Name != "other/name:v1"+tool {
			t.Errorf("%s: %+v %v", tool, two, err)
		}
	}
	leftovers(t, s, 1)

	// The name moves on, the digest stays.
	next, err := s.ImportFrom(ctx, "one:latest", bytes.NewReader(rootfs(t, "two")))
	ok(t, err)
	if now, err := s.Resolve(ctx, "one"); err != nil || now.Digest != next.Digest || next.Digest == img.Digest {
		t.Errorf("%+v %v", now, err)
	}
	if pinned, err := s.ResolveDigest(ctx, img.Digest); err != nil || pinned.Lower[0] == next.Lower[0] {
		t.Errorf("%+v %v", pinned, err)
	}
	if b, err := os.ReadFile(img.Lower[0] + "/etc/f"); string(b) != "one" {
		t.Errorf("%q %v", b, err)
	}
	// A directory gives what tar of it gives.
	dir, err := s.Import(ctx, "dir", next.Lower[0])
	if err != nil || dir.Digest != next.Digest {
		t.Errorf("%+v %v", dir, err)
	}
}

func TestRefused(t *testing.T) {
	s := store(t)
	hdr := func(h tar.Header) []byte { return archive(t, ent{tar.Header{Name: "etc/f"}, "x"}, ent{h, ""}) }
	for what, c := range map[string]struct {
		data []byte
		want error
		says string
	}{
		"empty":    {nil, fault.ErrInvalid, "empty"},
		"no files": {make([]byte, 10240), fault.ErrInvalid, "no files"},
		"only top": {
			archive(t, ent{tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, ""}),
			fault.ErrInvalid, "no files",
		},
		"no tar":   {bytes.Repeat([]byte("text "), 500), fault.ErrInvalid, "not a tar"},
		"short":    {[]byte("x"), fault.ErrInvalid, "cut short"},
		"cut":      {rootfs(t, "x")[:1100], fault.ErrInvalid, "cut short"},
		"no end":   {rootfs(t, "x")[:len(rootfs(t, "x"))-1024], fault.ErrInvalid, "end marker"},
		"dotdot":   {hdr(tar.Header{Name: "../evil"}), fault.ErrInvalid, "outside"},
		"whiteout": {hdr(tar.Header{Name: "w", Typeflag: tar.TypeChar}), fault.ErrInvalid, "whiteout"},
		"opaque": {hdr(tar.Header{
			Name: "d/", Typeflag: tar.TypeDir,
			PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"},
		}), fault.ErrInvalid, "upperdir"},
		"redirect": {hdr(tar.Header{
			Name: "d/", Typeflag: tar.TypeDir,
			PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"},
		}), fault.ErrInvalid, "upperdir"},
		"text acl": {hdr(tar.Header{
			Name: "d/", Typeflag: tar.TypeDir,
			PAXRecords: map[string]string{"SCHILY.acl.access": "user::rwx,user:joe:rwx"},
		}), fault.ErrUnsupported, "--xattrs"},
		"saved": {archive(t, ent{tar.Header{Name: "manifest.json"}, "[]"},
			ent{tar.Header{Name: "abc/layer.tar"}, "x"}), fault.ErrUnsupported, "docker save"},
		"oci": {archive(t, ent{tar.Header{Name: "oci-layout"}, "{}"},
			ent{tar.Header{Name: "blobs/sha256/x"}, "x"}), fault.ErrUnsupported, "OCI layout"},
		"gzip only": {[]byte("\x1f\x8b"), fault.ErrInvalid, "damaged"},
	} {
		_, err := s.ImportFrom(ctx, "x", bytes.NewReader(c.data))
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
		leftovers(t, s, 0)
	}
	for _, name := range []string{
		"", "UPPER", "../x", "a b", "a:", "a:b:c", "/a", "a/", "a//b", "a\n", "-a",
		strings.Repeat("a", 300), "x@sha256:1",
	} {
		if _, err := s.ImportFrom(ctx, name, bytes.NewReader(rootfs(t, "x"))); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("name %q: %v", name, err)
		}
	}
	for _, name := range []string{"a", "a-b_c.d/e:T.1", "localhost:5000/a/b:c", "Host.example/x"} {
		if _, err := s.canonical(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Import(ctx, "x", "/nowhere"); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if _, err := s.Import(ctx, "x", t.TempDir()); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	broken := errors.New("broken pipe of the source")
	if _, err := s.ImportFrom(ctx, "x", io.MultiReader(bytes.NewReader(rootfs(t, "x")[:1024]),
		errReader{broken})); !errors.Is(err, broken) {
		t.Error(err)
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := s.ImportFrom(cancelled, "x", bytes.NewReader(rootfs(t, "x"))); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	leftovers(t, s, 0)
	if _, err := s.Resolve(ctx, "x"); !errors.Is(err, fault.ErrNotFound) ||
		!strings.Contains(fault.Hint(err)[0], "image import") || !strings.Contains(fault.Hint(err)[0], "busybox") {
		t.Errorf("%v %v", err, fault.Hint(err))
	}
	for _, ref := range []string{"", "../x", "NOPE"} {
		if _, err := s.Resolve(ctx, ref); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	if _, err := s.ResolveDigest(ctx, "sha256:"+strings.Repeat("0", 64)); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if _, err := s.ResolveDigest(ctx, "../../etc"); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestListRemove(t *testing.T) {
	s := store(t)
	var digests []string
	for _, name := range []string{"b", "a", "c:1"} {
		img, err := s.ImportFrom(ctx, name, bytes.NewReader(rootfs(t, name)))
		ok(t, err)
		digests = append(digests, img.Digest)
	}
	_, err := s.ImportFrom(ctx, "a2", bytes.NewReader(rootfs(t, "a")))
	ok(t, err)
	names := func() string {
		list, err := s.List(ctx)
		ok(t, err)
		var l []string
		for _, img := range list {
			l = append(l, img.Name)
		}
		return strings.Join(l, " ")
	}
	if got := names(); got != "a a2 b c:1" {
		t.Error(got)
	}
	used := func(d string) bool { return d == digests[0] }
	if err := s.Remove(ctx, digests[1], nil); !errors.Is(err, fault.ErrInvalid) ||
		!strings.Contains(err.Error(), "a2") {
		t.Errorf("by a digest with two names: %v", err)
	}
	ok(t, s.Remove(ctx, "a", nil)) // a2 still has it
	_, err = s.ResolveDigest(ctx, digests[1])
	ok(t, err)
	leftovers(t, s, 3)
	ok(t, s.Remove(ctx, digests[1], nil)) // by digest, one name
	leftovers(t, s, 2)
	ok(t, s.Remove(ctx, "b", used)) // in use: only the name goes
	leftovers(t, s, 2)
	if _, err := s.Resolve(ctx, "b"); err == nil {
		t.Error("the name is still there")
	}
	if img, err := s.ResolveDigest(ctx, digests[0]); err != nil || img.Name != "" {
		t.Errorf("%+v %v", img, err)
	}
	if got := names(); got != "c:1 " {
		t.Errorf("%q", got)
	}
	if err := s.Remove(ctx, digests[0], used); !errors.Is(err, fault.ErrState) {
		t.Errorf("in use: %v", err)
	}
	if gone, err := s.GC(ctx, used); err != nil || len(gone) != 0 {
		t.Errorf("%v %v", gone, err)
	}
	if gone, err := s.GC(ctx, nil); err != nil || !slices.Equal(gone, digests[:1]) {
		t.Errorf("%v %v", gone, err)
	}
	leftovers(t, s, 1)
	if err := s.Remove(ctx, "none", nil); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	ok(t, s.Remove(ctx, "c:1", nil))
	leftovers(t, s, 0)
}

func TestManyAtOnce(t *testing.T) {
	s := store(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			name := fmt.Sprintf("i%d", i)
			for n := range 5 {
				if _, err := s.ImportFrom(ctx, name, bytes.NewReader(rootfs(t, fmt.Sprint(i%3, n)))); err != nil {
					t.Error(err)
				}
				if _, err := s.Resolve(ctx, name); err != nil {
					t.Error(err)
				}
				if i == 7 {
					if _, err := s.GC(ctx, nil); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	_, err := s.GC(ctx, nil)
	ok(t, err)
	leftovers(t, s, 3)
	for i := range 8 {
		img, err := s.Resolve(ctx, fmt.Sprintf("i%d", i))
		ok(t, err)
		ok(t, s.Verify(ctx, img.Digest))
	}
}

// failpoints reports whether this build obeys them.
func failpoints(t *testing.T) bool {
	t.Setenv("AGENTBOX_FAILPOINT", "probe=error")
	return failpoint.Hit("probe") != nil
}

// A process that dies at any instant leaves an image that is whole or none.
// It needs the build tag "failpoint".
func TestKilled(t *testing.T) {
	if !failpoints(t) {
		t.Log("built without the tag failpoint: only the kill by time runs")
		killByTime(t)
		return
	}
	src := filepath.Join(t.TempDir(), "x.tar")
	ok(t, os.WriteFile(src, rootfs(t, "x"), 0o600))
	for _, point := range []string{
		"images.import.before-sync", "images.import.before-rename", "images.import.after-rename",
		"images.import.before-index",
	} {
		s := store(t)
		root := filepath.Dir(s.dir)
		if out, err := other(root, "IMAGES_TEST_SOURCE="+src, "AGENTBOX_FAILPOINT="+point+"=kill"); err == nil ||
			!strings.Contains(err.Error(), "killed") {
			t.Fatalf("%s did not fire: %v %s", point, err, out)
		}
		if _, err := s.Resolve(ctx, "killed"); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s: %v", point, err)
		}
		if _, err := other(root, "IMAGES_TEST_SOURCE="+src, "AGENTBOX_FAILPOINT="+point+"=error"); err == nil {
			t.Errorf("%s: no error", point)
		}
		_, err := s.GC(ctx, nil)
		ok(t, err)
		leftovers(t, s, 0)
		img, err := s.Import(ctx, "killed", src)
		ok(t, err)
		ok(t, s.Verify(ctx, img.Digest))
		leftovers(t, s, 1)
	}
	for _, point := range []string{"images.remove.after-index", "images.remove.before-layers"} {
		s := store(t)
		img, err := s.Import(ctx, "killed", src)
		ok(t, err)
		if out, err := other(filepath.Dir(s.dir), "IMAGES_TEST_REMOVE=killed",
			"AGENTBOX_FAILPOINT="+point+"=kill"); err == nil {
			t.Fatalf("%s did not fire: %s", point, out)
		}
		if _, err := s.Resolve(ctx, "killed"); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s: %v", point, err)
		}
		if _, err := s.ResolveDigest(ctx, img.Digest); err != nil && !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("%s: %v", point, err)
		}
		_, err = s.GC(ctx, nil)
		ok(t, err)
		leftovers(t, s, 0)
	}
	killByTime(t)
}

func killByTime(t *testing.T) {
	s := store(t)
	for i := range 12 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "IMAGES_TEST_ROOT="+filepath.Dir(s.dir))
		ok(t, cmd.Start())
		time.Sleep(time.Duration(i) * 8 * time.Millisecond) // the instant is what is tested
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		list, err := s.List(ctx)
		ok(t, err)
		for _, img := range list {
			ok(t, s.Verify(ctx, img.Digest))
			if img.Name != "" { // else killed before it was named, and whole all the same
				ok(t, s.Remove(ctx, img.Name, nil))
			}
		}
	}
	_, err := s.GC(ctx, nil)
	ok(t, err)
	leftovers(t, s, 0)
}

func TestNoSpace(t *testing.T) {
	root := t.TempDir()
	ok(t, unix.Mount("tmpfs", root, "tmpfs", 0, "size=24m"))
	defer unix.Unmount(root, unix.MNT_DETACH)
	s, err := Open(root)
	ok(t, err)
	big := archive(t, ent{tar.Header{Name: "etc/f"}, strings.Repeat("x", 20<<20)})
	_, err = s.ImportFrom(ctx, "big", bytes.NewReader(big))
	if !errors.Is(err, unix.ENOSPC) || len(fault.Hint(err)) == 0 {
		t.Errorf("%v", err)
	}
	leftovers(t, s, 0)
}

// A Debian root filesystem made by tar, imported as tar and as a directory,
// against the independent listing of the original.
func TestRealRootfs(t *testing.T) {
	src := t.TempDir()
	for _, d := range []string{"etc", "usr/share/doc/libc6", "var/lib/dpkg/info"} {
		if _, err := os.Stat("/" + d); err != nil {
			continue
		}
		ok(t, os.MkdirAll(filepath.Join(src, filepath.Dir(d)), 0o755))
		if out, err := exec.Command("cp", "-a", "/"+d, filepath.Join(src, d)).CombinedOutput(); err != nil {
			t.Fatalf("%s", out)
		}
	}
	ok(t, unix.Mkfifo(src+"/fifo", 0o600))
	ok(t, unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	ok(t, unix.Setxattr(src+"/etc", "user.k", []byte("v"), 0))
	tarball := filepath.Join(t.TempDir(), "x.tar")
	if out, err := exec.Command("tar", "-C", src, "--format=pax", "--xattrs", "--xattrs-include=*", "--numeric-owner",
		"-cf", tarball, ".").CombinedOutput(); err != nil {
		t.Fatalf("%s", out)
	}
	want := listing(t, src)
	s := store(t)
	var seen image.Progress
	s.Progress = func(p image.Progress) { seen = p }
	start := time.Now()
	a, err := s.Import(ctx, "tar", tarball)
	ok(t, err)
	t.Logf("tar: %v for %d bytes, %d entries seen", time.Since(start), a.Bytes, seen.Entries)
	start = time.Now()
	b, err := s.Import(ctx, "dir", src)
	ok(t, err)
	t.Logf("directory: %v", time.Since(start))
	if a.Digest != b.Digest {
		t.Error("tar and directory differ in their digest")
	}
	sameListing(t, listing(t, a.Lower[0]), want)
}

func FuzzImport(f *testing.F) {
	f.Add(rootfs(f, "x"))
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Add([]byte("\x28\xb5\x2f\xfd\x04\x00"))
	f.Add([]byte("BZh9"))
	s := store(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		c, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		img, err := s.ImportFrom(c, "fuzz", bytes.NewReader(data))
		if err == nil {
			ok(t, s.Verify(ctx, img.Digest))
			ok(t, s.Remove(ctx, "fuzz", nil))
		}
		leftovers(t, s, 0)
	})
}

// TestOpenExisting: nothing is made in a root that may be on its way out.
func TestOpenExisting(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	s, err := OpenExisting(root)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := s.List(t.Context()); len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	if _, err := os.Lstat(root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the root: %v", err)
	}
}
