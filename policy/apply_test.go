package policy

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestValidators reads each form of a validator, and what is recorded of it.
func TestValidators(t *testing.T) {
	p := resolved(t, `apply:
  validators:
    - go test ./...
    - [go, vet, ./...]
    - {run: "make\nlint", timeout: 1h, network: sandbox}
    - {name: the build, run: [make, "-j 2"]}
`)
	want := []Validator{
		{"go test ./...", []string{"sh", "-c", "go test ./..."}, 10 * time.Minute, ValidatorNone},
		{"go vet ./...", []string{"go", "vet", "./..."}, 10 * time.Minute, ValidatorNone},
		{"make lint", []string{"sh", "-c", "make\nlint"}, time.Hour, ValidatorSandbox},
		{"the build", []string{"make", "-j 2"}, 10 * time.Minute, ValidatorNone},
	}
	if d := cmp.Diff(want, p.Rules.Apply.Validators); d != "" {
		t.Error(d)
	}
	again, err := ParseCanonical("p", p.Rules.Canonical())
	if err != nil || again.Rules.Digest() != p.Rules.Digest() {
		t.Fatalf("%+v, %v", again, err)
	}
	if d := cmp.Diff(want, again.Rules.Apply.Validators); d != "" {
		t.Error(d)
	}
	if got := nameOf(strings.Repeat("ü", 100)); len([]rune(got)) != maxNameLength || !strings.HasSuffix(got, "...") {
		t.Errorf("a long name: %q", got)
	}
}

// TestValidatorsAdd: a policy that narrows another one adds to its validators, and cannot drop any.
func TestValidatorsAdd(t *testing.T) {
	f := finder(t, map[string]string{
		"base": "apply: {validators: [a]}\n",
		"none": "base: base\napply: {validators: []}\n",
		"more": "base: base\napply: {validators: [b, a]}\n",
		"many": "base: base\napply: {validators: [b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q]}\n",
	})
	for name, want := range map[string][]string{"base": {"a"}, "none": {"a"}, "more": {"a", "b"}} {
		p, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, v := range p.Rules.Apply.Validators {
			got = append(got, v.Name)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if _, err := f.Find("many"); err == nil || !strings.Contains(err.Error(), "more than 16, those of the base among") {
		t.Error(err)
	}
}

func TestValidatorsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"apply: [a]":                                               "apply: not a mapping",
		"apply: {validator: [a]}":                                  "did you mean validators?",
		"apply: {validators: make}":                                "apply.validators: not a list",
		"apply: {validators: [1]}":                                 `not a text; write it "in quotes"`,
		"apply: {validators: ['']}":                                "apply.validators: empty",
		"apply: {validators: [[]]}":                                "not a program and at most 63 arguments",
		"apply: {validators: [a, a]}":                              "stands here a second time",
		"apply: {validators: [{name: a}]}":                         "a validator without run",
		"apply: {validators: [{run: a, rn: b}]}":                   "did you mean run?",
		"apply: {validators: [{run: a, timeout: 7h}]}":             "7h is more than 6h",
		"apply: {validators: [{run: a, timeout: 0s}]}":             "is not a duration",
		"apply: {validators: [{run: a, network: host}]}":           "is none of none, sandbox",
		"apply: {validators: [{run: a, run: b}]}":                  "stands here a second time",
		"apply: {validators: [{run: a, name: \"b\\n\"}]}":          "is no name",
		"apply: {validators: [\"a\\0\"]}":                          "is no command",
		"apply: {validators: [&x a]}":                              "anchors",
		"apply: {validators: [" + strings.Repeat("a, ", 17) + "]}": "more than 16",
	} {
		_, err := (Finder{}).Resolve("p", []byte(text))
		if !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %s", text, err, want)
		}
	}
}

// TestApprove: of two rules the stricter one counts, and a policy cannot be laxer than its base.
func TestApprove(t *testing.T) {
	f := finder(t, map[string]string{
		"base":   "apply: {approve: {at: 5, expires: 1h, paths: [a]}}\n",
		"same":   "base: base\n",
		"strict": "base: base\napply: {approve: {at: 3, expires: 1m, paths: [b, a]}}\n",
		"more":   "base: base\napply: {approve: {at: 6}}\n",
		"longer": "base: base\napply: {approve: {expires: 2h}}\n",
	})
	for name, want := range map[string]Approve{
		"base": {5, time.Hour, []string{"a"}}, "same": {5, time.Hour, []string{"a"}},
		"strict": {3, time.Minute, []string{"a", "b"}},
	} {
		p, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, p.Rules.Apply.Approve); d != "" {
			t.Errorf("%s: %s", name, d)
		}
		again, err := ParseCanonical(name, p.Rules.Canonical())
		if err != nil || again.Rules.Digest() != p.Rules.Digest() {
			t.Errorf("%s: %+v, %v", name, again, err)
		}
	}
	for name, want := range map[string]string{"more": "6 is more than 5", "longer": "2h is more than 1h"} {
		if _, err := f.Find(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	for text, want := range map[string]string{
		"apply: {approve: {at: 0}}":           "is not a number from 1 to 1000",
		"apply: {approve: {at: 1001}}":        "is not a number from 1 to 1000",
		"apply: {approve: {expires: 8d}}":     "is more than",
		"apply: {approve: {paths: [/etc]}}":   "relative to the directory",
		"apply: {approve: {paths: [a/../b]}}": "relative to the directory",
		"apply: {approve: {paths: ['[']}}":    "wrong [class]",
		"apply: {approve: {paths: infra}}":    "not a list",
		"apply: {approve: {who: me}}":         "unknown key \"apply.approve.who\"",
		"apply: {approve: [1]}":               "apply.approve: not a mapping",
	} {
		_, err := (Finder{}).Resolve("p", []byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	one := Apply{Approve: Approve{At: 5, Paths: []string{"a"}}}
	two := Apply{Approve: Approve{At: 7, Expires: time.Hour, Paths: []string{"b"}}}
	want := Approve{5, time.Hour, []string{"a", "b"}}
	for _, got := range []Apply{one.With(two), {Approve: want}} {
		if d := cmp.Diff(want, got.Approve); d != "" || !got.Asks() {
			t.Error(d)
		}
	}
	if (Apply{}).With(Apply{}).Asks() {
		t.Error("no rules ask for something")
	}
	a := Approve{Paths: []string{"infra", "*.sql", "src/**/x", "docs/*"}}
	for rel, want := range map[string]string{
		"infra": "infra", "infra/a/b": "infra", "infrared": "", "a.sql": "*.sql", "d/a.sql": "", "src/x": "src/**/x",
		"src/a/b/x": "src/**/x", "src/a/b": "", "docs/a": "docs/*", "docs/a/b": "docs/*", "docs": "", "": "", ".": "",
	} {
		if got := a.Covers(rel); got != want {
			t.Errorf("%s: %q, want %q", rel, got, want)
		}
	}
	for _, c := range []struct{ pattern, rel, covers, below string }{
		{"**", ".", "**", "**"}, {"*", ".", "", ""}, {"infra", ".", "", ""},
		{"infra/*.tf", "infra", "", "infra/*.tf"}, {"infra/a/*.tf", "infra", "", "infra/a/*.tf"},
		{"infra/a/*.tf", "infra/a", "", "infra/a/*.tf"}, {"infra/*.tf", "infrared", "", ""},
		{"infra/*.tf", "infra/a.sh", "", ""}, {"infra/*.tf", "infra/a.tf", "infra/*.tf", "infra/*.tf"},
		{"infra/*/x", "infra/a", "", "infra/*/x"}, {"infra/**/x", "infra/a/b", "", "infra/**/x"},
		{"*/x", "a", "", "*/x"}, {"*/x", "a/b", "", ""},
		// What is below the symlink is covered where it is.
		{"**/*.sql", "a", "", ""}, {"**/*.sql", "a/b.sql", "**/*.sql", "**/*.sql"},
		{"**/db/*.sql", "a/db", "", "**/db/*.sql"}, {"**/db/*.sql", "db", "", "**/db/*.sql"},
		{"**/db/*.sql", "a/b", "", ""}, {"{a,**}/b/c", "a", "", "{a,**}/b/c"}, {"{a,**}/b/c", "d", "", ""},
	} {
		a := Approve{Paths: []string{c.pattern}}
		if covers, below := a.Covers(c.rel), a.CoversBelow(c.rel); covers != c.covers || below != c.below {
			t.Errorf("%s, %s: %q and %q, want %q and %q", c.pattern, c.rel, covers, below, c.covers, c.below)
		}
	}
}

// TestCanaries reads canaries, and has a policy add its own to those of its base.
func TestCanaries(t *testing.T) {
	f := finder(t, map[string]string{
		"base": "apply: {canary: {workspace: /work, check: 'true'}}\n",
		"more": "base: base\napply: {canary: [{paths: [src, '*.md'], check: [make, x], name: docs, " +
			"timeout: 1m, network: sandbox}]}\n",
		"none": "base: base\napply: {canary: []}\n",
	})
	base := Canary{
		Validator: Validator{"true", []string{"sh", "-c", "true"}, 10 * time.Minute, ValidatorNone}, Workspace: "/work",
	}
	docs := Canary{
		Validator: Validator{"docs", []string{"make", "x"}, time.Minute, ValidatorSandbox}, Paths: []string{"src", "*.md"},
	}
	for name, want := range map[string][]Canary{"base": {base}, "none": {base}, "more": {base, docs}} {
		p, err := f.Find(name)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseCanonical(name, p.Rules.Canonical())
		if err != nil {
			t.Fatal(err)
		}
		for _, rules := range []Rules{p.Rules, again.Rules} {
			if d := cmp.Diff(want, rules.Apply.Canaries); d != "" || !rules.Apply.Asks() {
				t.Errorf("%s: %s", name, d)
			}
		}
	}
	for _, c := range []struct {
		of             Canary
		workspace, rel string
		want           bool
	}{
		{base, "/work", "a/b", true}, {base, "/other", "a/b", false},
		{docs, "/work", "src/a", true}, {docs, "/work", "a.md", true}, {docs, "/work", "a/b.md", false},
	} {
		if got := c.of.Takes(c.workspace, c.rel); got != c.want {
			t.Errorf("%s takes %s of %s: %v", c.of.Name, c.rel, c.workspace, got)
		}
	}
	for text, want := range map[string]string{
		"apply: {canary: make}":                                                    "write {paths: [PATTERN...], check: COMMAND}",
		"apply: {canary: {check: a}}":                                              "a canary without paths and workspace",
		"apply: {canary: {paths: [a]}}":                                            "a canary without check",
		"apply: {canary: {paths: [], check: a}}":                                   "a canary without paths and workspace",
		"apply: {canary: {paths: [/a], check: a}}":                                 "apply.canary.paths: ",
		"apply: {canary: {workspace: a, check: a}}":                                "is no clean, absolute path",
		"apply: {canary: {workspace: /a/, check: a}}":                              "is no clean, absolute path",
		"apply: {canary: {paths: [a], run: a}}":                                    "unknown key \"apply.canary.run\"",
		"apply: {canary: {paths: [a], check: a, timeout: 7h}}":                     "7h is more than 6h",
		"apply: {canary: {paths: [a], check: a, check: b}}":                        "stands here a second time",
		"apply: {canary: {paths: [a], paths: [b], check: b}}":                      "stands here a second time",
		"apply: {canary: {paths: [a], check: a, network: bridge}}":                 "is none of none, sandbox",
		"apply: {canary: [" + strings.Repeat("{paths: [a], check: a}, ", 5) + "]}": "more than 4",
	} {
		_, err := (Finder{}).Resolve("p", []byte(text))
		if !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60s: %v, want %s", text, err, want)
		}
	}
}
