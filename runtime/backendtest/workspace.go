package backendtest

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/agentbox/agentbox/runtime"
)

// NoWorkspaces are the cases that a backend without workspaces cannot pass.
func NoWorkspaces() map[string]string {
	cannot := map[string]string{}
	for _, c := range cases {
		if strings.HasPrefix(c.name, "workspace/") {
			cannot[c.name] = "its engine would have to mount them"
		}
	}
	return cannot
}

// workspace makes a directory of the host with a few files, and the mount of it.
func (e *bench) workspace() (dir string, m runtime.Mount) {
	e.Helper()
	dir = filepath.Join(e.TempDir(), "work space")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(dir, "sub"), 0o755), os.WriteFile(filepath.Join(dir, "a"), []byte("original\n"), 0o640),
		os.WriteFile(filepath.Join(dir, "sub", "b"), []byte("below\n"), 0o644),
		os.Chown(dir, 1000, 1000), os.Chown(filepath.Join(dir, "a"), 1000, 1001),
	} {
		if err != nil {
			e.Fatal(err)
		}
	}
	return dir, runtime.Mount{Type: runtime.MountWorkspace, Source: dir, Target: "/made/work"}
}

// untouched checks that a directory is as workspace made it.
func (e *bench) untouched(dir string) {
	e.Helper()
	for name, want := range map[string]string{"a": "original\n", "sub/b": "below\n"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); string(b) != want {
			e.Errorf("%s of the host is %q, want %q: %v", name, b, want, err)
		}
	}
	if list, err := os.ReadDir(dir); len(list) != 2 {
		e.Errorf("the directory of the host has %v, %v", list, err)
	}
}

func workspaceChanges(e *bench) {
	dir, m := e.workspace()
	s := e.spec(sh(`cd /made/work; stat -c %u:%g . a; cat a; ls; echo changed > a; rm -rf sub; echo new >> new
chown 1000:1000 new`)...)
	s.Mounts = []runtime.Mount{m}
	out, _, exit := e.run(s, "")
	equal(e, "exit", exit, 0)
	equal(e, "output", out, "1000:1000\n1000:1001\noriginal\na\nsub\n")
	e.untouched(dir)

	c := e.inspect(s.ID)
	if len(c.Volumes) != 1 || c.Volumes[0].Name != "/made/work" || c.Volumes[0].Target != "/made/work" ||
		c.Volumes[0].Lower != dir {
		e.Fatalf("its volumes: %+v", c.Volumes)
	}
	for name, want := range map[string]string{"a": "changed\n", "new": "new\n"} {
		if b, err := os.ReadFile(filepath.Join(c.Volumes[0].Path, name)); string(b) != want {
			e.Errorf("%s in the upperdir is %q, want %q: %v", name, b, want, err)
		}
	}

	// Stopped, it is seen where it was, and nothing stays mounted.
	err := e.b.Mount(e.ctx, s.ID, func(root string) error {
		if b, err := os.ReadFile(root + "/made/work/a"); string(b) != "changed\n" {
			e.Errorf("a of the stopped sandbox is %q: %v", b, err)
		}
		if _, err := os.Stat(root + "/made/work/sub"); err == nil {
			e.Error("a directory that it removed is back")
		}
		return e.f.IDs.AsRoot(func() error {
			return os.WriteFile(root+"/made/work/by-host", []byte("by the host\n"), 0o644)
		})
	})
	if err != nil {
		e.Fatal(err)
	}
	e.restart(s.ID)
	equal(e, "second exit", e.wait(s.ID), 0)
	out, _ = e.logs(s.ID, runtime.LogOptions{Tail: -1})
	equal(e, "output of both", out, "1000:1000\n1000:1001\noriginal\na\nsub\n1000:1000\n1000:1001\nchanged\na\nby-host\nnew\n")
	e.untouched(dir)
	if err := e.b.Remove(e.ctx, s.ID); err != nil {
		e.Fatal(err)
	}
	e.removed(s.ID)
	e.untouched(dir)
}

func workspaceReadOnly(e *bench) {
	dir, m := e.workspace()
	m.ReadOnly = true
	s := e.spec(sh("cat /made/work/a; echo x > /made/work/a || echo refused")...)
	s.Mounts = []runtime.Mount{m}
	out, _, exit := e.run(s, "")
	equal(e, "exit", exit, 0)
	equal(e, "output", out, "original\nrefused\n")
	e.untouched(dir)
}

func workspaceGone(e *bench) {
	dir, m := e.workspace()
	s := e.spec(sh("cat /made/work/a /made/work/kept; echo kept > /made/work/kept")...)
	s.Mounts = []runtime.Mount{m}
	id := e.startSpec(s)
	e.wait(id)
	away := dir + " moved away"
	if err := os.Rename(dir, away); err != nil {
		e.Fatal(err)
	}
	_, err := e.b.Start(e.ctx, id, runtime.StartOptions{})
	e.wantErr("Start without the directory", err, runtime.ErrNotFound)
	if err := os.Symlink("/etc", dir); err != nil {
		e.Fatal(err)
	}
	_, err = e.b.Start(e.ctx, id, runtime.StartOptions{})
	e.wantErr("Start with a link in place of the directory", err, runtime.ErrDenied)
	if err := os.Remove(dir); err != nil {
		e.Fatal(err)
	}
	if err := os.Rename(away, dir); err != nil {
		e.Fatal(err)
	}
	e.restart(id)
	equal(e, "exit", e.wait(id), 0)
	out, _ := e.logs(id, runtime.LogOptions{Tail: -1})
	equal(e, "output", out, "original\noriginal\nkept\n")
}

func workspaceOfItself(e *bench) {
	_, m := e.workspace()
	for _, dir := range []string{"/", e.root, filepath.Dir(e.root)} {
		m.Source = dir
		s := e.spec("true")
		s.Mounts = []runtime.Mount{m}
		e.wantErr("Create over "+dir, e.b.Create(e.ctx, s, e.lower), runtime.ErrInvalid)
		_, err := e.b.Inspect(e.ctx, s.ID)
		e.wantErr("Inspect after a failed Create", err, runtime.ErrNotFound)
	}
}
