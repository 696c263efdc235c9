package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/doctor"
)

func TestMain(m *testing.M) {
	testscript.Main(guarded{m}, map[string]func(){
		"agentbox":      main,
		"agentbox-fake": fakeMain, // for terminal_test.go
	})
}

// guarded fails tests that make the default root: they used the state of this
// host, or would have if it had any.
type guarded struct{ m *testing.M }

func (g guarded) Run() int {
	_, before := os.Lstat(runtime.DefaultRoot)
	code := g.m.Run()
	if _, err := os.Lstat(runtime.DefaultRoot); err == nil && before != nil {
		fmt.Fprintln(os.Stderr, "the tests made", runtime.DefaultRoot)
		return 1
	}
	return code
}

// A result is how one command line ended.
type result struct {
	code           int
	stdout, stderr string
}

// try runs a command line against svc, with stdin as its input.
func try(t *testing.T, svc runtime.Service, stdin string, args ...string) result {
	t.Helper()
	dir := t.TempDir()
	file := func(name, text string) *os.File {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	a := &app{
		stdin: file("stdin", stdin), stdout: file("stdout", ""), stderr: file("stderr", ""),
		open: func(context.Context, globals) (runtime.Service, error) { return svc, nil },
		examine: func(context.Context, globals) doctor.Report {
			return doctor.Report{Checks: []doctor.Check{
				{Name: "overlayfs", Status: "ok", Detail: "mounted"},
				{Name: "criu", Status: "fail", Detail: "not found", Remedy: "Run scripts/install-deps.sh."},
			}}
		},
		now: func() time.Time { return epoch.Add(3 * time.Second) },
	}
	r := result{code: a.main(args)}
	for name, to := range map[string]*string{"stdout": &r.stdout, "stderr": &r.stderr} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		*to = string(data)
	}
	return r
}

func (r result) want(t *testing.T, code int, stdout string, stderr ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d; stderr: %s", r.code, code, r.stderr)
	}
	if r.stdout != stdout {
		t.Errorf("stdout:\n%s\nwant:\n%s", r.stdout, stdout)
	}
	for _, s := range stderr {
		if !strings.Contains(r.stderr, s) {
			t.Errorf("stderr %q does not contain %q", r.stderr, s)
		}
	}
	if len(stderr) == 0 && r.stderr != "" {
		t.Errorf("stderr: %s", r.stderr)
	}
}
