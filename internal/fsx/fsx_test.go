package fsx

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// only proves that a directory has one file, with this content and mode.
func only(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	list, err := os.ReadDir(filepath.Dir(path))
	must(t, err)
	if len(list) != 1 {
		t.Fatalf("%d files are there, not one: %v", len(list), list)
	}
	data, err := os.ReadFile(path)
	must(t, err)
	st, err := os.Stat(path)
	must(t, err)
	if string(data) != content || st.Mode() != mode {
		t.Fatalf("%v %q, not %v %q", st.Mode(), data, mode, content)
	}
}

func TestWrite(t *testing.T) {
	for name, o := range map[string]Options{
		"durable": {}, "volatile": {Volatile: true}, "unnamed": {Unnamed: true}, "fixed": {Temp: "f.new"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "f")
			if o.Temp != "" {
				o.Temp = filepath.Join(dir, o.Temp)
				must(t, os.WriteFile(path, nil, 0o644), os.Symlink(path, o.Temp)) // not to be written through
			}
			must(t, Write(path, []byte("one"), o))
			only(t, path, "one", 0o600)
			o.Mode = 0o666
			must(t, Write(path, []byte("two"), o))
			only(t, path, "two", 0o666)
		})
	}
}

func TestLike(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	must(t, os.WriteFile(path, []byte("one"), 0o600), os.Chmod(path, 0o640))
	like, err := os.Stat(path)
	must(t, err, Write(path, []byte("two"), Options{Like: like}))
	only(t, path, "two", 0o640)
}

// A file that cannot be published leaves what was there, and nothing beside it.
func TestErrors(t *testing.T) {
	refused := errors.New("refused")
	for _, o := range []Options{{}, {Unnamed: true}} {
		path := filepath.Join(t.TempDir(), "sub", "f")
		must(t, os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("one"), 0o600))
		err := Create(path, o, func(f *os.File) error {
			_, err := f.WriteString("half")
			return errors.Join(err, refused)
		})
		if !errors.Is(err, refused) {
			t.Fatal(err)
		}
		only(t, path, "one", 0o600)

		if err := Write(filepath.Dir(path), nil, o); err == nil { // a directory
			t.Fatal("replaced a directory")
		}
		if list, err := os.ReadDir(filepath.Dir(filepath.Dir(path))); err != nil || len(list) != 1 {
			t.Fatal(list, err)
		}
	}
	if err := Write(filepath.Join(t.TempDir(), "none", "f"), nil, Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

func TestTemp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := New(path, Options{})
	must(t, err)
	_, err = f.WriteString("one")
	must(t, err, f.Seal())
	if data, err := os.ReadFile(f.Name()); err != nil || string(data) != "one" {
		t.Fatalf("%q, %v", data, err)
	}
	must(t, f.Commit())
	f.Discard()
	only(t, path, "one", 0o600)
}

// A process that is killed while it publishes leaves a whole file, and at most one other.
func TestKilled(t *testing.T) {
	if path := os.Getenv("FSX_TEST_FILE"); path != "" {
		o := Options{Unnamed: os.Getenv("FSX_TEST_UNNAMED") != "", Volatile: true}
		for i := byte('a'); ; i++ {
			if err := Write(path, bytes.Repeat([]byte{i}, 64<<10), o); err != nil {
				os.Exit(1)
			}
		}
	}
	for range 10 {
		for _, unnamed := range []string{"", "yes"} {
			dir := t.TempDir()
			path := filepath.Join(dir, "f")
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestKilled$")
			cmd.Env = append(os.Environ(), "FSX_TEST_FILE="+path, "FSX_TEST_UNNAMED="+unnamed)
			must(t, cmd.Start())
			for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(path); err == nil {
					break
				}
				if time.Now().After(deadline) {
					t.Error("nothing was written")
					break
				}
			}
			must(t, cmd.Process.Kill())
			if err := cmd.Wait(); cmd.ProcessState.Exited() {
				t.Fatalf("ended by itself: %v", err)
			}
			data, err := os.ReadFile(path)
			must(t, err)
			if len(data) != 64<<10 || bytes.Count(data, data[:1]) != len(data) {
				t.Fatalf("%d bytes, not all alike", len(data))
			}
			list, err := os.ReadDir(dir)
			must(t, err)
			if len(list) > 2 || len(list) == 2 && !strings.HasPrefix(list[0].Name(), ".tmp-") {
				t.Fatalf("left behind: %v", list)
			}
		}
	}
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		root, path string
		want       bool
	}{
		{"/a", "/a", true}, {"/a", "/a/b", true}, {"/a", "/ab", false}, {"/a/", "/a", true}, {"/a", "/a/", true},
		{"/", "/", true}, {"/", "/a", true}, {"/a", "/", false}, {"/a/b", "/a", false},
		{"/a", "/a/../b", false}, {"/a", "/a/..b", true}, {"/a", "/b/../a/c", true}, {"/a", "/a//b", true},
		{".", "a", true}, {".", "..", false}, {".", "/a", false}, {"/", "a", false}, {"a", "a/b", true},
		{"a", "a/../b", false},
		{"..", "../a", true}, {"..", "../..", false}, {"", "/a", false}, {"", "a", false},
		{"/a", "", false}, {"", "", false},
	} {
		if got := Within(c.root, c.path); got != c.want {
			t.Errorf("Within(%q, %q) = %v", c.root, c.path, got)
		}
	}
}

// Within agrees with the way from root to path.
func TestWithinProperty(t *testing.T) {
	paths := rapid.StringMatching(`/?([ab./]{0,3}/){0,3}[ab.]{0,3}`)
	rapid.Check(t, func(t *rapid.T) {
		root, path := paths.Draw(t, "root"), paths.Draw(t, "path")
		rel, err := filepath.Rel(root, path)
		want := err == nil && root != "" && path != "" && filepath.IsLocal(rel)
		if got := Within(root, path); got != want {
			t.Fatalf("Within(%q, %q) = %v; the way there is %q", root, path, got, rel)
		}
	})
}
