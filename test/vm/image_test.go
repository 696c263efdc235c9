package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// imageScript is a copy of scripts/vm-image.sh whose programs that fetch and
// write gigabytes are replaced: mmdebstrap makes a root of a few files.
type imageScript struct {
	*testing.T
	dir string
}

func newImageScript(t *testing.T) imageScript {
	t.Helper()
	s := imageScript{t, t.TempDir()}
	for _, name := range []string{"vm-image.sh", "debian-image.sh"} {
		if err := copyFile(filepath.Join("../../scripts", name), filepath.Join(s.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s.program("mmdebstrap", `
printf '%s\n' "$@" >>"$HERE/called"
for a; do case $a in --setup-hook=*) (set -- "$HERE/hooked"; eval "${a#--setup-hook=}") || exit 1 ;; esac; done
for a; do case $a in */root | */qemu) dir=$a ;; */sandboxes/tmp.*) file=$a ;; esac; done
[ -n "$dir" ] || { echo tar >"$file"; exit; }
[ -z "$BROKEN" ] || { echo no such mirror; exit 100; }
mkdir -p "$dir/boot" "$dir/var/lib/dpkg/info" "$dir/var/lib/dpkg/updates"
touch "$dir/boot/vmlinuz-6" "$dir/boot/initrd.img-6"
for p in docker.io docker-cli containerd runc; do
	printf 'Package: %s\nStatus: install ok installed\nMaintainer: x\nArchitecture: amd64\nVersion: %s+dfsg4-5\nDescription: x\n\n' $p "${ENGINE:-28.5.2}"
done >"$dir/var/lib/dpkg/status"
`)
	s.program("mke2fs", `for last; do prev=$image image=$last; done; echo disk >"$prev"`)
	s.program("df", `printf 'Avail\n%sM\n' "${FREE:-100000}"`)
	return s
}

func (s imageScript) program(name, script string) {
	s.Helper()
	if err := os.MkdirAll(filepath.Join(s.dir, "bin"), 0o700); err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, "bin", name), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		s.Fatal(err)
	}
}

// run returns what the script prints, and what it says.
func (s imageScript) run(env string, args ...string) (out, said string, err error) {
	cmd := exec.Command(filepath.Join(s.dir, "vm-image.sh"), args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(s.dir, "bin")+":"+os.Getenv("PATH"), "HERE="+s.dir, "AGENTBOX_CACHE="+filepath.Join(s.dir, "cache"), env)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	data, err := cmd.Output()
	return strings.TrimSpace(string(data)), stderr.String(), err
}

func (s imageScript) made(env string, args ...string) string {
	s.Helper()
	out, said, err := s.run(env, args...)
	if err != nil {
		s.Fatalf("vm-image.sh %q: %v: %s", args, err, said)
	}
	if data, err := os.ReadFile(filepath.Join(out, "disk.img")); err != nil || string(data) != "disk\n" {
		s.Fatalf("vm-image.sh %q prints %q: %v", args, out, err)
	}
	return out
}

// calls returns what mmdebstrap was called with since it was last asked.
func (s imageScript) calls() string {
	data, _ := os.ReadFile(filepath.Join(s.dir, "called"))
	_ = os.Remove(filepath.Join(s.dir, "called"))
	return string(data)
}

// Each image is made once, is there beside the other, and is made anew with
// another script.
func TestImages(t *testing.T) {
	s := newImageScript(t)
	usual := s.made("X=", "--image", "trixie")
	if c := s.calls(); strings.Contains(c, " sid ") || !strings.Contains(c, "linux-image-cloud-amd64") {
		t.Errorf("trixie is made of %s", c)
	}
	if again := s.made("X="); again != usual || s.calls() != "" {
		t.Errorf("without a name it is %s, not %s, or was made again", again, usual)
	}
	other := s.made("AGENTBOX_VM_SID=http://sid.example", "--image", "docker28")
	if c := s.calls(); !strings.Contains(c, "\ndeb http://sid.example sid main\n") || !strings.Contains(c, "\nhttp://deb.debian.org/debian\n") {
		t.Errorf("docker28 is made of %s", c)
	}
	if filepath.Dir(other) != filepath.Dir(usual) || !strings.HasPrefix(filepath.Base(other), "docker28-") {
		t.Errorf("%s is beside %s", other, usual)
	}
	pins, err := os.ReadFile(filepath.Join(s.dir, "hooked/etc/apt/preferences.d/sid"))
	if want := "Package: *\nPin: release n=sid\nPin-Priority: 100\n\nPackage: docker.io docker-cli containerd runc\nPin: release n=sid\nPin-Priority: 990\n\n"; err != nil || string(pins) != want {
		t.Errorf("the pins are %q (%v)", pins, err)
	}
	for _, i := range images {
		s.made("FREE=0", "--image", i.name)
	}
	if c := s.calls(); c != "" {
		t.Errorf("what is there was made again: %s", c)
	}
	path := filepath.Join(s.dir, "vm-image.sh")
	script, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, append(script, "# changed\n"...), 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	if now := s.made("X=", "--image", "docker28"); now == other {
		t.Error("a changed script makes no other image")
	}
	if _, err := os.Stat(other); err == nil {
		t.Error("the old image is still there")
	}
	if _, err := os.Stat(usual); err != nil {
		t.Errorf("the other image is gone: %v", err)
	}
}

// What cannot be made is refused, and leaves nothing.
func TestImageRefused(t *testing.T) {
	s := newImageScript(t)
	for _, c := range []struct {
		env   string
		args  []string
		begun bool
		want  string
	}{
		{"X=", []string{"--image", "docker27"}, false, `no image "docker27"`},
		{"X=", []string{"--image"}, false, `no image ""`},
		{"FREE=5999", []string{"--image", "docker28"}, false, "5999 MB free and this needs 6000 MB"},
		{"FREE=6999", []string{"--image", "docker28", "--qemu"}, false, "6999 MB free and this needs 7000 MB"},
		{"BROKEN=1", []string{"--image", "trixie"}, true, "no such mirror"},
		{"ENGINE=29.1.0", []string{"--image", "docker28"}, true, "has Docker Engine 29.1.0+dfsg4-5 by now"},
	} {
		out, said, err := s.run(c.env, c.args...)
		if err == nil || out != "" || !strings.Contains(said, c.want) {
			t.Errorf("%s vm-image.sh %q: %v, %q, want %q", c.env, c.args, err, said, c.want)
		}
		if begun := s.calls() != ""; begun != c.begun {
			t.Errorf("%s vm-image.sh %q: begun: %v", c.env, c.args, begun)
		}
	}
	left, err := filepath.Glob(filepath.Join(s.dir, "cache/vm/*"))
	if err != nil || fmt.Sprint(left) != fmt.Sprint([]string{filepath.Join(s.dir, "cache/vm/lock")}) {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
