package main

import (
	"os"
	"strings"
	"testing"
)

// TestVolume has the verbs on volumes, over a root of its own.
func TestVolume(t *testing.T) {
	root, err := os.MkdirTemp("", "av")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	from := t.TempDir()
	box := func(args ...string) result {
		t.Helper()
		return try(t, newFake(), "", append([]string{"--root", root}, args...)...)
	}
	box("volume", "ls", "--format", "json").want(t, 0, "[]\n")
	box("volume", "create", "--from", from, "ws").want(t, 0, "ws\n")
	box("volume", "create", "--from", from, "ws").want(t, 0, "ws\n")
	box("volume", "create", "ws").want(t, exitState, "", "already exists")
	box("volume", "create", "--from", root, "own").want(t, exitDenied, "", "agentbox's own state")
	box("volume", "create", "--from", from+"/no", "own").want(t, exitNotFound, "", "Create it first")
	box("volume", "create", "../x").want(t, exitUsage, "", "volume name")
	box("volume", "ls", "-q").want(t, 0, "ws\n")
	if r := box("volume", "ls"); !strings.Contains(r.stdout, from) {
		t.Errorf("%s", r.stdout)
	}
	if r := box("volume", "inspect", "ws"); !strings.Contains(r.stdout, `"from": "`+from+`"`) {
		t.Errorf("%s", r.stdout)
	}
	box("volume", "inspect", "no").want(t, exitNotFound, "[]\n", "not found")
	box("volume", "rm", "ws").want(t, 0, "ws\n")
	box("volume", "rm", "ws").want(t, exitNotFound, "", "not found")
}
