package bundle

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

// An init that wants a loader is refused when the sandbox is made, and not by a
// first process that does not start.
func TestInit(t *testing.T) {
	loaded, err := exec.LookPath("tar")
	if err != nil {
		t.Fatal(err)
	}
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for program, ok := range map[string]func(error) bool{
		loaded:     func(err error) bool { return errors.Is(err, fault.ErrUnsupported) },
		text:       func(err error) bool { return err != nil },
		busybox(t): func(err error) bool { return err == nil },
	} {
		p := Place{Dir: t.TempDir(), Init: program}
		if err := p.copyInit(); !ok(err) {
			t.Errorf("%s: %v", program, err)
		}
		want, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(p.Dir, "init")); ok(nil) != (err == nil &&
			string(got) == string(want)) {
			t.Errorf("%s: there are %d bytes: %v", program, len(got), err)
		}
	}
}

func busybox(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	return path
}
