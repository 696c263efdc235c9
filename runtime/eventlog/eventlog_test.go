package eventlog

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// Several write at once and one reads all the time: until files are dropped it
// has each line once, in the order of each writer, and files stay bounded.
func TestReadWhileOthersAppend(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "events")
	r := NewReader(dir, "a")
	defer r.Close()
	last := map[string]int{}
	read := func() {
		t.Helper()
		err := r.Read(func(line []byte) error {
			var who string
			var n int
			if _, err := fmt.Sscan(string(line), &who, &n); err != nil || line[len(line)-1] != '\n' {
				return fmt.Errorf("%.40q: %w", line, err)
			}
			if n != last[who]+1 {
				t.Errorf("%s: %d after %d", who, n, last[who])
			}
			last[who] = n
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	const lines = 150
	var wg sync.WaitGroup
	for _, who := range []string{"x", "y", "z"} {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := range lines { // 1.8 MiB in all
				if err := Append(dir, "a", fmt.Appendf(nil, "%s %d %s\n", who, n+1,
					strings.Repeat("-", 4000))); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for over := false; !over; read() {
		select {
		case <-done:
			over = true
		default:
		}
	}
	if last["x"] != lines || last["y"] != lines || last["z"] != lines {
		t.Errorf("read %v", last)
	}
	// A late reader reads the same.
	r = NewReader(dir, "a")
	last = map[string]int{}
	read()
	if last["x"] != lines {
		t.Errorf("read %v", last)
	}
	for _, path := range []string{Path(dir, "a"), older(dir, "a")} {
		if st, err := os.Stat(path); err != nil || st.Size() > limit || st.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", st, err)
		}
	}
	if err := Remove(dir, "a"); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// A line that is on its way is not read yet, and a crash between putting the
// file aside and the next event takes nothing.
func TestCutOff(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(older(dir, "a"), []byte("one\ntw"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := NewReader(dir, "a")
	defer r.Close()
	var got bytes.Buffer
	for _, step := range []string{"", "o\n"} {
		f, err := os.OpenFile(older(dir, "a"), os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, err = f.WriteString(step)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Read(func(line []byte) error { got.Write(line); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if err := Append(dir, "a", []byte("three\n")); err != nil {
		t.Fatal(err)
	}
	if err := r.Read(func(line []byte) error { got.Write(line); return nil }); err != nil ||
		got.String() != "one\ntwo\nthree\n" {
		t.Errorf("%q, %v", got.String(), err)
	}
}

// A line cut off by a full disk or a kill takes no later event with it.
func TestAppendAfterACut(t *testing.T) {
	dir := t.TempDir()
	long := strings.Repeat("x", 3*4096)
	for _, was := range []string{"tw", "one\ntw", "one\n" + long, long} {
		if err := os.WriteFile(Path(dir, "a"), []byte(was), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Append(dir, "a", []byte("three\n")); err != nil {
			t.Fatal(err)
		}
		want := "three\n"
		if strings.HasPrefix(was, "one\n") {
			want = "one\n" + want
		}
		if got, err := os.ReadFile(Path(dir, "a")); string(got) != want || err != nil {
			t.Errorf("after %.10q: %q, %v", was, got, err)
		}
	}
}
