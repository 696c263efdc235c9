package engine

import (
	"context"
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
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/changes"
)

// change compares one path of two directories, as far as a patch needs it.
func change(t *testing.T, old, new, from, to string) runtime.Change {
	t.Helper()
	state := func(root, name string) *runtime.FileState {
		path := filepath.Join(root, name)
		fi, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			return nil
		}
		if err != nil {
			t.Fatal(err)
		}
		f := &runtime.FileState{Type: "file", Size: fi.Size(), Mode: changes.Octal(uint32(fi.Mode().Perm()))}
		switch {
		case fi.IsDir():
			f.Type = "dir"
		case fi.Mode()&fs.ModeSymlink != 0:
			f.Type = "symlink"
			if f.Target, err = os.Readlink(path); err != nil {
				t.Fatal(err)
			}
		}
		return f
	}
	c := runtime.Change{Path: "/" + to, Change: "M", Old: state(old, from), New: state(new, to)}
	switch {
	case from != to:
		c.Change, c.From = "R", "/"+from
	case c.Old == nil:
		c.Change = "A"
	case c.New == nil:
		c.Change = "D"
	case c.Old.Type != c.New.Type:
		c.Change = "T"
	case c.Old.Target != c.New.Target:
		c.What = append(c.What, "target")
	default:
		a, errA := os.ReadFile(filepath.Join(old, from))
		b, errB := os.ReadFile(filepath.Join(new, to))
		if errA == nil && errB == nil && string(a) != string(b) {
			c.What = append(c.What, "content")
		}
	}
	return c
}

func opener(old, new string) openContent {
	return func(c runtime.Change, newer bool) (io.ReadCloser, error) {
		switch {
		case newer:
			return os.Open(filepath.Join(new, c.Path))
		case c.From != "":
			return os.Open(filepath.Join(old, c.From))
		}
		return os.Open(filepath.Join(old, c.Path))
	}
}

type fileSet map[string]string // "-> target", "x:data" for an executable, "/" for a directory

func (tr fileSet) write(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, data := range tr {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		mode := fs.FileMode(0o644)
		if rest, ok := strings.CutPrefix(data, "x:"); ok {
			data, mode = rest, 0o755
		}
		switch target, link := strings.CutPrefix(data, "-> "); {
		case data == "/":
			err = errors.Join(err, os.MkdirAll(path, 0o755))
		case link:
			err = errors.Join(err, os.Symlink(target, path))
		default:
			err = errors.Join(err, os.WriteFile(path, []byte(data), mode), os.Chmod(path, mode))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// read is what write was given.
func read(t *testing.T, root string) fileSet {
	t.Helper()
	tr := fileSet{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, _ := filepath.Rel(root, path)
		fi, err := d.Info()
		if err != nil {
			return err
		}
		if fi.Mode()&fs.ModeSymlink != 0 {
			target, err := os.Readlink(path)
			tr[name] = "-> " + target
			return err
		}
		data, err := os.ReadFile(path)
		tr[name] = string(data)
		if fi.Mode()&0o100 != 0 {
			tr[name] = "x:" + tr[name]
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

// patches makes a patch of all that differs; moved maps new names to old ones.
func patches(t *testing.T, old, new string, moved map[string]string) string {
	t.Helper()
	names := map[string]bool{}
	a, b := read(t, old), read(t, new)
	for name := range a {
		names[name] = true
	}
	for name := range b {
		names[name] = true
	}
	for _, from := range moved {
		delete(names, from)
	}
	var list []runtime.Change
	for name := range names {
		from, ok := moved[name]
		if !ok {
			from = name
		}
		if from != name || a[name] != b[name] || len(a[name]) == 0 || len(b[name]) == 0 {
			list = append(list, change(t, old, new, from, name))
		}
	}
	slices.SortFunc(list, func(a, b runtime.Change) int { return strings.Compare(a.Path, b.Path) })
	if n, err := fillPatches(context.Background(), list, "", opener(old, new)); err != nil || n != len(list) {
		t.Fatal(n, err)
	}
	var text strings.Builder
	for _, c := range list {
		text.WriteString(c.Patch)
	}
	return text.String()
}

func tool(t *testing.T, dir, stdin, name string, args ...string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Fatalf("%v: install it, scripts/install-deps.sh does", err)
	}
	cmd := exec.Command(name, args...)
	cmd.Dir, cmd.Stdin = dir, strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "GIT_DIR=/nonexistent", "GIT_CONFIG_NOSYSTEM=1", "HOME=/nonexistent", "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s\n%s", cmd, err, out, stdin)
	}
}

func same(t *testing.T, what, dir string, want fileSet) {
	t.Helper()
	got := read(t, dir)
	for name, data := range want {
		if data == "/" {
			continue
		}
		if got[name] != data {
			t.Errorf("%s: %q is %.80q, want %.80q", what, name, got[name], data)
		}
		delete(got, name)
	}
	for name := range got {
		t.Errorf("%s: %q is there", what, name)
	}
}

// reversesDeletedLinks reports whether this git makes a symlink again that a patch
// deletes: 2.47 makes a file of it, of its own patches, too.
func reversesDeletedLinks(t *testing.T) bool {
	t.Helper()
	dir := t.TempDir()
	const deletes = "diff --git a/l b/l\ndeleted file mode 120000\n--- a/l\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n"
	tool(t, dir, deletes, "git", "apply", "-R", "-")
	fi, err := os.Lstat(filepath.Join(dir, "l"))
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode()&fs.ModeSymlink != 0
}

// git and patch make the new state out of the old one, and git the old one
// out of the new.
func TestPatchApplies(t *testing.T) {
	lines := func(n int, format string) (s string) {
		for i := range n {
			s += fmt.Sprintf(format, i)
		}
		return s
	}
	old := fileSet{
		"same": "same\n", "plain": lines(40, "line %d\n"), "no-end": "a\nb", "got-end": "a\nb\n",
		"lost-end": "a\nb\n", "exec": "#!/bin/sh\n",
		"unexec": "x:#!/bin/sh\n", "both": "x:one\n", "gone": "bye\n", "gone-empty": "",
		"emptied": "data\n", "filled": "",
		"crlf": "a\r\nb\r\n", "latin": "caf\xe9\nx\n", "moved": "as it was\n", "moved-mode": "as it was, too\n",
		"dir with space/a file": "1\n2\n", "odd\n\"name\"\\\t\x01é": "1\n", "deep/er": "x\n",
		"link": "-> old target", "link-gone": "-> x",
		"to-link": "a file\n", "to-file": "-> somewhere", "sp ace": "1\n", "two-hunks": lines(100, "%d\n"),
	}
	next := fileSet{
		"same": "same\n", "plain": strings.Replace(lines(40, "line %d\n"), "line 20\n", "changed\nand more\n",
			1), "no-end": "a\nb\nc",
		"got-end": "a\nb", "lost-end": "a\nb\nc\n", "exec": "x:#!/bin/sh\n", "unexec": "#!/bin/sh\n", "both": "two\n",
		"emptied": "", "filled": "data",
		"crlf": "a\r\nc\r\n", "latin": "caf\xe9\ny\n", "moved-to": "as it was\n", "moved mode": "x:as it was, too\n",
		"dir with space/a file": "1\n3\n", "odd\n\"name\"\\\t\x01é": "2\n", "deep/er": "y\n",
		"deep/and/deeper": "new\n", "link": "-> new target",
		"to-link": "-> a-link", "to-file": "a file\n", "new-empty": "", "new-exec": "x:new\n", "new-link": "-> new",
		"new \xff": "no utf-8\n", "sp ace": "2\n",
		"two-hunks": strings.Replace(strings.Replace(lines(100, "%d\n"), "\n10\n", "\nten\n", 1), "\n90\n", "\n", 1),
	}
	a, b := old.write(t), next.write(t)
	moved := map[string]string{"moved-to": "moved", "moved mode": "moved-mode"}
	text := patches(t, a, b, moved)
	for _, line := range []string{
		"\n--- a/plain\n+++ b/plain\n@@ -18,7 +18,8 @@\n line 17\n line 18\n line 19\n-line 20\n+changed\n+and more\n line 21\n",
		"diff --git a/exec b/exec\nold mode 100644\nnew mode 100755\ndiff --git",
		"diff --git a/gone b/gone\ndeleted file mode 100644\nindex b023018..0000000\n--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-bye\n",
		"diff --git a/new-empty b/new-empty\nnew file mode 100644\nindex 0000000..e69de29\ndiff --git",
		"diff --git a/new-exec b/new-exec\nnew file mode 100755\nindex 0000000..3e75765\n--- /dev/null\n+++ b/new-exec\n@@ -0,0 +1 @@\n+new\n",
		"diff --git a/moved b/moved-to\nsimilarity index 100%\nrename from moved\nrename to moved-to\n",
		"old mode 100644\nnew mode 100755\nsimilarity index 100%\nrename from moved-mode\nrename to moved mode\n",
		"-old target\n\\ No newline at end of file\n+new target\n\\ No newline at end of file\n",
		"diff --git a/deep/er b/deep/er\nindex 587be6b..975fbec 100644\n",
		"--- a/sp ace\t\n+++ b/sp ace\t\n",
		`--- "a/odd\n\"name\"\\\t\001\303\251"` + "\n",
		`+++ "b/new \377"` + "\t\n",
		"diff --git a/to-link b/to-link\ndeleted file mode 100644\nindex 02f6335..0000000\n--- a/to-link\n+++ /dev/null\n@@ -1 +0,0 @@\n-a file\ndiff --git a/to-link b/to-link\nnew file mode 120000\nindex 0000000..",
	} {
		if !strings.Contains(text, line) {
			t.Errorf("no %q in\n%s", line, text)
		}
	}
	if strings.Contains(text, "/same") {
		t.Error("what is the same is in the patch")
	}
	dir := old.write(t)
	tool(t, dir, text, "git", "apply", "--whitespace=nowarn", "-")
	same(t, "git apply", dir, next)
	tool(t, dir, text, "git", "apply", "--whitespace=nowarn", "-R", "-")
	was := maps.Clone(old)
	if !reversesDeletedLinks(t) {
		for _, link := range []string{"link-gone", "to-file"} {
			was[link] = strings.TrimPrefix(was[link], "-> ")
		}
	}
	same(t, "git apply -R", dir, was)

	// GNU patch 2.7 cannot turn a file into a symlink, nor read git's form of
	// renames to a name with a space; a name with a line end it refuses.
	simpler := func(tr fileSet) fileSet {
		c := fileSet{}
		for name, data := range tr {
			if !strings.HasPrefix(name, "to-") && !strings.HasPrefix(name, "odd") &&
				name != "moved-mode" && name != "moved mode" {
				c[name] = data
			}
		}
		return c
	}
	old, next = simpler(old), simpler(next)
	delete(moved, "moved mode")
	a, b = old.write(t), next.write(t)
	dir = old.write(t)
	tool(t, dir, patches(t, a, b, moved), "patch", "-p1", "--binary")
	same(t, "patch", dir, next)
}

// TestPatchAppliesRandom makes random edits of random files.
func TestPatchAppliesRandom(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	text := func(words, n int) (lines []string) {
		for range n {
			lines = append(lines, fmt.Sprintf("%d\n", rnd.IntN(words)))
		}
		return lines
	}
	finish := func(lines []string) string {
		s := strings.Join(lines, "")
		if rnd.IntN(4) == 0 {
			s = strings.TrimSuffix(s, "\n")
		}
		return s
	}
	old, next := fileSet{}, fileSet{}
	for i := range 300 {
		words := 2 + rnd.IntN(50)
		was := text(words, rnd.IntN(60))
		is := slices.Clone(was)
		for range rnd.IntN(8) {
			at := rnd.IntN(len(is) + 1)
			end := min(len(is), at+rnd.IntN(4))
			is = slices.Replace(is, at, end, text(words, rnd.IntN(4))...)
		}
		name := fmt.Sprint(i)
		old[name], next[name] = finish(was), finish(is)
	}
	diff := patches(t, old.write(t), next.write(t), nil)
	dir := old.write(t)
	tool(t, dir, diff, "git", "apply", "--whitespace=nowarn", "-")
	same(t, "git apply", dir, next)
	tool(t, dir, diff, "patch", "-R", "-p1", "--binary")
	for name, data := range old {
		if data == "" { // patch removes what it empties
			delete(old, name)
			_ = os.Remove(filepath.Join(dir, name))
		}
	}
	same(t, "patch -R", dir, old)
}

func TestPatchBinary(t *testing.T) {
	big := strings.Repeat("a line\n", maxPatchFile/7)
	old := fileSet{
		"nul": "a\x00b", "from-text": "text\n", "big": big + "1\n", "gone": "\x00", "fits": big[:maxPatchFile-13],
	}
	next := fileSet{
		"nul": "a\x00c", "from-text": "te\x00t\n", "big": big + "1\n1234567890", "new": "\x00",
		"fits": big[:maxPatchFile-13] + "more\n",
	}
	a, b := old.write(t), next.write(t)
	got := patches(t, a, b, nil)
	for _, want := range []string{
		"diff --git a/nul b/nul\nBinary files a/nul and b/nul differ\n",
		"Binary files a/from-text and b/from-text differ\n", "Binary files a/big and b/big differ\n",
		"new file mode 100644\nBinary files /dev/null and b/new differ\n",
		"deleted file mode 100644\nBinary files a/gone and /dev/null differ\n", "+a linmore\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%.4000s", want, got)
		}
	}
	// One that grows while it is read is not read to its end.
	endless := func(runtime.Change, bool) (io.ReadCloser, error) {
		return os.Open("/dev/zero")
	}
	text, err := patchText(runtime.Change{
		Path: "/f", Change: "A", New: &runtime.FileState{Type: "file", Mode: "0600", Size: 3},
	}, "", endless)
	if want := "diff --git a/f b/f\nnew file mode 100600\nBinary files /dev/null and b/f differ\n"; err != nil ||
		text != want {
		t.Errorf("%q, %v", text, err)
	}
}

// TestPatchNone: a change that git cannot express, or a file that is gone, has no patch; any
// other error is returned.
func TestPatchNone(t *testing.T) {
	file := &runtime.FileState{Type: "file", Mode: "0644"}
	gone := func(runtime.Change, bool) (io.ReadCloser, error) { return nil, fmt.Errorf("open: %w", fs.ErrNotExist) }
	for _, c := range []runtime.Change{
		{
			Path: "/d", Change: "M", Old: &runtime.FileState{Type: "dir", Mode: "0755"},
			New: &runtime.FileState{Type: "dir", Mode: "0711"},
		},
		{Path: "/p", Change: "A", New: &runtime.FileState{Type: "fifo", Mode: "0644"}},
		{Path: "/f", Change: "M", What: []string{"mtime", "xattrs", "owner"}, Old: file, New: file},
		{Path: "/f", Change: "M", What: []string{"content"}, Old: file, New: file},
	} {
		if text, err := patchText(c, "", gone); text != "" || err != nil {
			t.Errorf("%+v: %q, %v", c, text, err)
		}
	}
	broken := func(runtime.Change, bool) (io.ReadCloser, error) { return nil, runtime.ErrCorrupt }
	list := []runtime.Change{{Path: "/f", Change: "A", New: file}}
	if n, err := fillPatches(context.Background(), list, "", broken); n != 0 || !errors.Is(err, runtime.ErrCorrupt) {
		t.Error(n, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := fillPatches(ctx, list, "", gone); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestPatchTime: the worst files must not keep a diff busy; git's own limit is far above.
func TestPatchTime(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 1))
	text := func() string {
		b := make([]byte, maxPatchFile)
		for i := range b {
			if b[i] = '\n'; i%2 == 0 {
				b[i] = byte('a' + rnd.IntN(26))
			}
		}
		return string(b)
	}
	was, is := text(), text()
	open := func(_ runtime.Change, newer bool) (io.ReadCloser, error) {
		if newer {
			return io.NopCloser(strings.NewReader(is)), nil
		}
		return io.NopCloser(strings.NewReader(was)), nil
	}
	f := &runtime.FileState{Type: "file", Mode: "0644", Size: maxPatchFile}
	start := time.Now()
	text2, err := patchText(runtime.Change{Path: "/f", Change: "M", What: []string{"content"}, Old: f, New: f}, "", open)
	took := time.Since(start)
	t.Logf("%v, %d bytes", took, len(text2))
	if err != nil || len(text2) < maxPatchFile || took > 20*time.Second {
		t.Errorf("%v: %d bytes, %v", took, len(text2), err)
	}
}
