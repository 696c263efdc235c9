package overlay

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUsage(t *testing.T) {
	dir := t.TempDir()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	is := func(least, most int64) {
		t.Helper()
		if got, err := Usage(t.Context(), dir, math.MaxInt64); err != nil || got < least || got > most {
			t.Errorf("%d, %v; want %d to %d", got, err, least, most)
		}
	}
	is(0, 0)
	ok(os.WriteFile(filepath.Join(dir, "a"), make([]byte, 1<<20), 0o600))
	is(1<<20, 1<<20+8192)
	// Another name is no more data; a hole is none, nor is what a link leads to.
	ok(os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")))
	ok(os.WriteFile(filepath.Join(dir, "hole"), nil, 0o600))
	ok(os.Truncate(filepath.Join(dir, "hole"), 1<<40))
	ok(os.Symlink("/", filepath.Join(dir, "root")))
	ok(unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	is(1<<20, 1<<20+16384)
	ok(os.MkdirAll(filepath.Join(dir, "x/y"), 0o700))
	ok(os.WriteFile(filepath.Join(dir, "x/y/c"), make([]byte, 1<<20), 0o600))
	is(2<<20, 2<<20+32768)
	// Files of no bytes are no way around it.
	for i := range 100 {
		ok(os.WriteFile(filepath.Join(dir, "x", strings.Repeat("e", i+1)), nil, 0o600))
	}
	is(2<<20+100*256, 2<<20+100*256+65536)
	if got, err := Usage(t.Context(), dir, 1000); err != nil || got <= 1000 {
		t.Errorf("%d, %v", got, err)
	}
	// Nor are directories in directories.
	at := filepath.Join(dir, "x")
	for range 600 {
		at += "/d"
		ok(os.Mkdir(at, 0o700))
	}
	if _, err := Usage(t.Context(), dir, math.MaxInt64); !errors.Is(err, ErrTooDeep) {
		t.Error(err)
	}
}
