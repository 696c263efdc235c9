package audit

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestReportErr(t *testing.T) {
	for n, want := range map[int]string{
		1: "the audit log is corrupt: 1 finding", 2: "the audit log is corrupt: 2 findings",
	} {
		if got := (Report{Findings: make([]Finding, n)}).Err().Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A log that was there and is gone, all or its end, is found: at once, and after
// it has gone on.
func TestGone(t *testing.T) {
	add := func(l *Log, n int) {
		t.Helper()
		for range n {
			if _, err := l.Append(Record{Phase: Note, Verb: "after"}, true); err != nil {
				t.Fatal(err)
			}
		}
	}
	finds := func(l *Log, want string) {
		t.Helper()
		r := verify(t, l, "")
		if len(r.Findings) != 1 || !strings.Contains(r.Findings[0].What, want) ||
			!errors.Is(r.Err(), fault.ErrCorrupt) {
			t.Errorf("%+v, want only %q", r, want)
		}
	}
	remove := func(path string) {
		t.Helper()
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}

	l := filled(t, 10)
	remove(l.dir)
	finds(l, "is gone, and with it the records up to 10, which were on the disk")
	for range 3 { // also with as many records as there were
		add(l, 5)
		finds(l, "the records up to 10 are missing, and no record tells that they were pruned")
	}
	if r := verify(t, l, ""); r.First != 11 || r.Seq != 25 || r.Records != 15 {
		t.Errorf("%+v", r)
	}

	// The segments alone, and records at the end.
	l = filled(t, 10)
	remove(only(t, l))
	add(l, 20)
	finds(l, "the records up to 10 are missing")
	l = filled(t, 10)
	data, err := os.ReadFile(only(t, l))
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.Collect(bytes.Lines(data))
	if err := os.WriteFile(only(t, l), bytes.Join(lines[:7], nil), 0o600); err != nil {
		t.Fatal(err)
	}
	add(l, 20)
	finds(l, "the records 8 to 10 are missing")

	// A crash before what is known was written anew: it is behind the log, which is whole.
	l = filled(t, 10)
	for _, path := range []string{filepath.Join(l.dir, "head"), l.anchorPath()} {
		r, _, err := unseal(bytes.TrimSuffix(lines[3], []byte("\n")))
		if err != nil {
			t.Fatal(err)
		}
		_ = os.WriteFile(only(t, l), data, 0o600) // the lines that l has are of another time
		if err := overwrite(path, place{r.Seq, r.Hash}); err != nil {
			t.Fatal(err)
		}
	}
	if r := verify(t, l, ""); !r.OK || len(r.Notes) > 0 {
		t.Errorf("%+v", r)
	}
	add(l, 1)
	if at, err := l.anchor(); err != nil || at.seq != 11 {
		t.Error(at, err)
	}

	// The anchor of a log from before there were any is made by the next record.
	remove(l.anchorPath())
	if r := verify(t, l, ""); !r.OK || len(r.Notes) != 1 ||
		!strings.Contains(r.Notes[0], "there is no "+l.anchorPath()) {
		t.Errorf("%+v", r)
	}
	add(l, 1)
	if r := verify(t, l, ""); !r.OK || len(r.Notes) > 0 {
		t.Errorf("%+v", r)
	}
	if err := os.WriteFile(l.anchorPath(), []byte("12\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	add(l, 1)
	finds(l, "audit.head: corrupt")

	// Without either, the sandboxes show it.
	remove(l.dir)
	remove(l.anchorPath())
	if r := verify(t, l, ""); !r.OK || r.Records != 0 {
		t.Errorf("%+v", r)
	}
	for _, dir := range []string{
		"checkpoints/failed", "checkpoints/tmp-" + strings.Repeat("0", 32), "sandboxes/" + strings.Repeat("1", 32),
	} {
		if err := os.MkdirAll(filepath.Join(filepath.Dir(l.dir), dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	finds(l, "though there are sandboxes (1), each of which was put on record")
}
