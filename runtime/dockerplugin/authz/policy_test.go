package authz

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestParseErrors(t *testing.T) {
	for yaml, want := range map[string]string{
		"privilegd: true":                            `1:1: invalid argument: unknown key "privilegd"`,
		"mounts:\n  allow: [/a]\n  alow: [/b]":       `3:3: invalid argument: unknown key "mounts.alow"`,
		"privileged: yes please":                     "1:13: invalid argument: privileged: neither true nor false",
		"privileged: \"true\"":                       "1:13: invalid argument: privileged: neither",
		"privileged: true\nprivileged: false":        `2:1: invalid argument: the key "privileged"`,
		"host_namespaces: [network, time]":           `1:28: invalid argument: host_namespaces: "time" is none of`,
		"host_namespaces: network":                   "1:18: invalid argument: host_namespaces: not a list",
		"mounts: [/a]":                               "1:9: invalid argument: mounts: not a mapping",
		"mounts: {allow: [srv]}":                     `1:18: invalid argument: mounts.allow: "srv" is no absolute path`,
		"mounts: {allow: [/a/../b]}":                 "1:18: invalid argument: mounts.allow:",
		"mounts: {allow: [/a/**/b]}":                 "** can only be the last",
		"mounts: {allow: ['/a/[']}":                  "is no pattern",
		"mounts: {allow: [/a//b]}":                   "empty component",
		"devices: [null]":                            "1:11: invalid argument: devices: an empty item",
		"devices: [{a: b}]":                          "1:11: invalid argument: devices: not a string",
		"capabilities: {allow: ['SYS ADMIN']}":       "is no capability",
		"security_opt: [unconfined]":                 "is not KEY=VALUE",
		"unknown_calls: maybe":                       "neither refuse nor allow",
		"runtimes: ['']":                             "runtimes: it is empty",
		"- a":                                        "1:1: invalid argument: a policy is a mapping",
		"{}\n---\n{}":                                "a second document",
		"a: [":                                       ":1: invalid argument: ",
		"devices: &x [/dev/null]":                    "anchors",
		"mounts: &m {allow: [/a]}\ncapabilities: *m": "anchors",
		"<<: {privileged: true}":                     `unknown key "<<"`,
		"? [a]\n: b":                                 "unknown key",
		"privileged: true\n\tbad":                    ":1: invalid argument: ",
	} {
		_, err := Parse([]byte(yaml))
		if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%q: %v, want %q", yaml, err, want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, empty := range []string{"", "# nothing\n", "{}", "devices:\nmounts:\n", "null", "---\n"} {
		if p, err := Parse([]byte(empty)); err != nil || p.Privileged || p.Mounts.Allow != nil || !p.Mounts.volumes() {
			t.Errorf("%q: %+v, %v", empty, p, err)
		}
	}
	p, err := Parse([]byte(everything + "\n# end"))
	if err != nil {
		t.Fatal(err)
	}
	if !p.Privileged || p.Mounts.Allow[0] != "/**" || p.UnknownCalls != Allow || p.Capabilities.Allow[0] != "ALL" ||
		len(p.HostNamespaces) != 6 {
		t.Errorf("%+v", p)
	}
	if p, err := Parse([]byte("mounts: {volumes: false}")); err != nil || p.Mounts.volumes() {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "p.yaml")
	if _, err := Load(file); !errors.Is(err, fault.ErrNotFound) {
		t.Error(err)
	}
	if err := os.WriteFile(file, []byte("a: b"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(file); err == nil || !strings.HasPrefix(err.Error(), file+":1:1: ") {
		t.Error(err)
	}
	if err := os.WriteFile(file, make([]byte, maxPolicy+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(file); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
	if err := Trusted(file); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(file, 0o620); err != nil {
		t.Fatal(err)
	}
	if err := Trusted(file); !errors.Is(err, fault.ErrDenied) || len(fault.Hint(err)) == 0 {
		t.Error(err)
	}
}

func TestCovers(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"/", "/", true}, {"/", "/a", false}, {"/**", "/", true}, {"/**", "/a/b", true},
		{"/x/*", "/x/a", true}, {"/x/*", "/x", false}, {"/x/*", "/x/a/b", false},
		{"/x/**", "/x", true}, {"/x/**", "/x/a/b", true}, {"/x/**", "/xa", false},
		{"/x/*/w", "/x/a/w", true}, {"/x/*/w", "/x/a/v", false}, {"/x/a*", "/x/ab", true},
		{"/x/", "/x", true}, {"/x/*/**", "/x", false}, {"/x/*/**", "/x/a", true},
	} {
		if got := covers(c.pattern, c.path); got != c.want {
			t.Errorf("%s covers %s: %v", c.pattern, c.path, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(everything))
	f.Add([]byte(allowing))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse(data)
		if err != nil && !errors.Is(err, fault.ErrInvalid) {
			t.Fatal(err)
		}
		if err == nil && p == nil {
			t.Fatal("no policy")
		}
	})
}
