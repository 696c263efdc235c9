package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// step is one change to a tree, made by random numbers; it may fail.
type step struct {
	What    int
	A, B    int // which paths
	N       int
	Content string
}

var names = []string{"a", "b", "dir", "d2", ".git", "x y", "\xff\xfe", "l\nn"}

// somewhere is a path of up to three components.
func somewhere(root string, n int) string {
	k := len(names)
	p := names[n%k]
	if n/k%3 > 0 {
		p = path.Join(names[n/k/3%3+2], p)
	}
	if n/k%3 > 1 {
		p = path.Join(names[n/k/9%3+2], p)
	}
	return filepath.Join(root, p)
}

func (s step) do(root string) {
	p, q := somewhere(root, s.A), somewhere(root, s.B)
	switch s.What % 16 {
	case 0, 1, 2:
		_ = os.MkdirAll(filepath.Dir(p), 0o755)
		// Not into a FIFO, which would wait for a reader.
		if f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NONBLOCK|unix.O_NOFOLLOW,
			os.FileMode(0o600+s.N%0o200)); err == nil {
			_, _ = f.WriteString(s.Content)
			_ = f.Close()
		}
	case 3:
		_ = os.MkdirAll(p, os.FileMode(0o700+s.N%0o100))
	case 4, 5:
		removeAll(p)
	case 6:
		_ = os.Link(p, q)
	case 7:
		_ = os.Symlink(s.Content, p)
	case 8:
		_ = os.Rename(p, q)
	case 9:
		_ = unix.Lchown(p, s.N%1000, s.N%7)
	case 10:
		_ = unix.Chmod(p, uint32(s.N)&0o7777)
	case 11:
		t := time.Unix(int64(s.N)*7919, int64(s.N)*104729%1e9)
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{
			unix.NsecToTimespec(t.UnixNano()), unix.NsecToTimespec(t.UnixNano()),
		}, unix.AT_SYMLINK_NOFOLLOW)
	case 12:
		_ = unix.Lsetxattr(p, []string{"user.k", "trusted.k", "security.k"}[s.N%3], []byte(s.Content), 0)
	case 13:
		// A directory in the place of what was there: opaque, if that was one.
		removeAll(p)
		_ = os.MkdirAll(filepath.Join(p, names[s.N%8]), 0o750)
	case 14:
		if f, err := os.OpenFile(p, os.O_WRONLY|os.O_CREATE|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0o640); err == nil {
			_, _ = f.WriteAt([]byte(s.Content), int64(s.N%4)<<20)
			_ = f.Truncate(int64(s.N%5)<<20 + 1)
			_ = f.Close()
		}
	case 15:
		_ = unix.Mknod(p, []uint32{unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR}[s.N%3]|0o640, int(unix.Mkdev(1, 3)))
	}
}

// removeAll spares what lies below a FIFO: os.RemoveAll opens what is above, and
// would wait for a writer.
func removeAll(p string) {
	if fi, err := os.Lstat(filepath.Dir(p)); err == nil && fi.IsDir() {
		_ = os.RemoveAll(p)
	}
}

func steps(t *rapid.T, name string, n int) []step {
	one := rapid.Custom(func(t *rapid.T) step {
		return step{
			What: rapid.IntRange(0, 15).Draw(t, "what"), A: rapid.IntRange(0, 215).Draw(t, "a"),
			B: rapid.IntRange(0, 215).Draw(t, "b"),
			N: rapid.IntRange(0, 1<<20).Draw(t, "n"), Content: rapid.StringN(1, 20, 60).Draw(t, "content"),
		}
	})
	return rapid.SliceOfN(one, 0, n).Draw(t, name)
}

// TestApplyIsTheMergedView has random changes through a real overlay: after an
// apply the original is what the volume showed, after an undo what it was, and
// the volume shows the same all the time.
func TestApplyIsTheMergedView(t *testing.T) {
	for place := range places {
		t.Run(place, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				b, cleanup := makeBench(t, place)
				defer cleanup()
				ctx := context.Background()
				for _, s := range steps(t, "before", 30) {
					s.do(b.from)
				}
				b.create(t)
				old := look(t, b.from)
				changed := steps(t, "changes", 30)
				must(t, b.With(ctx, "ws", func(p string) error {
					for _, s := range changed {
						s.do(p)
					}
					return nil
				}))
				merged := b.view(t)
				equalLook(t, "the original before the apply", old, look(t, b.from))
				dry, err := b.Apply(ctx, "ws", runtime.ApplyOptions{DryRun: true, Owners: true})
				must(t, err)
				if len(dry.Conflicts) > 0 {
					t.Fatalf("conflicts where nobody else was: %q", dry.Conflicts)
				}
				equalLook(t, "the original after a dry run", old, look(t, b.from))
				var allow []string
				if len(dry.Refused) > 0 {
					if _, err := b.Apply(ctx, "ws",
						runtime.ApplyOptions{Owners: true}); !errors.Is(err, fault.ErrDenied) {
						t.Fatalf("apply of %+v: %v", dry.Refused, err)
					}
					equalLook(t, "the original after a refused apply", old, look(t, b.from))
					must(t, b.With(ctx, "ws", func(p string) error {
						for _, r := range dry.Refused {
							at := rawPath(t, r)
							if allow = append(allow, at); r.MayAllow {
								continue
							}
							if err := os.Remove(filepath.Join(p, at)); err != nil {
								return err
							}
						}
						return nil
					}))
					merged = b.view(t)
				}
				_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Owners: true, Allow: allow})
				must(t, err)
				equalLook(t, "the original after the apply", merged, look(t, b.from))
				equalLook(t, "the volume after the apply", merged, b.view(t))
				_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true})
				must(t, err)
				equalLook(t, "the original after the undo", undone(place, old), undone(place, look(t, b.from)))
				equalLook(t, "the volume after the undo", merged, b.view(t))
				_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Force: true, Owners: true, Allow: allow})
				must(t, err)
				equalLook(t, "the original after the second apply", merged, look(t, b.from))
				if left, _ := filepath.Glob(b.from + "/.agentbox-*"); len(left) > 0 {
					t.Fatalf("left in the original: %q", left)
				}
			})
		})
	}
}

// undone is a look without the one thing that an undo cannot bring back to an
// original on another mount, where it has copies to work with: that a file is
// one with a name that the apply did not touch.
func undone(place string, look map[string]string) map[string]string {
	if place == "near" {
		return look
	}
	out := map[string]string{}
	for p, s := range look {
		out[p], _, _ = strings.Cut(s, " group=")
	}
	return out
}

// scene has one of each kind of change.
func (b *bench) scene(t tb) (old, merged map[string]string) {
	t.Helper()
	run := func(root, script string) {
		t.Helper()
		for line := range strings.SplitSeq(strings.TrimSpace(script), "\n") {
			f := strings.Fields(line)
			at := func(i int) string { return filepath.Join(root, f[i]) }
			var err error
			switch f[0] {
			case "dir":
				err = os.MkdirAll(at(1), 0o755)
			case "put":
				if err = os.MkdirAll(filepath.Dir(at(1)), 0o755); err == nil {
					err = os.WriteFile(at(1), []byte(f[2]), 0o644)
				}
			case "rm":
				err = os.RemoveAll(at(1))
			case "link":
				err = os.Link(at(1), at(2))
			case "sym":
				err = os.Symlink(f[2], at(1))
			case "own":
				err = os.Lchown(at(1), 1234, 5678)
			case "x":
				err = unix.Setxattr(at(1), "user.x", []byte(f[2]), 0)
			}
			must(t, err)
		}
	}
	run(b.from, `
dir keep/deep
put keep/deep/same same
put mod/file old
put gone/tree/a a
put gone/tree/b/c c
put lone lone
put opaque/old1 1
put opaque/sub/old2 2
put was/dir/x x
put wasfile f
put h1 hard
link h1 h2
link h1 keep/h3
dir attrs
x attrs one`)
	b.create(t)
	old = look(t, b.from)
	must(t, b.With(context.Background(), "ws", func(p string) error {
		run(p, `
put mod/file new
put mod/added added
rm gone/tree
rm lone
rm opaque
put opaque/new n
rm was/dir
sym was/dir elsewhere
rm wasfile
put wasfile/in in
put h2 changed
put fresh/a/b/c c
link fresh/a/b/c fresh/other
x attrs two
own attrs
own keep/deep/same`)
		return nil
	}))
	return old, b.view(t)
}

func TestApplyListsChanges(t *testing.T) {
	b := newBench(t, "near")
	b.scene(t)
	out, err := b.Apply(context.Background(), "ws", runtime.ApplyOptions{DryRun: true, Owners: true})
	must(t, err)
	var got []string
	for _, c := range out.Changes {
		got = append(got, c.Change+" "+c.Path)
	}
	want := `M /attrs
A /fresh
A /fresh/a
A /fresh/a/b
A /fresh/a/b/c
A /fresh/other
D /gone/tree
D /gone/tree/a
D /gone/tree/b
D /gone/tree/b/c
M /h2
M /keep/deep/same
D /lone
A /mod/added
M /mod/file
A /opaque/new
D /opaque/old1
D /opaque/sub
D /opaque/sub/old2
T /was/dir
D /was/dir/x
T /wasfile
A /wasfile/in`
	// The directories' own lines depend on times; h1 and h3 share what h2 was.
	if s := strings.Join(got, "\n"); s != want {
		t.Errorf("listed:\n%s\nwant:\n%s", s, want)
	}
}

// TestApplyRefuses has what an apply must not do.
func TestApplyRefuses(t *testing.T) {
	ctx := context.Background()
	t.Run("in use", func(t *testing.T) {
		b := newBench(t, "near")
		old, _ := b.scene(t)
		if _, err := b.Volumes.Mount(ctx, "ws", "someone"); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{}); !errors.Is(err, fault.ErrState) {
			t.Errorf("apply of a mounted volume: %v", err)
		}
		equalLook(t, "original", old, look(t, b.from))
		must(t, b.Unmount(ctx, "ws", "someone"))
	})
	t.Run("no original", func(t *testing.T) {
		b := newBench(t, "near")
		must(t, b.Volumes.Create(ctx, "ws", CreateOptions{}))
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{}); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("apply of a volume over nothing: %v", err)
		}
	})
	t.Run("changed meanwhile", func(t *testing.T) {
		b := newBench(t, "near")
		b.scene(t)
		time.Sleep(20 * time.Millisecond) // the clock of inodes ticks every 1 to 10 ms
		must(t, os.WriteFile(b.from+"/mod/file", []byte("by somebody else"), 0o644))
		must(t, os.WriteFile(b.from+"/lone", []byte("by somebody else"), 0o644))
		old := look(t, b.from)
		_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{})
		if !errors.Is(err, fault.ErrState) || !strings.Contains(err.Error(), "/mod/file") ||
			!strings.Contains(err.Error(), "/lone") {
			t.Errorf("apply over others' changes: %v", err)
		}
		equalLook(t, "original", old, look(t, b.from))
		out, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Force: true, Owners: true})
		must(t, err)
		if len(out.Conflicts) != 2 {
			t.Errorf("conflicts %q", out.Conflicts)
		}
		if data, _ := os.ReadFile(b.from + "/mod/file"); string(data) != "new" {
			t.Errorf("forced: %q", data)
		}
	})
	t.Run("undo of nothing", func(t *testing.T) {
		b := newBench(t, "near")
		b.scene(t)
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true}); !errors.Is(err, fault.ErrState) {
			t.Errorf("undo: %v", err)
		}
	})
	t.Run("undo over changes", func(t *testing.T) {
		b := newBench(t, "near")
		b.scene(t)
		_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{})
		must(t, err)
		must(t, os.WriteFile(b.from+"/fresh/a/b/more", nil, 0o644))
		now := look(t, b.from)
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Undo: true}); !errors.Is(err, fault.ErrState) {
			t.Errorf("undo over a change in the original: %v", err)
		}
		equalLook(t, "original", now, look(t, b.from))
		must(t, b.With(ctx, "ws", func(p string) error { return os.WriteFile(p+"/new", nil, 0o644) }))
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{
			Undo: true, Force: true,
		}); !errors.Is(err, fault.ErrState) {
			t.Errorf("undo over a change in the volume: %v", err)
		}
	})
	t.Run("mount point", func(t *testing.T) {
		b := newBench(t, "near")
		must(t, os.MkdirAll(b.from+"/m/below", 0o755))
		b.create(t)
		must(t, b.With(ctx, "ws", func(p string) error { return os.WriteFile(p+"/m/below/f", []byte("x"), 0o644) }))
		must(t, unix.Mount("tmpfs", b.from+"/m", "tmpfs", 0, ""))
		defer unix.Unmount(b.from+"/m", 0)
		if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{}); !errors.Is(err, fault.ErrUnsupported) {
			t.Errorf("apply into a mount point: %v", err)
		}
	})
}

// TestApplyOwners has root inside change files of a user's directory: they stay the
// user's.
func TestApplyOwners(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	must(t, os.Mkdir(b.from+"/web", 0o755))
	must(t, os.WriteFile(b.from+"/main.go", []byte("old"), 0o644))
	must(t, os.WriteFile(b.from+"/chowned", []byte("same"), 0o644))
	for p, owner := range map[string][2]int{
		"": {1000, 100}, "/web": {33, 34}, "/main.go": {1000, 1001}, "/chowned": {1000, 100},
	} {
		must(t, os.Chown(b.from+p, owner[0], owner[1]))
	}
	b.create(t)
	must(t, b.With(ctx, "ws", func(p string) error {
		must(t, os.Remove(p+"/main.go"))
		must(t, os.WriteFile(p+"/main.go", []byte("new"), 0o644))
		must(t, os.MkdirAll(p+"/new/deep", 0o755))
		must(t, os.WriteFile(p+"/new/deep/f", nil, 0o644))
		must(t, os.Symlink("f", p+"/new/deep/l"))
		must(t, os.WriteFile(p+"/web/page", nil, 0o644))
		must(t, os.Chown(p+"/web", 0, 0))
		must(t, os.Chown(p+"/chowned", 0, 0))
		return os.Chown(p+"/new/deep/f", 65534, 65534)
	}))
	out, err := b.Apply(ctx, "ws", runtime.ApplyOptions{DryRun: true})
	must(t, err)
	want := map[string]string{
		".": "1000:100", "main.go": "1000:1001", "chowned": "1000:100", "web": "33:34", "web/page": "33:34",
		"new": "1000:100", "new/deep": "1000:100", "new/deep/f": "1000:100", "new/deep/l": "1000:100",
	}
	for _, c := range out.Changes {
		if c.Path == "/chowned" {
			t.Errorf("listed, though nothing of it changes: %+v", c)
		}
		if c.New != nil {
			if got := fmt.Sprintf("%d:%d", c.New.UID, c.New.GID); got != want[strings.TrimPrefix(c.Path,
				"/")] && c.Path != "/" {
				t.Errorf("the dry run has %s owned by %s", c.Path, got)
			}
		}
	}
	_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{})
	must(t, err)
	for p, want := range want {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(b.from, p), &st))
		if got := fmt.Sprintf("%d:%d", st.Uid, st.Gid); got != want {
			t.Errorf("%s is owned by %s, want %s", p, got, want)
		}
	}
	if data, _ := os.ReadFile(b.from + "/main.go"); string(data) != "new" {
		t.Errorf("applied: %q", data)
	}
}

// TestApplyPrivileged has what would give a program of the sandbox rights on the
// host: none of it comes out unasked.
func TestApplyPrivileged(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	must(t, os.WriteFile(b.from+"/had", []byte("old"), 0o644))
	must(t, os.Chmod(b.from+"/had", 0o755|os.ModeSetuid))
	must(t, os.WriteFile(b.from+"/untouched", []byte("old"), 0o644))
	must(t, os.Chmod(b.from+"/untouched", 0o755|os.ModeSetuid))
	b.create(t)
	capability := []byte{1, 0, 0, 2, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	must(t, b.With(ctx, "ws", func(p string) error {
		for _, name := range []string{"had", "suid", "sgid", "caps", "d/in/suid"} {
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(p, name)), 0o755))
			must(t, os.WriteFile(filepath.Join(p, name), []byte("evil"), 0o755))
		}
		must(t, unix.Chmod(p+"/had", 0o4755))
		must(t, unix.Chmod(p+"/suid", 0o4755))
		must(t, unix.Chmod(p+"/sgid", 0o2755))
		must(t, unix.Chmod(p+"/d/in/suid", 0o4755))
		must(t, unix.Setxattr(p+"/caps", "security.capability", capability, 0))
		must(t, unix.Mknod(p+"/disk", unix.S_IFBLK|0o666, int(unix.Mkdev(8, 0))))
		must(t, unix.Mknod(p+"/d/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		return unix.Mkfifo(p+"/fifo", 0o644)
	}))
	old := look(t, b.from)
	list := func(out runtime.Applied) string {
		var s []string
		for _, r := range out.Refused {
			s = append(s, fmt.Sprintf("%s %v", r.Path, r.MayAllow))
		}
		return strings.Join(s, ", ")
	}
	out, err := b.Apply(ctx, "ws", runtime.ApplyOptions{DryRun: true})
	must(t, err)
	if got, want := list(out), "/caps true, /d/in/suid true, /d/null false, /disk false, /had true, /sgid true, /suid true"; got != want {
		t.Errorf("refused: %s; want %s", got, want)
	}
	_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Force: true})
	if !errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), "/disk: it is a device (block 8:0)") ||
		!strings.Contains(err.Error(), "mode 4755") {
		t.Errorf("apply: %v", err)
	}
	equalLook(t, "the original after a refused apply", old, look(t, b.from))
	must(t, b.With(ctx, "ws", func(p string) error {
		return errors.Join(os.Remove(p+"/disk"), os.Remove(p+"/d/null"))
	}))
	out, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Allow: []string{
		"/suid", "caps", "/had", "/d/in/../in/suid",
	}, DryRun: true})
	must(t, err)
	if got := list(out); got != "/sgid true" {
		t.Errorf("refused of what is named: %s", got)
	}
	_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Allow: []string{"/suid", "caps", "/had", "/d/in/suid", "/sgid"}})
	must(t, err)
	for name, want := range map[string]uint32{
		"suid": 0o4755, "had": 0o4755, "sgid": 0o2755, "d/in/suid": 0o4755, "caps": 0o755,
	} {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(b.from, name), &st))
		if st.Mode&0o7777 != want {
			t.Errorf("%s has mode %o, want %o", name, st.Mode&0o7777, want)
		}
	}
	buf := make([]byte, 64)
	if n, err := unix.Getxattr(b.from+"/caps", "security.capability", buf); err != nil ||
		string(buf[:n]) != string(capability) {
		t.Errorf("capabilities: %x, %v", buf[:max(n, 0)], err)
	}
}

// TestApplyGit has what would have git run programs: in the .git of the directory, and in a directory that
// becomes a repository. None of it comes out unasked.
func TestApplyGit(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	for _, dir := range []string{".git/hooks", "bare/objects", "bare/refs", "sub/.git"} {
		must(t, os.MkdirAll(filepath.Join(b.from, dir), 0o755))
	}
	for _, name := range []string{".git/config", ".git/hooks/gone", "bare/config", "sub/.git/HEAD"} {
		must(t, os.WriteFile(filepath.Join(b.from, name), []byte("had\n"), 0o755))
	}
	b.create(t)
	put := func(p, name string) {
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(p, name)), 0o755))
		must(t, os.WriteFile(filepath.Join(p, name), []byte("came\n"), 0o755))
	}
	must(t, b.With(ctx, "ws", func(p string) error {
		for _, name := range []string{
			".git/config", ".git/hooks/pre-commit", ".git/refs/heads/main", "new/.git/hooks/pre-commit", "bare/HEAD", "fine",
		} {
			put(p, name)
		}
		must(t, os.RemoveAll(p+"/sub/.git"))
		put(p, "sub/.git")
		return os.Remove(p + "/.git/hooks/gone")
	}))
	old := look(t, b.from)
	out, err := b.Apply(ctx, "ws", runtime.ApplyOptions{DryRun: true})
	must(t, err)
	var refused []string
	for _, r := range out.Refused {
		if !r.MayAllow {
			t.Errorf("%s cannot be allowed", r.Path)
		}
		refused = append(refused, r.Path)
	}
	slices.Sort(refused)
	want := []string{
		"/.git/config", "/.git/hooks/gone", "/.git/hooks/pre-commit", "/bare/HEAD", "/new/.git/hooks/pre-commit", "/sub/.git",
	}
	if !slices.Equal(refused, want) {
		t.Errorf("refused: %q, want %q", refused, want)
	}
	if _, err := b.Apply(ctx, "ws", runtime.ApplyOptions{}); !errors.Is(err, fault.ErrDenied) {
		t.Errorf("apply: %v", err)
	}
	equalLook(t, "the original after a refused apply", old, look(t, b.from))
	_, err = b.Apply(ctx, "ws", runtime.ApplyOptions{Allow: []string{"/.git", "/bare", "/new", "/sub"}})
	must(t, err)
	for _, name := range []string{".git/config", "bare/HEAD", "new/.git/hooks/pre-commit", "sub/.git", "fine"} {
		if data, err := os.ReadFile(filepath.Join(b.from, name)); string(data) != "came\n" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

// TestApplyFollowsNoSymlink replaces a directory of the original by a symlink after the
// volume was made.
func TestApplyFollowsNoSymlink(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	outside := t.TempDir()
	must(t, os.WriteFile(outside+"/f", []byte("outside"), 0o600))
	must(t, os.MkdirAll(b.from+"/d", 0o755))
	must(t, os.WriteFile(b.from+"/d/f", []byte("inside"), 0o600))
	b.create(t)
	must(t, b.With(ctx, "ws", func(p string) error { return os.WriteFile(p+"/d/f", []byte("changed"), 0o600) }))
	must(t, os.RemoveAll(b.from+"/d"))
	must(t, os.Symlink(outside, b.from+"/d"))
	_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Force: true, Owners: true})
	must(t, err)
	if data, _ := os.ReadFile(outside + "/f"); string(data) != "outside" {
		t.Errorf("outside of the original: %q", data)
	}
	if data, _ := os.ReadFile(b.from + "/d/f"); string(data) != "changed" {
		t.Errorf("in the original: %q", data)
	}
}

// TestApplyUnderChange has another writer change the original all the while: an apply
// succeeds or leaves everything as it found it, and never loses that writer's last change.
func TestApplyUnderChange(t *testing.T) {
	ctx := context.Background()
	b := newBench(t, "near")
	for i := range 50 {
		must(t, os.WriteFile(fmt.Sprintf("%s/f%d", b.from, i), []byte("old"), 0o644))
	}
	b.create(t)
	must(t, b.With(ctx, "ws", func(p string) error {
		for i := range 50 {
			must(t, os.WriteFile(fmt.Sprintf("%s/f%d", p, i), []byte("volume"), 0o644))
		}
		return nil
	}))
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			p := fmt.Sprintf("%s/f%d", b.from, n%50)
			_ = os.WriteFile(p+".tmp", fmt.Appendf(nil, "other %d", n), 0o644)
			_ = os.Rename(p+".tmp", p)
			time.Sleep(time.Millisecond)
		}
	}()
	applied := false
	for range 20 {
		_, err := b.Apply(ctx, "ws", runtime.ApplyOptions{Force: true, Owners: true})
		if err == nil {
			applied = true
			break
		}
		if !errors.Is(err, fault.ErrState) && !errors.Is(err, fault.ErrBusy) {
			t.Errorf("apply: %v", err)
		}
		for i := range 50 {
			if data, _ := os.ReadFile(fmt.Sprintf("%s/f%d", b.from, i)); string(data) == "volume" {
				t.Errorf("f%d is applied after a failed apply (%v)", i, err)
			}
		}
	}
	close(stop)
	<-ended
	t.Logf("applied under fire: %v", applied)
}
