package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const modulePath = "github.com/agentbox/agentbox"

// suite is the tests of a package.
type suite struct {
	pkg  string
	args []string // more of its command line
	// boots: it has machines of its own, whose disk lasts, and of agentbox what the
	// package brings.
	boots bool
}

// name is the suite's as that of a file. Packages have packages beneath them.
func (s suite) name() string { return strings.ReplaceAll(s.pkg, "/", "-") }

// binary is where its compiled tests are, in the payload that is at root.
func (s suite) binary(root string) string { return filepath.Join(root, "tests", s.name()) }

// suites are all that is worth a machine of its own, the most telling first:
// what depends on the kernel, cgroups, systemd, and versions of programs.
var suites = []suite{
	{pkg: "runtime/oci"},
	{pkg: "criu/freezer"},
	{pkg: "criu"},
	{pkg: "cmd/agentbox-runtime"},
	{pkg: "test"},
	{pkg: "test/systemd", boots: true},
	{pkg: "overlay"},
	{pkg: "runtime/internal/kernel"},
	{pkg: "runtime/internal/apparmor"},
	{pkg: "runtime/doctor"},
	{pkg: "runtime/network"},
	{pkg: "runtime/network/egress"},
	{pkg: "policy"},
	{pkg: "runtime/store"},
	{pkg: "runtime/volume"},
	{pkg: "runtime/engine"},
	{pkg: "cmd/agentbox"},
	{pkg: "cmd/docker-agentbox"},
	{pkg: "runtime/docker"},
	{pkg: "test/docker"},
	{pkg: "runtime/dockerplugin"},
	{pkg: "runtime/containerd"},
	{pkg: "test/containerd"},
	{pkg: "runtime/podman"},
	{pkg: "runtime/portable"},
	{pkg: "internal/setup"},
}

// builds are the programs that tests build, by the tags they do it with.
var builds = map[string][]string{
	"": {"cmd/agentbox", "cmd/agentbox-runtime", "cmd/docker-agentbox", "test/testdata/steady", "test/testdata/echo",
		"test/testdata/escape", "test/testdata/waits", "test/testdata/stops", "test/testdata/state",
		"test/testdata/unaccepted",
		"criu/testdata/ping", "criu/testdata/watch", "criu/testdata/moves", "criu/testdata/talk"},
	"failpoint": {"cmd/agentbox", "cmd/agentbox-runtime", "cmd/docker-agentbox"},
}

// chosen returns the suites of some names, in the order of suites.
func chosen(names []string) ([]suite, error) {
	if len(names) == 0 {
		return suites, nil
	}
	var list []suite
	for _, s := range suites {
		if slices.Contains(names, s.pkg) {
			list = append(list, s)
		}
	}
	for _, n := range names {
		if !slices.ContainsFunc(suites, func(s suite) bool { return s.pkg == n }) {
			return nil, fmt.Errorf("there is no suite %q; --list shows all", n)
		}
	}
	return list, nil
}

// result is what came of a suite.
type result struct {
	suite                   suite
	passed, failed, skipped int
	took                    time.Duration
	err                     error // it could not be run to its end
	facts                   string
	failures                []string
	before                  time.Time // when it ended, if that was in an earlier run
}

func (r result) ok() bool { return r.err == nil && r.failed == 0 && r.passed > 0 }

// none reports whether the suite ran nothing, which proves nothing.
func (r result) none() bool { return r.err == nil && r.failed == 0 && r.passed == 0 }

// add adds what came of one test of the suite, and reports whether it passed.
func (r *result) add(name string, part result) bool {
	if part.none() {
		part.err = errors.New("it was not run")
	}
	if part.err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("%s: %w", name, part.err))
	}
	r.passed, r.failed, r.skipped = r.passed+part.passed, r.failed+part.failed, r.skipped+part.skipped
	r.failures = append(r.failures, part.failures...)
	return part.ok()
}

// topLevel is what of a -run is for names of top-level tests: of each alternative what
// is before its first slash, as package testing splits it.
func topLevel(run string) string {
	var top strings.Builder
	square, round, sub := 0, 0, false
	for i := 0; i < len(run); i++ {
		from := i
		switch c := run[i]; {
		case c == '\\' && i+1 < len(run):
			i++
		case c == '[':
			square++
		case c == ']':
			square = max(square-1, 0)
		case square > 0:
		case c == '(':
			round++
		case c == ')':
			round--
		case c == '/' && round == 0:
			sub = true
		case c == '|' && round == 0:
			sub = false
		}
		if !sub {
			top.WriteString(run[from : i+1])
		}
	}
	return top.String()
}

func (r result) String() string {
	word := "ok  "
	if r.none() {
		word = "NONE"
	} else if !r.ok() {
		word = "FAIL"
	}
	s := fmt.Sprintf("%s  %-26s %4d passed %4d failed %4d skipped %8.1fs", word, r.suite.pkg, r.passed, r.failed,
		r.skipped, r.took.Seconds())
	if !r.before.IsZero() {
		s += "  on " + r.before.Format("2006-01-02 15:04")
	}
	if r.err != nil {
		first, _, _ := strings.Cut(r.err.Error(), "\n")
		s += "  " + first
	}
	return s
}

// event is one of test2json's.
type event struct {
	Action, Test, Output string
	Package              string `json:",omitempty"`
}

var (
	errBound  = errors.New("which is its bound (-timeout)")
	errUnkept = errors.New("the suite was ended: its results cannot be kept")
)

// tally reads the events of a suite and counts its top-level tests. The output
// of those that failed goes to show, or everything as it comes.
func (r *result) tally(events io.Reader, show io.Writer, all bool) error {
	output, running := map[string]*bytes.Buffer{}, map[string]bool{}
	var bound error
	for dec := json.NewDecoder(events); ; {
		var e event
		if err := dec.Decode(&e); err == io.EOF {
			for _, top := range slices.Sorted(maps.Keys(running)) {
				r.failed++
				r.failures = append(r.failures, top+" (it did not end)")
				r.show(show, output[top])
			}
			return bound
		} else if err != nil {
			return err
		}
		if after, ok := strings.CutPrefix(e.Output, "panic: test timed out after "); ok {
			bound = fmt.Errorf("ended after %s, %w", strings.TrimSpace(after), errBound)
		}
		top, sub, _ := strings.Cut(e.Test, "/")
		switch {
		case e.Action == "run" && sub == "":
			running[top] = true
			continue
		case e.Action == "output":
			if output[top] == nil {
				output[top] = new(bytes.Buffer)
			}
			if all {
				_, _ = io.WriteString(show, e.Output)
			} else {
				output[top].WriteString(e.Output)
			}
			continue
		case e.Test == "" || sub != "":
			if e.Test == "" && e.Action == "fail" && r.failed == 0 && len(running) == 0 {
				// Not a test's failure: the whole ended badly.
				r.failed++
				r.failures = append(r.failures, "(the suite)")
				r.show(show, output[""])
			}
			continue
		case e.Action == "pass":
			r.passed++
		case e.Action == "skip":
			r.skipped++
		case e.Action == "fail":
			r.failed++
			r.failures = append(r.failures, top)
			r.show(show, output[top])
		default:
			continue
		}
		delete(output, top)
		delete(running, top)
	}
}

func (r *result) show(to io.Writer, output *bytes.Buffer) {
	if output != nil {
		_, _ = to.Write(output.Bytes())
	}
}

// verdict prints the results of suites and returns why all is not well. With a -run
// a suite may have nothing that it matches, but not all of them.
func verdict(w io.Writer, list []suite, results []result, facts, run string) error {
	fmt.Fprintf(w, "\n%s\n\n", facts)
	var lost, failed error
	ran := false
	for _, r := range results {
		fmt.Fprintln(w, r)
		for _, name := range r.failures {
			fmt.Fprintln(w, "        ", name)
		}
		ran = ran || !r.none()
		switch {
		case r.err != nil && lost == nil:
			lost = fmt.Errorf("%s: %w", r.suite.pkg, r.err)
		case r.none() && run == "":
			failed = cmp.Or(failed, fmt.Errorf("of %s nothing was run", r.suite.pkg))
		case r.failed > 0:
			failed = cmp.Or(failed, errors.New("tests failed"))
		}
	}
	if missing := len(list) - len(results); missing > 0 {
		for _, s := range list {
			if !slices.ContainsFunc(results, func(r result) bool { return r.suite.pkg == s.pkg }) {
				fmt.Fprintln(w, "not run:", s.pkg)
			}
		}
		failed = cmp.Or(failed, fmt.Errorf("%d suites were not run", missing))
	} else if !ran {
		failed = cmp.Or(failed, fmt.Errorf("nothing was run: no test passed or failed that matches -run %q", run))
	}
	return cmp.Or(lost, failed)
}
