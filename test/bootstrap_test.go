package test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// bootstrapMirror makes a mirror with one package, and returns the image that is made of it.
func bootstrapMirror(b *box) string {
	b.Helper()
	dir := b.root + ".mirror" // apt reads it as another user
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	script := `set -e; umask 022
mkdir -p "$1" "$1.p/DEBIAN" "$1.p/usr/bin"; trap 'rm -rf "$1.p"' EXIT
echo hi > "$1.p/usr/bin/tiny"
printf 'Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: x\n' > "$1.p/DEBIAN/control"
dpkg-deb -b "$1.p" "$1/tiny_1_all.deb"
cd "$1"; apt-ftparchive packages . > Packages`
	if out, err := exec.Command("sh", "-c", script, "sh", dir).CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	return "bootstrap:debian/bookworm?variant=extract&include=tiny&mirror=" +
		url.QueryEscape("deb [trusted=yes] file://"+dir+" ./")
}

// TestBootstrapKilled has agentbox killed while mmdebstrap makes an image: it ends by itself,
// with all that it has put into TMPDIR, and no image is there.
func TestBootstrapKilled(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	tmp := b.root + ".tmp"
	if err := os.Mkdir(tmp, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	env := "TMPDIR=" + tmp
	there := func(pattern string) []string {
		list, err := filepath.Glob(filepath.Join(tmp, pattern))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	image := bootstrapMirror(b)
	for _, begun := range []string{"*", "mmdebstrap.*/var/lib/dpkg"} {
		cmd := b.command(context.Background(), "image", "pull", image)
		cmd.Env = append(cmd.Env, env)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		b.eventually(begun+" is there", func() bool { return len(there(begun)) > 0 })
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != -1 {
			t.Fatalf("it was not killed: %v", cmd.ProcessState)
		}
		b.eventually("its processes have ended", func() bool { return len(withEnv(env)) == 0 })
		equal(b, "what is left in TMPDIR", fmt.Sprint(there("*")), "[]")
	}
	b.ok("recover")
	equal(b, "images", b.ok("image", "ls", "-q"), "busybox")
	if left, _ := filepath.Glob(b.root + "/images/tmp/*"); len(left) != 0 {
		b.ok("image", "prune", "--force")
	}
	left, _ := filepath.Glob(b.root + "/images/tmp/*")
	equal(b, "what is left of the image", strings.Join(left, " "), "")
}
