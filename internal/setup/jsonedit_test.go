package setup

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

func TestAddRuntime(t *testing.T) {
	for _, tt := range []struct {
		name, in, out string
		makeDefault   bool
	}{
		{name: "no document", in: "", out: `{
  "runtimes": {
    "agentbox": {
      "path": "/p"
    }
  }
}
`},
		{name: "empty object", in: "{}", out: `{
  "runtimes": {
    "agentbox": {
      "path": "/p"
    }
  }
}`},
		{name: "order and indentation are kept",
			in: "{\n    \"debug\": true,\n    \"bip\": \"10.0.0.1/24\"\n}\n", out: `{
    "debug": true,
    "bip": "10.0.0.1/24",
    "runtimes": {
        "agentbox": {
            "path": "/p"
        }
    }
}
`},
		{name: "tabs and Windows' lines", in: "{\r\n\t\"debug\": true\r\n}\r\n",
			out: "{\r\n\t\"debug\": true,\r\n\t\"runtimes\": {\r\n\t\t\"agentbox\": {\r\n\t\t\t\"path\": \"/p\"\r\n\t\t}\r\n\t}\r\n}\r\n"},
		{name: "one line", in: `{"debug": true}`, out: `{"debug": true, "runtimes": {"agentbox": {"path": "/p"}}}`},
		{name: "beside another", in: `{
  "runtimes": {
    "nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}
  },
  "debug": true
}`, out: `{
  "runtimes": {
    "nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []},
    "agentbox": {
      "path": "/p"
    }
  },
  "debug": true
}`},
		{name: "beside another on one line of several", in: `{
  "runtimes": {"nvidia": {"path": "n"}}
}`, out: `{
  "runtimes": {"nvidia": {"path": "n"}, "agentbox": {"path": "/p"}}
}`},
		{name: "another path", in: `{"runtimes":{"agentbox":{"runtimeArgs":["--x"],"path":"/old","n":1.50}}}`,
			out: `{"runtimes":{"agentbox":{"runtimeArgs":["--x"],"path":"/p","n":1.50}}}`},
		{
			name: "there already", in: `{"runtimes":{ "agentbox":{"path":"\/p"}}}`,
			out: `{"runtimes":{ "agentbox":{"path":"\/p"}}}`,
		},
		{name: "no path", in: `{"runtimes":{"agentbox":{}}}`, out: `{"runtimes":{"agentbox":{"path": "/p"}}}`},
		{name: "null", in: `{"runtimes": null}`, out: `{"runtimes": {"agentbox": {"path": "/p"}}}`},
		{
			name: "empty", in: "{\n  \"runtimes\": {}\n}",
			out: "{\n  \"runtimes\": {\n    \"agentbox\": {\n      \"path\": \"/p\"\n    }\n  }\n}",
		},
		{
			name: "escaped key", in: `{"runtime\u0073": {"a": {"path": "x"}}}`,
			out: `{"runtime\u0073": {"a": {"path": "x"}, "agentbox": {"path": "/p"}}}`,
		},
		{
			name: "default", in: `{"debug": true}`,
			out:         `{"debug": true, "runtimes": {"agentbox": {"path": "/p"}}, "default-runtime": "agentbox"}`,
			makeDefault: true,
		},
		{
			name: "another default", in: `{"default-runtime":"runc"}`,
			out: `{"default-runtime":"agentbox", "runtimes": {"agentbox": {"path": "/p"}}}`, makeDefault: true,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := addRuntime([]byte(tt.in), "agentbox", "/p", tt.makeDefault)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.out, string(got)); diff != "" {
				t.Error(diff)
			}
			again, err := addRuntime(got, "agentbox", "/p", tt.makeDefault)
			if err != nil || string(again) != string(got) {
				t.Errorf("not the same a second time: %v\n%s", err, again)
			}
		})
	}
}

func TestAddRuntimeRefuses(t *testing.T) {
	for in, want := range map[string]string{
		"{\n  \"debug\": true,\n}":         "line 3, column 1:",
		"// a comment\n{}":                 "line 1, column 1:",
		"{\"é\": x}":                       "line 1, column 7:",
		"[]":                               "not a JSON object",
		"{} {}":                            "line 1, column 4:",
		"{\"debug\": ":                     "unexpected end",
		`{"runtimes": []}`:                 `"runtimes": line 1, column 14: this must be an object`,
		`{"runtimes": {"a": "runc"}}`:      `runtime "a"`,
		`{"runtimes": {}, "runtimes": {}}`: `"runtimes" is there twice`,
		`{"runtimes": {"agentbox": {}, "agentbox": {}}}`:  `"agentbox" is there twice`,
		`{"runtimes": {"agentbox": {"runtimeType":"x"}}}`: "runtimeType",
	} {
		got, err := addRuntime([]byte(in), "agentbox", "/p", false)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q (%s)", in, err, want, got)
		}
		if !errors.Is(err, fault.ErrInvalid) && !errors.Is(err, fault.ErrExists) {
			t.Errorf("%s: %v wraps no sentinel", in, err)
		}
	}
}

func TestRemoveRuntime(t *testing.T) {
	for _, tt := range [][2]string{
		{`{"debug":true, "runtimes": {"agentbox": {"path": "/p"}}}`, `{"debug":true}`},
		{`{"runtimes": {"agentbox": {"path": "/p"}}, "debug":true}`, `{"debug":true}`},
		{`{"runtimes": {"agentbox": {"path": "/p"}}}`, `{}`},
		{
			`{"runtimes": {"agentbox": {"path": "/p"}, "x": {}}, "default-runtime": "agentbox"}`,
			`{"runtimes": {"x": {}}}`,
		},
		{
			`{"runtimes": {"a": {}, "agentbox": {"path": "/p"}, "x": {}}, "default-runtime": "a"}`,
			`{"runtimes": {"a": {}, "x": {}}, "default-runtime": "a"}`,
		},
		{`{"runtimes": {"x": {}}}`, `{"runtimes": {"x": {}}}`},
		{"{}", "{}"},
	} {
		got, err := removeRuntime([]byte(tt[0]), "agentbox")
		if err != nil || string(got) != tt[1] {
			t.Errorf("%s: %s, %v; want %s", tt[0], got, err, tt[1])
		}
	}
}

func TestReloadable(t *testing.T) {
	for doc, want := range map[string]bool{
		"": true, "{}": true, `{"runtimes":{"a":{}}}`: true,
		`{"runtimes":{}}`: false, `{"runtimes":null}`: false,
	} {
		c, err := readDaemonConfig([]byte(doc))
		if err != nil || c.reloadable() != want {
			t.Errorf("%s: %v, %v", doc, c.reloadable(), err)
		}
	}
}

// jsonValue draws any JSON value.
func jsonValue(depth int) *rapid.Generator[any] {
	leaves := []*rapid.Generator[any]{
		rapid.Just[any](nil), rapid.Bool().AsAny(), rapid.String().AsAny(),
		rapid.Float64Range(-1e9, 1e9).AsAny(),
	}
	if depth > 0 {
		key := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"path", "runtimes", "agentbox", "runtimeArgs"}))
		leaves = append(leaves,
			rapid.SliceOfN(jsonValue(depth-1), 0, 3).AsAny(),
			rapid.MapOfN(key, jsonValue(depth-1), 0, 3).AsAny())
	}
	return rapid.OneOf(leaves...)
}

func decode(t rapid.TB, doc []byte) (v map[string]any) {
	t.Helper()
	if err := json.Unmarshal(doc, &v); err != nil {
		t.Fatalf("%v in %s", err, doc)
	}
	return v
}

// In any document only the runtime's entry changes, and taking it out gives the document that
// there was.
func TestAddAndRemoveProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before := rapid.MapOfN(rapid.String(), jsonValue(3), 0, 5).Draw(t, "document")
		delete(before, "runtimes")
		delete(before, "default-runtime")
		delete(before, "hosts")
		delete(before, "pidfile")
		others := map[string]any{}
		if rapid.Bool().Draw(t, "runtimes") {
			for _, name := range rapid.SliceOfN(rapid.String(), 1, 3).Draw(t, "others") {
				others[name] = map[string]any{"path": rapid.String().Draw(t, "path"), "runtimeArgs": []any{"-x"}}
			}
			delete(others, "agentbox")
			if len(others) > 0 {
				before["runtimes"] = others
			}
		}
		var doc []byte
		var err error
		switch rapid.IntRange(0, 2).Draw(t, "layout") {
		case 0:
			doc, err = json.Marshal(before)
		case 1:
			doc, err = json.MarshalIndent(before, "", "    ")
		default:
			doc, err = json.MarshalIndent(before, " ", "\t")
		}
		if err != nil {
			t.Fatal(err)
		}
		makeDefault := rapid.Bool().Draw(t, "default")
		added, err := addRuntime(doc, "agentbox", "/a path/\"x\"", makeDefault)
		if err != nil {
			t.Fatalf("%v: %s", err, doc)
		}
		want := decode(t, doc)
		all := maps.Clone(others)
		all["agentbox"] = map[string]any{"path": "/a path/\"x\""}
		want["runtimes"] = all
		if makeDefault {
			want["default-runtime"] = "agentbox"
		}
		if diff := cmp.Diff(want, decode(t, added)); diff != "" {
			t.Fatalf("%s\n%s", diff, added)
		}
		removed, err := removeRuntime(added, "agentbox")
		if err != nil {
			t.Fatal(err)
		}
		if len(before) > 0 && string(removed) != string(doc) {
			t.Fatalf("removed:\n%s\nbefore:\n%s", removed, doc)
		}
		if diff := cmp.Diff(decode(t, doc), decode(t, removed)); diff != "" {
			t.Fatal(diff)
		}
	})
}

func FuzzDaemonJSON(f *testing.F) {
	for _, s := range []string{
		"", "{}", `{"runtimes": {"agentbox": {"path": "x"}}}`, "{\n\t\"a\": [1, {\"b\": \"\\\"}\"}]\n}",
		`{"runtimes":null}`, `{"a":1,"a":2}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		added, err := addRuntime(doc, "agentbox", "/p", true)
		if err != nil {
			return
		}
		after := decode(t, added)
		entry := after["runtimes"].(map[string]any)["agentbox"].(map[string]any)
		if entry["path"] != "/p" || after["default-runtime"] != "agentbox" {
			t.Fatalf("not registered in %s", added)
		}
		before := map[string]any{}
		if len(strings.TrimSpace(string(doc))) > 0 {
			before = decode(t, doc)
		}
		for _, key := range slices.Collect(maps.Keys(after)) {
			if key != "runtimes" && key != "default-runtime" && !cmp.Equal(before[key], after[key]) {
				t.Fatalf("%q changed in %s", key, added)
			}
		}
		removed, err := removeRuntime(added, "agentbox")
		if err != nil {
			return // keys that dockerd would refuse, too
		}
		if _, there := decode(t, removed)["default-runtime"]; there {
			t.Fatalf("still the default: %s", removed)
		}
	})
}
