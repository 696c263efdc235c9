package streams

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime"
)

func printed(t *testing.T, path string, opts runtime.LogOptions) (stdout, stderr string) {
	t.Helper()
	var out, errw bytes.Buffer
	if err := Print(t.Context(), path, opts, &out, &errw); err != nil {
		t.Fatal(err)
	}
	return out.String(), errw.String()
}

func TestWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for range 2 { // a second run appends
		w, err := OpenWriter(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range []struct {
			stderr bool
			text   string
		}{{false, "one\ntw"}, {true, "error\n"}, {false, "o\n\nthree\n"}} {
			if err := w.Write(p.stderr, []byte(p.text)); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	out, errs := printed(t, path, runtime.LogOptions{Tail: -1})
	if want := strings.Repeat("one\ntwo\n\nthree\n", 2); out != want || errs != "error\nerror\n" {
		t.Errorf("%q, %q", out, errs)
	}
	if out, _ := printed(t, path, runtime.LogOptions{Tail: 1}); out != "three\n" {
		t.Errorf("the last line: %q", out)
	}
}

func TestWriterAfterATornRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("2030-01-02T03:04:05Z stdout F whole\n2030-01-02T03:04:05Z stdo"),
		0o600); err != nil {
		t.Fatal(err)
	}
	w, err := OpenWriter(path)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := w.Write(false, []byte("next\n")); err != nil {
		t.Fatal(err)
	}
	if out, _ := printed(t, path, runtime.LogOptions{Tail: -1}); out != "whole\nnext\n" {
		t.Errorf("%q", out)
	}
}

func TestWriterTurns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	w, err := OpenWriter(path)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	line := []byte(strings.Repeat("x", 8<<10-1) + "\n")
	old, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	w.size = Limit - 10<<10 // what was written before
	for range 3 {
		if err := w.Write(false, line); err != nil {
			t.Fatal(err)
		}
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	was, err := old.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if os.SameFile(st, was) || was.Size() > 10<<10 || st.Size() < 16<<10 {
		t.Errorf("%d bytes in the old log, %d in the new one", was.Size(), st.Size())
	}
}
