package overlay

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/thorough"
)

// openView returns a view of an upperdir as it is now.
func openView(t tb, upper string, opts ViewOptions) *View {
	t.Helper()
	if upper != "" {
		opts.Tree, opts.Data = fullTree(t, upper).Tree, &dirSource{dir: upper}
	}
	v, err := NewView(context.Background(), opts)
	must(t, err)
	t.Cleanup(v.Close)
	return v
}

// wholeFile is a file's, holes as zeros.
func wholeFile(f *ViewFile) ([]byte, error) {
	r, err := f.Open()
	if err != nil {
		return nil, err
	}
	data := make([]byte, f.Size)
	for _, x := range f.spans() {
		if _, err := io.ReadFull(r, data[x.Off:x.Off+x.Len]); err != nil {
			return nil, errors.Join(err, r.Close())
		}
	}
	if n, err := r.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		return nil, errors.Join(fmt.Errorf("%d bytes more: %v", n, err), r.Close())
	}
	return data, r.Close()
}

// viewed is what a walk of a view finds, in the words of look.
func viewed(t tb, v *View, top string) (seen map[string]map[string]string, groups map[string][]string) {
	t.Helper()
	seen, groups = map[string]map[string]string{}, map[string][]string{}
	kinds := map[Type]uint32{
		TypeDir: unix.S_IFDIR, TypeFile: unix.S_IFREG, TypeSymlink: unix.S_IFLNK, TypeFifo: unix.S_IFIFO,
		TypeSocket: unix.S_IFSOCK, TypeChar: unix.S_IFCHR, TypeBlock: unix.S_IFBLK,
	}
	last := ""
	must(t, v.Walk(top, func(f *ViewFile) error {
		if last != "" && ComparePaths(last, f.Path) >= 0 {
			t.Errorf("%q after %q", f.Path, last)
		}
		last = f.Path
		var x bytes.Buffer
		for _, name := range slices.Sorted(maps.Keys(f.Xattrs)) {
			fmt.Fprintf(&x, " %q=%q", name, f.Xattrs[name])
		}
		e := map[string]string{
			WhatType: fmt.Sprintf("%o", kinds[f.Type]), WhatMode: fmt.Sprintf("%o", f.Mode),
			WhatOwner: fmt.Sprintf("%d:%d", f.UID, f.GID), WhatXattrs: x.String(),
		}
		if f.Type != TypeDir {
			e[WhatMtime] = fmt.Sprintf("%d.%09d", f.Mtime.Sec, f.Mtime.Nsec)
		}
		switch f.Type {
		case TypeFile:
			data, err := wholeFile(f)
			if err != nil {
				return err
			}
			sum := sha256.Sum256(data)
			e[WhatContent] = fmt.Sprintf("%d %x", f.Size, sum[:8])
		case TypeSymlink:
			e[WhatTarget] = f.Link
		case TypeChar, TypeBlock:
			e[WhatDevice] = fmt.Sprint(unix.Mkdev(f.Major, f.Minor))
		}
		if f.Inode != "" {
			groups[f.Inode] = append(groups[f.Inode], f.Path)
		}
		seen[f.Path] = e
		return nil
	}))
	return seen, groups
}

// sameSeen compares what two walks have found.
func sameSeen(t tb, what string, want, got map[string]map[string]string) {
	t.Helper()
	for p, w := range want {
		if !maps.Equal(w, got[p]) {
			t.Errorf("%s: %q is %v, want %v", what, p, got[p], w)
		}
	}
	for p := range got {
		if want[p] == nil {
			t.Errorf("%s: %q should not be there", what, p)
		}
	}
}

// TestViewIsWhatOneSees makes layers with real whiteouts and opaque directories, changes a
// mounted overlay at random, and holds the view of the captured upperdir against a walk of the
// mount, and the way it resolves paths against the kernel's.
func TestViewIsWhatOneSees(t *testing.T) {
	thorough.Checks(t, 40)
	base := noDevices(t)
	resolved, missing, links, whiteouts, opaque := 0, 0, 0, 0, 0
	rapid.Check(t, func(rt *rapid.T) {
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
		m.Upper, m.Work = sub("upper"), sub("work")
		must(t, m.Mount())
		image := look(rt, m.Target)
		got, _ := viewed(rt, openView(rt, "", ViewOptions{Lower: m.Lower}), ".")
		delete(image, ".") // an upperdir has a root of its own from the start
		delete(got, ".")
		sameSeen(rt, "image", image, got)

		c.change(rt, "upper", 80)
		now := look(rt, m.Target)
		v := openView(rt, m.Upper, ViewOptions{Lower: m.Lower})
		got, groups := viewed(rt, v, ".")
		sameSeen(rt, "checkpoint", now, got)
		for inode, names := range groups {
			for _, name := range names {
				var a, b unix.Stat_t
				must(t, errors.Join(unix.Lstat(filepath.Join(m.Target, names[0]), &a),
					unix.Lstat(filepath.Join(m.Target, name), &b)))
				if a.Ino != b.Ino {
					rt.Errorf("%q and %q are not one inode (%q)", names[0], name, inode)
				}
			}
			if len(names) > 1 {
				links++
			}
		}
		again, _ := viewed(rt, v, ".")
		sameSeen(rt, "once more", now, again)
		all := slices.Sorted(maps.Keys(now))
		part := all[len(all)/2]
		in, _ := viewed(rt, v, part)
		sameSeen(rt, "below "+part, only(now, part), in)
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "paths"), 1))
		for range 60 {
			p, follow := somePath(rnd, all), rnd.IntN(2) == 0
			if sameResolve(rt, v, m.Target, p, follow, now) {
				resolved++
			} else {
				missing++
			}
		}
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
	t.Logf("%d paths there, %d not, %d groups of hard links, %d whiteouts, %d opaque directories", resolved, missing,
		links, whiteouts, opaque)
	if !t.Failed() && (resolved == 0 || missing == 0 || links == 0 || whiteouts == 0 || opaque == 0) {
		t.Error("the test does not see what it is for")
	}
}

// only keeps what is at a path and below it.
func only(seen map[string]map[string]string, top string) map[string]map[string]string {
	out := map[string]map[string]string{}
	for p, e := range seen {
		if p == top || top == "." || strings.HasPrefix(p, top+"/") {
			out[p] = e
		}
	}
	return out
}

// somePath is a path made of names that exist, of "..", and of some that mostly do not.
func somePath(rnd *rand.Rand, all []string) string {
	p := ""
	for range 1 + rnd.IntN(4) {
		switch rnd.IntN(8) {
		case 0:
			p += "/.."
		case 1:
			p += "/./"
		case 2:
			p += "/" + hostileNames[rnd.IntN(len(hostileNames))]
		default:
			p += "/" + all[rnd.IntN(len(all))]
		}
	}
	if rnd.IntN(4) == 0 {
		p += "/"
	}
	return p
}

// sameResolve holds Resolve against the kernel, and reports whether there is something at p.
func sameResolve(t tb, v *View, root, p string, follow bool, now map[string]map[string]string) bool {
	t.Helper()
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY, 0)
	must(t, err)
	defer unix.Close(at)
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	if !follow {
		how.Flags |= unix.O_NOFOLLOW
	}
	real, e, err := v.Resolve(p, follow)
	fd, kerr := unix.Openat2(at, p, &how)
	for kerr == unix.EAGAIN { // a rename or a mount anywhere on the machine raced with a ".."
		fd, kerr = unix.Openat2(at, p, &how)
	}
	if kerr != nil {
		if err == nil && e != nil {
			t.Errorf("%q (follow %v) is %q here, to the kernel: %v", p, follow, real, kerr)
		}
		if err != nil && !errors.Is(err, fault.ErrNotFound) && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v", p, err)
		}
		return false
	}
	defer unix.Close(fd)
	want, lerr := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	must(t, lerr)
	if want = strings.TrimPrefix(strings.TrimPrefix(want, root), "/"); want == "" {
		want = "."
	}
	if err != nil || e == nil || real != want {
		t.Errorf("%q (follow %v) is %q, %v, %v; to the kernel it is %q", p, follow, real, e, err, want)
		return true
	}
	if got := fmt.Sprintf("%d:%d", e.UID, e.GID); got != now[want][WhatOwner] {
		t.Errorf("%q is of %s, want %s", p, got, now[want][WhatOwner])
	}
	return true
}

// small makes layers and an upperdir with one of everything, and mounts them.
func small(t testing.TB) Mount {
	t.Helper()
	m := layers(t, "view", 1)
	write := func(p, data string) {
		t.Helper()
		must(t, errors.Join(os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, []byte(data), 0o644)))
	}
	write(m.Lower[0]+"/etc/hosts", "lower")
	write(m.Lower[0]+"/srv/hidden", "below the volume")
	write(m.Lower[0]+"/data/x", "x")
	must(t, os.Symlink("/data", m.Lower[0]+"/alias"))
	mounted(t, m, m.Mount)
	write(m.Target+"/new", "new")
	must(t, errors.Join(os.Link(m.Target+"/new", m.Target+"/same"), os.Symlink("loop", m.Target+"/loop"),
		os.Symlink("../../../../etc", m.Target+"/up")))
	return m
}

// paths are those that a walk finds; what is mounted there behind a colon.
func paths(t tb, v *View, top string) (list []string) {
	t.Helper()
	must(t, v.Walk(top, func(f *ViewFile) error {
		p := f.Path
		if f.Mount != "" {
			p += ":" + f.Mount
		}
		list = append(list, p)
		return nil
	}))
	return list
}

// What is bound over the root, and what is mounted there, recorded or not.
func TestViewMounts(t *testing.T) {
	m := small(t)
	volume := t.TempDir()
	must(t, os.WriteFile(volume+"/kept", []byte("kept"), 0o600))
	v := openView(t, m.Upper, ViewOptions{
		Lower: m.Lower,
		Bound: map[string]BoundFile{
			"/etc/hosts": {Mode: 0o640, UID: 3, Data: []byte("bound")}, "/etc/more": {Mode: 0o600, Data: []byte("more")},
			"/nowhere/x": {},
		},
		Mounts: map[string]ViewMount{
			"/alias":    {Kind: "volume"}, // that is /data
			"/srv":      {Kind: "volume", Files: openView(t, volume, ViewOptions{})},
			"/none/x/y": {Kind: "tmpfs"},
		},
	})
	want := []string{
		".", "alias", "data:volume", "etc", "etc/hosts", "etc/more", "from0", "loop", "new", "same", "srv", "srv/kept",
		"top", "up",
	}
	if got := paths(t, v, "."); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := paths(t, v, "srv"); !slices.Equal(got, []string{"srv", "srv/kept"}) {
		t.Errorf("%q", got)
	}
	if got := paths(t, v, "data"); !slices.Equal(got, []string{"data:volume"}) {
		t.Errorf("%q", got)
	}
	for p, want := range map[string]string{"etc/hosts": "bound", "etc/more": "more", "srv/kept": "kept", "same": "new"} {
		real, e, err := v.Resolve("/up/../"+p, true)
		if err != nil || e == nil || real != p || e.Type != TypeFile || e.Size != int64(len(want)) {
			t.Fatalf("%s: %q, %+v, %v", p, real, e, err)
		}
		must(t, v.Walk(real, func(f *ViewFile) error {
			if data, err := wholeFile(f); err != nil || string(data) != want || f.Path != p {
				t.Errorf("%s: %q, %v", f.Path, data, err)
			}
			return nil
		}))
	}
	if _, e, err := v.Resolve("etc/hosts", false); err != nil || e.Mode != 0o640 || e.UID != 3 {
		t.Errorf("%+v, %v", e, err)
	}
	for _, p := range []string{"/data/x", "/alias/x", "/alias/none/y"} {
		if _, _, err := v.Resolve(p, false); !errors.Is(err, fault.ErrNotFound) ||
			!strings.Contains(err.Error(), `has a mount (volume) at "/data"`) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if _, _, err := v.Resolve("/none/x/y", true); !errors.Is(err, fault.ErrNotFound) ||
		!strings.Contains(err.Error(), "tmpfs") {
		t.Error(err)
	}
	if err := v.Walk("data/x", func(*ViewFile) error { return nil }); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	skipped := 0
	must(t, v.Walk(".", func(f *ViewFile) error {
		if f.Path != "." && f.Type == TypeDir {
			return fs.SkipDir
		}
		if strings.Contains(f.Path, "/") {
			skipped++
		}
		return nil
	}))
	if skipped > 0 {
		t.Errorf("%d entries of directories that were left out", skipped)
	}
}

// TestViewNestedMounts: a mount in another one is found there, also by a symlink of the outer one's.
func TestViewNestedMounts(t *testing.T) {
	root, outer, inner := t.TempDir(), t.TempDir(), t.TempDir()
	shell := func(t *testing.T, dir, script string) {
		t.Helper()
		cmd := exec.Command("sh", "-ec", script)
		cmd.Dir = dir
		must(t, cmd.Run())
	}
	shell(t, root, "mkdir work")
	shell(t, outer, "mkdir -p real/in deep/er; ln -s real to; echo hidden > real/in/hidden; echo o > file")
	shell(t, inner, "echo i > file; mkdir sub")
	v := openView(t, root, ViewOptions{Mounts: map[string]ViewMount{
		"/work":         {Kind: "workspace", Files: openView(t, outer, ViewOptions{})},
		"/work/to/in":   {Kind: "workspace", Files: openView(t, inner, ViewOptions{})},
		"/work/deep/er": {Kind: "tmpfs"},
	}})
	want := []string{
		".", "work", "work/deep", "work/deep/er:tmpfs", "work/file", "work/real", "work/real/in", "work/real/in/file",
		"work/real/in/sub", "work/to",
	}
	if got := paths(t, v, "."); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	if got := paths(t, v, "work/real"); !slices.Equal(got, want[5:9]) {
		t.Errorf("below: %q, want %q", got, want[5:9])
	}
	if real, e, err := v.Resolve("/work/to/in/file", true); err != nil || e == nil || real != "work/real/in/file" {
		t.Errorf("%q, %v, %v", real, e, err)
	}
	if _, e, err := v.Resolve("/work/real/in/hidden", true); e != nil || err != nil {
		t.Errorf("what the mount hides: %v, %v", e, err)
	}
	if _, _, err := v.Resolve("/work/deep/er/x", true); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("%v", err)
	}
}

func TestViewRefuses(t *testing.T) {
	m := small(t)
	v := openView(t, m.Upper, ViewOptions{Lower: m.Lower})
	for p, want := range map[string]error{
		"": fault.ErrInvalid, strings.Repeat("a/", 3000): fault.ErrInvalid, "/loop": fault.ErrInvalid,
		"/new/x": fault.ErrNotFound, "/new/": fault.ErrNotFound, "/new/..": fault.ErrNotFound,
	} {
		if _, _, err := v.Resolve(p, true); !errors.Is(err, want) {
			t.Errorf("%.20q: %v", p, err)
		}
	}
	for _, p := range []string{"/none", "/none/../new", "/a\x00b", "/" + strings.Repeat("n", 300), "/etc/../none"} {
		if real, e, err := v.Resolve(p, true); err != nil || e != nil {
			t.Errorf("%.20q: %q, %v, %v", p, real, e, err)
		}
	}
	if err := v.Walk("none", func(*ViewFile) error { return nil }); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	own := errors.New("own")
	if err := v.Walk("etc", func(*ViewFile) error { return own }); err != own {
		t.Error(err)
	}
	if _, err := NewView(t.Context(), ViewOptions{}); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}

	// Damage of the tree, wherever it is found, and of a file.
	tree := fullTree(t, m.Upper).Tree
	damaged := fmt.Errorf("a piece is gone: %w", fault.ErrCorrupt)
	hurt := func() (io.ReadCloser, error) {
		r, err := tree()
		return closer{r, damaged}, err
	}
	broken, err := NewView(t.Context(), ViewOptions{Lower: m.Lower, Tree: hurt})
	if err == nil {
		defer broken.Close()
		_, _, err = broken.Resolve("/new", true)
	}
	if !errors.Is(err, fault.ErrCorrupt) {
		t.Error(err)
	}
	calls := 0
	late, err := NewView(t.Context(), ViewOptions{Lower: m.Lower, Tree: func() (io.ReadCloser, error) {
		if calls++; calls < 3 { // the third time it is read for the walk
			return tree()
		}
		return hurt()
	}})
	must(t, err)
	defer late.Close()
	if err := late.Walk(".", func(*ViewFile) error { return nil }); !errors.Is(err, fault.ErrCorrupt) || calls != 3 {
		t.Errorf("%d calls: %v", calls, err)
	}
	must(t, unix.Setxattr(m.Upper+"/new", "trusted.overlay.metacopy", nil, 0))
	meta := openView(t, m.Upper, ViewOptions{Lower: m.Lower})
	if _, _, err := meta.Resolve("/new", true); !errors.Is(err, fault.ErrUnsupported) {
		t.Error(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended, err := NewView(ctx, ViewOptions{Lower: m.Lower, Tree: tree})
	must(t, err)
	defer ended.Close()
	cancel()
	if err := ended.Walk(".", func(*ViewFile) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, _, err := ended.Resolve("/etc", true); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// A link that leads to hundreds of names that have to be looked for costs one reading of the tree.
func TestViewReadsOnce(t *testing.T) {
	dir := noDevices(t)
	upper := dir + "/upper"
	must(t, os.Mkdir(upper, 0o755))
	for i := range 300 {
		must(t, os.Mkdir(fmt.Sprintf("%s/d%d", upper, i), 0o755))
	}
	var link strings.Builder
	for i := range 300 {
		fmt.Fprintf(&link, "d%d/../", i)
	}
	must(t, os.Symlink(link.String()+"end", upper+"/far"))
	must(t, os.WriteFile(upper+"/end", []byte("x"), 0o644))
	tree, calls := fullTree(t, upper).Tree, 0
	v, err := NewView(t.Context(), ViewOptions{Lower: []string{t.TempDir()}, Tree: func() (io.ReadCloser, error) {
		calls++
		return tree()
	}})
	must(t, err)
	defer v.Close()
	if real, e, err := v.Resolve("/far", true); err != nil || e == nil || real != "end" {
		t.Errorf("%q, %v, %v", real, e, err)
	}
	if calls > 2 {
		t.Errorf("the tree was read %d times", calls)
	}
}
