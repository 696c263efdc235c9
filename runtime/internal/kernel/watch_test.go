package kernel

import (
	"errors"
	"io/fs"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Who gets no inotify is told again and again that something may have changed.
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
