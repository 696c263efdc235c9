package overlay

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
)

// TestUpdateLinksRandom deals few names to few inodes, on both sides.
func TestUpdateLinksRandom(t *testing.T) {
	thorough.Checks(t, 50)
	base := noDevices(t)
	kept := 0
	rapid.Check(t, func(rt *rapid.T) {
		top, err := os.MkdirTemp(base, "round-")
		must(t, err)
		defer os.RemoveAll(top)
		var sides [2]string
		for i := range sides {
			sides[i] = filepath.Join(top, fmt.Sprint(i))
			first := map[int]string{}
			for _, sub := range []string{"", "/b", "/b/c"} {
				must(t, os.Mkdir(sides[i]+sub, 0o755))
			}
			for _, name := range []string{"a", "b/a", "b/c/a", "b/c/z", "b/z", "x", "y", "z"} {
				p := filepath.Join(sides[i], name)
				n := rapid.IntRange(-1, 5).Draw(rt, name)
				switch {
				case n < 0:
					continue
				case first[n] != "":
					must(t, os.Link(first[n], p))
					continue
				case n == 5:
					must(t, unix.Mknod(p, unix.S_IFCHR|0o600, 0))
				default:
					must(t, os.WriteFile(p, []byte{'0' + byte(n%2)}, 0o600+os.FileMode(n/2*0o44)))
				}
				must(t, touch(p, 1, 1))
				first[n] = p
			}
			for _, sub := range []string{"/b/c", "/b", ""} {
				must(t, touch(sides[i]+sub, 2, 2))
			}
		}
		had, wanted, before := peek(rt, sides[0]), peek(rt, sides[1]), inodes(rt, sides[0])
		u := update(rt, sides[0], sides[1])
		after := inodes(rt, sides[0])
		onlyDifferences(rt, u, had, wanted, before, after)
		for p, b := range before {
			if !b.dir && after[p].ino == b.ino {
				kept++
			}
		}
		if n := u.Bytes(); n > 5 { // no wanted inode is staged twice
			rt.Fatalf("%d bytes staged", n)
		}
	})
	if !t.Failed() && kept == 0 {
		t.Error("no inode was ever kept")
	}
}

// TestUpdateSharedWhiteout: the kernel makes whiteouts names of one inode that
// it keeps in its work directory. That one stays as it is.
func TestUpdateSharedWhiteout(t *testing.T) {
	base := noDevices(t)
	dir, want, work := base+"/dir", base+"/want", base+"/work"
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.Mkdir(want, 0o755))
	must(t, unix.Mknod(work, unix.S_IFCHR, 0))
	must(t, os.Link(work, dir+"/a"))
	must(t, os.Link(work, dir+"/b"))
	must(t, unix.Mknod(want+"/a", unix.S_IFCHR|0o600, 0))
	must(t, os.Link(want+"/a", want+"/b"))
	var before, after unix.Stat_t
	must(t, unix.Lstat(work, &before))
	update(t, dir, want)
	must(t, unix.Lstat(work, &after))
	if after.Mode != before.Mode || after.Mtim != before.Mtim || after.Nlink != 1 {
		t.Errorf("%+v, was %+v", after, before)
	}
}

// TestUpdateMadeUpLink has a tree with a hard link to nothing: it is refused
// before anything is touched.
func TestUpdateMadeUpLink(t *testing.T) {
	base := t.TempDir()
	dir := base + "/dir"
	must(t, os.Mkdir(dir, 0o755))
	must(t, os.WriteFile(dir+"/a", []byte("x"), 0o644))
	root := Entry{Path: ".", Type: TypeDir, Mode: 0o700}
	for _, to := range []string{"b", "b/c", "."} {
		u, err := plan(t.Context(), digested(dir), seqOf([]Entry{root, {Path: "z", Type: TypeFile, Hardlink: to}}))
		if err == nil {
			before := peek(t, dir)
			must(t, u.Stage(t.Context(), dir, dir+".stage", nil))
			err = u.Apply(t.Context(), dir, dir+".stage")
			samePeek(t, "untouched", before, peek(t, dir))
			must(t, os.RemoveAll(dir+".stage"))
		}
		if !errors.Is(err, fault.ErrState) && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", to, err)
		}
	}
}
