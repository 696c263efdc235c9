package runtime

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSecretSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	named := []Secret{{Name: "a"}, {Name: "b"}}
	for _, c := range []struct {
		what                    string
		spec, given, known, get []Secret
		why                     string
	}{
		{what: "none"},
		{what: "known", spec: named, known: []Secret{{Name: "a", Env: "A"}, {Name: "b", File: file}}, get: []Secret{{Name: "a", Env: "A"}, {Name: "b", File: file}}},
		{what: "given", spec: named, given: []Secret{{Name: "a", File: file}}, known: []Secret{{Name: "a", Env: "A"}, {Name: "b", Env: "B"}}, get: []Secret{{Name: "a", File: file}, {Name: "b", Env: "B"}}},
		{what: "unknown", spec: named, known: []Secret{{Name: "a", Env: "A"}}, why: "where the secret b comes from is not known"},
		{what: "a checkpoint from elsewhere names a file", spec: []Secret{{Name: "a", File: "/etc/shadow"}}, why: "where the secret a comes from is not known"},
		{what: "a checkpoint from elsewhere leads out", spec: []Secret{{Name: "../a"}}, known: []Secret{{Name: "../a", Env: "A"}}, why: "a name is"},
		{what: "another one", spec: named, given: []Secret{{Name: "c", Env: "A"}}, why: "has no secret c"},
		{what: "no source", spec: named, given: []Secret{{Name: "a"}}, why: "comes from a file or from a variable"},
	} {
		got, err := sources(Spec{Secrets: c.spec}, c.given, c.known)
		if c.why != "" {
			if err == nil || !strings.Contains(err.Error(), c.why) {
				t.Errorf("%s: %v, want %q", c.what, err, c.why)
			}
			continue
		}
		if d := cmp.Diff(c.get, got); err != nil || d != "" {
			t.Errorf("%s: %v %s", c.what, err, d)
		}
	}
}
