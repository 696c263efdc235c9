package main

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/runtime/audit"
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

	// Found by its name as that of a sandbox.
	var got []string
	list, err := audit.Open(root).List(t.Context(), audit.Filter{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		got = append(got, e.Who.By+" "+e.Verb+" "+e.Ref+" "+e.Name+" "+e.Outcome)
		if e.EndSeq == 0 || (e.Name == "volume://ws") != (len(e.Sandbox) == 32) {
			t.Errorf("%+v", e)
		}
	}
	want := []string{"command volume create ws volume://ws ok", "command volume create ws volume://ws ok",
		"command volume create ws  exists", "command volume create own  denied",
		"command volume create own  not_found", "command volume create ../x  invalid",
		"command volume rm ws volume://ws ok"}
	if !slices.Equal(got, want) {
		t.Errorf("on record is\n%s\nand not\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// Without the log one is removed, and none is made.
	box("volume", "create", "ws").want(t, 0, "ws\n")
	if err := errors.Join(os.RemoveAll(root+"/audit"), os.WriteFile(root+"/audit", nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	box("volume", "create", "more").want(t, exitFailure, "", "nothing was done, as it cannot be put on record")
	if r := box("volume", "rm", "ws"); r.code != 0 || !strings.Contains(r.stderr, "audit record not written") {
		t.Errorf("%+v", r)
	}
	box("volume", "ls", "-q").want(t, 0, "")
}
