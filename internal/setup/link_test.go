package setup

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// TestBeside: a program is found where this one really is, then on the PATH; a link to this
// program is none.
func TestBeside(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	t.Setenv("PATH", elsewhere)
	write := func(path string) string {
		t.Helper()
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	link := func(path, to string) string {
		t.Helper()
		_ = os.Remove(path)
		if err := os.Symlink(to, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	self := write(filepath.Join(dir, "agentbox"))
	alias := link(filepath.Join(t.TempDir(), PluginName), self)
	if _, err := Beside(alias, PluginName); !errors.Is(err, fault.ErrNotFound) || len(fault.Hint(err)) == 0 {
		t.Errorf("there is none: %v", err)
	}
	onPath := filepath.Join(elsewhere, PluginName)
	link(onPath, self)
	if path, err := Beside(alias, PluginName); !errors.Is(err, fault.ErrNotFound) {
		t.Errorf("a link to itself: %s, %v", path, err)
	}
	link(onPath, write(filepath.Join(t.TempDir(), "other")))
	if path, err := Beside(alias, PluginName); err != nil || path != onPath {
		t.Errorf("on the PATH: %s, %v", path, err)
	}
	beside := write(filepath.Join(dir, PluginName))
	if path, err := Beside(alias, PluginName); err != nil || path != beside {
		t.Errorf("beside: %s, %v", path, err)
	}
}
