package source

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

// archiveOfOne makes a mirror with the package "tiny".
func archiveOfOne(t *testing.T) (line string) {
	t.Helper()
	dir := t.TempDir()
	for path := dir; path != "/"; path = filepath.Dir(path) { // apt reads as another user
		if err := os.Chmod(path, 0o755); path == os.TempDir() {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	pkg := filepath.Join(t.TempDir(), "p")
	if err := errors.Join(os.MkdirAll(pkg+"/DEBIAN", 0o755), os.MkdirAll(pkg+"/usr/bin", 0o755),
		os.WriteFile(pkg+"/usr/bin/tiny", []byte("hi\n"), 0o755),
		os.WriteFile(pkg+"/DEBIAN/control",
			[]byte("Package: tiny\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: x\n"),
			0o644)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("dpkg-deb", "-b", pkg, dir+"/tiny_1_all.deb").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command("apt-ftparchive", "packages", ".")
	cmd.Dir = dir
	list, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/Packages", list, 0o644); err != nil {
		t.Fatal(err)
	}
	return "deb [trusted=yes] file://" + dir + " ./"
}

func TestBootstrap(t *testing.T) {
	o := fast(t)
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	mirror := url.QueryEscape(archiveOfOne(t))
	ref := func(include string) reference.Reference {
		return mustParse(t, "bootstrap:debian/bookworm?variant=extract&include="+include+"&mirror="+mirror)
	}
	// Side by side, as their time is that of apt.
	made := func(include string) ([]byte, error) {
		r, err := Tree(t.Context(), ref(include), o)
		if err != nil {
			return nil, err
		}
		b, err := io.ReadAll(r)
		return b, errors.Join(err, r.Close())
	}
	var all [2][]byte
	var g errgroup.Group
	for i := range all {
		g.Go(func() (err error) { all[i], err = made("tiny"); return err })
	}
	g.Go(func() error {
		_, err := made("tiny,none")
		if h := strings.Join(fault.Hint(err), " "); err == nil ||
			!strings.Contains(h, "Is the package in this suite") || !strings.Contains(err.Error(), "none") {
			return fmt.Errorf("a package that is not there: %w (hint %q)", err, h)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(all[0], all[1]) {
		t.Error("the same twice is not the same")
	}
	sizes := map[string]int64{}
	for r := tar.NewReader(bytes.NewReader(all[0])); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		sizes[h.Name] = h.Size
		if h.ModTime.Unix() > 1700000000 {
			t.Errorf("%s is of %s", h.Name, h.ModTime)
		}
	}
	if sizes["./usr/bin/tiny"] != 3 {
		t.Errorf("the package is not there: %v", sizes)
	}
	for _, f := range []string{"./etc/hostname", "./etc/resolv.conf"} { // not this machine's
		if n, ok := sizes[f]; !ok || n != 0 {
			t.Errorf("%s has %d bytes", f, n)
		}
	}
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		r, err := Tree(ctx, ref("tiny"), o)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if _, err := io.ReadAll(r); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := Open(t.Context(), ref("tiny"), o); !errors.Is(err, fault.ErrInvalid) {
		t.Error(err)
	}
}

// The mounts of mmdebstrap are gone with it, even when both are killed.
func TestBootstrapMountsApart(t *testing.T) {
	dir := t.TempDir()
	fake := "#!/bin/sh\nmount -t tmpfs ours \"$HERE\" && readlink /proc/self/ns/mnt\n"
	if err := os.WriteFile(filepath.Join(dir, "mmdebstrap"), []byte(fake), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("HERE", t.TempDir())
	defer func() { _ = syscall.Unmount(os.Getenv("HERE"), syscall.MNT_DETACH) }()
	r, err := Tree(t.Context(), mustParse(t, "bootstrap:debian/bookworm?mirror=http%3A%2F%2Fmirror.example"), fast(t))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	said, err := io.ReadAll(r)
	if ours, _ := os.Readlink("/proc/self/ns/mnt"); err != nil || strings.TrimSpace(string(said)) == ours {
		t.Errorf("it runs in %q (%v), and so does this", said, err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil ||
		strings.Contains(string(mounts), os.Getenv("HERE")) {
		t.Errorf("it mounts on the host (%v)", err)
	}
}

func TestComplete(t *testing.T) {
	for _, c := range []struct{ ref, platform, epoch, want string }{
		{"bootstrap:debian/sid", "linux/amd64", "", "bootstrap:debian/sid?arch=amd64&variant=minbase"},
		{
			"bootstrap:debian/sid?include=git", "linux/arm64", "1",
			"bootstrap:debian/sid?arch=arm64&epoch=1&include=git&variant=minbase",
		},
		{
			"bootstrap:debian/sid?arch=armhf&epoch=2&variant=apt", "linux/arm/v6", "1",
			"bootstrap:debian/sid?arch=armhf&epoch=2&variant=apt",
		},
		{"debian", "linux/amd64", "1", "docker.io/library/debian:latest"},
		{"bootstrap:debian/sid", "windows/amd64", "", ""},
		{"bootstrap:debian/sid", "linux/amd64", "yesterday", ""},
	} {
		t.Setenv("SOURCE_DATE_EPOCH", c.epoch)
		r, err := Complete(mustParse(t, c.ref), image.SourceOptions{Platform: c.platform})
		if c.want == "" && err == nil || c.want != "" && (err != nil || r.String() != c.want) {
			t.Errorf("%s: %s, %v", c.ref, r, err)
		}
	}
}
