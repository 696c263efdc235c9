package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/runtime"
)

func TestSecretSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	named := []runtime.Secret{{Name: "a"}, {Name: "b"}}
	for _, c := range []struct {
		what                    string
		spec, given, known, get []runtime.Secret
		why                     string
	}{
		{what: "none"},
		{
			what: "known", spec: named, known: []runtime.Secret{{Name: "a", Env: "A"}, {Name: "b", File: file}},
			get: []runtime.Secret{{Name: "a", Env: "A"}, {Name: "b", File: file}},
		},
		{
			what: "given", spec: named, given: []runtime.Secret{{Name: "a", File: file}},
			known: []runtime.Secret{{Name: "a", Env: "A"}, {Name: "b", Env: "B"}},
			get:   []runtime.Secret{{Name: "a", File: file}, {Name: "b", Env: "B"}},
		},
		{
			what: "unknown", spec: named, known: []runtime.Secret{{Name: "a", Env: "A"}},
			why: "where the secret b comes from is not known",
		},
		{
			what: "a checkpoint from elsewhere names a file", spec: []runtime.Secret{{Name: "a", File: "/etc/shadow"}},
			why: "where the secret a comes from is not known",
		},
		{
			what: "a checkpoint from elsewhere leads out", spec: []runtime.Secret{{Name: "../a"}},
			known: []runtime.Secret{{Name: "../a", Env: "A"}}, why: "a name is",
		},
		{what: "another one", spec: named, given: []runtime.Secret{{Name: "c", Env: "A"}}, why: "has no secret c"},
		{
			what: "no source", spec: named, given: []runtime.Secret{{Name: "a"}},
			why: "comes from a file or from a variable",
		},
	} {
		got, err := sources(runtime.Spec{Secrets: c.spec}, c.given, c.known)
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

// TestSecretsInNoCore: a process that has read secrets leaves no core, which would contain them.
func TestSecretsInNoCore(t *testing.T) {
	dumpable := func(set int) int {
		t.Helper()
		if set >= 0 {
			if err := unix.Prctl(unix.PR_SET_DUMPABLE, uintptr(set), 0, 0, 0); err != nil {
				t.Fatal(err)
			}
		}
		is, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	was := dumpable(1)
	defer dumpable(was)
	b, ctx := &sandboxes{core: &core{}, kept: map[string]string{}},
		runtime.WithVariables(t.Context(), map[string]string{"A": "value"})
	if got, err := b.readSecrets(ctx, runtime.Spec{}, nil); err != nil || len(got) > 0 || dumpable(-1) != 1 {
		t.Errorf("%v, %v; dumpable %d without a secret", got, err, dumpable(-1))
	}
	got, err := b.readSecrets(ctx, runtime.Spec{}, []runtime.Secret{{Name: "a", Env: "A"}})
	if err != nil || len(got) != 1 || string(got[0].Data) != "value" || dumpable(-1) != 0 {
		t.Errorf("%v, %v; dumpable %d with one", got, err, dumpable(-1))
	}
}
