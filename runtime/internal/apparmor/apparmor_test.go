package apparmor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentbox/agentbox/internal/fault"
)

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// profile is Profile on a machine of which dir has what the kernel says.
func profile(t *testing.T, dir, asked string) (string, error) {
	was := sys
	sys = dir
	defer func() { sys = was }()
	return Profile(asked)
}

func TestProfile(t *testing.T) {
	dir := t.TempDir()
	none := filepath.Join(dir, "none")
	off := filepath.Join(dir, "off")
	write(t, off+"/module/apparmor/parameters/enabled", "N\n")
	on := filepath.Join(dir, "on")
	list := on + "/kernel/security/apparmor/profiles"
	write(t, on+"/module/apparmor/parameters/enabled", "Y\n")
	write(t, list, "/usr/bin/man (enforce)\nmy own (complain)\nagentbox-default-too (enforce)\n")
	t.Setenv("PATH", dir+"/nothing")
	for _, c := range []struct {
		sys, asked, want string
		err              error
	}{
		{none, "", "", nil}, {none, "unconfined", "", nil}, {none, "mine", "", fault.ErrUnsupported},
		{off, "", "", nil}, {off, "mine", "", fault.ErrUnsupported},
		{on, "", "", nil}, {on, "unconfined", "", nil}, // there is no program to load it
		{on, "my own", "my own", nil}, {on, "/usr/bin/man", "/usr/bin/man", nil},
		{on, "my", "", fault.ErrNotFound}, {on, "my own (complain)", "", fault.ErrNotFound},
	} {
		if got, err := profile(t, c.sys, c.asked); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s, asked for %q: %q, %v", filepath.Base(c.sys), c.asked, got, err)
		}
	}

	// The program that loads profiles is given ours, once.
	write(t, dir+"/bin/apparmor_parser", "#!/bin/sh\n[ $1 = -Kr ] || exit 3\n/bin/cat $2 >>"+dir+
		"/given\necho 'agentbox-default (enforce)' >>"+list+"\n")
	t.Setenv("PATH", dir+"/bin")
	for range 2 {
		if got, err := profile(t, on, ""); got != Default || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	}
	given, err := os.ReadFile(dir + "/given")
	if text := string(given); err != nil || strings.Count(text, "profile agentbox-default flags=") != 1 ||
		!strings.Contains(text, "deny mount,") || !strings.Contains(text, "deny @{PROC}/sysrq-trigger rwklx,") {
		t.Errorf("%v: %s", err, given)
	}

	write(t, list, "")
	write(t, dir+"/bin/apparmor_parser", "#!/bin/sh\necho broken\nexit 1\n")
	if got, err := profile(t, on, ""); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("%q, %v", got, err)
	}
}
