package overlay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
)

// dirSource has the data of the files of a directory.
type dirSource struct {
	dir   string
	calls atomic.Int64
	hurt  func(e Entry, r io.Reader) io.Reader
}

func (s *dirSource) Data(_ context.Context, e Entry) (io.ReadCloser, error) {
	s.calls.Add(1)
	f, err := os.Open(filepath.Join(s.dir, e.Path))
	if err != nil {
		return nil, err
	}
	var parts []io.Reader
	for _, x := range e.spans() {
		parts = append(parts, io.NewSectionReader(f, x.Off, x.Len))
	}
	r := io.MultiReader(parts...)
	if s.hurt != nil {
		r = s.hurt(e, r)
	}
	return struct {
		io.Reader
		io.Closer
	}{r, f}, nil
}

func digested(dir string) iter.Seq2[Entry, error] {
	return DirEntries(context.Background(), dir, WalkOptions{Digest: true})
}

// update makes dir what want is, and proves it.
func update(t tb, dir, want string) *Update {
	t.Helper()
	u := planDirs(t, dir, want)
	check := checkedPlan(t, dir, want)
	stage := dir + ".stage"
	src := &dirSource{dir: want}
	must(t, u.Stage(context.Background(), dir, stage, src))
	must(t, u.Apply(context.Background(), dir, stage))
	if _, err := os.Lstat(stage); !os.IsNotExist(err) {
		t.Fatalf("the stage is still there: %v", err)
	}
	proven(t, dir, want)
	check()
	return u
}

func proven(t tb, dir, want string) {
	t.Helper()
	samePeek(t, "updated", peek(t, want), peek(t, dir))
	diffs, err := Verify(context.Background(), dir, bytes.NewReader(treeOf(t, want)), CompareOptions{})
	if err != nil || len(diffs) > 0 {
		t.Fatalf("Verify: %v %v", diffs, err)
	}
	if u := planDirs(t, dir, want); !u.Empty() {
		t.Fatalf("there is still something to do: %v", kinds(t, u))
	}
}

func kinds(t tb, u *Update) (list []string) {
	for _, c := range inOrder(t, u) {
		list = append(list, string(c.Kind)+" "+c.Path)
	}
	return list
}

type inode struct {
	ino   uint64
	ctime unix.Timespec
	dir   bool
}

func inodes(t tb, dir string) map[string]inode {
	t.Helper()
	seen := map[string]inode{}
	must(t, filepath.Walk(dir, func(p string, _ os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		seen[rel] = inode{st.Ino, st.Ctim, st.Mode&unix.S_IFMT == unix.S_IFDIR}
		return err
	}))
	return seen
}

// onlyDifferences proves that what is the same before and after was not touched.
func onlyDifferences(t tb, u *Update, had, wanted map[string]string, before, after map[string]inode) {
	t.Helper()
	touched := map[string]bool{}
	for _, c := range inOrder(t, u) {
		touched[c.Path] = true
		parent, _ := splitPath(c.Path)
		touched[parent] = true
		if (c.Old == nil) != (c.Kind == Added) || (c.New == nil) != (c.Kind == Deleted) {
			t.Errorf("%s %q: %v %v", c.Kind, c.Path, c.Old, c.New)
		}
		if c.Path != "." && had[c.Path] == wanted[c.Path] {
			t.Errorf("%s %q, which is the same on both sides: %s", c.Kind, c.Path, had[c.Path])
		}
	}
	if !slices.IsSortedFunc(inOrder(t, u), func(a, b *updateChange) int { return ComparePaths(a.Path, b.Path) }) {
		t.Errorf("out of order: %q", kinds(t, u))
	}
	for path, b := range before {
		a, ok := after[path]
		if !ok || had[path] != wanted[path] {
			if ok && a.ino == b.ino && a.ctime == b.ctime && !sharesOnly(had[path], wanted[path]) {
				t.Errorf("%q was not touched: %s, want %s", path, had[path], wanted[path])
			}
			continue
		}
		if a.ino != b.ino {
			t.Errorf("%q has inode %d, had %d", path, a.ino, b.ino)
		}
		if a.ctime != b.ctime && !(b.dir && touched[path]) {
			t.Errorf("%q was touched: %s", path, had[path])
		}
	}
}

// sharesOnly reports whether only the hard link groups differ, which shrink or grow by what
// happens to others.
func sharesOnly(a, b string) bool {
	a, _, ga := strings.Cut(a, " group ")
	b, _, gb := strings.Cut(b, " group ")
	return a == b && (ga || gb)
}

// TestUpdateRandom takes random trees from one to the other.
func TestUpdateRandom(t *testing.T) {
	thorough.Checks(t, 50)
	base := noDevices(t)
	done, actions := map[string]int{}, map[action]int{}
	round := 0
	rapid.Check(t, func(rt *rapid.T) {
		round++
		top, err := os.MkdirTemp(base, "round-")
		must(t, err)
		defer os.RemoveAll(top)
		dir, want := pair(rt, top, done)
		had, wanted, before := peek(rt, dir), peek(rt, want), inodes(rt, dir)
		u := update(rt, dir, want)
		onlyDifferences(rt, u, had, wanted, before, inodes(rt, dir))
		samePeek(rt, "the wanted directory itself", wanted, peek(rt, want))
		for _, c := range inOrder(rt, u) {
			actions[c.do]++
		}
	})
	t.Logf("%d rounds, actions %v, operations %v", round, actions, done)
	if t.Failed() || round < 50 {
		return
	}
	for _, do := range []action{doRemove, doDir, doAttrs, doFile, doNode, doLink} {
		if actions[do] == 0 {
			t.Errorf("action %d never happened", do)
		}
	}
}

// pair makes two directories with a past in common.
func pair(rt *rapid.T, top string, done map[string]int) (dir, want string) {
	c := &chaos{done: map[string]int{}, root: filepath.Join(top, "base")}
	must(rt, os.Mkdir(c.root, 0o755))
	c.run(rt, 60)
	archive, _ := captureDir(rt, c.root)
	dir, _ = applyTo(rt, top, archive)
	want, _ = applyTo(rt, top, archive)
	c.done = done
	c.root = dir
	c.run(rt, 30)
	c.root = want
	c.run(rt, 30)
	return dir, want
}

// TestUpdateFresh fills a directory that has nothing, and empties it again.
func TestUpdateFresh(t *testing.T) {
	base := noDevices(t)
	want, dir, empty := filepath.Join(base, "want"), filepath.Join(base, "dir"), filepath.Join(base, "empty")
	for _, d := range []string{want, dir, empty} {
		must(t, os.Mkdir(d, 0o755))
	}
	everything(t, want)
	u := update(t, dir, want)
	if u.Bytes() < 3_000_000 {
		t.Errorf("%d bytes", u.Bytes())
	}
	for _, c := range inOrder(t, u) {
		if c.Kind != Added && c.Path != "." {
			t.Errorf("%s %q", c.Kind, c.Path)
		}
	}
	before := inodes(t, dir)
	if u := update(t, dir, want); !u.Empty() {
		t.Error(kinds(t, u))
	}
	if after := inodes(t, dir); fmt.Sprint(before) != fmt.Sprint(after) {
		t.Error("an empty update touched something")
	}
	n := len(before)
	u = update(t, dir, empty)
	if u.Len() != n { // everything below, and "." is modified
		t.Errorf("%d changes of %d entries: %q", u.Len(), n, kinds(t, u))
	}
}

// TestUpdateCases are the changes that need thought, each from a to b and back.
func TestUpdateCases(t *testing.T) {
	in := func(d, n string) string { return filepath.Join(d, n) }
	file := func(p, data string) { must(t, os.WriteFile(p, []byte(data), 0o644)); must(t, touch(p, 1000, 1)) }
	fill := func(d string) {
		must(t, os.MkdirAll(in(d, "x/y/z"), 0o755))
		file(in(d, "x/y/z/f"), "deep")
		must(t, os.Symlink("/etc", in(d, "x/y/link")))
	}
	for name, c := range map[string]struct {
		a, b func(d string)
		keep []string // these keep their inodes from a to b
		data int      // files that are staged from a to b
	}{
		"nothing":             {func(d string) {}, func(d string) {}, nil, 0},
		"file to full dir":    {func(d string) { file(in(d, "x"), "1") }, fill, nil, 1},
		"symlink to full dir": {func(d string) { must(t, os.Symlink(".", in(d, "x"))) }, fill, nil, 1},
		"whiteout to full dir": {func(d string) { must(t, unix.Mknod(in(d, "x"), unix.S_IFCHR, 0)) }, func(d string) {
			fill(d)
			must(t, unix.Lsetxattr(in(d, "x"), "trusted.overlay.opaque", []byte("y"), 0))
		}, nil, 1},
		"mode 0 all along": {func(d string) {
			fill(d)
			must(t, os.Chmod(in(d, "x/y"), 0))
			must(t, os.Chmod(in(d, "x"), 0))
		}, func(d string) {
			fill(d)
			file(in(d, "x/y/z/f"), "Deep")
			must(t, os.Chmod(in(d, "x/y"), 0))
			must(t, os.Chmod(in(d, "x"), 0))
		}, []string{"x", "x/y", "x/y/z"}, 1},
		"set-gid and default ACL do not spread": {func(d string) {
			must(t, os.Mkdir(in(d, "x"), 0o755))
			must(t, os.Chown(in(d, "x"), 7, 7))
			must(t, unix.Lsetxattr(in(d, "x"), "system.posix_acl_default", posixACL(7, 1000), 0))
			must(t, unix.Chmod(in(d, "x"), 0o2755))
		}, func(d string) {
			must(t, os.Mkdir(in(d, "x"), 0o755))
			must(t, os.Mkdir(in(d, "x/sub"), 0o755))
			file(in(d, "x/f"), "1")
			must(t, unix.Mkfifo(in(d, "x/fifo"), 0o644))
			must(t, os.Symlink("a", in(d, "x/link")))
			must(t, os.Chown(in(d, "x"), 7, 7))
			must(t, unix.Lsetxattr(in(d, "x"), "system.posix_acl_default", posixACL(7, 1000), 0))
			must(t, unix.Chmod(in(d, "x"), 0o2755))
		}, []string{"x"}, 1},
		"attributes in place": {func(d string) {
			file(in(d, "f"), "1")
			must(t, os.Chown(in(d, "f"), 5, 6))
			must(t, unix.Chmod(in(d, "f"), 0o6711))
			must(t, unix.Lsetxattr(in(d, "f"), "security.capability",
				[]byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
			must(t, unix.Lsetxattr(in(d, "f"), "trusted.overlay.origin", []byte("o"), 0))
		}, func(d string) {
			file(in(d, "f"), "1")
			must(t, unix.Lsetxattr(in(d, "f"), "system.posix_acl_access", posixACL(7, 1000), 0))
		}, []string{"f"}, 0},
		"a link is broken": {func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			file(in(d, "a"), "2")
			file(in(d, "b"), "1")
		}, []string{"b"}, 1},
		"the first is broken off, the same but for its mode": {func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Chmod(in(d, "a"), 0o600))
			file(in(d, "b"), "1")
		}, []string{"b"}, 1},
		"the first name goes": {func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			file(in(d, "b"), "1")
		}, []string{"b"}, 0},
		"a name before the first": {func(d string) { file(in(d, "b"), "1") }, func(d string) {
			file(in(d, "b"), "1")
			must(t, os.Mkdir(in(d, "A"), 0o755))
			must(t, os.Link(in(d, "b"), in(d, "A/a")))
		}, []string{"b"}, 0},
		"groups are crossed": {func(d string) {
			file(in(d, "a"), "1")
			file(in(d, "b"), "2")
			must(t, os.Link(in(d, "a"), in(d, "c")))
			must(t, os.Link(in(d, "b"), in(d, "d")))
		}, func(d string) {
			file(in(d, "a"), "1")
			file(in(d, "b"), "2")
			must(t, os.Link(in(d, "b"), in(d, "c")))
			must(t, os.Link(in(d, "a"), in(d, "d")))
		}, []string{"a", "b"}, 0},
		"contents are exchanged": {func(d string) {
			file(in(d, "a"), "1")
			file(in(d, "b"), "2")
			must(t, os.Link(in(d, "a"), in(d, "c")))
		}, func(d string) {
			file(in(d, "a"), "2")
			file(in(d, "b"), "1")
			must(t, os.Link(in(d, "b"), in(d, "c")))
		}, []string{"c"}, 1},
		"one file becomes a name of another": {func(d string) {
			file(in(d, "a"), "1")
			file(in(d, "b"), "1")
		}, func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, []string{"a"}, 0},
		"links change with the inode": {func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			file(in(d, "a"), "2")
			must(t, os.Link(in(d, "a"), in(d, "b")))
			must(t, os.Link(in(d, "a"), in(d, "c")))
		}, nil, 1},
		"links change in place": {func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			file(in(d, "a"), "1")
			must(t, os.Chmod(in(d, "a"), 0o400))
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, []string{"a", "b"}, 0},
		"linked nodes": {func(d string) {
			must(t, unix.Mknod(in(d, "a"), unix.S_IFCHR, 0))
			must(t, os.Link(in(d, "a"), in(d, "b")))
		}, func(d string) {
			must(t, unix.Mknod(in(d, "a"), unix.S_IFCHR|0o600, 0))
			must(t, os.Link(in(d, "a"), in(d, "b")))
			must(t, os.Symlink("x", in(d, "c")))
			must(t, os.Link(in(d, "c"), in(d, "d")))
		}, nil, 0},
		"a hole instead of zeros": {func(d string) { file(in(d, "f"), string(make([]byte, 1<<20))) }, func(d string) {
			must(t, os.WriteFile(in(d, "f"), nil, 0o644))
			must(t, os.Truncate(in(d, "f"), 1<<20))
			must(t, touch(in(d, "f"), 1000, 1))
		}, nil, 1},
		"the top": {func(d string) {
			must(t, unix.Lsetxattr(d, "trusted.overlay.impure", []byte("y"), 0))
		}, func(d string) {
			must(t, os.Chown(d, 3, 4))
			must(t, unix.Chmod(d, 0o3700))
		}, []string{"."}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			base := noDevices(t)
			sides := [2]string{}
			for i, make := range []func(string){c.a, c.b} {
				sides[i] = in(base, fmt.Sprint(i))
				must(t, os.Mkdir(sides[i], 0o755))
				make(sides[i])
				// Only what a case is about may differ.
				must(t, filepath.Walk(sides[i], func(p string, info os.FileInfo, err error) error {
					if err == nil && (info.IsDir() || !info.Mode().IsRegular()) {
						return touch(p, 2000, 2)
					}
					return err
				}))
			}
			for i := range sides {
				archive, _ := captureDir(t, sides[i])
				dir, _ := applyTo(t, base, archive)
				had, wanted, before := peek(t, dir), peek(t, sides[1-i]), inodes(t, dir)
				u := update(t, dir, sides[1-i])
				after := inodes(t, dir)
				onlyDifferences(t, u, had, wanted, before, after)
				for _, p := range c.keep {
					if before[p].ino != after[p].ino {
						t.Errorf("%q has another inode; %q", p, kinds(t, u))
					}
				}
				data := 0
				for _, c := range inOrder(t, u) {
					if c.do == doFile {
						data++
					}
				}
				if i == 0 && data != c.data {
					t.Errorf("%d files staged, want %d: %q", data, c.data, kinds(t, u))
				}
			}
		})
	}
}

// TestUpdateDeep removes and makes again what is as deep as a path can be.
func TestUpdateDeep(t *testing.T) {
	base := t.TempDir()
	dir, want, empty := filepath.Join(base, "dir"), filepath.Join(base, "want"), filepath.Join(base, "empty")
	for _, d := range []string{dir, want, empty} {
		must(t, os.Mkdir(d, 0o755))
	}
	fd, err := unix.Open(want, unix.O_PATH, 0)
	must(t, err)
	for range maxDepth - 1 {
		must(t, unix.Mkdirat(fd, "d", 0o755))
		next, err := unix.Openat(fd, "d", unix.O_PATH, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = next
	}
	must(t, unix.Close(fd))
	for _, to := range []string{want, empty} {
		u := planDirs(t, dir, to)
		if u.Len() < maxDepth-1 {
			t.Errorf("%d changes", u.Len())
		}
		must(t, u.Stage(t.Context(), dir, dir+".stage", nil))
		must(t, u.Apply(t.Context(), dir, dir+".stage"))
		if u := planDirs(t, dir, to); !u.Empty() {
			t.Error(u.Len())
		}
	}
}
