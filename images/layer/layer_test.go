package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	"github.com/agentbox/agentbox/internal/guard"
)

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make devices and foreign owners: run them as root")
		os.Exit(1)
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
		if e.Format = tar.FormatPAX; e.ModTime.IsZero() {
			e.ModTime = time.Unix(1234567890, 123456789)
		}
		e.Size = int64(len(e.data))
		ok(t, tw.WriteHeader(&e.Header))
		_, err := io.WriteString(tw, e.data)
		ok(t, err)
	}
	ok(t, tw.Close())
	return buf.Bytes()
}

func file(name, data string) ent { return ent{tar.Header{Name: name}, data} }
func dir(name string) ent {
	return ent{tar.Header{Name: name + "/", Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}
func link(name, to string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}, ""}
}

func unpack(t testing.TB, stream []byte) (*os.File, Report, error) {
	t.Helper()
	d, err := os.Open(t.TempDir())
	ok(t, err)
	t.Cleanup(func() { d.Close() })
	rep, err := Unpack(ctx, bytes.NewReader(stream), d, Options{})
	return d, rep, err
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// full has all that a layer can hold.
func full(t testing.TB) []byte {
	big := strings.Repeat("0123456789abcdef", 1<<12) + strings.Repeat("\x00", 96<<10) + "end"
	return archive(t,
		dir("etc"), file("etc/passwd", "root:x:0:0\n"), file("etc/empty", ""), file("big", big),
		ent{tar.Header{Name: "etc/s", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd", Uid: 7, Gid: 8}, ""},
		ent{tar.Header{
			Name: "bin/su", Mode: 0o4755,
			PAXRecords: map[string]string{"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", "SCHILY.xattr.user.k": "v\x00w"},
		}, "su"},
		link("bin/su2", "bin/su"),
		ent{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3, Mode: 0o666}, ""},
		ent{tar.Header{Name: "run/fifo", Typeflag: tar.TypeFifo, Mode: 0o600, Uid: 1000, Gid: 1000}, ""},
		file("usr/.wh.gone", ""), file("opt/.wh..wh..opq", ""), dir("opt"), file("opt/new", "n"),
		file("var/.wh.lib", ""), dir("var/lib"), file("var/lib/x", "x"), // a directory in place of another
		file("srv/.wh.a", ""), file("srv/a/b/c", "c"), // without an entry of its own
		dir("home"), file("home/f", "f"), file(".wh.home", ""), // the mark comes after
		file("twice", "first"), link("kept", "twice"), file("twice", "second"), file("twice", "third"),
		file(".wh..wh.plnk/1.2", "aufs"), file(".wh..wh.aufs", ""), file(".wh.twice", ""),
		ent{tar.Header{Name: "top", Mode: 0o600, ModTime: time.Unix(-5, 999999999)}, "t"},
	)
}

func TestUnpack(t *testing.T) {
	stream := append(full(t), make([]byte, 10240)...) // a tape's padding
	d, rep, err := unpack(t, stream)
	ok(t, err)
	if rep.DiffID != digest(stream) || strings.Join(rep.Implicit,
		" ") != " bin dev run srv srv/a srv/a/b usr var" || rep.Opaque {
		t.Errorf("%+v", rep)
	}
	root := filepath.Join(d.Name(), "diff")
	for path, want := range map[string]string{
		"etc/passwd": "root:x:0:0\n", "kept": "first", "twice": "third", "srv/a/b/c": "c", "bin/su2": "su",
	} {
		if b, err := os.ReadFile(filepath.Join(root, path)); string(b) != want {
			t.Errorf("%s: %q %v", path, b, err)
		}
	}
	for path, want := range map[string]bool{
		"opt": true, "var/lib": true, "srv/a": true, "home": true, "var": false, "srv": false, "etc": false,
	} {
		var b [1]byte
		n, err := unix.Getxattr(filepath.Join(root, path), "trusted.overlay.opaque", b[:])
		if (n == 1 && b[0] == 'y') != want {
			t.Errorf("%s opaque: %v %v", path, !want, err)
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(root+"/usr/gone", &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
		t.Errorf("whiteout: %+v %v", st, err)
	}
	if err := unix.Lstat(root+"/top", &st); err != nil || st.Mtim != (unix.Timespec{Sec: -5, Nsec: 999999999}) ||
		st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("top: %+v %v", st, err)
	}
	r := Pack(ctx, d)
	again, err := io.ReadAll(r)
	ok(t, err)
	ok(t, r.Close())
	if !bytes.Equal(again, stream) {
		t.Error("another stream")
	}
	ok(t, Verify(ctx, d, rep.DiffID))
}

// Verify finds every change to a layer and says where it is.
func TestVerify(t *testing.T) {
	stream := full(t)
	for what, c := range map[string]struct {
		do   func(root string) error
		says string
	}{
		"content": {func(r string) error { return rewrite(r+"/etc/passwd", "root:x:0:1\n") }, "etc/passwd"},
		"hole":    {func(r string) error { return rewrite(r+"/big", "x") }, "big"},
		"longer":  {func(r string) error { return rewrite(r+"/etc/empty", "x") }, "etc/empty"},
		"gone":    {func(r string) error { return os.Remove(r + "/etc/s") }, "gone"},
		"lost":    {func(r string) error { return os.Remove(r + "/etc/passwd") }, "etc/passwd"},
		"new":     {func(r string) error { return os.WriteFile(r+"/etc/new", nil, 0o600) }, "etc/new"},
		"new dir": {func(r string) error { return os.Mkdir(r+"/x", 0o700) }, `"x"`},
		"mode":    {func(r string) error { return os.Chmod(r+"/bin/su", 0o755) }, "the mode"},
		"owner":   {func(r string) error { return os.Lchown(r+"/etc/s", 0, 0) }, "the owner"},
		"xattr":   {func(r string) error { return unix.Removexattr(r+"/bin/su", "user.k") }, "attribute"},
		"value":   {func(r string) error { return unix.Setxattr(r+"/bin/su", "user.k", []byte("v"), 0) }, "user.k"},
		"time":    {func(r string) error { return os.Chtimes(r+"/opt", time.Time{}, time.Unix(1, 0)) }, "the time"},
		"opaque":  {func(r string) error { return unix.Removexattr(r+"/opt", "trusted.overlay.opaque") }, "attribute"},
		"target":  {func(r string) error { return retarget(r + "/etc/s") }, "the target"},
		"whiteout": {func(r string) error {
			return errors.Join(os.Remove(r+"/usr/gone"), os.Mkdir(r+"/usr/gone", 0o755))
		}, "usr/gone"},
		"links": {unlink, "hard links"},
		"symlink": {func(r string) error {
			return errors.Join(os.Rename(r+"/etc", r+"/../etc"), os.Symlink("../etc", r+"/etc"))
		}, "etc/passwd"},
		"frame":    {func(r string) error { return os.Truncate(r+"/../frame.zst", 100) }, "frame"},
		"no frame": {func(r string) error { return os.Remove(r + "/../frame.zst") }, "frame"},
		"spare":    {func(r string) error { return rewrite(r+"/../spare/1", "SECOND") }, "twice"},
	} {
		d, rep, err := unpack(t, stream)
		ok(t, err)
		ok(t, c.do(filepath.Join(d.Name(), "diff")))
		if err := Verify(ctx, d, rep.DiffID); !errors.Is(err, fault.ErrCorrupt) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// rewrite keeps the time.
func rewrite(path, data string) error {
	fi, err := os.Stat(path)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(path, []byte(data), 0o600), os.Chtimes(path, time.Time{}, fi.ModTime()))
}

func retarget(path string) error {
	fi, err := os.Lstat(path)
	if err != nil {
		return err
	}
	ts := unix.NsecToTimespec(fi.ModTime().UnixNano())
	return errors.Join(os.Remove(path), os.Symlink("/etc/shadow", path), os.Lchown(path, 7, 8),
		unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
}

// unlink makes one file of two names, each with what it should hold.
func unlink(r string) error {
	fi, err := os.Stat(r + "/bin/su")
	if err != nil {
		return err
	}
	return errors.Join(exec.Command("cp", "-a", r+"/bin/su", r+"/bin/new").Run(), os.Rename(r+"/bin/new", r+"/bin/su2"),
		os.Chtimes(r+"/bin/su", time.Time{}, fi.ModTime()))
}

func TestHostile(t *testing.T) {
	var heavy []ent // they are kept until all is unpacked
	for i := range 65 {
		heavy = append(heavy, ent{tar.Header{
			Name: fmt.Sprint(i, "/"), Typeflag: tar.TypeDir,
			PAXRecords: map[string]string{"SCHILY.xattr.user.k": strings.Repeat("x", 512<<10)},
		}, ""})
	}
	for what, c := range map[string]struct {
		stream []byte
		says   string
	}{
		"empty":          {nil, "empty"},
		"dotdot":         {archive(t, file("../x", "")), "outside"},
		"dotdot mark":    {archive(t, file("a/../../.wh.x", "")), "outside"},
		"mark of dotdot": {archive(t, file("a/.wh...", "")), "hides nothing"},
		"bare mark":      {archive(t, file("a/.wh.", "")), "hides nothing"},
		"device":         {archive(t, ent{tar.Header{Name: "w", Typeflag: tar.TypeChar}, ""}), "0:0"},
		"redirect": {archive(t, ent{tar.Header{
			Name: "d/", Typeflag: tar.TypeDir,
			PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"},
		}, ""}), "overlayfs' own"},
		"through link": {archive(t, ent{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, ""},
			file("l/x", "")), "not a directory"},
		"mark in link": {archive(t, ent{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, ""},
			file("l/.wh.passwd", "")), "not a directory"},
		"opaque link": {archive(t, ent{tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc"}, ""},
			file("l/.wh..wh..opq", "")), "not a directory"},
		"link to host": {archive(t, link("l", "/etc/passwd")), "hard link"},
		"link to mark": {archive(t, file(".wh.x", ""), link("y", "x")), "hard link"},
		"cut":          {full(t)[:3000], "cut short"},
		"heavy":        {archive(t, heavy...), "too much about its directories"},
	} {
		if _, _, err := unpack(t, c.stream); !errors.Is(err, fault.ErrInvalid) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", what, err)
		}
	}
	d, err := os.Open(t.TempDir())
	ok(t, err)
	defer d.Close()
	if _, err := Unpack(ctx, bytes.NewReader(full(t)), d,
		Options{MaxBytes: 64 << 10}); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a bomb: %v", err)
	}
}

// Data that is no file's content is bounded, too: by the stream's length, and by the room on the
// disk.
func TestUnpackBeside(t *testing.T) {
	label := archive(t, ent{tar.Header{Name: "label", Typeflag: 'V'}, strings.Repeat("x", askEvery+1)}, file("f", "y"))
	for what, c := range map[string]struct {
		opts Options
		want error
	}{
		"bomb": {Options{MaxBytes: 1 << 20}, fault.ErrInvalid},
		"full": {Options{MinFree: 1 << 60}, unix.ENOSPC},
		"fits": {Options{MaxBytes: 32 << 20, MinFree: 1}, nil},
	} {
		d, err := os.Open(t.TempDir())
		ok(t, err)
		_, err = Unpack(ctx, bytes.NewReader(label), d, c.opts)
		d.Close()
		if !errors.Is(err, c.want) || c.want == nil && err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestOpaqueTop(t *testing.T) {
	_, rep, err := unpack(t, archive(t, file(".wh..wh..opq", ""), file("x", "")))
	if err != nil || !rep.Opaque {
		t.Errorf("%+v %v", rep, err)
	}
}

// Equal trees, equal streams, however the files came there.
func TestSeal(t *testing.T) {
	var ids []string
	for _, names := range [][]string{{"a", "b", "c"}, {"c", "a", "b"}} {
		d, err := os.Open(t.TempDir())
		ok(t, err)
		defer d.Close()
		root := d.Name() + "/diff"
		ok(t, os.Mkdir(root, 0o755))
		for _, n := range names {
			ok(t, os.WriteFile(root+"/"+n, []byte(strings.Repeat(n, 100<<10)), 0o644))
			ok(t, os.Chtimes(root+"/"+n, time.Time{}, time.Unix(1, 1)))
		}
		f, err := os.OpenFile(root+"/sparse", os.O_CREATE|os.O_WRONLY, 0o600)
		ok(t, err)
		ok(t, f.Truncate(1<<20))
		if names[0] == "c" { // the same zeros, but on disk
			_, err = f.Write(make([]byte, 1<<20))
			ok(t, err)
		}
		ok(t, f.Close())
		ok(t, os.Link(root+"/a", root+"/z"))
		for _, n := range []string{"/sparse", "/"} {
			ok(t, os.Chtimes(root+n, time.Time{}, time.Unix(2, 2)))
		}
		rep, err := Seal(ctx, d)
		ok(t, err)
		ok(t, Verify(ctx, d, rep.DiffID))
		ids = append(ids, rep.DiffID)
	}
	if ids[0] != ids[1] {
		t.Error(ids)
	}
}

func TestCompress(t *testing.T) {
	for _, n := range []int{0, 1, member, 3*member + 5} {
		data := bytes.Repeat([]byte("some text "), n/10+1)[:n]
		var sums []string
		for range 2 {
			z := Compress(bytes.NewReader(data))
			packed, err := io.ReadAll(z)
			ok(t, err)
			ok(t, z.Close())
			sums = append(sums, digest(packed))
			plain, done, err := Decompress(ctx, bytes.NewReader(packed))
			ok(t, err)
			got, err := io.ReadAll(plain)
			ok(t, errors.Join(err, done(err)))
			if !bytes.Equal(got, data) {
				t.Errorf("%d bytes: others", n)
			}
		}
		if sums[0] != sums[1] {
			t.Errorf("%d bytes: %v", n, sums)
		}
	}
	broken := errors.New("broken")
	z := Compress(io.MultiReader(bytes.NewReader(make([]byte, 2*member)), errReader{broken}))
	if _, err := io.ReadAll(z); !errors.Is(err, broken) {
		t.Error(err)
	}
	z = Compress(bytes.NewReader(make([]byte, 50*member)))
	ok(t, z.Close()) // before the end
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// Any stream that is unpacked without an error is given back byte by byte, and nothing lies
// outside.
func FuzzUnpack(f *testing.F) {
	f.Add(full(f))
	f.Add(archive(f, file("a/.wh.b", ""), file("a/b/c", "x")))
	f.Add(archive(f, file("x", "1"), link("y", "x"), file("x", "22")))
	f.Add(archive(f, dir("d"), file("d/.wh..wh..opq", ""), file(".wh.d", "")))
	f.Fuzz(func(t *testing.T, stream []byte) {
		tmp := t.TempDir()
		ok(t, os.Mkdir(tmp+"/l", 0o700))
		d, err := os.Open(tmp + "/l")
		ok(t, err)
		defer d.Close()
		c, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		rep, err := Unpack(c, bytes.NewReader(stream), d, Options{MaxBytes: 64 << 20, MaxEntries: 10000})
		if err == nil {
			if rep.DiffID != digest(stream) {
				t.Error("another digest")
			}
			ok(t, Verify(ctx, d, rep.DiffID))
		}
		if list, err := os.ReadDir(tmp); err != nil || len(list) != 1 {
			t.Errorf("outside: %v %v", list, err)
		}
	})
}

type defective struct{ left int }

func (d *defective) Read(p []byte) (int, error) {
	if d.left <= 0 {
		panic("a defect")
	}
	n := min(len(p), d.left)
	d.left -= n
	return n, nil
}

// A panic of the inner reader is an error, not the end of the stream.
func TestPanics(t *testing.T) {
	for name, r := range map[string]io.Reader{
		"compress": Compress(&defective{3 << 20}), "ahead": ReadAhead(&defective{3 << 20}, nil),
	} {
		_, err := io.Copy(io.Discard, r)
		if p := (*guard.Panic)(nil); !errors.As(err, &p) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
