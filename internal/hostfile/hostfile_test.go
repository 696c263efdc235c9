package hostfile

import (
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
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
)

var ctx = context.Background()

const limit = 1 << 20

func root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it keeps owners and xattrs")
	}
}

func must(t testing.TB, list ...error) {
	t.Helper()
	for _, err := range list {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// dirOf opens a new directory.
func dirOf(t testing.TB) (string, *Dir) {
	t.Helper()
	root(t)
	path := t.TempDir()
	d, err := Open(path)
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return path, d
}

// kept is a sink that keeps what it is given.
type kept struct{ data []byte }

func (k *kept) Data(_ context.Context, size int64, r io.Reader) (string, []overlay.Chunk, error) {
	k.data = make([]byte, size)
	_, err := io.ReadFull(r, k.data)
	return "", nil, err
}

// take is Take of a file without a past, and its data.
func take(path string) (*Taken, []byte, error) {
	k := &kept{}
	t, err := Take(ctx, path, k, limit, nil)
	return t, k.data, err
}

// state is a file as it is now, copied.
func state(t testing.TB, path string) State {
	t.Helper()
	got, data, err := take(path)
	must(t, err)
	if got.Entry == nil {
		return State{}
	}
	return State{got.Entry, func(context.Context) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	}}
}

// facts are all there is to a file; empty: it is not there.
func facts(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return ""
	}
	must(t, err)
	defer f.Close()
	e, err := (&file{File: f}).entry()
	must(t, err)
	text, err := io.ReadAll(f)
	must(t, err)
	return fmt.Sprintf("%o %d:%d %v %q %x", e.Mode, e.UID, e.GID, e.Mtime, e.Xattrs, text)
}

// alone proves that nothing is in a directory but these.
func alone(t testing.TB, dir string, names ...string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	must(t, err)
	var got []string
	for _, d := range list {
		got = append(got, d.Name())
	}
	if fmt.Sprint(got) != fmt.Sprint(names) {
		t.Errorf("in the directory are %q, want %q", got, names)
	}
}

// Any file comes back, over any other one, and a second time nothing is done.
func TestComesBack(t *testing.T) {
	path, d := dirOf(t)
	name := filepath.Join(path, "f")
	make := func(rt *rapid.T, label string) {
		must(t, os.RemoveAll(name))
		if rapid.IntRange(0, 5).Draw(rt, label+" kind") == 0 {
			return // absent
		}
		must(t, os.WriteFile(name, nil, 0o600))
		size := rapid.Int64Range(0, 300_000).Draw(rt, label+" size")
		must(t, os.Truncate(name, size))
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		must(t, err)
		for range rapid.IntRange(0, 3).Draw(rt, label+" runs") { // the rest are holes
			b := bytes.Repeat([]byte{rapid.Byte().Draw(rt, "byte")}, rapid.IntRange(1, 20_000).Draw(rt, "len"))
			if at := rapid.Int64Range(0, 280_000).Draw(rt, "at"); at+int64(len(b)) <= size {
				_, err := f.WriteAt(b, at)
				must(t, err)
			}
		}
		must(t, f.Close(), os.Chown(name, rapid.IntRange(0, 70000).Draw(rt, "uid"),
			rapid.IntRange(0, 70000).Draw(rt, "gid")))
		for _, x := range []string{"user.a", "trusted.b", "security.c"} {
			if rapid.Bool().Draw(rt, x) {
				must(t, unix.Setxattr(name, x, []byte(rapid.StringN(0, 20, 40).Draw(rt, "value")), 0))
			}
		}
		must(t, unix.Chmod(name, uint32(rapid.IntRange(0, 0o7777).Draw(rt, "mode"))))
		if rapid.Bool().Draw(rt, "acl") {
			if out, err := exec.Command("setfacl", "-m", "u:1234:rw", name).CombinedOutput(); err != nil {
				t.Fatalf("setfacl (package acl): %v: %s", err, out)
			}
		}
		at := time.Unix(rapid.Int64Range(0, 4e9).Draw(rt, "sec"), rapid.Int64Range(0, 999_999_999).Draw(rt, "nsec"))
		must(t, os.Chtimes(name, at, at))
	}
	rapid.Check(t, func(rt *rapid.T) {
		make(rt, "then")
		then, want := facts(t, name), state(t, name)
		make(rt, "now")
		now, was := facts(t, name), state(t, name)
		planned, grows, err := d.Check(ctx, "f", want, limit)
		must(t, err)
		got, err := d.Put(ctx, "f", ".temp", want, &was, nil)
		must(t, err)
		if after := facts(t, name); after != then {
			rt.Fatalf("it is   %.300s\nand was %.300s", after, then)
		}
		expect := Written
		switch {
		case then == now:
			expect = Same
		case then == "":
			expect = Removed
		}
		if got != expect || planned != expect {
			rt.Fatalf("did %q, planned %q (%d), want %q", got, planned, grows, expect)
		}
		if want.Entry != nil && got == Written {
			f, err := os.Open(name)
			must(t, err)
			if list, err := extents(f, want.Entry.Size); err != nil ||
				fmt.Sprint(list) != fmt.Sprint(want.Entry.Extents) {
				rt.Fatalf("its data lies at %v, want %v (%v)", list, want.Entry.Extents, err)
			}
			must(t, f.Close())
		}
		if again, err := d.Put(ctx, "f", ".temp", want, &was, nil); again != Same || err != nil {
			rt.Fatalf("again: %q, %v", again, err)
		}
		if back, err := d.Put(ctx, "f", ".temp", was, &want, nil); err != nil || facts(t, name) != now {
			rt.Fatalf("back: %q, %v", back, err)
		}
	})
}

// Files that cannot be attached are refused before anything is opened, by Take as by Put.
func TestKinds(t *testing.T) {
	path, d := dirOf(t)
	at := func(name string) string { return filepath.Join(path, name) }
	must(t, os.WriteFile(at("plain"), []byte("x"), 0o600), os.WriteFile(at("linked"), nil, 0o600),
		os.Link(at("linked"), at("other")),
		os.Mkdir(at("dir"), 0o700), os.Symlink("plain", at("symlink")), unix.Mkfifo(at("fifo"), 0o600),
		unix.Mknod(at("device"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))),
		os.WriteFile(at("large"), make([]byte, limit+1), 0o600))
	want := state(t, at("plain"))
	for name, says := range map[string]string{
		"linked": "2 hard links", "dir": "a directory", "symlink": "a symlink", "fifo": "a fifo",
		"device": "a device", "large": "at most",
	} {
		before, err := os.Lstat(at(name))
		must(t, err)
		if _, _, err := take(at(name)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("take %s: %v", name, err)
		}
		if name == "large" {
			continue
		}
		if _, _, err := d.Check(ctx, name, want, limit); !errors.Is(err, fault.ErrState) ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("check %s: %v", name, err)
		}
		if _, err := d.Put(ctx, name, ".temp", want, nil, nil); !errors.Is(err, fault.ErrState) {
			t.Errorf("put %s: %v", name, err)
		}
		if after, err := os.Lstat(at(name)); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s is another one now: %v", name, err)
		}
	}
}

// A symlink on the way, also one that comes later, is not followed.
func TestParent(t *testing.T) {
	path, _ := dirOf(t)
	in := func(parts ...string) string { return filepath.Join(append([]string{path}, parts...)...) }
	must(t, os.MkdirAll(in("real", "sub"), 0o700), os.Symlink("real", in("link")),
		os.WriteFile(in("real", "sub", "f"), []byte("then"), 0o600))
	if got, err := Resolve(in("link", "sub", "f")); got != in("real", "sub", "f") || err != nil {
		t.Errorf("resolved to %q, %v", got, err)
	}
	if _, err := Open(in("link", "sub")); !errors.Is(err, fault.ErrState) {
		t.Errorf("through a symlink: %v", err)
	}
	want := state(t, in("real", "sub", "f"))
	d, err := Open(in("real", "sub"))
	must(t, err)
	defer d.Close()
	must(t, os.Rename(in("real"), in("away")), os.MkdirAll(in("evil", "sub"), 0o700),
		os.WriteFile(in("evil", "sub", "f"), []byte("theirs"), 0o600),
		os.WriteFile(in("away", "sub", "f"), []byte("now"), 0o600))
	for _, swap := range []func() error{
		func() error { return os.Symlink("evil", in("real")) },
		func() error { return errors.Join(os.Remove(in("real")), os.Rename(in("evil"), in("real"))) },
	} {
		must(t, swap())
		if _, err := d.Put(ctx, "f", ".temp", want, nil, nil); !errors.Is(err, fault.ErrState) {
			t.Errorf("into another directory: %v", err)
		}
		if text, err := os.ReadFile(in("real", "sub", "f")); string(text) != "theirs" || err != nil {
			t.Errorf("theirs is %q, %v", text, err)
		}
	}
	if text, err := os.ReadFile(in("away", "sub", "f")); string(text) != "now" || err != nil {
		t.Errorf("ours is %q, %v", text, err)
	}
}

// Leftovers where the new file is written first: our own goes, all else stays, and another name
// is taken. Only leftovers under all the names are in the way.
func TestTemp(t *testing.T) {
	path, d := dirOf(t)
	name, temp := filepath.Join(path, "f"), filepath.Join(path, ".temp")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	want := state(t, name)
	victim := filepath.Join(t.TempDir(), "victim")
	must(t, os.WriteFile(victim, []byte("victim"), 0o600))
	for what, plant := range map[string]func() error{
		"a file":      func() error { return os.WriteFile(temp, []byte("half"), 0o600) },
		"a hard link": func() error { return os.Link(name, temp) },
		"a directory": func() error { return os.Mkdir(temp, 0o700) },
		"a symlink":   func() error { return os.Symlink(victim, temp) },
		"a fifo":      func() error { return unix.Mkfifo(temp, 0o600) },
		"everywhere": func() error {
			for i := range temps {
				if err := os.Mkdir(tempName(temp, i), 0o700); err != nil {
					return err
				}
			}
			return nil
		},
	} {
		must(t, os.WriteFile(name, []byte("now"), 0o600), plant())
		_, err := d.Put(ctx, "f", ".temp", want, nil, nil)
		text, e2 := os.ReadFile(name)
		must(t, e2)
		switch what {
		case "a file", "a hard link":
			if err != nil || string(text) != "then" {
				t.Errorf("%s: %q, %v", what, text, err)
			}
			alone(t, path, "f")
			continue
		case "everywhere":
			if !errors.Is(err, os.ErrExist) || string(text) != "now" {
				t.Errorf("%s: %q, %v", what, text, err)
			}
		default:
			if err != nil || string(text) != "then" {
				t.Errorf("%s: %q, %v", what, text, err)
			}
			alone(t, path, ".temp", "f")
		}
		must(t, os.WriteFile(name, []byte("then"), 0o600),
			os.Chtimes(name, time.Time{}, time.Unix(want.Entry.Mtime.Sec, want.Entry.Mtime.Nsec)))
		if action, err := d.Put(ctx, "f", ".temp", want, nil, nil); action != Same || err != nil {
			t.Errorf("%s, with nothing to do: %q, %v", what, action, err)
		}
		for i := range temps {
			if err := os.Remove(tempName(temp, i)); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
	}
	if text, err := os.ReadFile(victim); string(text) != "victim" || err != nil {
		t.Errorf("the victim is %q, %v", text, err)
	}
}

// A file that is neither as it was nor as it is to be stays, whatever it is.
func TestChanged(t *testing.T) {
	path, d := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	then := state(t, name)
	must(t, os.WriteFile(name, []byte("now"), 0o600))
	now := state(t, name)
	for what, change := range map[string]func() error{
		"written":  func() error { return os.WriteFile(name, []byte("new"), 0o600) },
		"its mode": func() error { return os.Chmod(name, 0o640) },
		"removed":  func() error { return os.Remove(name) },
	} {
		_, err := d.Put(ctx, "f", ".temp", now, nil, nil)
		must(t, err, change())
		before := facts(t, name)
		for _, want := range []State{then, {}} {
			if what == "removed" && want.Entry == nil {
				continue // that is what was wanted
			}
			if _, err := d.Put(ctx, "f", ".temp", want, &now, nil); !errors.Is(err, ErrChanged) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if after := facts(t, name); after != before {
			t.Errorf("%s: it is %s, and was %s", what, after, before)
		}
	}
	must(t, os.WriteFile(name, []byte("came"), 0o600))
	if _, err := d.Put(ctx, "f", ".temp", then, &State{}, nil); !errors.Is(err, ErrChanged) {
		t.Errorf("where there was nothing: %v", err)
	}
	alone(t, path, "f")
}

// A file that is written to while it is read is copied of one instant, or not at all.
func TestWriter(t *testing.T) {
	path, _ := dirOf(t)
	name := filepath.Join(path, "f")
	block := make([]byte, limit/2)
	must(t, os.WriteFile(name, block, 0o600))
	stop, done := make(chan struct{}), make(chan struct{})
	f, err := os.OpenFile(name, os.O_WRONLY, 0)
	must(t, err)
	go func() {
		defer close(done)
		for n := byte(1); ; n++ {
			select {
			case <-stop:
				return
			default:
				_, _ = f.WriteAt(bytes.Repeat([]byte{n}, len(block)), 0)
			}
		}
	}()
	refused := 0
	for i, until := 0, time.Now().Add(time.Minute); i < 20 || refused == 0 && time.Now().Before(until); i++ {
		_, text, err := take(name)
		if err != nil {
			if !errors.Is(err, ErrChanged) {
				t.Fatal(err)
			}
			refused++
			continue
		}
		// The writer goes from front to back, so that at any instant there is one step.
		first := bytes.TrimLeft(text, string(text[:1]))
		if rest := bytes.TrimLeft(first, string(first[:min(1, len(first))])); len(rest) > 0 ||
			len(first) > 0 && text[0] != first[0]+1 {
			t.Fatalf("a copy of several instants: %d, then %d, then %d bytes more", text[0], first[0], len(rest))
		}
	}
	close(stop)
	<-done
	must(t, f.Close())
	if refused == 0 {
		t.Error("no copy of a file that changes all the time was refused")
	}
	if _, text, err := take(name); len(text) != len(block) || err != nil {
		t.Errorf("at rest: %d, %v", len(text), err)
	}
}

// mounted is a small filesystem on a disk of its own.
func mounted(t *testing.T, options ...string) string {
	t.Helper()
	root(t)
	base := t.TempDir()
	image, at := filepath.Join(base, "image"), filepath.Join(base, "at")
	must(t, os.WriteFile(image, nil, 0o600), os.Truncate(image, 4<<20), os.Mkdir(at, 0o700))
	if out, err := exec.Command("mkfs.ext4", append(options, "-q", "-m", "0", image)...).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, at).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() { must(t, unix.Unmount(at, 0)) })
	return at
}

// Where there is no room, or nothing can be written, Check knows or Put fails, and all stays as
// it was.
func TestNoRoom(t *testing.T) {
	root(t)
	at := mounted(t)
	name := filepath.Join(at, "f")
	must(t, os.WriteFile(name, bytes.Repeat([]byte("then"), limit/4), 0o600))
	want := state(t, name)
	must(t, os.WriteFile(name, []byte("now"), 0o600))
	before := facts(t, name)
	d, err := Open(at)
	must(t, err)
	defer d.Close()
	full := filepath.Join(at, "full")
	f, err := os.Create(full)
	must(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 64<<10))
	}
	must(t, f.Close())
	if _, free, err := d.Free(); err != nil || free > limit {
		t.Errorf("free: %d, %v", free, err)
	}
	if _, err := d.Put(ctx, "f", ".temp", want, nil, nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("on a full filesystem: %v", err)
	}
	alone(t, at, "f", "full", "lost+found")
	must(t, os.Remove(full), unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if _, _, err := d.Check(ctx, "f", want, limit); !errors.Is(err, unix.EROFS) {
		t.Errorf("on a read-only filesystem: %v", err)
	}
	if _, err := d.Put(ctx, "f", ".temp", want, nil, nil); !errors.Is(err, unix.EROFS) {
		t.Errorf("put on a read-only filesystem: %v", err)
	}
	if after := facts(t, name); after != before {
		t.Error("it has changed")
	}
	// The same through a read-only bind mount, and a file that is a mount of its own.
	path, other := dirOf(t)
	must(t, os.WriteFile(filepath.Join(path, "f"), []byte("now"), 0o600), unix.Mount(path, path, "", unix.MS_BIND, ""))
	bound, err := Open(path)
	must(t, err)
	_, err = bound.look(ctx, "f")
	must(t, err, unix.Mount("", path, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	if _, _, err := bound.Check(ctx, "f", want, limit); !errors.Is(err, unix.EROFS) {
		t.Errorf("in a read-only bind mount: %v", err)
	}
	must(t, bound.Close(), unix.Unmount(path, unix.MNT_DETACH))
	over := filepath.Join(path, "f")
	must(t, unix.Mount(over, over, "", unix.MS_BIND, ""))
	defer unix.Unmount(over, unix.MNT_DETACH)
	if _, _, err := other.Check(ctx, "f", want, limit); !errors.Is(err, fault.ErrState) ||
		!strings.Contains(err.Error(), "mounted") {
		t.Errorf("a mount: %v", err)
	}
}

func TestImmutable(t *testing.T) {
	path, d := dirOf(t)
	name := filepath.Join(path, "f")
	must(t, os.WriteFile(name, []byte("then"), 0o600))
	want := state(t, name)
	must(t, os.WriteFile(name, []byte("now"), 0o600))
	for _, at := range []string{name, path} {
		if out, err := exec.Command("chattr", "+i", at).CombinedOutput(); err != nil {
			t.Fatalf("chattr: %v: %s", err, out)
		}
		_, _, err := d.Check(ctx, "f", want, limit)
		if out, e2 := exec.Command("chattr", "-i", at).CombinedOutput(); e2 != nil {
			t.Fatalf("chattr: %v: %s", e2, out)
		}
		if err == nil || !strings.Contains(err.Error(), "immutable") {
			t.Errorf("%s: %v", at, err)
		}
	}
}
