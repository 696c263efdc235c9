package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// work is a box with a working directory /work that has src/a.go in it, the
// alias /alias and links that lead out of it.
func work(t *testing.T) (s *Scope, root, outside string) {
	t.Helper()
	j, root, outside := box(t)
	if err := os.MkdirAll(root+"/work/src", 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, root+"/work/src/a.go", "package a")
	symlink(t, "work", root+"/alias")
	symlink(t, "/alias/src", root+"/work/loopback")
	symlink(t, "../etc", root+"/work/etc")
	symlink(t, "/work/src/none", root+"/work/dangling")
	symlink(t, outside, root+"/work/out")
	symlink(t, "loop", root+"/work/loop")
	s, err := j.Scope("/work", false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, root, outside
}

// wantEscape wants the corrective error, which names the working directory.
func wantEscape(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, fault.ErrDenied) || !strings.Contains(err.Error(), "/work") || len(fault.Hint(err)) != 1 ||
		!strings.Contains(fault.Hint(err)[0], "/work") {
		t.Errorf("%s: %v (%v), want an error that names the working directory", what, err, fault.Hint(err))
	}
}

func TestScopeAlias(t *testing.T) {
	both(t, func(t *testing.T) {
		s, _, _ := work(t)
		for name, want := range map[string]string{
			"": "/work", ".": "/work", "/work": "/work", "/work/": "/work", "src": "/work/src",
			"./src/../src/a.go": "/work/src/a.go",
			"/alias":            "/work", "/alias/src/a.go": "/work/src/a.go", "loopback/a.go": "/work/src/a.go",
			"../alias/src": "/work/src", "../work/src": "/work/src",
		} {
			at, err := s.Find(name)
			if err != nil || at.Real != want || s.Name(at.Path) != want {
				t.Errorf("%q: %+v, %v; want %s", name, at, err, want)
			}
		}
		f, err := s.OpenFile("/src/a.go", os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	})
}

func TestScopeNotYetExisting(t *testing.T) {
	both(t, func(t *testing.T) {
		s, _, _ := work(t)
		for name, want := range map[string]string{
			"new": "/work/new", "new/deep/file": "/work/new/deep/file", "/alias/new/x": "/work/new/x",
			"loopback/new/x": "/work/src/new/x",
			"dangling":       "/work/src/none", "dangling/y": "/work/src/none/y", "new/../src": "/work/src",
		} {
			if at, err := s.Find(name); err != nil || at.Real != want {
				t.Errorf("%q: %+v, %v; want %s", name, at, err, want)
			}
		}
		// The deepest existing ancestor decides: these would be made outside.
		for _, name := range []string{"etc/new", "out/new/x", "new/../../x", "/workshop/new", "/etc/new"} {
			_, err := s.Find(name)
			wantEscape(t, name, err)
		}
	})
}

func TestScopeEscape(t *testing.T) {
	both(t, func(t *testing.T) {
		s, _, outside := work(t)
		for _, name := range []string{
			"..", "/", "../etc/passwd", "etc/passwd", "/etc/passwd", outside + "/secret", "out/secret", "src/../..",
			"/workshop", "../../../../home",
		} {
			begun := time.Now()
			_, err := s.Find(name)
			wantEscape(t, name, err)
			if took := time.Since(begun); took > time.Second {
				t.Errorf("%s was refused after %s", name, took)
			}
		}
		for _, name := range []string{"loop", "a\x00b", strings.Repeat("x/", 4000)} {
			if _, err := s.Find(name); err == nil {
				t.Errorf("%.20q: no error", name)
			}
		}
		whole, err := s.outer.Scope("/work", true)
		if err != nil {
			t.Fatal(err)
		}
		if at, err := whole.Find("../etc/passwd"); err != nil || at.Real != "/etc/passwd" {
			t.Errorf("in the whole sandbox: %+v, %v", at, err)
		}
		if _, err := s.outer.Scope("/none", false); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("a missing working directory: %v", err)
		}
	})
}

func TestGlobBase(t *testing.T) {
	s, _, _ := work(t)
	parse := func(pattern string) Glob {
		g, err := ParseGlob(pattern)
		if err != nil {
			t.Fatalf("%s: %v", pattern, err)
		}
		return g
	}
	// An absolute pattern or a .. replaces the base.
	for pattern, want := range map[string]string{
		"*.go": "/work/src", "./*.go": "/work/src", "/work/*": "/work", "/alias/src/*": "/work/src", "../*": "/work",
		"../../alias/*.go": "/work",
		"/work/src/a.go":   "/work/src", "../src/{a,b}.go": "/work/src",
	} {
		at, err := s.FindGlob("src", parse(pattern))
		if pattern == "../../alias/*.go" {
			at, err = s.FindGlob("/work/src", parse(pattern))
		}
		if err != nil || at.Real != want {
			t.Errorf("%s: %+v, %v; want %s", pattern, at, err, want)
		}
	}
	for _, pattern := range []string{
		"/*", "/etc/*", "../../**/passwd", "../../../../../../etc/*", "/**", "/work/../etc/*", "../etc/*",
	} {
		_, err := s.FindGlob("src", parse(pattern))
		wantEscape(t, pattern, err)
	}
	for _, pattern := range []string{"*/../../etc/*", "{..,src}/*", "**/..", "[.]*/../x"} {
		if _, err := ParseGlob(pattern); !errors.Is(err, fault.ErrDenied) || len(fault.Hint(err)) != 1 {
			t.Errorf("%s: %v", pattern, err)
		}
	}
	for _, pattern := range []string{
		"", "[", "a{b", "x\\", "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", strings.Repeat("{a,b}", 1000),
		strings.Repeat("a", 5000), "a\x00", strings.Repeat("*/", 100),
	} {
		if _, err := ParseGlob(pattern); !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%.20q: %v", pattern, err)
		}
	}
}

func TestGlobMatch(t *testing.T) {
	for pattern, want := range map[string]string{ // names, a ! before those that do not match
		"*.go":               "a.go .a.go !a.c !src/a.go",
		"**/*.go":            "a.go src/a.go src/x/.y/a.go !a.c",
		"**":                 "a a/b a/b/c",
		"*/**":               "a/b a/b/c a",
		"**/x/**/y":          "x/y a/x/y a/x/b/y x/x/y/y !x !y/x",
		"{a,b}.{go,c}":       "a.go b.c !c.go",
		"*{a,{b,c}}":         "xa xb xc a !d",
		"[ab]?":              "ac bb !cc",
		"{,x}a":              "a xa !ya",
		"?a**":               "xabc !a/b",
		"*/./b//":            "a/b !b",
		"[{]x":               "{x",
		`\*`:                 "* !a",
		"{src,test}/**/*.go": "src/a.go test/x/y.go !lib/a.go",
	} {
		g, err := ParseGlob(pattern)
		if err != nil {
			t.Errorf("%s: %v", pattern, err)
			continue
		}
		for _, name := range strings.Fields(want) {
			name, not := strings.CutPrefix(name, "!")
			if g.Match(name) == not {
				t.Errorf("%s and %s: %v", pattern, name, !not)
			}
			if dir := filepath.Dir(name); !not && dir != "." && !g.Below(dir) {
				t.Errorf("%s: the walk would not enter %s", pattern, dir)
			}
		}
	}
	g, _ := ParseGlob("*/x")
	if g.Below("a/b") || !g.Below("a") {
		t.Error("*/x: the wrong directories are entered")
	}
}

func FuzzGlob(f *testing.F) {
	for _, s := range []string{"**/*.go", "/a/../{b,c}/[x-z]*", "{a,{b,c}}/**", `\{`, "[[:a]", "a/**/**/b"} {
		f.Add(s, "src/a.go")
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		g, err := ParseGlob(pattern)
		if err != nil {
			return
		}
		if !strings.HasPrefix(pattern, g.Base) {
			t.Fatalf("the base %q is not how %q begins", g.Base, pattern)
		}
		// A walk that goes by Below finds all that Match means.
		if dir, rest, _ := strings.Cut(name, "/"); dir != "" && strings.Trim(rest, "/") != "" &&
			g.Match(name) && !g.Below(dir) {
			t.Fatalf("%q means %q, but %q is not entered", pattern, name, dir)
		}
	})
}

func TestWalkBounds(t *testing.T) {
	s, root, _ := work(t)
	deep := root + "/work/deep"
	for range 20 {
		deep += "/d"
	}
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		write(t, fmt.Sprintf("%s/work/src/%02d", root, i), "")
	}
	walk := func(l Limits, fn func(Entry) error) (names []string, cut string) {
		cut, err := s.Walk(t.Context(), "/", l, nil, func(e Entry) error {
			names = append(names, e.Path)
			if fn != nil {
				return fn(e)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return names, cut
	}
	all, cut := walk(Limits{Entries: 1000, Depth: 100, Time: time.Minute}, nil)
	if len(all) != 50+20+8 || cut != "" || !slices.Contains(all, "src/a.go") || slices.Contains(all, "out/secret") ||
		slices.Contains(all, "etc/passwd") {
		t.Errorf("%d entries, cut %q: %v", len(all), cut, all)
	}
	if names, cut := walk(Limits{Entries: 30, Depth: 100, Time: time.Minute}, nil); len(names) > 30 || cut == "" {
		t.Errorf("%d entries, cut %q", len(names), cut)
	}
	if names, cut := walk(Limits{Entries: 1000, Depth: 3, Time: time.Minute}, nil); !slices.Contains(names,
		"deep/d/d/d") || slices.Contains(names, "deep/d/d/d/d") || cut == "" || !slices.Contains(names, "src/49") {
		t.Errorf("%v, cut %q", names, cut)
	}
	if names, cut := walk(Limits{Entries: 1000, Depth: 100, Time: time.Nanosecond}, nil); len(names) > 1 || cut == "" {
		t.Errorf("%d entries, cut %q", len(names), cut)
	}
	if names, _ := walk(Limits{Entries: 1000, Depth: 100, Time: time.Minute}, func(e Entry) error {
		if e.Path == "deep" {
			return fs.SkipDir
		}
		return nil
	}); len(names) != len(all)-20 {
		t.Errorf("%d entries but for what is in deep", len(names))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Walk(ctx, "/", Limits{1000, 10, time.Minute}, nil, func(Entry) error {
		return nil
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestWriteFile(t *testing.T) {
	s, root, outside := work(t)
	put := func(name string) error { return s.WriteFile(name, []byte("new"), 0o640) }
	if err := put("/src/new"); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(root + "/work/src/new"); err != nil || fi.Mode() != 0o640 {
		t.Errorf("%v, %v", fi, err)
	}
	old := root + "/work/src/a.go"
	if err := errors.Join(os.Chown(old, 1234, 4321), os.Chmod(old, 0o751|fs.ModeSetgid),
		unix.Setxattr(old, "user.x", []byte("y"), 0), os.Link(old, root+"/work/hard")); err != nil {
		t.Fatal(err)
	}
	if err := put("/src/a.go"); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	value := make([]byte, 10)
	if err := unix.Stat(old, &st); err != nil || st.Uid != 1234 || st.Gid != 4321 || st.Mode&0o7777 != 0o2751 {
		t.Errorf("%+v, %v", st, err)
	}
	if n, err := unix.Getxattr(old, "user.x", value); err != nil || string(value[:n]) != "y" {
		t.Errorf("attribute: %v", err)
	}
	if b, _ := os.ReadFile(root + "/work/hard"); string(b) != "package a" {
		t.Errorf("the other link: %q", b)
	}
	if err := unix.Mkfifo(root+"/work/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{
		"/out": unix.ELOOP, "/dangling": unix.ELOOP, "/fifo": fault.ErrDenied, "/src": unix.EISDIR, "/": unix.EISDIR,
		"/none/x": fault.ErrNotFound, "/out/made": fault.ErrNotFound,
	} {
		if err := put(name); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	// A mount point cannot be exchanged, and is written in place.
	write(t, outside+"/bound", "bound and long")
	write(t, root+"/work/bound", "")
	if err := unix.Mount(outside+"/bound", root+"/work/bound", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	err := put("/bound")
	if e := unix.Unmount(root+"/work/bound", 0); e != nil {
		t.Fatal(e)
	}
	if b, _ := os.ReadFile(outside + "/bound"); err != nil || string(b) != "new" {
		t.Errorf("a mount point: %q, %v", b, err)
	}
	if left, _ := filepath.Glob(root + "/work/.agentbox-*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A process inside swaps a directory of the working directory for symlinks that
// lead out of it, and out of the sandbox, between judging and acting.
func TestScopeRace(t *testing.T) {
	both(t, func(t *testing.T) {
		s, root, outside := work(t)
		write(t, root+"/work/src/f", "inside")
		symlink(t, "/usr/bin", root+"/work/link")
		symlink(t, "../../../../../../../../../.."+outside+"/d", root+"/work/link2")
		stop, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				other := [2]string{"/work/link", "/work/link2"}[n&1]
				_ = unix.Renameat2(unix.AT_FDCWD, root+"/work/src", unix.AT_FDCWD, root+other, unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(unix.AT_FDCWD, root+"/work/src", unix.AT_FDCWD, root+other, unix.RENAME_EXCHANGE)
			}
		}()
		write(t, root+"/usr/bin/f", "of the sandbox")
		var inside, refused int
		deadline := time.Now().Add(3 * time.Second)
		for i := 0; (i < 500 || inside == 0 || refused == 0) && time.Now().Before(deadline); i++ {
			at, err := s.Find("src/f")
			if err != nil {
				refused++
				continue
			}
			if f, err := s.OpenFile(at.Path, os.O_RDONLY, 0); err == nil {
				if b, _ := io.ReadAll(f); string(b) != "inside" {
					t.Fatalf("escaped: read %q", b)
				}
				f.Close()
				inside++
			}
			if at, err := s.Find("src/made"); err == nil {
				_ = s.WriteFile(at.Path, []byte("made"), 0o600)
			}
			_, _ = s.Walk(t.Context(), "/", Limits{1000, 10, time.Second}, nil, func(e Entry) error {
				if strings.HasSuffix(e.Path, "passwd") || strings.HasSuffix(e.Path, "secret") {
					t.Errorf("escaped: the walk came to %s", e.Path)
				}
				return nil
			})
		}
		close(stop)
		<-done
		for _, dir := range []string{outside + "/d", root + "/usr/bin"} {
			if names, _ := os.ReadDir(dir); len(names) != 1 {
				t.Fatalf("escaped: %s holds %v", dir, names)
			}
		}
		if inside == 0 || refused == 0 {
			t.Errorf("no race happened: %d inside, %d refused", inside, refused)
		}
	})
}
