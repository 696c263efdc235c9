package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A package of a tree with a file that no commit has does not have a commit's version.
func TestDebVersion(t *testing.T) {
	dir := t.TempDir()
	sh := func(script string) string {
		t.Helper()
		cmd := exec.Command("sh", "-ec", script)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, ".git/stand-ins")+":"+os.Getenv("PATH"),
			"DEB_VERSION=", "TMPDIR="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return string(out)
	}
	if err := os.Mkdir(filepath.Join(dir, "scripts"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := copyFile("../../scripts/deb.sh", filepath.Join(dir, "scripts/deb.sh")); err != nil {
		t.Fatal(err)
	}
	// The first program that it calls ends it, and has its version in a trace.
	sh(`git init -q; echo /bin/ >.gitignore; git add -A; git -c user.name=x -c user.email=x@x commit -qm x
mkdir .git/stand-ins bin; printf '#!/bin/sh\nexit 1\n' >.git/stand-ins/make; chmod +x .git/stand-ins/make; touch bin/ignored`)
	version := func() string { return sh(`bash -x scripts/deb.sh amd64 2>&1 | grep '^+ version='`) }
	if v := version(); strings.Contains(v, "dirty") || !strings.Contains(v, "0.0~git") {
		t.Errorf("of a commit: %s", v)
	}
	sh("mkdir docs; touch docs/new.md")
	if v := version(); !strings.HasSuffix(strings.TrimSpace(v), "+dirty") {
		t.Errorf("with a file that is in none: %s", v)
	}
}

// Processes that a run has begun end with it, with all that they started.
func TestRunEnds(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		eventually(t, "it runs", func() bool { _, err := os.Stat(filepath.Join(dir, "pid")); return err == nil })
		cancel(errInterrupted)
	}()
	err := run(ctx, "bash", "-c", `trap 'rm "$0/work"' EXIT; touch "$0/work"; sleep 300 & echo $! >"$0/new"; mv "$0/new" "$0/pid"; wait`, dir)
	if !errors.Is(err, errInterrupted) {
		t.Errorf("it ended with %v", err)
	}
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the sleep is gone", func() bool {
		state, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat")
		return err != nil || strings.Contains(string(state), ") Z")
	})
	if _, err := os.Stat(filepath.Join(dir, "work")); err == nil {
		t.Error("its file is left")
	}
}
