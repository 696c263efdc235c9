package overlay

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// everything makes a directory with one of each kind of thing.
func everything(t testing.TB, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.MkdirAll(in("sub/deep/empty"), 0o700))
	must(t, os.WriteFile(in("plain"), []byte("plain\n"), 0o644))
	must(t, os.WriteFile(in("empty"), nil, 0o400))
	must(t, os.WriteFile(in("large"), bytes.Repeat([]byte("0123456789"), 300_000), 0o644))
	must(t, os.Link(in("large"), in("sub/large2")))
	must(t, os.WriteFile(in(".hidden"), []byte("x"), 0o644))
	must(t, os.WriteFile(in(strings.Repeat("n", 255)), []byte("x"), 0o644))
	must(t, os.WriteFile(in("not\xffutf8\nline"), []byte("x"), 0o644))
	must(t, os.WriteFile(in("setuid"), []byte("#!"), 0o755))
	must(t, os.Chown(in("setuid"), 1000, 100))
	must(t, unix.Chmod(in("setuid"), 0o6755))
	must(t, os.Mkdir(in("setgid"), 0o755))
	must(t, os.Chown(in("setgid"), 0, 50))
	must(t, os.WriteFile(in("setgid/inside"), nil, 0o600))
	must(t, unix.Chmod(in("setgid"), 0o3777))
	must(t, os.Symlink("/no/such\nplace", in("symlink")))
	must(t, os.Link(in("symlink"), in("symlink2")))
	must(t, os.Link(in("plain"), in("sub/deep/link")))
	must(t, os.Link(in("plain"), in("a-first-name")))
	must(t, unix.Mkfifo(in("fifo"), 0o622))
	must(t, os.Link(in("fifo"), in("fifo2")))
	must(t, unix.Mknod(in("socket"), unix.S_IFSOCK|0o755, 0))
	must(t, unix.Mknod(in("char"), unix.S_IFCHR|0o600, int(unix.Mkdev(4095, 1<<20-1))))
	must(t, unix.Mknod(in("block"), unix.S_IFBLK|0o600, int(unix.Mkdev(4000, 7))))
	must(t, unix.Mknod(in("whiteout"), unix.S_IFCHR, 0))
	must(t, os.Link(in("whiteout"), in("sub/whiteout2")))
	sparse, err := os.Create(in("sparse"))
	must(t, err)
	_, err = sparse.WriteAt([]byte("middle"), 1<<20)
	must(t, err)
	_, err = sparse.WriteAt(bytes.Repeat([]byte("m"), 200_000), 3<<20)
	must(t, err)
	must(t, sparse.Truncate(5<<20+17))
	must(t, sparse.Close())
	hole, err := os.Create(in("hole"))
	must(t, err)
	must(t, hole.Truncate(12345))
	must(t, hole.Close())
	x := func(name, attr, value string) { must(t, unix.Lsetxattr(in(name), attr, []byte(value), 0)) }
	x("plain", "user.empty", "")
	x("plain", "user.binary", "a\x00b=c\n\xff")
	x("plain", "trusted.with=equals", "1")
	x("plain", "trusted.with%3Dpercent", "2")
	x("plain", "trusted.\xff\nname", "3")
	x("symlink", "trusted.x", "on a symlink")
	x("socket", "trusted.x", "on a socket")
	x("sub", "trusted.overlay.opaque", "y")
	x("sub", "system.posix_acl_default", string(posixACL(6, 1000)))
	x("empty", "system.posix_acl_access", string(posixACL(4, 1001)))
	x("setuid", "security.capability",
		"\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	x(".", "user.root", "the upperdir itself")
	for name, ts := range map[string]unix.Timespec{
		"plain": {Sec: -1, Nsec: 500_000_000}, "symlink": {Sec: 1, Nsec: 1},
		"sub/deep": {Sec: 12_000_000_000, Nsec: 999_999_999},
		"sub":      {Sec: 1_700_000_000}, "fifo": {Sec: -2_000_000_000, Nsec: 7},
		".": {Sec: 1_600_000_000, Nsec: 123_456_789},
	} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, in(name), []unix.Timespec{{Nsec: unix.UTIME_OMIT}, ts},
			unix.AT_SYMLINK_NOFOLLOW))
	}
	must(t, unix.Chmod(dir, 0o1751))
}

// TestEverything takes one of each from and to both kinds of filesystem.
func TestEverything(t *testing.T) {
	disk, fileCache := noDevices(t), tmpfs(t, "size=100m")
	for name, c := range map[string][2]string{
		"disk to disk": {disk, disk}, "disk to tmpfs": {disk, fileCache}, "tmpfs to disk": {fileCache, disk},
		"tmpfs to tmpfs": {fileCache, fileCache},
	} {
		t.Run(name, func(t *testing.T) {
			src, err := os.MkdirTemp(c[0], "src-")
			must(t, err)
			everything(t, src)
			want := peek(t, src)
			archive, tree := captureDir(t, src)
			dst, applied := applyTo(t, c[1], archive)
			samePeek(t, "applied", want, peek(t, dst))
			if !bytes.Equal(tree, applied) {
				t.Error("Apply reports another tree than Capture")
			}
			var walked bytes.Buffer
			tw := NewTreeWriter(&walked)
			must(t, Walk(t.Context(), dst, WalkOptions{Digest: true}, tw.Write))
			must(t, tw.Close())
			if !bytes.Equal(tree, walked.Bytes()) {
				t.Error("Walk reports another tree than Capture")
			}
			second, _ := captureDir(t, dst)
			if !bytes.Equal(archive, second) {
				t.Error("a second capture is another archive")
			}
		})
	}
}

func TestCaptureLeavesAccessTimes(t *testing.T) {
	dir := tmpfs(t, "size=10m")
	must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_STRICTATIME|unix.MS_NODEV|unix.MS_NOSUID, ""))
	everything(t, dir)
	old := []unix.Timespec{{Sec: 1000}, {Sec: 1000}}
	for _, p := range []string{"plain", "large", "sub", ".", ".hidden"} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(dir, p), old, 0))
	}
	captureDir(t, dir)
	if _, err := os.ReadFile(filepath.Join(dir, ".hidden")); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	must(t, unix.Lstat(filepath.Join(dir, ".hidden"), &st))
	if st.Atim.Sec == 1000 {
		t.Fatal("reading changes no access times here: the test sees nothing")
	}
	for _, p := range []string{"plain", "large", "sub"} {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(dir, p), &st))
		if st.Atim.Sec != 1000 {
			t.Errorf("%s was accessed at %d", p, st.Atim.Sec)
		}
	}
}

// TestForeignReaders reads our archive with archive/tar and with GNU tar.
func TestForeignReaders(t *testing.T) {
	base := noDevices(t)
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	everything(t, src)
	archive, _ := captureDir(t, src)

	seen := 0
	r := tar.NewReader(bytes.NewReader(archive))
	err := Walk(t.Context(), src, WalkOptions{Digest: true}, func(e Entry) error {
		h, err := r.Next()
		if err != nil {
			return err
		}
		seen++
		if filepath.Clean(h.Name) != e.Path {
			t.Errorf("archive/tar sees %q, want %q", h.Name, e.Path)
		}
		if e.Hardlink != "" {
			if h.Linkname != e.Hardlink || h.Typeflag != tar.TypeLink {
				t.Errorf("%q: link to %q", e.Path, h.Linkname)
			}
			return nil
		}
		if h.Linkname != e.Link || h.Mode != int64(e.Mode) || h.Uid != int(e.UID) ||
			h.Gid != int(e.GID) || h.Size != e.Size ||
			!h.ModTime.Equal(time.Unix(e.Mtime.Sec, e.Mtime.Nsec)) {
			t.Errorf("%q: archive/tar sees %+v", e.Path, h)
		}
		got, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		if e.Type == TypeFile {
			want, err := os.ReadFile(filepath.Join(src, e.Path))
			must(t, err)
			if !bytes.Equal(got, want) {
				t.Errorf("%q: archive/tar reads other content", e.Path)
			}
		}
		for name, v := range e.Xattrs {
			if !strings.ContainsAny(name, "=%") && h.PAXRecords["SCHILY.xattr."+name] != v {
				t.Errorf("%q: archive/tar lacks %q", e.Path, name)
			}
		}
		return nil
	})
	must(t, err)
	if _, err := r.Next(); err != io.EOF || seen != 27 {
		t.Errorf("after %d entries: %v", seen, err)
	}

	// Attributes that only we can read go before GNU tar comes.
	must(t, unix.Lremovexattr(filepath.Join(src, "plain"), "trusted.with=equals"))
	must(t, unix.Lremovexattr(filepath.Join(src, "plain"), "trusted.with%3Dpercent"))
	must(t, os.Remove(filepath.Join(src, "socket")))
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, src, []unix.Timespec{{}, {Sec: 5, Nsec: 5}}, 0))
	archive, _ = captureDir(t, src)
	dst := filepath.Join(base, "dst")
	must(t, os.Mkdir(dst, 0o755))
	cmd := exec.Command("tar", "-x", "-C", dst, "--xattrs", "--xattrs-include=*", "--numeric-owner", "-p",
		"--warning=no-timestamp", "--delay-directory-restore")
	cmd.Stdin = bytes.NewReader(archive)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("tar: %v\n%s", err, out)
	}
	want, got := peek(t, src), peek(t, dst)
	samePeek(t, "GNU tar", want, got)
}

// TestLinkOutsideGroup has an inode with a name that is not in the tree.
func TestLinkOutsideGroup(t *testing.T) {
	base := t.TempDir()
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	must(t, os.WriteFile(filepath.Join(src, "a"), []byte("x"), 0o600))
	must(t, os.Link(filepath.Join(src, "a"), filepath.Join(src, "b")))
	must(t, os.Link(filepath.Join(src, "a"), filepath.Join(base, "elsewhere")))
	archive, _ := captureDir(t, src)
	dst, _ := applyTo(t, base, archive)
	samePeek(t, "applied", peek(t, src), peek(t, dst))
}

func TestCaptureRefusesMountPoints(t *testing.T) {
	for _, kind := range []string{"tmpfs on a directory", "bind on a directory", "bind on a file", "bind on a FIFO"} {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			spot, other := filepath.Join(dir, "spot"), filepath.Join(dir, "other")
			switch {
			case strings.HasSuffix(kind, "directory"):
				must(t, os.Mkdir(spot, 0o755))
				must(t, os.Mkdir(other, 0o755))
			case strings.HasSuffix(kind, "file"):
				must(t, os.WriteFile(spot, nil, 0o644))
				must(t, os.WriteFile(other, nil, 0o644))
			default:
				must(t, unix.Mkfifo(spot, 0o644))
				must(t, unix.Mkfifo(other, 0o644))
			}
			if strings.HasPrefix(kind, "tmpfs") {
				must(t, unix.Mount("tmpfs", spot, "tmpfs", 0, ""))
			} else {
				must(t, unix.Mount(other, spot, "", unix.MS_BIND, ""))
			}
			defer Unmount(spot, UnmountOptions{})
			_, err := Capture(t.Context(), dir, io.Discard, CaptureOptions{})
			if !errors.Is(err, fault.ErrUnsupported) || !strings.Contains(err.Error(), `"spot" is a mount point`) {
				t.Errorf("%v", err)
			}
			// The upperdir itself may well be one.
			must(t, Unmount(spot, UnmountOptions{}))
			must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
			defer Unmount(dir, UnmountOptions{})
			_, err = Capture(t.Context(), dir, io.Discard, CaptureOptions{})
			must(t, err)
		})
	}
}

func TestCaptureRefusesImmutable(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "fixed"))
	must(t, err)
	defer f.Close()
	must(t, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0x10)) // FS_IMMUTABLE_FL
	defer func() { must(t, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0)) }()
	_, err = Capture(t.Context(), dir, io.Discard, CaptureOptions{})
	if !errors.Is(err, fault.ErrUnsupported) || !strings.Contains(err.Error(), `"fixed"`) {
		t.Error(err)
	}
}

// slowly lets a test act while an archive is being written.
type slowly func(n int64) error

func (f slowly) write(w io.Writer) io.Writer { return &slowWriter{w: w, f: f} }

type slowWriter struct {
	w io.Writer
	f slowly
	n int64
}

func (s *slowWriter) Write(p []byte) (int, error) {
	if err := s.f(s.n); err != nil {
		return 0, err
	}
	s.n += int64(len(p))
	return s.w.Write(p)
}

// TestCaptureNoticesChanges changes a file while its data goes by.
func TestCaptureNoticesChanges(t *testing.T) {
	for name, change := range map[string]func(string) error{
		"cut":     func(p string) error { return os.Truncate(p, 100) },
		"longer":  func(p string) error { return os.Truncate(p, 30<<20) },
		"written": func(p string) error { return appendTo(p, 0, "other") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			p := filepath.Join(dir, "f")
			must(t, os.WriteFile(p, make([]byte, 20<<20), 0o644))
			past := []unix.Timespec{{Sec: 1000}, {Sec: 1000}}
			must(t, unix.UtimesNanoAt(unix.AT_FDCWD, p, past, 0))
			done := false
			_, err := Capture(t.Context(), dir, slowly(func(n int64) error {
				if done {
					return nil
				}
				done = true
				return change(p)
			}).write(io.Discard), CaptureOptions{})
			if !errors.Is(err, fault.ErrBusy) || !strings.Contains(err.Error(), `"f" changed`) {
				t.Error(err)
			}
		})
	}
	t.Run("vanished", func(t *testing.T) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "a"), make([]byte, 20<<20), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "b"), make([]byte, 1<<20), 0o644))
		_, err := Capture(t.Context(), dir, slowly(func(n int64) error {
			if n == 0 {
				return os.Remove(filepath.Join(dir, "b"))
			}
			return nil
		}).write(io.Discard), CaptureOptions{})
		if !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
	})
	t.Run("exchanged for a symlink", func(t *testing.T) {
		dir := t.TempDir()
		must(t, os.WriteFile(filepath.Join(dir, "a"), make([]byte, 20<<20), 0o644))
		must(t, os.WriteFile(filepath.Join(dir, "b"), make([]byte, 1<<20), 0o644))
		_, err := Capture(t.Context(), dir, slowly(func(n int64) error {
			if n == 0 {
				return errors.Join(os.Remove(filepath.Join(dir, "b")),
					os.Symlink("/etc/passwd", filepath.Join(dir, "b")))
			}
			return nil
		}).write(io.Discard), CaptureOptions{})
		if !errors.Is(err, unix.ELOOP) {
			t.Error(err)
		}
	})
}

// TestWalkNoticesChanges writes to a file all the while it is read.
func TestWalkNoticesChanges(t *testing.T) {
	dir := tmpfs(t, "size=100m")
	p := filepath.Join(dir, "f")
	must(t, os.WriteFile(p, make([]byte, 50<<20), 0o644))
	f, err := os.OpenFile(p, os.O_WRONLY, 0)
	must(t, err)
	stop, stopped := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				stopped <- f.Close()
				return
			default:
				_, _ = f.WriteAt([]byte("x"), 1000)
			}
		}
	}()
	err = Walk(t.Context(), dir, WalkOptions{Digest: true}, func(Entry) error { return nil })
	close(stop)
	must(t, <-stopped)
	if !errors.Is(err, fault.ErrBusy) {
		t.Error(err)
	}
}

func appendTo(p string, off int64, s string) error {
	f, err := os.OpenFile(p, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(s), off)
	return errors.Join(err, f.Close())
}

func TestCaptureErrors(t *testing.T) {
	dir := tmpfs(t, "size=100m")
	tenThousand(t, dir)
	full := errors.New("full")
	_, err := Capture(t.Context(), dir, slowly(func(n int64) error {
		if n > 1<<20 {
			return full
		}
		return nil
	}).write(io.Discard), CaptureOptions{})
	if !errors.Is(err, full) {
		t.Errorf("a write error came back as %v", err)
	}
	mine := errors.New("mine")
	n := 0
	_, err = Capture(t.Context(), dir, io.Discard, CaptureOptions{Entry: func(Entry) error {
		if n++; n == 5000 {
			return mine
		}
		return nil
	}})
	if err != mine || n != 5000 {
		t.Errorf("the caller's error came back as %v after %d", err, n)
	}
	if err := Walk(t.Context(), dir, WalkOptions{}, func(Entry) error { return mine }); err != mine {
		t.Errorf("the caller's error came back as %v", err)
	}
	_, err = Capture(t.Context(), filepath.Join(dir, "none"), io.Discard, CaptureOptions{})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	_, err = Capture(t.Context(), filepath.Join(dir, "d00/file-0"), io.Discard, CaptureOptions{})
	if !errors.Is(err, unix.ENOTDIR) {
		t.Error(err)
	}
}

// TestCancel ends a capture, a walk and an apply in the middle; TestMain finds
// the goroutines that would stay behind.
func TestCancel(t *testing.T) {
	dir := tmpfs(t, "size=1g")
	src := filepath.Join(dir, "src")
	must(t, os.Mkdir(src, 0o755))
	tenThousand(t, src)
	must(t, os.WriteFile(filepath.Join(src, "big"), make([]byte, 40<<20), 0o644))
	archive, _ := captureDir(t, src)
	fds := openFiles(t)
	for _, after := range []int64{0, 1 << 20, 30 << 20, 50 << 20} {
		ctx, cancel := context.WithCancel(t.Context())
		count := slowly(func(n int64) error {
			if n >= after {
				cancel()
			}
			return nil
		})
		_, err := Capture(ctx, src, count.write(io.Discard), CaptureOptions{})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("capture after %d: %v", after, err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		dst, err := os.MkdirTemp(dir, "dst-")
		must(t, err)
		r := io.TeeReader(bytes.NewReader(archive), count.write(io.Discard))
		_, err = Apply(ctx, r, dst, ApplyOptions{})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("apply after %d: %v", after, err)
		}
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	err := Walk(ctx, src, WalkOptions{Digest: true}, func(Entry) error {
		if n++; n == 100 {
			cancel()
		}
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("walk: %v", err)
	}
	for range DirEntries(t.Context(), src, WalkOptions{}) {
		break
	}
	if now := openFiles(t); now != fds {
		t.Errorf("%d files are open, %d were before", now, fds)
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(list)
}
