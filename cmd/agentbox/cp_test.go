package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseEnd(t *testing.T) {
	for in, want := range map[string]end{
		"c:/x":   {"c", "/x"},
		"c:x:y":  {"c", "x:y"},
		"/x:y":   {"", "/x:y"},
		"./c:y":  {"", "./c:y"},
		"../c:y": {"", "../c:y"},
		"file":   {"", "file"},
		"-":      {"", "-"},
		":/x":    {"", ":/x"},
		"c:":     {"c", ""},
	} {
		if got := parseEnd(in); got != want {
			t.Errorf("%q: %+v, want %+v", in, got, want)
		}
	}
}

// The rules of docker cp, from the sandbox to the host.
func TestCopyOut(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		want []string // of the host's directory, or words of the error
	}{
		{"run:/d .", 0, []string{"d/", "d/f", "dir/", "file", "link"}},
		{"run:d dir", 0, []string{"dir/", "dir/d/", "dir/d/f", "file", "link"}},
		{"run:/d/. dir", 0, []string{"dir/", "dir/f", "file", "link"}},
		{"run:/d new", 0, []string{"dir/", "file", "link", "new/", "new/f"}},
		{"run:/d/. new", 0, []string{"dir/", "file", "link", "new/", "new/f"}},
		{"run:/d new/", 0, []string{"dir/", "file", "link", "new/", "new/f"}},
		{"run:/d/f new", 0, []string{"dir/", "file", "link", "new"}},
		{"run:/d/f dir", 0, []string{"dir/", "dir/f", "file", "link"}},
		{"run:/d/f file", 0, []string{"dir/", "file", "link"}},
		{"run:/d/f link", 0, []string{"dir/", "file", "link"}},
		{"run:/l dir", 0, []string{"dir/", "dir/l", "file", "link"}},
		{"-L run:/l dir", 0, []string{"dir/", "dir/l/", "dir/l/f", "file", "link"}},
		{"run:/l/ dir", 0, []string{"dir/", "dir/l/", "dir/l/f", "file", "link"}},
		{"run:/d/f new/", exitNotFound, []string{"does not exist"}},
		{"run:/d/f nodir/new", exitNotFound, []string{"not found"}},
		{"run:/d file", exitUsage, []string{"over the file"}},
		{"run:/d/f/ dir", exitUsage, []string{"not a directory"}},
		{"run:/nope dir", exitNotFound, []string{"/nope"}},
		{"nope:/d dir", exitNotFound, []string{"sandbox not found"}},
	} {
		host(t)
		r := try(t, boxes(), "", append([]string{"cp"}, strings.Fields(c.args)...)...)
		if r.code != c.code {
			t.Errorf("cp %s: %+v", c.args, r)
			continue
		}
		if c.code != 0 {
			for _, w := range c.want {
				if !strings.Contains(r.stderr, w) {
					t.Errorf("cp %s: %s, want %q", c.args, r.stderr, w)
				}
			}
			c.want = []string{"dir/", "file", "link"}
		}
		if d := cmp.Diff(c.want, walk(t)); d != "" {
			t.Errorf("cp %s:\n%s", c.args, d)
		}
		if strings.HasSuffix(c.args, "link") {
			if data, _ := os.ReadFile("file"); string(data) != "hi" {
				t.Errorf("cp %s: the link's target holds %q", c.args, data)
			}
		}
	}
	f := boxes()
	host(t)
	if r := try(t, f, "", "cp", "run:/d", "-"); r.code != 0 || !strings.Contains(r.stdout, "ustar") {
		t.Errorf("%+v", r)
	}
}

// And into it.
func TestCopyIn(t *testing.T) {
	for _, c := range []struct {
		args string
		dir  string
		want []string
	}{
		{"dir run:/d", "/d", []string{"dir/", "dir/in"}},
		{"dir/. run:/d", "/d", []string{"./", "./in"}},
		{"dir run:/new", "/", []string{"new/", "new/in"}},
		{"dir run:new/", "/", []string{"new/", "new/in"}},
		{"file run:/d", "/d", []string{"file"}},
		{"file run:/d/", "/d/", []string{"file"}},
		{"file run:/new", "/", []string{"new"}},
		{"file run:/d/f", "/d/", []string{"f"}},
		{"file run:/l", "/d", []string{"file"}},
		{"link run:/d", "/d", []string{"link"}},
		{"-L link run:/d", "/d", []string{"link"}},
	} {
		host(t)
		if err := os.WriteFile("dir/in", []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		f := boxes()
		r := try(t, f, "", append([]string{"cp"}, strings.Fields(c.args)...)...)
		if r.code != 0 {
			t.Errorf("cp %s: %+v", c.args, r)
			continue
		}
		if !slices.Contains(f.calls, "CopyTo "+c.dir) {
			t.Errorf("cp %s: %q", c.args, f.calls)
		}
		if d := cmp.Diff(c.want, f.tarNames()); d != "" {
			t.Errorf("cp %s:\n%s", c.args, d)
		}
	}
	host(t)
	for args, code := range map[string]int{
		"file run:/new/": exitNotFound, "dir run:/d/f": exitUsage, "nope run:/d": exitNotFound,
		"file nope:/d": exitNotFound,
	} {
		if r := try(t, boxes(), "", append([]string{"cp"},
			strings.Fields(args)...)...); r.code != code || r.stderr == "" {
			t.Errorf("cp %s: %+v", args, r)
		}
	}
	f := boxes()
	try(t, f, "a tar", "cp", "-", "run:/d").want(t, 0, "")
	if string(f.stdin) != "a tar" {
		t.Errorf("%q", f.stdin)
	}
}

// host makes the current directory one with dir/, file and link -> file.
func host(t *testing.T) {
	t.Helper()
	t.Chdir(t.TempDir())
	for _, err := range []error{
		os.Mkdir("dir", 0o700), os.WriteFile("file", []byte("old"), 0o600), os.Symlink("file", "link"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func walk(t *testing.T) (names []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(p string, d os.DirEntry, err error) error {
		if p == "." || err != nil {
			return err
		}
		if d.IsDir() {
			p += "/"
		}
		names = append(names, p)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
