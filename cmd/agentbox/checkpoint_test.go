package main

import (
	"os"
	"path/filepath"
	"testing"
)

// A path with ".." leads where the kernel goes, also from a working directory that was
// reached through a symlink, and not to what looks shorter.
func TestHostPath(t *testing.T) {
	top, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(top, name) }
	for _, dir := range []string{"data/project/infra", "home"} {
		if err := os.MkdirAll(at(dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(at("data/project"), at("home/project")); err != nil {
		t.Fatal(err)
	}
	t.Chdir(at("home/project"))
	for path, want := range map[string]string{
		"../state":                          at("data/state"),
		"infra/../state":                    at("data/project/state"),
		at("home") + "/project/../state":    at("data/state"),
		at("home") + "/./project//../state": at("data/state"),
		"infra/state":                       at("home/project/infra/state"), // which a checkpoint resolves
		at("home/project/state"):            at("home/project/state"),
	} {
		if got, err := hostPath(path); err != nil || got != want {
			t.Errorf("%s is %s, want %s (%v)", path, got, want, err)
		}
	}
	for _, path := range []string{"..", "../", "../..", "../none/state", "none/../state"} {
		if got, err := hostPath(path); err == nil {
			t.Errorf("%s is %s", path, got)
		}
	}
}
