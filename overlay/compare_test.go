package overlay

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestVerifySeesEverything changes one thing at a time; each must be reported
// for the right path and in the right words.
func TestVerifySeesEverything(t *testing.T) {
	changes := map[string]struct {
		path, says string
		do         func(p string) error
	}{
		"mode": {"a-first-name", "mode 0600, want 0644", func(p string) error {
			return os.Chmod(p, 0o600)
		}},
		"set-id":          {"setuid", "mode 0755, want 6755", func(p string) error { return os.Chmod(p, 0o755) }},
		"owner":           {"a-first-name", "owner 1:2, want 0:0", func(p string) error { return os.Chown(p, 1, 2) }},
		"owner of a link": {"symlink", "owner 1:1, want 0:0", func(p string) error { return os.Lchown(p, 1, 1) }},
		"a nanosecond": {"sub", "modified 1700000000.000000001 (", func(p string) error {
			return touch(p, 1_700_000_000, 1)
		}},
		"time of a link":   {"symlink", "modified 1.000000002", func(p string) error { return touch(p, 1, 2) }},
		"time of the root": {".", "modified 5", func(p string) error { return touch(p, 5, 0) }},
		"mode of the root": {".", "mode 0755, want 1751", func(p string) error { return os.Chmod(p, 0o755) }},
		"attribute gone": {"a-first-name", `attribute "user.empty" missing`, func(p string) error {
			return unix.Lremovexattr(p, "user.empty")
		}},
		"attribute new": {"fifo", `attribute "trusted.new" that should not be there`, func(p string) error {
			return unix.Lsetxattr(p, "trusted.new", nil, 0)
		}},
		"attribute changed": {"symlink", `attribute "trusted.x" is "y", want "on a symlink"`, func(p string) error {
			return unix.Lsetxattr(p, "trusted.x", []byte("y"), 0)
		}},
		"opaque mark gone": {"sub", `attribute "trusted.overlay.opaque" missing`, func(p string) error {
			return unix.Lremovexattr(p, "trusted.overlay.opaque")
		}},
		"capability gone": {"setuid", `attribute "security.capability" missing`, func(p string) error {
			return unix.Lremovexattr(p, "security.capability")
		}},
		"one byte": {"large", "content blake3:", func(p string) error {
			return keepTimes(p, func() error { return appendTo(p, 2_000_000, "x") })
		}},
		"a byte more": {"large", "size 3000001, want 3000000", func(p string) error {
			return keepTimes(p, func() error { return appendTo(p, 3_000_000, "x") })
		}},
		"hole filled": {"sparse", "data at [", func(p string) error {
			return keepTimes(p, func() error { return appendTo(p, 2<<20, "\x00") })
		}},
		"hole made": {"large", "data at [", func(p string) error {
			return keepTimes(p, func() error { return punch(p) })
		}},
		"link elsewhere": {"symlink", `link to "x"`, func(p string) error {
			return errors.Join(os.Remove(p), os.Symlink("x", p))
		}},
		"file now a dir": {"empty", "a dir, want a file", func(p string) error {
			return errors.Join(os.Remove(p), os.Mkdir(p, 0o755))
		}},
		"whiteout gone": {"whiteout", "missing, want a whiteout", os.Remove},
		"char now whiteout": {"char", "a whiteout, want a char", func(p string) error {
			return errors.Join(os.Remove(p), unix.Mknod(p, unix.S_IFCHR, 0))
		}},
		"other device": {"block", "device 4000:8, want 4000:7", func(p string) error {
			return errors.Join(os.Remove(p), unix.Mknod(p, unix.S_IFBLK|0o600, int(unix.Mkdev(4000, 8))))
		}},
		"socket now fifo": {"socket", "a fifo, want a socket", func(p string) error {
			return errors.Join(os.Remove(p), unix.Mkfifo(p, 0o755))
		}},
		"file new": {"sub/new", "a file that should not be there", func(p string) error {
			return os.WriteFile(p, nil, 0o600)
		}},
		"last file new": {"\xff\xff", "a file that should not be there", func(p string) error {
			return os.WriteFile(p, nil, 0o600)
		}},
		"dotfile gone":   {".hidden", "missing, want a file", os.Remove},
		"empty dir gone": {"sub/deep/empty", "missing, want a dir", os.Remove},
		"link broken": {"sub/deep/link", `a file of its own, want a hard link to "a-first-name"`, func(p string) error {
			return errors.Join(os.Rename(p, p+"2"), os.WriteFile(p, []byte("plain\n"), 0o644), os.Remove(p+"2"))
		}},
		"link made": {"not\xffutf8\nline", `a hard link to ".hidden", want a file of its own`, func(p string) error {
			return errors.Join(os.Remove(p), os.Link(filepath.Join(filepath.Dir(p), ".hidden"), p))
		}},
	}
	base := noDevices(t)
	src := filepath.Join(base, "src")
	must(t, os.Mkdir(src, 0o755))
	everything(t, src)
	archive, tree := captureDir(t, src)
	for name, c := range changes {
		t.Run(name, func(t *testing.T) {
			dir, _ := applyTo(t, base, archive)
			must(t, c.do(filepath.Join(dir, c.path)))
			diffs, err := Verify(t.Context(), dir, bytes.NewReader(tree), CompareOptions{})
			must(t, err)
			found := slices.ContainsFunc(diffs, func(d Difference) bool {
				return d.Path == c.path && strings.Contains(d.What, c.says)
			})
			if !found {
				t.Errorf("want %q: %s, got %v", c.path, c.says, diffs)
			}
			parent, _ := splitPath(c.path)
			for _, d := range diffs {
				if d.Path != c.path && d.Path != parent && d.Path != "symlink2" { // whose time may have changed, which has lost its group
					t.Errorf("%v besides", d)
				}
			}
		})
	}
}

func touch(p string, sec, nsec int64) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{{}, {Sec: sec, Nsec: nsec}}, unix.AT_SYMLINK_NOFOLLOW)
}

func keepTimes(p string, do func() error) error {
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil {
		return err
	}
	return errors.Join(do(), touch(p, st.Mtim.Sec, st.Mtim.Nsec))
}

func punch(p string) error {
	f, err := os.OpenFile(p, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 1<<20, 65536)
	return errors.Join(err, f.Close())
}

// TestVerifyCoarserHoles has a filesystem with larger blocks than the one that
// was captured: more of a file is data there, and it is still the same file.
func TestVerifyCoarserHoles(t *testing.T) {
	dir := t.TempDir()
	p := filepath.Join(dir, "f")
	f, err := os.Create(p)
	must(t, err)
	_, err = f.WriteAt([]byte(strings.Repeat("x", 4096)), 8192)
	must(t, err)
	must(t, f.Truncate(1<<20))
	must(t, f.Close())
	_, tree := captureDir(t, dir)
	// The extents as 64 KiB blocks would have made them.
	must(t, keepTimes(p, func() error {
		return errors.Join(appendTo(p, 0, string(make([]byte, 8192))), appendTo(p, 12288, string(make([]byte, 53248))))
	}))
	verify := func(unit int64) []Difference {
		diffs, err := Verify(t.Context(), dir, bytes.NewReader(tree), CompareOptions{Block: unit})
		must(t, err)
		return diffs
	}
	if d := verify(65536); len(d) != 0 {
		t.Error(d)
	}
	if d := verify(4096); len(d) != 1 || !strings.Contains(d[0].What, "data at") {
		t.Error(d)
	}
	must(t, keepTimes(p, func() error { return appendTo(p, 20000, "y") }))
	if d := verify(65536); len(d) != 1 || !strings.Contains(d[0].What, "content") {
		t.Errorf("a byte where a hole should be: %v", d)
	}
	must(t, keepTimes(p, func() error { return errors.Join(appendTo(p, 20000, "\x00"), appendTo(p, 8192, "z")) }))
	if d := verify(65536); len(d) != 1 || !strings.Contains(d[0].What, "content") {
		t.Errorf("another byte in the data: %v", d)
	}
}

func TestCompare(t *testing.T) {
	seq := func(list ...Entry) iter.Seq2[Entry, error] {
		return func(yield func(Entry, error) bool) {
			for _, e := range list {
				if !yield(e, nil) {
					return
				}
			}
		}
	}
	root := Entry{Path: ".", Type: TypeDir}
	file := func(p, digest string) Entry { return Entry{Path: p, Type: TypeFile, Size: 1, Digest: digest} }
	diffs, err := Compare(seq(root, file("a", "1"), file("b", "1")),
		seq(root, file("b", "1"), file("c", "1")), CompareOptions{})
	must(t, err)
	if len(diffs) != 2 || diffs[0].Path != "a" || diffs[1].Path != "c" {
		t.Error(diffs)
	}
	if diffs, _ := Compare(seq(root, file("a", "1")), seq(root, file("a", "")), CompareOptions{}); len(diffs) != 1 {
		t.Errorf("content that nobody read: %v", diffs)
	}
	diffs, err = Compare(seq(root, file("a", "1"), file("b", "1")), seq(root), CompareOptions{Limit: 1})
	must(t, err)
	if len(diffs) != 1 {
		t.Errorf("limit: %v", diffs)
	}
	broken := errors.New("broken")
	bad := func(yield func(Entry, error) bool) { _ = yield(root, nil) && yield(Entry{}, broken) }
	if _, err := Compare(seq(root), bad, CompareOptions{}); err != broken {
		t.Error(err)
	}
	if _, err := Compare(bad, seq(root), CompareOptions{}); err != broken {
		t.Error(err)
	}
	_, err = Verify(context.Background(), t.TempDir(), strings.NewReader("{}\n"), CompareOptions{})
	if !errors.Is(err, fault.ErrCorrupt) {
		t.Error(err)
	}
}
