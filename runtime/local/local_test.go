package local

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
)

// Those that adopt have no images, and so make no sandboxes.
func TestAdopts(t *testing.T) {
	for _, name := range Backends() {
		root := t.TempDir()
		h, err := openBackend(name, place{root: root, run: filepath.Join(root, "run"), program: os.Args[0]})
		if err != nil && Adopts(name) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil && (h.Images == nil) != Adopts(name) {
			t.Errorf("%s has images: %t; adopts: %t", name, h.Images != nil, Adopts(name))
		}
	}
	if _, err := openBackend("none-such", place{}); !errors.Is(err, fault.ErrInvalid) ||
		!strings.Contains(err.Error(), "containerd, docker, oci, podman, volume") {
		t.Errorf("of a backend that does not exist: %v", err)
	}
}

// The Engine of a new root works, and its verbs are on record.
func TestOpen(t *testing.T) {
	root := t.TempDir()
	for range 2 { // made, and opened again
		eng, err := Open(t.Context(), Options{Root: root, Program: os.Args[0], By: "test"})
		if err != nil {
			t.Fatal(err)
		}
		if list, err := eng.Sandboxes(t.Context()); err != nil || len(list) > 0 {
			t.Errorf("sandboxes of a new root: %v, %v", list, err)
		}
		if err := eng.Pause(t.Context(), "c"); !errors.Is(err, runtime.ErrNotFound) {
			t.Error(err)
		}
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	}
	list, err := audit.Open(root).List(t.Context(), audit.Filter{})
	if err != nil || len(list) != 2 || list[1].Verb != "pause" || list[1].Who.By != "test" ||
		list[1].Outcome != "not_found" {
		t.Errorf("on record: %+v, %v", list, err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := Open(t.Context(), Options{Root: root}); !errors.Is(err, fault.ErrNotFound) ||
		len(fault.Hint(err)) == 0 {
		t.Errorf("without the agentbox command: %v", err)
	}
}

// A root that is removed while an Engine of it is open stays removed: the monitor of a sandbox
// may still be at work then.
func TestRootRemoved(t *testing.T) {
	root := filepath.Join(t.TempDir(), "root")
	eng, err := Open(t.Context(), Options{Root: root, Program: os.Args[0], By: "test", NoRecovery: true})
	if err != nil {
		t.Fatal(err)
	}
	defer eng.Close()
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	_, err = eng.Images(t.Context())
	if !errors.Is(err, runtime.ErrNotFound) || !strings.Contains(err.Error(), root+" was removed") {
		t.Errorf("the backend opens: %v", err)
	}
	if _, err := os.Lstat(root); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the root is there again: %v", err)
	}
}

// The process is told the root and the backend, is passed files, has a session of its own,
// and is no plugin of docker.
func TestHelper(t *testing.T) {
	dir := t.TempDir()
	told := filepath.Join(dir, "told")
	if err := unix.Mkfifo(told, 0o600); err != nil {
		t.Fatal(err)
	}
	self := filepath.Join(dir, "docker-agentbox")
	passed, err := os.Create(filepath.Join(dir, "passed"))
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	script := "#!/bin/sh\necho \"$@\" $(readlink /proc/$$/fd/3) $(pwd) $(cut -d' ' -f6 /proc/$$/stat) $$ >" + told +
		"\n"
	if err := os.WriteFile(self, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	args := "--backend oci supervise " + passed.Name() + " /"
	for root, want := range map[string]string{"": args, "/srv/box": "--root /srv/box " + args} {
		if err := (helper{self, root, "oci"}).start([]*os.File{passed}, "supervise"); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(told)
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Fields(string(data))
		n := len(words)
		if got := strings.Join(words[:n-2], " "); got != want || words[n-1] != words[n-2] {
			t.Errorf("%q, want %q", data, want)
		}
	}
	if err := (helper{program: self + "x"}).start(nil, "supervise"); err == nil {
		t.Error("no error of a program that is not there")
	}
}
