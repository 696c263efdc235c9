package main

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// record is what is kept of suites, in a directory: of each its events and, once
// it has passed, of what it has.
type record struct {
	dir     string
	digests map[string]string // by package: of all that the suite is made of
}

// passed is a suite that has passed, as it is kept.
type passed struct {
	Digest  string    `json:"digest"`
	Passed  int       `json:"passed"`
	Skipped int       `json:"skipped"`
	Seconds float64   `json:"seconds"`
	Ended   time.Time `json:"ended"`
	Facts   string    `json:"facts"` // the machine's own
}

// eventsOf and passedOf are the files of a suite.
func (c record) eventsOf(s suite) string { return filepath.Join(c.dir, s.name()+".json") }
func (c record) passedOf(s suite) string { return filepath.Join(c.dir, s.name()+".passed") }

// begin makes a suite's file of events anew. From here on it has not passed.
func (c record) begin(s suite) (*os.File, error) {
	if err := os.Remove(c.passedOf(s)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.Create(c.eventsOf(s))
}

// end keeps what came of a suite.
func (c record) end(r result, facts string) result {
	digest := c.digests[r.suite.pkg]
	if !r.ok() || digest == "" {
		return r
	}
	p := passed{
		Digest: digest, Passed: r.passed, Skipped: r.skipped, Seconds: r.took.Seconds(),
		Ended: time.Now(), Facts: facts,
	}
	data, err := json.Marshal(p)
	if err == nil {
		// A part of it is no JSON: not passed.
		err = os.WriteFile(c.passedOf(r.suite), append(data, '\n'), 0o644)
	}
	r.err = err
	return r
}

// earlier is what a suite came to when it was run before, if that was of what it is
// made of now.
func (c record) earlier(s suite) (result, bool) {
	var p passed
	data, err := os.ReadFile(c.passedOf(s))
	if err != nil || json.Unmarshal(data, &p) != nil || p.Digest == "" || p.Digest != c.digests[s.pkg] {
		return result{}, false
	}
	return result{
		suite: s, passed: p.Passed, skipped: p.Skipped, took: time.Duration(p.Seconds * float64(time.Second)),
		facts: p.Facts, before: p.Ended,
	}, true
}

// split tells suites that have passed before, with what they came to, from those that
// are to be run.
func (c record) split(list []suite) (before []result, todo []suite) {
	for _, s := range list {
		if r, ok := c.earlier(s); ok {
			fmt.Println(r)
			before = append(before, r)
		} else {
			todo = append(todo, s)
		}
	}
	return before, todo
}

// digest is, for each suite, that of all that its results depend on: the payload but for
// other suites' tests, the machine, and the options that change what is run. Sources of
// tests are left out: their binaries have them, and a test that looks for a word in one
// comes to the same on any machine.
func digest(root string, list []suite, machine string, o options) (map[string]string, error) {
	common, own := sha256.New(), map[string]string{}
	fmt.Fprintf(common, "%q %q %t %d %d\n", machine, o.run, o.long, o.cpus, o.memory)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil || strings.HasPrefix(name, "src/") && strings.HasSuffix(name, "_test.go") {
			return err
		}
		of := sha256.New()
		if info.Mode().IsRegular() {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			_, err = io.Copy(of, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
		} else if target, err := os.Readlink(path); err == nil {
			fmt.Fprint(of, target)
		}
		line := fmt.Sprintf("%q %v %x\n", name, info.Mode(), of.Sum(nil))
		if strings.HasPrefix(name, "tests/") || strings.HasSuffix(name, ".deb") && !strings.Contains(name, "/") {
			own[name] = line
		} else {
			fmt.Fprint(common, line)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	digests := map[string]string{}
	for _, s := range list {
		all := sha256.New()
		fmt.Fprintf(all, "%x\n%s", common.Sum(nil), own["tests/"+s.name()])
		if s.boots {
			fmt.Fprint(all, own["agentbox.deb"], own["older.deb"], o.cuts)
		}
		digests[s.pkg] = fmt.Sprintf("%x", all.Sum(nil))
	}
	return digests, nil
}
