package test

import (
	"strings"
	"testing"
)

// A checkpoint has no name that means a state of the sandbox, and a name means the
// checkpoint of the sandbox that is named with it, or none.
func TestNamesOfCheckpoints(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	for _, name := range []string{"x", "y"} {
		b.ok("create", "--name", name, "--network", "none", "busybox", "true")
		b.own(name)
	}
	b.ok("checkpoint", "--name", "own", "x")
	a1 := b.checkpoint("--name", "a1", "y")
	for _, name := range []string{"image", "head", "undo", "now", "latest", "HEAD"} {
		for _, args := range [][]string{{"checkpoint", "--name", name, "x"}, {"checkpoint", "tag", "x@own", name}} {
			if r := b.try(nil, args...); r.code != 2 || !strings.Contains(r.err, "reserved") ||
				!strings.Contains(r.err, "\nhint: ") {
				t.Errorf("want 2 and that it is reserved: %s", r)
			}
		}
	}
	b.ok("create", "--name", "now", "--network", "none", "busybox", "true") // of a sandbox it means nothing
	b.own("now")
	for _, args := range [][]string{
		{"restore", "x", "a1"}, {"restore", "x", "x@a1"}, {"restore", "--dry-run", "x", "a1"}, {"fork", "x@a1"},
		{"diff", "x@a1"}, {"commit", "x@a1", "made"},
		{"checkpoint", "inspect", "x@a1"}, {"checkpoint", "rm", "x@a1"}, {"checkpoint", "tag", "x@a1", "more"},
		{"checkpoint", "pin", "x@a1"},
		{"checkpoint", "export", "x@a1", "-"}, {"verify", "x@a1"},
	} {
		r := b.try(nil, args...)
		if r.code != 3 || !strings.Contains(r.err, `sandbox x has no checkpoint "a1": not found`) ||
			strings.Contains(r.err, b.inspect("x").ID) {
			t.Errorf("want 3 and the names that were given: %s", r)
		}
		if bare := args[len(args)-1] == "a1"; bare && !strings.Contains(r.err, "y@a1") {
			t.Errorf("want where there is one: %s", r)
		}
	}
	b.ok("diff", "x@own", "y@a1") // which says whose
	if r := b.try(nil, "restore", "x", a1); r.code != 4 || !strings.Contains(r.err, "belongs to sandbox y") {
		t.Errorf("want 4: %s", r)
	}
}
