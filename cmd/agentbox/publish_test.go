package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

// A file is there whole or not at all, and nothing else is in its directory at any
// time, so that a kill leaves nothing.
func TestPublish(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "f.tar")
	names := func() (list []string) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			list = append(list, e.Name())
		}
		return list
	}
	write := func(text string, fails error) func(io.Writer) error {
		return func(w io.Writer) error {
			before := names()
			if len(before) > 1 || len(before) == 1 && before[0] != "f.tar" {
				t.Errorf("while it is written there are %q", before)
			}
			_, err := io.WriteString(w, text)
			return errors.Join(err, fails)
		}
	}
	broken := errors.New("broken")
	for _, c := range []struct {
		text string
		err  error
		want string
	}{{"half", broken, ""}, {"one", nil, "one"}, {"half", broken, "one"}, {"two", nil, "two"}} {
		if err := publish(file, write(c.text, c.err)); !errors.Is(err, c.err) {
			t.Errorf("%q: %v", c.text, err)
		}
		data, err := os.ReadFile(file)
		if string(data) != c.want || (err != nil) != (c.want == "") {
			t.Errorf("after %q there is %q, %v", c.text, data, err)
		}
	}
	if got := names(); len(got) != 1 {
		t.Errorf("left: %q", got)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := publish(link, write("three", nil)); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(file); string(data) != "three" {
		t.Errorf("through a link: %q, %v", data, err)
	}
	if err := publish(filepath.Join(dir, "none", "f"), write("x", nil)); !errors.Is(err, runtime.ErrNotFound) {
		t.Errorf("into no directory: %v", err)
	}
}
