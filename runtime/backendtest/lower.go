package backendtest

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// BusyboxLower makes a root filesystem of the host's static busybox, with what
// the cases look for in it: a user "agent" (1000:1000), /etc/base,
// /etc/not-executable and a directory /srv/tree with two files.
func BusyboxLower(t *testing.T) []string {
	t.Helper()
	binary, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatalf("the conformance suite needs a static busybox: %v", err)
	}
	root := t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"bin", "dev", "proc", "sys", "etc", "root", "tmp", "srv/tree", "home/agent"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o1777); err != nil {
		t.Fatal(err)
	}
	copyFile(t, binary, filepath.Join(root, "bin/busybox"))
	list, err := exec.Command(binary, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range strings.Fields(string(list)) {
		if name == "busybox" {
			continue
		}
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{
		"etc/passwd":         "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
		"etc/group":          "root:x:0:\nagent:x:1000:\nextra:x:2000:agent\n",
		"etc/base":           "base\n",
		"etc/not-executable": "#!/bin/sh\n",
		"srv/tree/a":         "a\n",
		"srv/tree/b":         "b\n",
	} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return []string{root}
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}
