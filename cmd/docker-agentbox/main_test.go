package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// built is where TestMain has room for the programs.
var built string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "docker-agentbox-test-")
	if err != nil {
		panic(err)
	}
	built = dir
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
	os.Exit(code)
}

var build = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "build", "-ldflags", "-s -w", "-o", built, ".", "../agentbox").CombinedOutput()
	return string(out), err
})

// programs returns a directory with docker-agentbox and agentbox.
func programs(t testing.TB) string {
	t.Helper()
	if out, err := build(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return built
}

func TestScripts(t *testing.T) {
	dir := programs(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", dir+string(filepath.ListSeparator)+env.Getenv("PATH"))
			env.Setenv("AGENTBOX_ROOT", filepath.Join(env.WorkDir, "root"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"exits": exits},
	})
}

// exits runs a program that must end with that exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM ARGS")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	code := 0
	if exit, ok := err.(*exec.ExitError); ok {
		code = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if code != want {
		ts.Fatalf("exit code %d, want %d", code, want)
	}
}
