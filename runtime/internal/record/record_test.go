package record

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// Files of every length are read whole up to the bound, those without one as well.
func TestRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, n := range []int{0, 1, 511, 512, 513, 5000, Limit - 1, Limit, Limit + 1} {
		want := bytes.Repeat([]byte("0123456789"), n/10+1)[:n]
		if err := os.WriteFile(path, want, 0o600); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		got, at, err := Read(path)
		if err != nil || !bytes.Equal(got, want[:min(n, Limit)]) || !at.Equal(st.ModTime()) {
			t.Errorf("of %d bytes %d, written at %v, not %v: %v", n, len(got), at, st.ModTime(), err)
		}
	}
	want, err := os.ReadFile("/proc/self/limits")
	if err != nil {
		t.Fatal(err)
	}
	if got, _, err := Read("/proc/self/limits"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%q, not %q: %v", got, want, err)
	}
	var e *fs.PathError
	if _, _, err := Read(path + "x"); !errors.Is(err, fs.ErrNotExist) || !errors.As(err, &e) || e.Path != path+"x" {
		t.Error(err)
	}
	if _, _, err := Read(filepath.Dir(path)); err == nil {
		t.Error("a directory is read")
	}
}
