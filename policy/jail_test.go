package policy

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// box makes TMP/outside (with a secret) and TMP/root, and a jail of the latter.
func box(t *testing.T) (j *Jail, root, outside string) {
	t.Helper()
	tmp := t.TempDir()
	root, outside = filepath.Join(tmp, "root"), filepath.Join(tmp, "outside")
	for _, d := range []string{
		filepath.Join(root, "etc"), filepath.Join(root, "usr/bin"), filepath.Join(outside, "d"),
	} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(outside, "secret"), "outside")
	write(t, filepath.Join(outside, "d/f"), "outside")
	write(t, filepath.Join(root, "etc/passwd"), "inside")
	write(t, filepath.Join(root, "usr/bin/f"), "inside")
	j, err := Open(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j, root, outside
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, target, name string) {
	t.Helper()
	if err := os.Symlink(target, name); err != nil {
		t.Fatal(err)
	}
}

// both runs a test with openat2 and with the walk that replaces it.
func both(t *testing.T, fn func(t *testing.T)) {
	t.Run("openat2", fn)
	t.Run("walk", func(t *testing.T) {
		noOpenat2.Store(true)
		defer noOpenat2.Store(false)
		fn(t)
	})
}

func TestOpenStaysInside(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, outside := box(t)
		symlink(t, "/etc/passwd", root+"/abs")
		symlink(t, "../../../../../../etc/passwd", root+"/up")
		symlink(t, "/usr/bin", root+"/bin")
		symlink(t, outside+"/secret", root+"/out")
		symlink(t, "loop2", root+"/loop")
		symlink(t, "loop", root+"/loop2")
		symlink(t, "nowhere", root+"/dangling")
		if err := unix.Mkfifo(root+"/fifo", 0o600); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]error{
			"/etc/passwd":                         nil,
			"etc/passwd":                          nil,
			"//etc/./passwd":                      nil,
			"/../../../../../../../../etc/passwd": nil,
			"../etc/passwd":                       nil,
			"/abs":                                nil,
			"/up":                                 nil,
			"/bin/f":                              nil,
			"/bin/../bin/f":                       nil, // "/usr/bin": the link's target decides what ".." is
			"/bin/../../etc/passwd":               nil,
			"/bin/../etc/passwd":                  fault.ErrNotFound,
			"/out":                                fault.ErrNotFound,
			outside + "/secret":                   fault.ErrNotFound,
			"/loop":                               unix.ELOOP,
			"/dangling":                           unix.ENOENT,
			"/etc/passwd/":                        unix.ENOTDIR,
			"/etc/passwd/x":                       unix.ENOTDIR,
			"/fifo":                               fault.ErrDenied,
			"":                                    fault.ErrNotFound,
			"/" + strings.Repeat("x", 256):        unix.ENAMETOOLONG,
			"/" + strings.Repeat("x/", 4000):      fs.ErrInvalid,
		} {
			f, err := j.OpenFile(name, os.O_RDONLY, 0)
			if want == nil {
				if err != nil {
					t.Errorf("%q: %v", name, err)
					continue
				}
				if b, _ := io.ReadAll(f); string(b) != "inside" {
					t.Errorf("%q: read %q", name, b)
				}
				f.Close()
				continue
			}
			if f != nil {
				t.Errorf("%q opened %s", name, f.Name())
			}
			if want != fs.ErrInvalid && !errors.Is(err, want) || err == nil {
				t.Errorf("%.40q: %v, want %v", name, err, want)
			}
		}
		if _, err := j.OpenFile("/abs", os.O_RDONLY|unix.O_NOFOLLOW, 0); !errors.Is(err, unix.ELOOP) {
			t.Errorf("O_NOFOLLOW on a symlink: %v", err)
		}
	})
}

func TestMagicLinks(t *testing.T) {
	both(t, func(t *testing.T) {
		_, _, outside := box(t)
		f, err := os.Open(outside)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		j, err := Open("/proc")
		if err != nil {
			t.Fatal(err)
		}
		defer j.Close()
		for _, name := range []string{
			fmt.Sprintf("/%d/fd/%d/secret", os.Getpid(), f.Fd()),
			fmt.Sprintf("/%d/root/etc/passwd", os.Getpid()),
			fmt.Sprintf("/%d/cwd/jail.go", os.Getpid()),
			fmt.Sprintf("/%d/exe", os.Getpid()),
		} {
			f, err := j.OpenFile(name, os.O_RDONLY, 0)
			if err == nil {
				f.Close()
				t.Errorf("%s: a magic link was followed", name)
			}
		}
		if _, err := j.Lstat("/self"); err != nil {
			t.Error(err)
		}
	})
}

func TestCreate(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, outside := box(t)
		symlink(t, "/etc/new", root+"/to-new")
		symlink(t, outside+"/made", root+"/to-out")
		symlink(t, "../../../../../../../../../"+outside+"/made", root+"/to-out2")
		symlink(t, "/usr/bin", root+"/bin")
		symlink(t, "self", root+"/self")
		put := func(name string, flags int) error {
			f, err := j.OpenFile(name, os.O_WRONLY|os.O_CREATE|flags, 0o640)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteString("new")
			return err
		}
		for name, at := range map[string]string{
			"/a": "a", "/to-new": "etc/new", "/bin/b": "usr/bin/b", "/etc/passwd": "etc/passwd",
		} {
			if err := put(name, os.O_TRUNC); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if b, err := os.ReadFile(filepath.Join(root, at)); string(b) != "new" {
				t.Errorf("%s: %q, %v", at, b, err)
			}
		}
		if err := put("/to-out", 0); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("through a link to the outside: %v", err)
		}
		if err := put("/to-out2", 0); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("through a link to the outside: %v", err)
		}
		if err := put("/self", 0); !errors.Is(err, unix.ELOOP) {
			t.Errorf("loop: %v", err)
		}
		if err := put("/a", os.O_EXCL); !errors.Is(err, fault.ErrExists) {
			t.Errorf("O_EXCL: %v", err)
		}
		if err := put("/etc", 0); !errors.Is(err, unix.EISDIR) {
			t.Errorf("directory: %v", err)
		}
		if _, err := os.Lstat(outside + "/made"); err == nil {
			t.Fatal("a file was made outside")
		}
	})
}

func TestMkdirAll(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, outside := box(t)
		symlink(t, "/usr/bin", root+"/bin")
		symlink(t, outside, root+"/out")
		symlink(t, "nowhere", root+"/dangling")
		for name, at := range map[string]string{
			"/a/b/c": "a/b/c", "/bin/x/y": "usr/bin/x/y", "/etc": "etc", "/q/../r": "r", "../../s": "s",
		} {
			if err := j.MkdirAll(name, 0o755); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if fi, err := os.Stat(filepath.Join(root, at)); err != nil || !fi.IsDir() {
				t.Errorf("%s: %v", at, err)
			}
		}
		for _, name := range []string{"/etc/passwd/x", "/etc/passwd", "/dangling/x", "/out/x", ""} {
			if err := j.MkdirAll(name, 0o755); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	})
}

func TestParentAndStat(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, _ := box(t)
		symlink(t, "/usr/bin", root+"/bin")
		for name, want := range map[string][2]string{
			"/bin/f": {"usr/bin", "f"}, "/bin": {"", "bin"}, "/bin/": {"", "bin"}, "/": {"", "."},
			"/bin/..": {"usr", "."},
			"/bin/.":  {"usr/bin", "."}, "x": {"", "x"}, "/etc/none": {"etc", "none"},
		} {
			dir, base, err := j.Parent(name)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			got, _ := dir.Stat()
			wantDir, _ := os.Stat(filepath.Join(root, want[0]))
			if !os.SameFile(got, wantDir) || base != want[1] {
				t.Errorf("%s: wrong directory or base %q", name, base)
			}
			dir.Close()
		}
		if _, _, err := j.Parent("/none/x"); !errors.Is(err, fault.ErrNotFound) {
			t.Error(err)
		}
		if fi, err := j.Lstat("/bin"); err != nil || fi.Mode()&fs.ModeSymlink == 0 {
			t.Errorf("lstat: %v", err)
		}
		if fi, err := j.Lstat("/bin/"); err != nil || !fi.IsDir() {
			t.Errorf("lstat with a slash: %v", err)
		}
		if fi, err := j.Stat("/bin"); err != nil || !fi.IsDir() {
			t.Errorf("stat: %v", err)
		}
		if l, err := j.Readlink("/bin"); err != nil || l != "/usr/bin" {
			t.Errorf("readlink: %q %v", l, err)
		}
		if _, err := j.Readlink("/etc"); !errors.Is(err, unix.EINVAL) {
			t.Errorf("readlink of a directory: %v", err)
		}
	})
}

func TestReal(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, outside := box(t)
		if err := os.MkdirAll(root+"/work/src", 0o755); err != nil {
			t.Fatal(err)
		}
		symlink(t, "/usr/bin", root+"/bin")
		symlink(t, "work", root+"/alias")
		symlink(t, "../etc", root+"/work/etc")
		symlink(t, "/work/src/none", root+"/work/dangling")
		symlink(t, outside, root+"/out")
		symlink(t, "loop", root+"/loop")
		for name, want := range map[string]string{
			"/": "/", "/..": "/", "/bin/f": "/usr/bin/f", "/bin/..": "/usr",
			"/alias/src/new/file": "/work/src/new/file",
			"/work/etc/x":         "/etc/x", "/work/dangling": "/work/src/none", "/work/dangling/y": "/work/src/none/y",
			"/none/../etc/passwd": "/etc/passwd", "/none/../bin/x": "/usr/bin/x", "/out/secret": outside + "/secret",
		} {
			got, exists, err := j.Real(name)
			if err != nil || got != want {
				t.Errorf("Real(%s) = %s, %v; want %s", name, got, err, want)
			}
			if _, err := j.Stat(name); exists != (err == nil) && !strings.HasPrefix(name, "/none/..") {
				t.Errorf("%s: exists is %v", name, exists)
			}
		}
		if _, _, err := j.Real("/loop"); !errors.Is(err, unix.ELOOP) {
			t.Errorf("loop: %v", err)
		}
	})
}

// A process inside swaps a directory for a symlink to the outside as fast as it can. All files
// that are opened or made must lie inside.
func TestRace(t *testing.T) {
	both(t, func(t *testing.T) {
		j, root, outside := box(t)
		if err := os.Mkdir(root+"/d", 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, root+"/d/f", "inside")
		symlink(t, outside+"/d", root+"/link")
		symlink(t, "../../../../../../../.."+outside+"/d", root+"/link2")
		stop, done := make(chan struct{}), make(chan int)
		go func() {
			n := 0
			for ; ; n++ {
				select {
				case <-stop:
					done <- n
					return
				default:
				}
				other := [2]string{"/link", "/link2"}[n&1]
				_ = unix.Renameat2(unix.AT_FDCWD, root+"/d", unix.AT_FDCWD, root+other, unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(unix.AT_FDCWD, root+"/d", unix.AT_FDCWD, root+other, unix.RENAME_EXCHANGE)
			}
		}()
		var inside, refused int
		deadline := time.Now().Add(5 * time.Second)
		for i := 0; (i < 4000 || inside == 0 || refused == 0) && time.Now().Before(deadline); i++ {
			f, err := j.OpenFile([2]string{"/d/f", "/d/../d/f"}[i&1], os.O_RDONLY, 0)
			if err == nil {
				b, _ := io.ReadAll(f)
				f.Close()
				if string(b) != "inside" {
					t.Fatalf("escaped: read %q", b)
				}
				inside++
			} else {
				refused++
			}
			if f, err := j.OpenFile("/d/new", os.O_CREATE|os.O_WRONLY, 0o600); err == nil {
				f.Close()
			}
			_ = j.MkdirAll("/d/sub/sub", 0o755)
			if dir, base, err := j.Parent("/d/made"); err == nil {
				_ = unix.Mkdirat(int(dir.Fd()), base, 0o755)
				dir.Close()
			}
			_, _, _ = j.Real("/d/f")
		}
		close(stop)
		swaps := <-done
		names, _ := os.ReadDir(outside + "/d")
		if len(names) != 1 {
			t.Fatalf("escaped: outside now holds %v", names)
		}
		if inside == 0 || refused == 0 || swaps < 1000 {
			t.Errorf("no race happened: %d inside, %d refused, %d swaps", inside, refused, swaps)
		}
		t.Logf("%d inside, %d refused, %d swaps", inside, refused, swaps)
	})
}
