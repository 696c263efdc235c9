package setup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

const handlerV2 = `# agentbox setup containerd, runtime agentbox: begin (` +
	"`agentbox setup containerd --remove`" + ` takes this out)
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.agentbox]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.agentbox.options]
    BinaryName = "/p"
# agentbox setup containerd, runtime agentbox: end
`

func TestAddHandler(t *testing.T) {
	v3 := strings.ReplaceAll(handlerV2, "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
	systemd := strings.ReplaceAll(handlerV2, "\"/p\"\n", "\"/p\"\n    SystemdCgroup = true\n")
	kube := `version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = true # kubelet says so
`
	byHand := `version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."agentbox"]
  runtime_type = 'io.containerd.runc.v2' # mine
  pod_annotations = ["x.*"]
  options.BinaryName = '/old' # this
`
	for _, tt := range []struct{ name, in, out string }{
		{"no document", "", "version = 2\n\n" + handlerV2},
		{"version 2", "version = 2\nroot = '/x' # mine", "version = 2\nroot = '/x' # mine\n\n" + handlerV2},
		{"version 3", "version = 3\n", "version = 3\n\n" + v3},
		{"kubelet with systemd", kube, kube + "\n" + systemd},
		{
			"another path of ours", "version = 2\n\n" + strings.ReplaceAll(handlerV2, "/p", "/old"),
			"version = 2\n\n" + handlerV2,
		},
		{"there", "version = 2\n" + handlerV2 + "\n[debug]\n", "version = 2\n" + handlerV2 + "\n[debug]\n"},
		{"by hand", byHand, strings.Replace(byHand, "'/old'", `"/p"`, 1)},
		{"Windows' lines", "version = 2\r\n", "version = 2\r\n\r\n" + strings.ReplaceAll(handlerV2, "\n", "\r\n")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := addHandler([]byte(tt.in), "agentbox", "/p")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.out, string(got)); diff != "" {
				t.Error(diff)
			}
			if again, err := addHandler(got, "agentbox", "/p"); err != nil || string(again) != string(got) {
				t.Errorf("not the same a second time: %v\n%s", err, again)
			}
		})
	}
}

func TestAddHandlerRefuses(t *testing.T) {
	const cri = `[plugins."io.containerd.grpc.v1.cri".containerd`
	for in, want := range map[string]string{
		"version = 2\nx = [\n":                       "line 2, column",
		"version = 1\n":                              "version 1",
		"disabled_plugins = ['cri']\n":               "version 1",
		"version = 4\n":                              "version 4",
		"version = 2\n" + cri + "]\nruntimes = {}\n": "does not fit",
		"version = 2\n" + cri + ".runtimes]\nagentbox = {runtime_type = 'io.containerd.runc.v2', options = {BinaryName = '/x'}}\n": "is there already",
		"version = 2\n" + cri + ".runtimes.agentbox]\nruntime_type = 'io.containerd.kata.v2'\noptions.BinaryName = '/x'\n":         "another kind",
	} {
		_, err := addHandler([]byte(in), "agentbox", "/p")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", in, err, want)
		}
	}
}

func TestRemoveHandler(t *testing.T) {
	after := "version = 2\n\n" + handlerV2 + "\n[debug]\n  level = 'info'\n"
	for _, tt := range []struct{ in, out, err string }{
		{in: "version = 2\n\n" + handlerV2, out: "version = 2\n"},
		{in: after, out: "version = 2\n\n\n[debug]\n  level = 'info'\n"},
		{in: "version = 2\n", out: "version = 2\n"},
		{in: "version = 2\n\n" + handlerV2 + "mine = 1\n", err: "belongs to them"},
		{in: "version = 2\n" + strings.ReplaceAll(handlerV2, "# agentbox", "# "), err: "did not put it there"},
	} {
		got, err := removeHandler([]byte(tt.in), "agentbox")
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error()+strings.Join(fault.Hint(err), ""), tt.err) {
				t.Errorf("%v, want %q", err, tt.err)
			}
			continue
		}
		if err != nil || string(got) != tt.out {
			t.Errorf("%s: %v\n%s", tt.in, err, got)
		}
	}
}

func TestAddPodman(t *testing.T) {
	begin, end := beginMark("podman", "agentbox")+"\n", endMark("podman", "agentbox")+"\n"
	for _, tt := range []struct{ name, in, out string }{
		{"no document", "", begin + "[engine.runtimes]\nagentbox = [\"/p\"]\n" + end},
		{"others", "[containers]\npids_limit = 5\n", "[containers]\npids_limit = 5\n\n" + begin +
			"[engine.runtimes]\nagentbox = [\"/p\"]\n" + end},
		{
			"the table is there", "[engine.runtimes] # all\nrunsc = ['/r']\n[network]\n",
			"[engine.runtimes] # all\n" + begin + "agentbox = [\"/p\"]\n" + end + "runsc = ['/r']\n[network]\n",
		},
		{"the table is the end", "[engine.runtimes]", "[engine.runtimes]\n" + begin + "agentbox = [\"/p\"]\n" + end},
		{
			"another path", begin + "[engine.runtimes]\nagentbox = [\"/old\"]\n" + end,
			begin + "[engine.runtimes]\nagentbox = [\"/p\"]\n" + end,
		},
		{"by hand", "[engine.runtimes]\nagentbox = ['/p']\n", "[engine.runtimes]\nagentbox = ['/p']\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := addPodman([]byte(tt.in), "agentbox", "/p")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.out, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
	for in, want := range map[string]string{
		"[engine.runtimes]\nagentbox = ['/x']\n": "is there already",
		"[engine]\nruntimes = {}\n":              "does not fit",
		"engine = 3\n":                           "does not fit",
	} {
		if _, err := addPodman([]byte(in), "agentbox", "/p"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", in, err, want)
		}
	}
}

// In any document adding changes our entry only, and removing gives the document that there was.
func TestTOMLProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		before := rapid.MapOfN(rapid.StringMatching(`[a-z"'. é]{1,6}`), tomlValue(3), 0, 5).Draw(t, "document")
		before["version"] = int64(rapid.IntRange(2, 3).Draw(t, "version"))
		doc, err := toml.Marshal(before)
		if err != nil {
			t.Fatal(err)
		}
		for engine, edit := range map[string]struct {
			add    func([]byte) ([]byte, error)
			remove func([]byte) ([]byte, error)
		}{
			"containerd": {
				func(d []byte) ([]byte, error) { return addHandler(d, "a.b", "/a \\ \"b\"") },
				func(d []byte) ([]byte, error) { return removeHandler(d, "a.b") },
			},
			"podman": {
				func(d []byte) ([]byte, error) { return addPodman(d, "a.b", "/a \\ \"b\"") },
				func(d []byte) ([]byte, error) { return removePodman(d, "a.b") },
			},
		} {
			added, err := edit.add(doc)
			if err != nil {
				t.Fatalf("%s: %v\n%s", engine, err, doc)
			}
			removed, err := edit.remove(added)
			if err != nil {
				t.Fatalf("%s: %v\n%s", engine, err, added)
			}
			if string(removed) != string(doc) {
				t.Fatalf("%s: removed:\n%s\nbefore:\n%s", engine, removed, doc)
			}
		}
	})
}

func tomlValue(depth int) *rapid.Generator[any] {
	kinds := []*rapid.Generator[any]{
		rapid.Bool().AsAny(), rapid.Int64().AsAny(), rapid.Float64().AsAny(),
		rapid.StringMatching(`[a-z"'\\\n#=\[\] é]{0,12}`).AsAny(),
	}
	if depth > 0 {
		kinds = append(kinds,
			rapid.SliceOfN(rapid.Int64(), 0, 3).AsAny(),
			rapid.MapOfN(rapid.StringMatching(`[a-z"'. é]{1,6}`), tomlValue(depth-1), 0, 3).AsAny())
	}
	return rapid.OneOf(kinds...)
}

func FuzzTOML(f *testing.F) {
	for _, s := range []string{"", "version = 2\n", "version = 3", "version = 2\n\n" + handlerV2,
		"version=2\n[engine.runtimes]\nx=['y']", "version=2\r\n[[a]]\nb=nan\n",
		"version=2\nx = \"\"\"\n[engine.runtimes]\n\"\"\"\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, doc []byte) {
		for _, edit := range []struct {
			add, remove func([]byte) ([]byte, error)
		}{
			{func(d []byte) ([]byte, error) { return addHandler(d, "agentbox", "/p") }, func(d []byte) ([]byte, error) {
				return removeHandler(d, "agentbox")
			}},
			{func(d []byte) ([]byte, error) { return addPodman(d, "agentbox", "/p") }, func(d []byte) ([]byte, error) {
				return removePodman(d, "agentbox")
			}},
		} {
			added, err := edit.add(doc)
			if err != nil {
				continue
			}
			if again, err := edit.add(added); err != nil || string(again) != string(added) {
				t.Fatalf("not the same a second time: %v\n%s", err, again)
			}
			if string(added) == string(doc) {
				continue
			}
			removed, err := edit.remove(added)
			if err != nil {
				continue
			}
			if _, err := decodeTOML(removed); err != nil {
				t.Fatalf("%v in %s", err, removed)
			}
		}
	})
}

// The containerd that is installed takes what is written.
func TestValidateContainerd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.toml")
	for doc, good := range map[string]bool{"version = 2\n\n" + handlerV2: true, "version = 2\nroot = 3\n": false} {
		if err := os.WriteFile(path, []byte(doc), 0o600); err != nil {
			t.Fatal(err)
		}
		known, err := validateContainerd(context.Background(), path)
		if !known || good != (err == nil) || err != nil && !errors.Is(err, fault.ErrInvalid) {
			t.Errorf("%v, %v for\n%s", known, err, doc)
		}
	}
}
