package overlay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/thorough"
)

// look is the judge of Diff: what a process finds at each path of a mounted
// overlay, in the words of Change.What. It shares no code with the package.
func look(t tb, root string) map[string]map[string]string {
	t.Helper()
	seen := map[string]map[string]string{}
	must(t, filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		e := map[string]string{
			WhatType:   fmt.Sprintf("%o", st.Mode&syscall.S_IFMT),
			WhatMode:   fmt.Sprintf("%o", st.Mode&0o7777),
			WhatOwner:  fmt.Sprintf("%d:%d", st.Uid, st.Gid),
			WhatXattrs: peekXattrs(t, path),
		}
		if !info.IsDir() {
			e[WhatMtime] = fmt.Sprintf("%d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
		}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
			if err != nil {
				return err
			}
			h := sha256.New()
			_, err = io.Copy(h, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
			e[WhatContent] = fmt.Sprintf("%d %x", st.Size, h.Sum(nil)[:8])
		case syscall.S_IFLNK:
			if e[WhatTarget], err = os.Readlink(path); err != nil {
				return err
			}
		case syscall.S_IFCHR, syscall.S_IFBLK:
			e[WhatDevice] = fmt.Sprint(st.Rdev)
		}
		seen[rel] = e
		return nil
	}))
	return seen
}

var allWhat = []string{WhatContent, WhatTarget, WhatDevice, WhatMode, WhatOwner, WhatXattrs, WhatMtime}

// expected is what Diff must say of two states.
func expected(a, b map[string]map[string]string) map[string]string {
	want := map[string]string{}
	for p := range b {
		if a[p] == nil {
			want[p] = "A"
		}
	}
	for p, old := range a {
		now := b[p]
		switch {
		case now == nil:
			want[p] = "D"
		case now[WhatType] != old[WhatType]:
			want[p] = "T type"
		default:
			s := ""
			for _, what := range allWhat {
				if old[what] != now[what] {
					s += " " + what
				}
			}
			if s != "" {
				want[p] = "M" + s
			}
		}
	}
	return want
}

func changes(t tb, a, b Side, opts DiffOptions) (list []Change) {
	t.Helper()
	must(t, Diff(context.Background(), a, b, opts, func(c Change) error {
		if n := len(list); n > 0 && ComparePaths(list[n-1].Path, c.Path) >= 0 {
			t.Errorf("%q after %q", c.Path, list[n-1].Path)
		}
		if (c.Old == nil) != (c.Kind == Added) || (c.New == nil) != (c.Kind == Deleted) {
			t.Errorf("%s %q: old %v, new %v", c.Kind, c.Path, c.Old, c.New)
		}
		for _, e := range []*Entry{c.Old, c.New} {
			if e != nil && (e.Path != c.Path || e.Hardlink != "" || e.Type == TypeWhiteout) {
				t.Errorf("%s %q: %+v is no entry that anybody sees", c.Kind, c.Path, e)
			}
		}
		list = append(list, c)
		return nil
	}))
	return list
}

func (c Change) words() string {
	return strings.TrimSpace(string(c.Kind) + " " + strings.Join(c.What, " "))
}

// sameChanges compares; two trees cannot tell equal content from other content
// when its holes are elsewhere.
func sameChanges(t tb, what string, want map[string]string, got []Change, records bool) {
	t.Helper()
	left := map[string]string{}
	for p, w := range want {
		left[p] = w
	}
	for _, c := range got {
		w, ok := left[c.Path]
		delete(left, c.Path)
		g := c.words()
		if ok && g == w {
			continue
		}
		if records && c.Kind == Modified && c.Old.Type == TypeFile && c.Old.Size == c.New.Size &&
			!slices.Equal(c.Old.spans(), c.New.spans()) &&
			strings.TrimSpace(strings.Replace(g, " content", "", 1)) == strings.TrimSpace(w) {
			continue
		}
		t.Errorf("%s: %q: got %q, want %q\n old %+v\n new %+v", what, c.Path, g, w, c.Old, c.New)
	}
	for p, w := range left {
		t.Errorf("%s: %q: %q is missing", what, p, w)
	}
}

// fullTree returns a Side of the upperdir as it is now.
func fullTree(t tb, upper string) Side {
	t.Helper()
	taken := time.Now()
	_, tree := captureDir(t, upper)
	return Side{Taken: taken, Tree: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(tree)), nil }}
}

// diffOperations are those that matter to Diff beside the ones of chaos.
var diffOperations = map[string]func(c *chaos) error{
	"copy up": func(c *chaos) error {
		f, err := os.OpenFile(c.pick(isFile), os.O_WRONLY|os.O_APPEND|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		return f.Close()
	},
	"same mode": func(c *chaos) error { // copies directories up, too
		p := c.pick(func(i os.FileInfo) bool { return i.Mode()&os.ModeSymlink == 0 })
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		return unix.Chmod(p, st.Mode&0o7777)
	},
	"same owner": func(c *chaos) error { return unix.Lchown(c.pick(any1), -1, -1) },
	"forge": func(c *chaos) error { // other content, nothing else
		p := c.pick(isFile)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		if st.Size == 0 {
			return unix.EINVAL
		}
		f, err := os.OpenFile(p, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		b := make([]byte, 1)
		at := int64(c.n(int(st.Size - 1)))
		_, err = f.ReadAt(b, at)
		b[0]++
		_, e2 := f.WriteAt(b, at)
		return errors.Join(err, e2, f.Close(), unix.UtimesNanoAt(unix.AT_FDCWD, p,
			[]unix.Timespec{st.Atim, st.Mtim}, 0))
	},
	"dir to file": func(c *chaos) error {
		p := c.pick(isDir)
		if p == c.root {
			return unix.EBUSY
		}
		if err := os.RemoveAll(p); err != nil {
			return err
		}
		return create(p, c.bytes(100))
	},
	"file to dir": func(c *chaos) error {
		p := c.pick(notDir)
		if err := os.Remove(p); err != nil { // there may be none
			return err
		}
		if err := os.Mkdir(p, 0o755); err != nil {
			return err
		}
		return create(filepath.Join(p, c.name()), c.bytes(100))
	},
	"swap": func(c *chaos) error { // two things of any kind
		a, b := c.pick(any1), c.pick(any1)
		if a == c.root || b == c.root {
			return unix.EBUSY
		}
		return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	},
	"twins": func(c *chaos) error { // files that only their content tells apart, in directories that can be renamed
		for range 2 {
			dir := c.fresh()
			if err := os.Mkdir(dir, 0o755); err != nil {
				return err
			}
			p := filepath.Join(dir, "twin")
			if err := create(p, []byte{byte(c.n(255))}); err != nil {
				return err
			}
			if err := touch(p, 7, 7); err != nil {
				return err
			}
		}
		return nil
	},
	"swap dirs": func(c *chaos) error {
		a, b := c.pick(isDir), c.pick(isDir)
		if a == c.root || b == c.root {
			return unix.EBUSY
		}
		return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
	},
	"again": func(c *chaos) error { // the same content under the same name, but another file
		p := c.pick(isFile)
		data, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		if err := os.Remove(p); err != nil {
			return err
		}
		return create(p, data)
	},
	"move dir": func(c *chaos) error { // as mv does it where rename gives EXDEV
		p, to := c.pick(isDir), c.fresh()
		if p == c.root || strings.HasPrefix(to, p+"/") {
			return unix.EBUSY
		}
		if err := os.CopyFS(to, os.DirFS(p)); err != nil {
			return err
		}
		return os.RemoveAll(p)
	},
}

// change does up to most random things, those of diffOperations among them.
func (c *chaos) change(t *rapid.T, label string, most int) {
	names := slices.Clone(operationNames)
	all := map[string]func(*chaos) error{}
	for name, op := range operations {
		all[name] = op
	}
	for name, op := range diffOperations {
		all[name] = op
		names = append(names, name, name)
	}
	sort.Strings(names)
	for i, seed := range rapid.SliceOfN(rapid.Uint64(), most/4, most).Draw(t, label) {
		c.rand = rand.New(rand.NewPCG(seed, uint64(i)))
		name := names[c.n(len(names)-1)]
		err := all[name](c)
		if err == nil {
			c.done[name]++
		}
		t.Logf("%s: %v", name, err)
	}
}

// TestDiffIsWhatOneSees makes layers with real whiteouts and opaque directories,
// changes a mounted overlay at random before and after a capture, and holds what
// Diff says against what walks of the mount saw.
func TestDiffIsWhatOneSees(t *testing.T) {
	thorough.Checks(t, 50)
	old := racy
	racy = 20 * time.Millisecond
	defer func() { racy = old }()
	base := noDevices(t)
	done, kinds := map[string]int{}, map[string]int{}
	rounds, whiteouts, opaque := 0, 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		rounds++
		dir, err := os.MkdirTemp(base, "round-")
		must(t, err)
		defer os.RemoveAll(dir)
		sub := func(name string) string {
			p := filepath.Join(dir, name)
			must(t, os.Mkdir(p, 0o755))
			return p
		}
		m := Mount{Lower: []string{sub("layer0")}, Target: sub("merged")}
		defer Unmount(m.Target, UnmountOptions{Lazy: true})
		c := &chaos{done: map[string]int{}, root: m.Lower[0]}
		c.change(rt, "layer 0", 60)
		c.root = m.Target
		for i := range 2 {
			m.Upper, m.Work = sub(fmt.Sprint("layer", i+1)), sub(fmt.Sprint("work", i+1))
			must(t, m.Mount())
			c.change(rt, fmt.Sprint("layer ", i+1), 40)
			must(t, Unmount(m.Target, UnmountOptions{}))
			m.Lower = slices.Insert(m.Lower, 0, m.Upper)
		}
		c.done = done
		m.Upper, m.Work = sub("upper"), sub("work")
		must(t, m.Mount())
		image := look(rt, m.Target)
		// An upperdir has a root of its own from the start.
		rootless := func(list []Change) []Change {
			return slices.DeleteFunc(list, func(c Change) bool { return c.Path == "." })
		}
		if fresh := rootless(changes(rt, Side{}, Side{Dir: m.Upper}, DiffOptions{Lower: m.Lower})); len(fresh) > 0 {
			rt.Fatalf("nothing was done: %v", fresh)
		}

		c.change(rt, "before", 60)
		before := look(rt, m.Target)
		time.Sleep(racy + 8*time.Millisecond) // nothing announces that a file's time is old enough to be trusted
		then := fullTree(rt, m.Upper)
		c.change(rt, "after", 50)
		after := look(rt, m.Target)
		now := fullTree(rt, m.Upper)

		opts := DiffOptions{Lower: m.Lower}
		want := expected(before, after)
		for _, w := range want {
			kinds[strings.Split(w, " ")[0]]++
		}
		live := Side{Dir: m.Upper}
		sameChanges(rt, "then, now", want, changes(rt, then, live, opts), false)
		sameChanges(rt, "then, now, paranoid", want, changes(rt, then, live,
			DiffOptions{Lower: m.Lower, Paranoid: true}), false)
		sameChanges(rt, "now, then", expected(after, before), changes(rt, live, then, opts), false)
		sameChanges(rt, "two trees", want, changes(rt, then, now, opts), true)
		sameChanges(rt, "now, now", nil, changes(rt, now, live, opts), false)
		sameChanges(rt, "live, live", nil, changes(rt, live, live, opts), false)
		delete(image, ".")
		noRoot := func(seen map[string]map[string]string) map[string]map[string]string {
			seen = maps.Clone(seen)
			delete(seen, ".")
			return seen
		}
		sameChanges(rt, "image, now", expected(image, noRoot(after)), rootless(changes(rt, Side{}, live, opts)), false)
		sameChanges(rt, "image, then", expected(image, noRoot(before)),
			rootless(changes(rt, Side{}, then, opts)), false)
		sameChanges(rt, "now, image", expected(noRoot(after), image), rootless(changes(rt, live, Side{}, opts)), false)
		pairs, err := FindRenames(t.Context(), changes(rt, then, live, opts))
		must(t, err)
		var apart []Change
		for _, c := range pairs {
			if c.Kind != Renamed {
				apart = append(apart, c)
				continue
			}
			kinds["R"]++
			if before[c.From][WhatContent] != after[c.Path][WhatContent] {
				rt.Errorf("%q is not %q renamed", c.Path, c.From)
			}
			apart = append(apart, Change{Kind: Added, Path: c.Path}, Change{Kind: Deleted, Path: c.From})
		}
		sameChanges(rt, "renames", want, apart, false)

		for _, s := range peek(rt, m.Upper) {
			if strings.Contains(s, "rdev 0x0") {
				whiteouts++
			}
			if strings.Contains(s, `"trusted.overlay.opaque"="y"`) {
				opaque++
			}
		}
		must(t, Unmount(m.Target, UnmountOptions{}))
	})
	if t.Failed() {
		return
	}
	t.Logf("%d rounds, %d whiteouts, %d opaque directories, changes %v, operations %v", rounds,
		whiteouts, opaque, kinds, done)
	if rounds < 50 {
		return // asked for fewer checks than it takes to see everything
	}
	for name := range diffOperations {
		if done[name] == 0 {
			t.Errorf("%q never worked", name)
		}
	}
	for _, kind := range []ChangeKind{Added, Modified, Deleted, TypeChanged, Renamed} {
		if kinds[string(kind)] == 0 {
			t.Errorf("no change of kind %s was seen", kind)
		}
	}
	if whiteouts == 0 || opaque == 0 {
		t.Errorf("%d whiteouts and %d opaque directories: the test does not see what it is for", whiteouts, opaque)
	}
}

// TestDiffWhileItChanges reads an upperdir that is written to without a pause.
func TestDiffWhileItChanges(t *testing.T) {
	m := layers(t, "x", 2)
	must(t, m.Mount())
	defer Unmount(m.Target, UnmountOptions{Lazy: true})
	then := fullTree(t, m.Upper)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			c := &chaos{root: m.Target, done: map[string]int{}, rand: rand.New(rand.NewPCG(1, uint64(i)))}
			names := slices.Clone(operationNames)
			names = slices.DeleteFunc(names, func(s string) bool { return s == "large" || s == "long symlink" })
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				if len(c.paths(any1)) > 300 {
					_ = operations["rmdir"](c)
				}
				_ = operations[names[c.n(len(names)-1)]](c)
			}
		})
	}
	opts := DiffOptions{Lower: m.Lower}
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); {
		for _, side := range []Side{then, {}} {
			if err := Diff(t.Context(), side, Side{Dir: m.Upper}, opts, func(Change) error { return nil }); err != nil {
				t.Error(err)
			}
		}
	}
	close(stop)
	wg.Wait()
}

// A tree that lies about digests shows which files were read again.
func TestDiffReadsWhatItMust(t *testing.T) {
	dir := noDevices(t)
	must(t, os.Mkdir(filepath.Join(dir, "d"), 0o755))
	for _, f := range []string{"a", "d/b"} {
		must(t, os.WriteFile(filepath.Join(dir, f), []byte("content"), 0o644))
	}
	_, tree := captureDir(t, dir)
	tree = regexp.MustCompile("blake3:[0-9a-f]+").ReplaceAll(tree, []byte(digestOf(nil)))
	later := time.Now().Add(time.Hour)
	for name, c := range map[string]struct {
		taken time.Time
		now   Side
		opts  DiffOptions
		want  int
	}{
		"old enough":    {later, Side{Dir: dir}, DiffOptions{}, 0},
		"paranoid":      {later, Side{Dir: dir}, DiffOptions{Paranoid: true}, 2},
		"too new":       {time.Now(), Side{Dir: dir}, DiffOptions{}, 2},
		"nobody knows":  {time.Time{}, Side{Dir: dir}, DiffOptions{}, 2},
		"in the layers": {later, Side{}, DiffOptions{Lower: []string{dir}}, 2},
	} {
		then := Side{Taken: c.taken, Tree: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(tree)), nil
		}}
		if got := changes(t, then, c.now, c.opts); len(got) != c.want {
			t.Errorf("%s: %v, want %d", name, got, c.want)
		}
	}
}

// BenchmarkDiff compares 10,000 files of 4 KiB of which ten changed.
func BenchmarkDiff(b *testing.B) {
	mnt := ext4(b, "512M")
	lower, upper := filepath.Join(mnt, "lower"), filepath.Join(mnt, "upper")
	must(b, errors.Join(os.Mkdir(lower, 0o755), os.Mkdir(upper, 0o755)))
	tenThousand(b, upper)
	time.Sleep(racy + 10*time.Millisecond)
	then := fullTree(b, upper)
	unknown := then
	unknown.Taken = time.Time{}
	for i := range 10 {
		must(b, os.WriteFile(filepath.Join(upper, "d07", fmt.Sprint("new", i)), nil, 0o644))
	}
	for name, a := range map[string]Side{"trusted": then, "read": unknown, "image": {}} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				n := 0
				must(b, Diff(b.Context(), a, Side{Dir: upper}, DiffOptions{Lower: []string{lower}}, func(Change) error {
					n++
					return nil
				}))
				if n != 10 && name != "image" {
					b.Fatal(n)
				}
			}
		})
	}
}
