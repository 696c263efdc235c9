package kernel

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Without inotify a watcher is told again and again that something may have changed.
func TestWatchWithoutInotify(t *testing.T) {
	dir := t.TempDir()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	w, err := Watch(dir)
	_, gone := Watch(filepath.Join(dir, "nothing"))
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if w.f != nil {
		t.Fatal("it got one")
	}
	for range 2 {
		<-w.Events
	}
	if !errors.Is(gone, fs.ErrNotExist) {
		t.Errorf("of what is not there: %v", gone)
	}
}

// A file is told of when it changes, and once more; a directory each time.
func TestPolled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	at := time.Unix(1700000000, 0)
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	do(os.WriteFile(file, nil, 0o600))
	p := polled{paths: []string{file}, last: make([]seen, 1)}
	p.changed()
	p.changed()
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"written", func() error { return os.WriteFile(file, []byte("x"), 0o600) }},
		{"touched", func() error { return os.Chtimes(file, at, at) }},
		{"another", func() error {
			return errors.Join(os.WriteFile(file+".new", []byte("x"), 0o600), os.Chtimes(file+".new", at, at),
				os.Rename(file+".new", file))
		}},
		{"gone", func() error { return os.Remove(file) }},
	} {
		do(step.do())
		for i, want := range []bool{true, true, false, false} {
			if got := p.changed(); got != want {
				t.Errorf("%s: look %d tells %v", step.what, i+1, got)
			}
		}
	}
	p.paths[0] = filepath.Dir(file)
	for range 3 {
		if !p.changed() {
			t.Error("a directory may have changed")
		}
	}
}
