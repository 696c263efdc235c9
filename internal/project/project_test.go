package project

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/jsonschema-go/jsonschema"
	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/policy"
)

const full = `# a project
image: debian
memory: 2g
cpus: 1.5
network: filtered
egress:
  - pypi.org 443
  - "*.debian.org 80,443"
env:
  CI: "1"
  EMPTY: ""
secrets: {token: "file:/etc/token", key: "env:API_KEY"}
apply:
  validators:
    - make test
    - {name: lint, run: [make, lint], timeout: 1m, network: sandbox}
  approve: {at: 5, expires: 2d, paths: [infra, "*.sql"]}
  canary: {paths: [conf], check: make smoke}
`

func TestParse(t *testing.T) {
	got, err := Parse([]byte(full))
	if err != nil {
		t.Fatal(err)
	}
	want := File{
		Image: "debian", Memory: "2g", CPUs: "1.5", Network: "filtered",
		Egress:  []string{"pypi.org 443", "*.debian.org 80,443"},
		Env:     map[string]string{"CI": "1", "EMPTY": ""},
		Secrets: map[string]string{"token": "file:/etc/token", "key": "env:API_KEY"},
		Apply: policy.Apply{Validators: []policy.Validator{
			{Name: "make test", Run: []string{"sh", "-c", "make test"}, Timeout: 10 * time.Minute, Network: "none"},
			{Name: "lint", Run: []string{"make", "lint"}, Timeout: time.Minute, Network: "sandbox"},
		}, Approve: policy.Approve{At: 5, Expires: 48 * time.Hour, Paths: []string{"infra", "*.sql"}},
			Canaries: []policy.Canary{{Paths: []string{"conf"}, Validator: policy.Validator{
				Name: "make smoke", Run: []string{"sh", "-c", "make smoke"}, Timeout: 10 * time.Minute, Network: "none",
			}}}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for _, empty := range []string{"", "# nothing\n", "---\n"} {
		if got, err := Parse([]byte(empty)); err != nil || !reflect.DeepEqual(got, File{}) {
			t.Errorf("%q: %+v, %v", empty, got, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"imag: debian\n", `.agentbox.yaml:1: unknown key "imag"; known are image, memory, cpus, network, egress, env,`},
		{"network: lan\n", `.agentbox.yaml:1: network: "lan" is none of none, host, bridge, filtered`},
		{"secrets:\n  token: hush\n", `.agentbox.yaml:2: secrets.token: write file:PATH or env:VARIABLE`},
		{"image: debian\nvalidators: [make]\n", `.agentbox.yaml:2: unknown key "validators"`},
		{"image: [debian]\n", `.agentbox.yaml:1: image: not a text`},
		{"image: ''\n", `.agentbox.yaml:1: image: empty`},
		{"memory: 512\n", `.agentbox.yaml:1: memory: not a text; write it "in quotes"`},
		{"cpus: many\n", `.agentbox.yaml:1: cpus: not a number`},
		{"egress: pypi.org\n", `.agentbox.yaml:1: egress: not a list`},
		{"egress:\n- pypi.org\n- 443\n", `.agentbox.yaml:3: egress: not a text`},
		{"env: [A=b]\n", `.agentbox.yaml:1: env: not a mapping`},
		{"env:\n  PORT: 8080\n", `.agentbox.yaml:2: env.PORT: not a text; write it "in quotes"`},
		{"env: {A=b: c}\n", `.agentbox.yaml:1: env: "A=b" is not a name`},
		{"env:\n  A: b\n  A: c\n", `.agentbox.yaml:3: "A" stands here a second time`},
		{"image: a\nimage: b\n", `.agentbox.yaml:2: "image" stands here a second time`},
		{"image: &x a\nmemory: *x\n", `.agentbox.yaml:2: memory: not a text`},
		{"<<: {image: a}\n", `.agentbox.yaml:1: the file: not a key`},
		{"- image\n", `.agentbox.yaml:1: the file: not a mapping`},
		{"image: a\n---\nimage: b\n", `.agentbox.yaml:2: a second document`},
		{"image: 'a\n", `.agentbox.yaml:`},
		{"apply:\n  validators: make\n", `.agentbox.yaml:2: apply.validators: not a list`},
		{"apply:\n  validators:\n  - 1\n  - a\n  - [b, '']\n", ".agentbox.yaml:5: apply.validators: empty"},
		{"apply: {hooks: []}\n", `.agentbox.yaml:1: unknown key "apply.hooks"`},
		{"env: {" + strings.Repeat("A, ", 300) + "}\n", "more than 256 keys"},
	} {
		_, err := Parse([]byte(c.text))
		if !errors.Is(err, fault.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60q: %v, want %s", c.text, err, c.want)
		}
	}
	// All that is wrong is told at once.
	if _, err := Parse([]byte("a: 1\nb: 2\n")); strings.Count(err.Error(), "unknown key") != 2 {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse(data)
		if err != nil && !errors.Is(err, fault.ErrInvalid) {
			t.Fatal(err)
		}
		for _, line := range file.Words() {
			if strings.ContainsFunc(line, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				t.Fatalf("a control character: %q", line)
			}
		}
	})
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, Name)
	if data, err := Read(dir); data != nil || err != nil {
		t.Fatalf("%q, %v", data, err)
	}
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(path, "")
	if data, err := Read(dir); data == nil || err != nil {
		t.Fatalf("an empty file: %q, %v", data, err)
	}
	put(path, strings.Repeat("#", maxFile+1))
	if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Error(err)
	}
	outside := filepath.Join(t.TempDir(), "outside")
	put(outside, "image: stolen\n")
	put(filepath.Join(dir, "other.yaml"), "image: inside\n")
	for target, want := range map[string]string{
		outside: "", "../" + filepath.Base(dir) + "/other.yaml": "", "nowhere": "", "other.yaml": "image: inside\n",
	} {
		if err := errors.Join(os.Remove(path), os.Symlink(target, path)); err != nil {
			t.Fatal(err)
		}
		if data, err := Read(dir); string(data) != want || (err == nil) != (want != "") {
			t.Errorf("a link to %s: %q, %v", target, data, err)
		}
	}
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(dir); !errors.Is(err, fault.ErrInvalid) {
		t.Errorf("a FIFO: %v", err)
	}
}

func TestWords(t *testing.T) {
	f, err := Parse([]byte(full))
	if err != nil {
		t.Fatal(err)
	}
	f.Env["BAD"] = "a\x1b[2J\nb\u202e"
	want := `runs the image debian
may use 2g of memory
may use 1.5 cores
has the network filtered
reaches pypi.org 443
reaches *.debian.org 80,443
sets the variable BAD to "a\x1b[2J\nb\u202e"
sets the variable CI to 1
sets the variable EMPTY to ""
reads the secret key from your variable API_KEY
reads the secret token from your file /etc/token`
	if d := cmp.Diff(want, strings.Join(f.Words(), "\n")); d != "" {
		t.Error(d)
	}
}

func TestTrust(t *testing.T) {
	trust := Trust{filepath.Join(t.TempDir(), "new", "trusted")}
	has := func(dir, data string) bool {
		t.Helper()
		ok, err := trust.Has(dir, []byte(data))
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if has("/a", "x") {
		t.Error("trusted from the start")
	}
	for range 2 {
		if err := trust.Add("/a", []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	if !has("/a", "x") || has("/a", "y") || has("/b", "x") || has("/ax", "") {
		t.Error("trusted is not what was confirmed")
	}
}

// TestSchema holds the schema to the keys that Parse reads, and to what it says of their values.
func TestSchema(t *testing.T) {
	data, err := os.ReadFile("../../docs/agentbox.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema jsonschema.Schema
	if err := json.Unmarshal(data, &schema); err != nil {
		t.Fatal(err)
	}
	var names, fields []string
	for name := range schema.Properties {
		names = append(names, name)
	}
	for i := range reflect.TypeFor[File]().NumField() {
		name, _, _ := strings.Cut(reflect.TypeFor[File]().Field(i).Tag.Get("json"), ",")
		fields = append(fields, name)
	}
	have := known()
	slices.Sort(names)
	slices.Sort(fields)
	slices.Sort(have)
	if !slices.Equal(names, fields) || !slices.Equal(names, have) {
		t.Errorf("the schema has %v, File %v, Parse %v", names, fields, have)
	}
	resolved, err := schema.Resolve(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		full, "image: a\n", "cpus: 2\n", "egress: []\n", "env: {}\n", "imag: a\n", "image: 1\n", "image: ''\n",
		"memory: 512\n", "cpus: '2'\n", "network: [none]\n", "network: lan\n", "egress: a\n", "egress: [1]\n",
		"egress: ['']\n", "env: {A: 1}\n", "env: [A=b]\n", "secrets: {a: 1}\n", "secrets: {a: x}\n",
		"secrets: {a: 'env:'}\n", "env: {A=b: c}\n", "secrets: {a/b: 'env:A'}\n", "secrets: {a: 'file:b'}\n",
		"apply: {}\n", "apply: {validators: []}\n", "apply: {validators: [a, [b, c]]}\n", "apply: []\n",
		"apply: {validators: a}\n", "apply: {validators: [1]}\n", "apply: {validators: [[]]}\n", "apply: {hooks: []}\n",
		"apply: {canary: {paths: [a], check: b}}\n", "apply: {canary: [{workspace: /a, check: [b]}]}\n",
		"apply: {canary: []}\n",
		"apply: {canary: {check: b}}\n", "apply: {canary: {paths: [a]}}\n", "apply: {canary: {workspace: a, check: b}}\n",
		"apply: {approve: {at: 0}}\n", "apply: {approve: {paths: ['']}}\n", "apply: {approve: {by: me}}\n",
		"apply: {validators: [{run: a, network: none, timeout: 5m, name: b}]}\n", "apply: {validators: [{name: a}]}\n",
		"apply: {validators: [{run: a, network: host}]}\n", "apply: {validators: [{run: a, on: b}]}\n",
	} {
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			t.Fatal(err)
		}
		_, perr := Parse([]byte(text))
		if serr := resolved.Validate(value); (serr == nil) != (perr == nil) {
			t.Errorf("%q: by the schema %v, by Parse %v", text, serr, perr)
		}
	}
}
