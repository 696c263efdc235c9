package main

import (
	"os"
	"path/filepath"
	"testing"
)

// Without anything to supervise the supervisor makes nothing.
func TestSuperviseVerb(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	try(t, boxes(), "", "--root", root, "supervise").want(t, 0, "")
	if _, err := os.Lstat(root); err == nil {
		t.Error("it has made its root")
	}
	try(t, boxes(), "", "supervise", "run").want(t, exitUsage, "", "takes no argument")
}
