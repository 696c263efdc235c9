package engine

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

func account(name string, uid uint32, groups ...uint32) runtime.Account {
	a := runtime.Account{Name: name, UID: uid, Home: "/home/" + name}
	for _, gid := range groups {
		a.Groups = append(a.Groups, runtime.AccountGroup{Name: fmt.Sprintf("group%d", gid), GID: gid})
	}
	return a
}

func TestWithUser(t *testing.T) {
	const image = "root:x:0:0:root:/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\ngit:x:998:998::/srv/git:/bin/sh\n"
	for _, c := range []struct {
		a          runtime.Account
		name, line string
	}{
		{account("tess", 1234, 1000), "tess", "tess:x:1234:1000::/home/tess:/bin/sh\n"},
		{account("tess", 1000, 1000), "tess", "tess:x:1000:1000::/home/tess:/bin/sh\n"}, // its own name comes first
		{account("node", 1000, 1000), "node", ""},                                       // the image has it
		{account("git", 1234, 1000), "git-1234", "git-1234:x:1234:1000::/home/git:/bin/sh\n"},
	} {
		name, text := withUser([]byte(image), c.a)
		if name != c.name || string(text) != c.line+image {
			t.Errorf("%+v: %s\n%s", c.a, name, text)
		}
	}
	if _, text := withUser(nil, account("tess", 1, 2)); string(text) != "tess:x:1:2::/home/tess:/bin/sh\n" {
		t.Errorf("in an empty file: %q", text)
	}
}

func TestWithGroups(t *testing.T) {
	const image = "root:x:0:\nusers:x:100:ann\nempty:x:101:\nlast:x:102:tess\ngroup7:x:8:"
	a := account("tess", 1, 6, 100, 101, 102, 6, 7)
	want := "root:x:0:\nusers:x:100:ann,tess\nempty:x:101:tess\nlast:x:102:tess\ngroup7:x:8:\n" +
		"group6:x:6:\ngroup7-7:x:7:tess\n"
	if d := cmp.Diff(want, string(withGroups([]byte(image), "tess", a.Groups))); d != "" {
		t.Error(d)
	}
	if got := string(withGroups([]byte(image), "tess", account("tess", 1, 100, 102).Groups)); got != image {
		t.Errorf("changed for nothing: %q", got)
	}
}

func TestCheckSetup(t *testing.T) {
	good := func() *runtime.Setup {
		a := account("tess", 1, 2)
		return &runtime.Setup{Account: &a, Files: []runtime.SetupFile{{Path: "/etc/x", Mode: 0o644, Data: []byte("x")}}}
	}
	if err := errors.Join(checkSetup(nil), checkSetup(good())); err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func(*runtime.Setup){
		"a name with a colon":   func(s *runtime.Setup) { s.Account.Name = "a:b" },
		"no name":               func(s *runtime.Setup) { s.Account.Name = "" },
		"a line in a name":      func(s *runtime.Setup) { s.Account.Name = "a\nroot" },
		"a relative home":       func(s *runtime.Setup) { s.Account.Home = "home" },
		"the root as home":      func(s *runtime.Setup) { s.Account.Home = "/" },
		"a home with a colon":   func(s *runtime.Setup) { s.Account.Home = "/a:b" },
		"no group":              func(s *runtime.Setup) { s.Account.Groups = nil },
		"a group's name":        func(s *runtime.Setup) { s.Account.Groups[0].Name = "a,b" },
		"a path that leads up":  func(s *runtime.Setup) { s.Files[0].Path = "/etc/../x" },
		"a relative path":       func(s *runtime.Setup) { s.Files[0].Path = "etc/x" },
		"a setuid bit":          func(s *runtime.Setup) { s.Files[0].Mode = 0o4755 },
		"too many files":        func(s *runtime.Setup) { s.Files = make([]runtime.SetupFile, maxSetupFiles+1) },
		"too many bytes":        func(s *runtime.Setup) { s.Files[0].Data = make([]byte, maxSetupBytes+1) },
		"a control in the path": func(s *runtime.Setup) { s.Files[0].Path = "/etc/x\n" },
	} {
		s := good()
		spoil(s)
		if err := checkSetup(s); !errors.Is(err, runtime.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestSetupStream: what is written follows the links of the image inside of it, leaves what the
// image and workspaces have, and gives the way to a workspace in the home directory to the user.
func TestSetupStream(t *testing.T) {
	image := map[string]string{"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "var/home/other/x": ""}
	stream := func(s runtime.Spec, a runtime.Account, mounted ...string) string {
		t.Helper()
		root, upper := t.TempDir(), t.TempDir()
		put := func(top, name, text string) {
			t.Helper()
			path := filepath.Join(top, name)
			err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644))
			if err != nil {
				t.Fatal(err)
			}
		}
		for name, text := range image {
			put(root, name, text)
		}
		if err := os.Symlink("/var/home", filepath.Join(root, "home")); err != nil {
			t.Fatal(err)
		}
		for _, dir := range mounted { // mount points are in both
			for _, top := range []string{root, upper} {
				if err := os.MkdirAll(filepath.Join(top, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		jail, err := policy.Open(root)
		if err != nil {
			t.Fatal(err)
		}
		defer jail.Close()
		w := &setupWriter{jail: jail, upper: upper, spec: s, now: time.Unix(1, 0)}
		w.tar = tar.NewWriter(&w.buf)
		setup := runtime.Setup{
			Account: &a, Files: []runtime.SetupFile{{Path: "/etc/own/file", Mode: 0o755, Data: []byte("x")}},
		}
		if err := w.all(setup); err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for r := tar.NewReader(&w.buf); ; {
			h, err := r.Next()
			if err == io.EOF {
				return b.String()
			}
			if err != nil {
				t.Fatal(err)
			}
			data, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s %o %d:%d %s\n", h.Name, h.Mode, h.Uid, h.Gid, strings.ReplaceAll(string(data), "\n", "|"))
		}
	}
	const (
		files = "etc/passwd 644 0:0 tess:x:1:2::/home/tess:/bin/sh|root:x:0:0::/root:/bin/sh|\n" +
			"etc/group 644 0:0 group2:x:2:|\n"
		own = "etc/own/ 755 0:0 \netc/own/file 755 0:0 x\n"
	)
	workspace := func(at string) runtime.Spec {
		return runtime.Spec{
			IDs: &idmap.Map{Base: 1 << 20, Size: 1 << 16}, Mounts: []runtime.Mount{{Type: runtime.MountWorkspace, Target: at}},
		}
	}
	tess := account("tess", 1, 2, 1<<16) // the last is none of the namespace's
	for _, c := range []struct {
		what, want string
		got        string
	}{
		{"elsewhere", files + "var/home/tess/ 755 1:2 \n" + own, stream(workspace("/srv/p"), tess)},
		{
			"in the home", files + "var/home/tess/ 755 1:2 \nvar/home/tess/a/ 755 1:2 \n" + own,
			stream(workspace("/home/tess/a/p"), tess, "var/home/tess/a/p"),
		},
		{"the home", files + own, stream(workspace("/home/tess"), tess, "var/home/tess")},
		{"above the home", files + own, stream(workspace("/home"), tess)},
	} {
		if d := cmp.Diff(c.want, c.got); d != "" {
			t.Errorf("%s: %s", c.what, d)
		}
	}
	other := account("other", 1, 2)
	if got := stream(workspace("/srv/p"), other); strings.Contains(got, "home/other/") {
		t.Errorf("the image's home directory: %s", got)
	}
}
