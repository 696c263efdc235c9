package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func put(t *testing.T, path, what string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(what), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// A suite's digest is another once something is that its results depend on, and only then.
func TestDigest(t *testing.T) {
	a, b, boots := suite{pkg: "a"}, suite{pkg: "b/c"}, suite{pkg: "d", boots: true}
	for name, c := range map[string]struct {
		change  func(root string) error
		machine string
		o       options
		changed []suite
	}{
		"nothing": {nil, "", options{}, nil},
		"a program": {func(root string) error {
			return os.WriteFile(root+"/built/agentbox", []byte("2"), 0o644)
		}, "", options{}, []suite{a, b, boots}},
		"a source's name": {func(root string) error {
			return os.Rename(root+"/src/x", root+"/src/y")
		}, "", options{}, []suite{a, b, boots}},
		"a source's mode": {func(root string) error {
			return os.Chmod(root+"/src/x", 0o755)
		}, "", options{}, []suite{a, b, boots}},
		"where a link points": {func(root string) error {
			return errors.Join(os.Remove(root+"/bin/go"), os.Symlink("vm2", root+"/bin/go"))
		}, "", options{}, []suite{a, b, boots}},
		"a test's source": {func(root string) error {
			return os.WriteFile(root+"/src/x_test.go", []byte("2"), 0o644)
		}, "", options{}, nil},
		"its tests": {func(root string) error {
			return os.WriteFile(b.binary(root), []byte("2"), 0o644)
		}, "", options{}, []suite{b}},
		"the package": {func(root string) error {
			return os.WriteFile(root+"/agentbox.deb", []byte("2"), 0o644)
		}, "", options{}, []suite{boots}},
		"the older package": {func(root string) error {
			return os.Remove(root + "/older.deb")
		}, "", options{}, []suite{boots}},
		"the image":           {nil, "trixie-2", options{}, []suite{a, b, boots}},
		"the tests asked for": {nil, "", options{run: "TestX"}, []suite{a, b, boots}},
		"the power cuts":      {nil, "", options{cuts: 20}, []suite{boots}},
		"the bound":           {nil, "", options{timeout: time.Hour}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root, list := t.TempDir(), []suite{a, b, boots}
			for _, path := range []string{
				"built/agentbox", "src/x", "agentbox.deb", "older.deb", "tests/a", "tests/b-c", "tests/d",
			} {
				put(t, filepath.Join(root, path), "1")
			}
			put(t, filepath.Join(root, "bin/agentbox"), "1")
			if err := os.Symlink("vm", root+"/bin/go"); err != nil {
				t.Fatal(err)
			}
			was, err := digest(root, list, "", options{})
			if err != nil {
				t.Fatal(err)
			}
			if c.change != nil {
				if err := c.change(root); err != nil {
					t.Fatal(err)
				}
			}
			is, err := digest(root, list, c.machine, c.o)
			if err != nil {
				t.Fatal(err)
			}
			changed := map[string]bool{}
			for _, s := range c.changed {
				changed[s.pkg] = true
			}
			for _, s := range list {
				if was[s.pkg] == "" || (was[s.pkg] != is[s.pkg]) != changed[s.pkg] {
					t.Errorf("%s: %q, then %q", s.pkg, was[s.pkg], is[s.pkg])
				}
			}
			// A suite alone has the digest that it has beside others.
			if alone, err := digest(root, list[1:2], c.machine, c.o); err != nil || alone["b/c"] != is["b/c"] {
				t.Errorf("alone: %v (%v), want %q", alone, err, is["b/c"])
			}
		})
	}
}

// A suite that has passed is not run again, until what it is made of has changed or it is begun
// again.
func TestResume(t *testing.T) {
	good, bad, late, none := suite{pkg: "good"}, suite{pkg: "bad"}, suite{pkg: "late"}, suite{pkg: "none"}
	list := []suite{good, bad, late, none}
	rec := record{dir: t.TempDir(), digests: map[string]string{"good": "1", "bad": "1", "late": "1", "none": "1"}}
	todo := func(rec record) (names string) {
		t.Helper()
		before, rest := rec.split(list)
		if len(before)+len(rest) != len(list) {
			t.Errorf("of %d suites: %v and %v", len(list), before, rest)
		}
		for _, s := range rest {
			names += s.pkg + " "
		}
		return names
	}
	run := func(r result) result {
		t.Helper()
		f, err := rec.begin(r.suite)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		return rec.end(r, "Linux")
	}
	if names := todo(rec); names != "good bad late none " {
		t.Errorf("at first %q are to be run", names)
	}
	run(result{suite: good, passed: 3, skipped: 1, took: 90 * time.Second})
	run(result{suite: bad, passed: 3, failed: 1})
	run(result{suite: late, passed: 3, err: errBound})
	run(result{suite: none, skipped: 1})
	if names := todo(rec); names != "bad late none " {
		t.Errorf("with one that passed %q are to be run", names)
	}
	before, _ := rec.split(list)
	if r := before[0]; r.passed != 3 || r.skipped != 1 || !r.ok() || r.took != 90*time.Second || r.facts != "Linux" ||
		time.Since(r.before) > time.Minute {
		t.Errorf("it came to %+v", r)
	}
	other := record{dir: rec.dir, digests: map[string]string{"good": "2", "bad": "1", "late": "1", "none": "1"}}
	if names := todo(other); names != "good bad late none " {
		t.Errorf("of another tree %q are to be run", names)
	}
	if names := todo(record{dir: rec.dir}); names != "good bad late none " {
		t.Errorf("without digests %q are to be run", names)
	}
	// A result that was cut off as it was kept has not passed; nor has one that was begun and not
	// ended.
	put(t, rec.passedOf(good), `{"digest":"1","passed":3`)
	if names := todo(rec); names != "good bad late none " {
		t.Errorf("with a part of a record %q are to be run", names)
	}
	run(result{suite: good, passed: 3})
	if f, err := rec.begin(good); err != nil || f.Close() != nil || todo(rec) != "good bad late none " {
		t.Errorf("one that was begun again is taken to have passed (%v)", err)
	}
	// A result that cannot be kept is reported.
	rec.dir = filepath.Join(rec.dir, "gone")
	if r := rec.end(result{suite: good, passed: 3}, ""); !errors.Is(r.err, fs.ErrNotExist) {
		t.Errorf("it is %+v", r)
	}
}
