package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// All of a bundle that is not the wrapper's business keeps its bytes.
func TestEditKeeps(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	const before = `{"ociVersion":"1.0.2","process":{"env":["A=1","WHO=x","B=\u00e9","WHO=y"],"user":{"uid":0},"new":{"deep":[1e400,0.10,18446744073709551616]},"args":["<&>"]},` +
		`"linux":{"x":12345678901234567890123},"annotations":{"k":"<v>"},"unknown":null}`
	const after = `{"annotations":{"k":"<v>","org.criu.config":"/c"},"linux":{"x":12345678901234567890123},"ociVersion":"1.0.2",` +
		`"process":{"args":["<&>"],"env":["A=1","WHO=<z>","B=\u00e9","LAST=&"],"new":{"deep":[1e400,0.10,18446744073709551616]},"user":{"uid":0}},"unknown":null}`
	if err := os.WriteFile(path, []byte(before), 0o604); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, 3, 4); err != nil {
		t.Fatal(err)
	}
	if err := edit(dir, changes{env: []string{"WHO=old", "LAST=&", "WHO=<z>"}, config: "/c"}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil || string(got) != after {
		t.Errorf("got  %s\nwant %s", got, after)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&0o777 != 0o604 || st.Uid != 3 || st.Gid != 4 {
		t.Errorf("%+v, %v", st, err)
	}
	// Bytes that are no UTF-8, as an engine may pass them, stay in the entries that stay.
	if err := os.WriteFile(path, []byte("{\"process\":{\"env\":[\"X=\xff\xfe\"]}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := edit(dir, changes{env: []string{"Y=1"}}); err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(path); string(got) != "{\"process\":{\"env\":[\"X=\xff\xfe\",\"Y=1\"]}}" {
		t.Errorf("%q", got)
	}
	for _, bad := range []string{"", "[]", `{"process":[]}`, `{"process":{"env":{}}}`, `{"process":{"env":[1]}}`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := edit(dir, changes{env: []string{"Y=1"}}); err == nil {
			t.Errorf("edit of %s went well", bad)
		}
		if got, _ := os.ReadFile(path); string(got) != bad {
			t.Errorf("%s became %s", bad, got)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Files are written in place, and only files.
// A network that is to be made is cut off before the engine's hooks make it; one
// that is there is held still, and a stand-in made, after them.
func TestEditHooks(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path string
		to   changes
		want []string
	}{
		{
			"", changes{cut: true, standIn: []string{"192.0.2.1"}},
			[]string{cutVerb, "/first", "/theirs", standInVerb + " 192.0.2.1"},
		},
		{"/run/netns/x", changes{cut: true, standIn: []string{"192.0.2.1"}}, []string{"/first", "/theirs", downVerb}},
		{"", changes{standIn: []string{}}, []string{"/first", "/theirs", standInVerb}},
		{"", changes{resolve: true}, []string{"/first", "/theirs"}},
	} {
		dir := t.TempDir()
		text := `{"hooks": {"createRuntime": [{"path": "/theirs"}], "prestart": [{"path": "/first"}]}, "linux": {"namespaces": [{"type": "pid"}, {"type": "network", "path": "` + c.path + `"}]}}`
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := edit(dir, c.to); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(dir, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		var spec specs.Spec
		if err := json.Unmarshal(data, &spec); err != nil {
			t.Fatal(err)
		}
		var got []string
		//lint:ignore SA1019 Docker has its own there
		for _, h := range append(spec.Hooks.Prestart, spec.Hooks.CreateRuntime...) {
			if h.Path == self && len(h.Args) > 1 && h.Args[0] == self {
				got = append(got, strings.Join(h.Args[1:], " "))
			} else {
				got = append(got, h.Path)
			}
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%+v with the network %q: %q, want %q", c.to, c.path, got, c.want)
		}
	}
}

// A bundle that is edited still means the same to a Go program, but for what
// was asked.
func TestEditRealBundle(t *testing.T) {
	b := newBox(t, printEnv, nil)
	read := func() (s specs.Spec) {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(b.Bundle, "config.json"))
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(data, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	want := read()
	if err := edit(b.Bundle, changes{env: []string{"X=1"}, config: "/c"}); err != nil {
		t.Fatal(err)
	}
	want.Process.Env = append(want.Process.Env, "X=1")
	want.Annotations = map[string]string{criuConfig: "/c"}
	if got := read(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}
