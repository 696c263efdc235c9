package tree

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
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make devices and foreign owners: run them as root")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func all(string) bool           { return true }
func allX(string) (bool, error) { return true, nil }

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	ok(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// nasty fills dir with one of everything.
func nasty(t *testing.T, dir string, sockets bool) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	ok(t, os.MkdirAll(in("a/b/c"), 0o755))
	ok(t, os.WriteFile(in("a/file"), []byte("hello"), 0o640))
	ok(t, os.Chown(in("a/file"), 1234, 70000))
	ok(t, os.WriteFile(in("a/suid"), []byte("#!"), 0o755))
	ok(t, os.Chmod(in("a/suid"), 0o755|os.ModeSetuid|os.ModeSetgid))
	ok(t, os.Link(in("a/file"), in("a/b/hard")))
	ok(t, os.Symlink("/etc/passwd", in("abs")))
	ok(t, os.Symlink("nowhere/\xff\n", in("dangling")))
	ok(t, os.Lchown(in("dangling"), 7, 8))
	ok(t, os.WriteFile(in(".dot"), nil, 0))
	ok(t, os.WriteFile(in("new\nline \xff\xfe=é"), []byte("x"), 0o600))
	ok(t, os.WriteFile(in(strings.Repeat("n", 255)), []byte("long"), 0o600))
	deep := strings.Repeat("d", 200)
	ok(t, os.MkdirAll(in(filepath.Join(deep, deep, deep)), 0o700))
	ok(t, os.WriteFile(in(filepath.Join(deep, deep, deep, "f")), []byte("deep"), 0o600))
	ok(t, unix.Mkfifo(in("fifo"), 0o622))
	ok(t, unix.Mknod(in("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	ok(t, unix.Mknod(in("blk"), unix.S_IFBLK|0o600, int(unix.Mkdev(259, 1<<19))))
	if sockets {
		ok(t, unix.Mknod(in("sock"), unix.S_IFSOCK|0o755, 0))
	}
	ok(t, unix.Setxattr(in("a/file"), "user.k", []byte("v\x00=\n"), 0))
	ok(t, unix.Setxattr(in("a/file"), "user.a=b", []byte("w"), 0))
	ok(t, unix.Setxattr(in("a/suid"), "security.capability",
		[]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	ok(t, unix.Lsetxattr(in("abs"), "trusted.link", []byte("1"), 0))
	ok(t, exec.Command("setfacl", "-m", "u:1000:rx,d:u:1001:rwx", in("a/b")).Run())
	ok(t, os.WriteFile(in("a/b/noacl"), []byte("x"), 0o600))
	ok(t, exec.Command("setfacl", "-b", in("a/b/noacl"), in("a/b/hard")).Run())
	// Holes: in front, in the middle, at the end, and nothing else.
	f, err := os.Create(in("sparse"))
	ok(t, err)
	_, err = f.WriteAt([]byte("data"), 1<<20)
	ok(t, err)
	_, err = f.WriteAt(bytes.Repeat([]byte("y"), 100_000), 5<<20+17)
	ok(t, err)
	ok(t, f.Truncate(8<<20+1))
	f.Close()
	f, err = os.Create(in("hole"))
	ok(t, err)
	ok(t, f.Truncate(10<<30))
	f.Close()
	ok(t, os.WriteFile(in("zeros"), make([]byte, 300_000), 0o644))
	ok(t, os.WriteFile(in("big"), bytes.Repeat([]byte("0123456789abcdef\x00"), 50_000), 0o644))
	var paths []string
	ok(t, filepath.WalkDir(dir, func(p string, _ os.DirEntry, err error) error {
		paths = append(paths, p)
		return err
	}))
	for i := len(paths) - 1; i >= 0; i-- {
		ts := unix.Timespec{Sec: int64(i)*77_777_777 - 300_000_000, Nsec: int64(i)*1_234_567 + 1}
		ok(t, unix.UtimesNanoAt(unix.AT_FDCWD, paths[i], []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// listing describes a tree with find, getfattr and sha256sum: nothing of ours.
func listing(t *testing.T, dir string) string {
	t.Helper()
	cmd := exec.Command("sh", "-ec", `
		find . -printf '%P|%y|%m|%U:%G|%T@|%l|%n\n' | sort
		find . -type f -not -name hole -exec stat -c '%n %s' {} + | sort
		find . '(' -type b -o -type c ')' -exec stat -c '%n %t:%T' {} + | sort
		find . -type f -not -name hole -exec sha256sum {} + | sort
		find . -print0 | sort -z | xargs -0 getfattr -hd -m - -e hex --absolute-names
	`)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

func same(t *testing.T, want, got string) {
	t.Helper()
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	in := map[string]int{}
	for _, l := range w {
		in[l]++
	}
	for _, l := range g {
		in[l]--
	}
	for l, n := range in {
		if n > 0 {
			t.Errorf("missing: %q", l)
		} else if n < 0 {
			t.Errorf("surplus: %q", l)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	ctx := context.Background()
	src, dst := t.TempDir(), t.TempDir()
	nasty(t, src, true)
	var buf bytes.Buffer
	rep, err := Pack(ctx, open(t, src), ".", &buf, PackOptions{Name: ".", Xattr: all})
	ok(t, err)
	if len(rep.Skipped) != 1 || !strings.Contains(rep.Skipped[0], "sock") {
		t.Errorf("skipped: %q", rep.Skipped)
	}
	if buf.Len() > 3<<20 {
		t.Errorf("the archive has %d bytes: holes were written out", buf.Len())
	}
	t.Logf("%d entries, %d bytes, archive %d", rep.Entries, rep.Bytes, buf.Len())
	archive := buf.Bytes()
	ok(t, os.Remove(filepath.Join(src, "sock")))
	ok(t, touchLike(src))
	want := listing(t, src)

	start := time.Now()
	rep2, err := Extract(ctx, open(t, dst), bytes.NewReader(archive),
		ExtractOptions{Owners: true, Privileged: true, Fresh: true, Xattr: allX})
	ok(t, err)
	t.Logf("extract: %v", time.Since(start))
	ok(t, touchLike(dst))
	if rep2.Entries != rep.Entries || rep2.Bytes != rep.Bytes {
		t.Errorf("packed %+v, unpacked %+v", rep, rep2)
	}
	same(t, want, listing(t, dst))
	var st unix.Stat_t
	ok(t, unix.Stat(filepath.Join(dst, "hole"), &st))
	if st.Size != 10<<30 || st.Blocks > 8 {
		t.Errorf("hole: %d bytes in %d blocks", st.Size, st.Blocks)
	}
	ok(t, unix.Stat(filepath.Join(dst, "sparse"), &st))
	if st.Blocks*512 > 1<<20 {
		t.Errorf("sparse: %d blocks", st.Blocks)
	}

	// GNU tar reads the same out of it.
	gnu := t.TempDir()
	cmd := exec.Command("tar", "-xpf", "-", "-C", gnu, "--numeric-owner", "--xattrs", "--xattrs-include=*",
		"--exclude=./a/file", "--exclude=./a/b/hard")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("tar: %v\n%s", err, out)
	}
	for _, f := range []string{"sparse", "big", "zeros", "new\nline \xff\xfe=é", "dangling"} {
		var a, b unix.Stat_t
		ok(t, unix.Lstat(filepath.Join(dst, f), &a))
		ok(t, unix.Lstat(filepath.Join(gnu, f), &b))
		if a.Mtim != b.Mtim || a.Mode != b.Mode || a.Size != b.Size || a.Uid != b.Uid {
			t.Errorf("%q differs under GNU tar: %+v %+v", f, a, b)
		}
		if a.Mode&unix.S_IFMT == unix.S_IFREG {
			if out, err := exec.Command("cmp", filepath.Join(dst, f),
				filepath.Join(gnu, f)).CombinedOutput(); err != nil {
				t.Errorf("%s", out)
			}
		}
	}

	// The digest agrees, and sees every kind of change.
	h1, _, err := Hash(ctx, open(t, src))
	ok(t, err)
	h2, _, err := Hash(ctx, open(t, dst))
	ok(t, err)
	if h1 != h2 {
		t.Error("equal trees, different digests")
	}
	for what, change := range map[string]func() error{
		"mode":    func() error { return os.Chmod(dst+"/big", 0o600) },
		"owner":   func() error { return os.Lchown(dst+"/abs", 1, 1) },
		"time":    func() error { return os.Chtimes(dst+"/a", time.Now(), time.Now()) },
		"xattr":   func() error { return unix.Setxattr(dst+"/a", "user.z", nil, 0) },
		"content": func() error { return os.WriteFile(dst+"/zeros", append(make([]byte, 299_999), 1), 0o644) },
		"link": func() error {
			_ = os.Remove(dst + "/a/b/hard")
			return os.WriteFile(dst+"/a/b/hard", []byte("hello"), 0o640)
		},
		"gone": func() error { return os.Remove(dst + "/.dot") },
	} {
		ok(t, change())
		h, _, err := Hash(ctx, open(t, dst))
		ok(t, err)
		if h == h2 {
			t.Errorf("%s changed, the digest did not", what)
		}
		h2 = h
	}
}

// touchLike fixes the top directory's time, which the tests themselves change.
func touchLike(dir string) error {
	ts := unix.Timespec{Sec: 1}
	return unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{ts, ts}, 0)
}

func TestClone(t *testing.T) {
	ctx := context.Background()
	src, dst := t.TempDir(), t.TempDir()
	nasty(t, src, true)
	want := listing(t, src)
	_, err := Clone(ctx, open(t, src), open(t, dst), CloneOptions{})
	ok(t, err)
	same(t, want, listing(t, dst))
	h1, _, err := Hash(ctx, open(t, src))
	ok(t, err)
	h2, _, err := Hash(ctx, open(t, dst))
	ok(t, err)
	if h1 != h2 {
		t.Error("a clone has another digest")
	}

	ok(t, os.Mkdir(src+"/mnt", 0o755))
	ok(t, unix.Mount("tmpfs", src+"/mnt", "tmpfs", 0, ""))
	defer unix.Unmount(src+"/mnt", unix.MNT_DETACH)
	if _, err := Clone(ctx, open(t, src), open(t, t.TempDir()), CloneOptions{}); !errors.Is(err, fault.ErrInvalid) ||
		!strings.Contains(err.Error(), "mount point") {
		t.Errorf("a mount point: %v", err)
	}
	in := t.TempDir()
	ok(t, os.Mkdir(in+"/sub", 0o755))
	if _, err := Clone(ctx, open(t, in), open(t, in+"/sub"), CloneOptions{}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("into itself: %v", err)
	}
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
		h := e.Header
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		h.Size = int64(len(e.data))
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(tw, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func file(name, data string) ent { return ent{tar.Header{Name: name}, data} }
func link(name, to string) ent {
	return ent{tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeSymlink}, ""}
}
func hard(name, to string) ent {
	return ent{tar.Header{Name: name, Linkname: to, Typeflag: tar.TypeLink}, ""}
}
func dir(name string) ent          { return ent{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o777}, ""} }
func owned(name string, u int) ent { return ent{tar.Header{Name: name, Uid: u}, ""} }

// Every hostile archive, into a fresh directory and into one that holds things,
// has no effect outside of it.
func TestHostile(t *testing.T) {
	cases := map[string]struct {
		list  []ent
		fresh error // nil: must work
		used  error
	}{
		"dotdot":        {[]ent{file("../evil", "x")}, fault.ErrInvalid, fault.ErrInvalid},
		"dotdot inside": {[]ent{file("a/../../evil", "x")}, fault.ErrInvalid, fault.ErrInvalid},
		"absolute":      {[]ent{file("/evil", "x")}, nil, nil},
		"symlink parent": {
			[]ent{link("l", "../outside"), file("l/evil", "x")}, fault.ErrInvalid, fault.ErrInvalid,
		},
		"symlink chain": {
			[]ent{link("l", "m"), link("m", ".."), file("l/outside/evil", "x")}, fault.ErrInvalid, fault.ErrInvalid,
		},
		"symlink parent abs":   {[]ent{link("l", "/"), dir("l/evil")}, fault.ErrInvalid, fault.ErrInvalid},
		"write over symlink":   {[]ent{link("l", "../outside/secret"), file("l", "x")}, nil, nil},
		"dir over symlink":     {[]ent{link("l", "../outside"), dir("l"), file("l/evil", "x")}, nil, fault.ErrExists},
		"old symlink":          {[]ent{file("out/evil", "x")}, nil, fault.ErrInvalid},
		"dir over old symlink": {[]ent{dir("out"), file("out/evil", "x")}, nil, fault.ErrExists},
		"hard link out": {
			[]ent{hard("h", "../outside/secret"), file("h", "x")}, fault.ErrInvalid, fault.ErrInvalid,
		},
		"hard link abs": {[]ent{hard("h", "/etc/passwd")}, fault.ErrInvalid, fault.ErrInvalid},
		"hard link via link": {
			[]ent{link("l", "../outside"), hard("h", "l/secret")}, fault.ErrInvalid, fault.ErrInvalid,
		},
		"hard link to symlink": {[]ent{link("l", "../outside/secret"), hard("h", "l"), file("h", "x")}, nil, nil},
		"hard link to old":     {[]ent{hard("h", "old")}, fault.ErrInvalid, fault.ErrInvalid},
		"hard link to dir":     {[]ent{dir("d"), hard("h", "d")}, fault.ErrInvalid, fault.ErrInvalid},
		"hard link to itself":  {[]ent{file("f", "x"), hard("f", "f")}, nil, nil},
		"hard link to nothing": {[]ent{hard("f", "f")}, fault.ErrInvalid, fault.ErrInvalid},
		"file over dir":        {[]ent{dir("d"), file("d", "x")}, fault.ErrExists, fault.ErrExists},
		"dir over file":        {[]ent{file("d", "x"), dir("d")}, nil, fault.ErrExists},
		"file below file":      {[]ent{file("d", "x"), file("d/x", "x")}, fault.ErrInvalid, fault.ErrInvalid},
		"top is a file":        {[]ent{file(".", "")}, fault.ErrInvalid, fault.ErrInvalid},
		"top is a symlink":     {[]ent{link(".", "/")}, fault.ErrInvalid, fault.ErrInvalid},
		"twice":                {[]ent{file("f", "1"), file("f", "2")}, nil, nil},
		"unknown type":         {[]ent{{tar.Header{Name: "f", Typeflag: 'Z'}, ""}}, fault.ErrInvalid, fault.ErrInvalid},
		"owner -1":             {[]ent{owned("f", 1<<32-1)}, fault.ErrInvalid, nil},
		"long component":       {[]ent{file(strings.Repeat("x", 256), "x")}, unix.ENAMETOOLONG, unix.ENAMETOOLONG},
		"long path":            {[]ent{file(strings.Repeat("x/", 2100)+"f", "x")}, fault.ErrInvalid, fault.ErrInvalid},
		"deep":                 {[]ent{file(strings.Repeat("x/", 2000)+"f", "x")}, nil, nil},
	}
	for name, c := range cases {
		for _, fresh := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/fresh=%v", name, fresh), func(t *testing.T) {
				tmp := t.TempDir()
				ok(t, os.MkdirAll(tmp+"/outside", 0o755))
				ok(t, os.Mkdir(tmp+"/top", 0o750))
				ok(t, os.WriteFile(tmp+"/outside/secret", []byte("secret"), 0o600))
				want, opts := c.fresh, ExtractOptions{Owners: true, Privileged: true, Fresh: true, Xattr: allX}
				if !fresh {
					want, opts = c.used, ExtractOptions{}
					ok(t, os.Symlink("../outside", tmp+"/top/out"))
					ok(t, os.WriteFile(tmp+"/top/old", []byte("old"), 0o600))
				}
				before := listing(t, tmp+"/outside")
				_, err := Extract(context.Background(), open(t, tmp+"/top"),
					bytes.NewReader(archive(t, c.list...)), opts)
				if want == nil && err != nil || want != nil && !errors.Is(err, want) {
					t.Errorf("got %v, want %v", err, want)
				}
				same(t, before, listing(t, tmp+"/outside"))
				if l, _ := os.ReadDir(tmp); len(l) != 2 {
					t.Errorf("outside: %v", l)
				}
				_ = exec.Command("rm", "-rf", tmp+"/top").Run() // deeper than testing can remove quickly
			})
		}
	}
}

// The zero options take no privilege from an archive and keep what was there.
func TestModest(t *testing.T) {
	top := t.TempDir()
	ok(t, os.Mkdir(top+"/keep", 0o700))
	ok(t, os.WriteFile(top+"/old", []byte("old"), 0o600))
	ok(t, os.Chmod(top, 0o710))
	suid := ent{tar.Header{
		Name: "suid", Mode: 0o6755, Uid: 1000, PAXRecords: map[string]string{
			"SCHILY.xattr.security.capability": "x", "SCHILY.xattr.user.a": "b",
		},
	}, "x"}
	dev := ent{tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""}
	rep, err := Extract(context.Background(), open(t, top),
		bytes.NewReader(archive(t, dir("./"), dir("keep"), suid, dev, file("old", "new"))),
		ExtractOptions{Xattr: func(n string) (bool, error) { return strings.HasPrefix(n, "user."), nil }})
	ok(t, err)
	if len(rep.Skipped) != 2 {
		t.Errorf("skipped: %q", rep.Skipped)
	}
	for name, mode := range map[string]uint32{
		".": unix.S_IFDIR | 0o710, "keep": unix.S_IFDIR | 0o700, "suid": unix.S_IFREG | 0o755,
		"old": unix.S_IFREG | 0o644,
	} {
		var st unix.Stat_t
		ok(t, unix.Lstat(filepath.Join(top, name), &st))
		if st.Mode != mode || st.Uid != 0 {
			t.Errorf("%s: mode %o, uid %d", name, st.Mode, st.Uid)
		}
	}
	if _, err := os.Lstat(top + "/sda"); err == nil {
		t.Error("a device was made")
	}
	if b, _ := os.ReadFile(top + "/old"); string(b) != "new" {
		t.Errorf("old: %q", b)
	}
}

func TestDamaged(t *testing.T) {
	good := archive(t, dir("d"), file("d/f", strings.Repeat("x", 1000)), file("d/zeros", strings.Repeat("\x00", 2048)))
	run := func(b []byte) error {
		_, err := Extract(context.Background(), open(t, t.TempDir()), bytes.NewReader(b), ExtractOptions{Fresh: true})
		return err
	}
	ok(t, run(good))
	ok(t, run(good[:len(good)-512])) // a lone zero block is an end, as for tar
	for n := 0; n <= len(good)-1024; n++ {
		if n%97 != 0 && n%512 > 1 {
			continue
		}
		if err := run(good[:n]); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("cut at %d of %d: %v", n, len(good), err)
		}
	}
	if err := run([]byte(strings.Repeat("not a tar archive ", 100))); !errors.Is(err, fault.ErrInvalid) ||
		!strings.Contains(err.Error(), "not a tar") {
		t.Error(err)
	}
	bad := bytes.Clone(good)
	bad[520] ^= 1
	if err := run(bad); !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), "damaged") {
		t.Error(err)
	}
	if err := run(append(bytes.Clone(good), make([]byte, 10240)...)); err != nil {
		t.Errorf("padding: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Extract(ctx, open(t, t.TempDir()), bytes.NewReader(good),
		ExtractOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := Extract(context.Background(), open(t, t.TempDir()), bytes.NewReader(good),
		ExtractOptions{MaxEntries: 2}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	if _, err := Extract(context.Background(), open(t, t.TempDir()), bytes.NewReader(good),
		ExtractOptions{MinFree: 1 << 60}); !errors.Is(err, unix.ENOSPC) || len(fault.Hint(err)) == 0 {
		t.Error(err)
	}
}

func TestRename(t *testing.T) {
	for rename, want := range map[string]string{"": "src/f src/h", "dst": "dst/f dst/h", ".": "f h"} {
		for _, names := range [][2]string{{"src", "src/"}, {"./", "./"}} {
			if names[0] == "./" && rename == "" {
				continue
			}
			top := t.TempDir()
			_, err := Extract(context.Background(), open(t, top),
				bytes.NewReader(archive(t, dir(names[0]), file(names[1]+"f", "x"), hard(names[1]+"h", names[1]+"f"))),
				ExtractOptions{Rename: rename})
			ok(t, err)
			for p := range strings.FieldsSeq(want) {
				if _, err := os.Lstat(filepath.Join(top, p)); err != nil {
					t.Error(err)
				}
			}
		}
	}
	for _, bad := range []string{"..", "a/b", "../x"} {
		if _, err := Extract(context.Background(), open(t, t.TempDir()), bytes.NewReader(archive(t, file("f", ""))),
			ExtractOptions{Rename: bad}); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestOwnerAndName(t *testing.T) {
	src := t.TempDir()
	ok(t, os.WriteFile(src+"/f", nil, 0o600))
	ok(t, os.Chown(src+"/f", 5, 5))
	var buf bytes.Buffer
	_, err := Pack(context.Background(), open(t, src), "f", &buf, PackOptions{Name: "g", Owner: &Owner{42, 43}})
	ok(t, err)
	h, err := tar.NewReader(&buf).Next()
	ok(t, err)
	if h.Name != "g" || h.Uid != 42 || h.Gid != 43 {
		t.Errorf("%+v", h)
	}
	ok(t, unix.Mknod(src+"/s", unix.S_IFSOCK|0o600, 0))
	if _, err := Pack(context.Background(), open(t, src), "s", io.Discard, PackOptions{Name: "s"}); !errors.Is(err,
		fault.ErrUnsupported) {
		t.Error(err)
	}
	if _, err := Pack(context.Background(), open(t, src), "none", io.Discard,
		PackOptions{Name: "s"}); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}

func FuzzExtract(f *testing.F) {
	f.Add(archive(f, dir("d"), file("d/f", "x"), link("l", ".."), hard("h", "d/f"), file("l/x", "y")), true)
	f.Add(archive(f, file("/a", "x"), file("../b", "x")), false)
	f.Add(archive(f, ent{tar.Header{Name: "s", PAXRecords: map[string]string{
		"SCHILY.xattr.user.x": "y", "AGENTBOX.xattr64.dXNlci5hPWI": "1",
	}}, "data"}), true)
	f.Fuzz(func(t *testing.T, data []byte, fresh bool) {
		if len(data) > 1<<16 {
			return
		}
		tmp := t.TempDir()
		ok(t, os.Mkdir(tmp+"/top", 0o755))
		top := open(t, tmp+"/top")
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := Extract(ctx, top, bytes.NewReader(data),
			ExtractOptions{Fresh: fresh, Owners: fresh, Privileged: fresh, Xattr: allX, MinFree: 1 << 30})
		if l, _ := os.ReadDir(tmp); len(l) != 1 {
			t.Fatalf("outside: %v", l)
		}
		if err == nil {
			if _, _, err := Hash(ctx, top); err != nil && ctx.Err() == nil {
				t.Fatal(err)
			}
		}
	})
}
