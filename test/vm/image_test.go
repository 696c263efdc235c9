package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// imageScript is a copy of scripts/vm-image.sh, and of others that make roots, whose programs that fetch and
// write gigabytes are replaced: mmdebstrap makes a root of a few files.
type imageScript struct {
	*testing.T
	dir string
}

func newImageScript(t *testing.T) imageScript {
	t.Helper()
	s := imageScript{t, t.TempDir()}
	for _, name := range []string{"vm-image.sh", "debian-image.sh", "fresh-root.sh"} {
		if err := copyFile(filepath.Join("../../scripts", name), filepath.Join(s.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	s.program("mmdebstrap", `
printf '%s\n' "$@" >>"$HERE/called"
for a; do case $a in --setup-hook=*) (set -- "$HERE/hooked"; eval "${a#--setup-hook=}") || exit 1 ;; esac; done
for a; do case $a in */root | */qemu) dir=$a ;; */roots/tmp.* | */fresh/tmp.tar) file=$a ;; esac; done
if [ -n "$HANGS" ]; then
	dir=${dir:-${TMPDIR:-$HERE}/root}
	mkdir -p "$dir/proc" && mount -t proc proc "$dir/proc" && touch "$HERE/hangs"
	exec sleep 600
fi
[ -n "$dir" ] || { echo tar >"$file"; exit; }
[ -z "$EXPIRED" ] || { echo 'E: Release file for http://sid.example/dists/sid/InRelease is expired (invalid since 18d). Updates will not be applied.'; exit 100; }
[ -z "$BROKEN" ] || { echo no such mirror; exit 100; }
mkdir -p "$dir/boot" "$dir/var/lib/dpkg/info" "$dir/var/lib/dpkg/updates"
touch "$dir/boot/vmlinuz-6" "$dir/boot/initrd.img-6"
for p in docker.io docker-cli containerd runc; do
	printf 'Package: %s\nStatus: install ok installed\nMaintainer: x\nArchitecture: amd64\nVersion: %s+dfsg4-5\nDescription: x\n\n' $p "${ENGINE:-28.5.2}"
done >"$dir/var/lib/dpkg/status"
`)
	s.program("mke2fs", `for last; do prev=$image image=$last; done; echo disk >"$prev"`)
	s.program("slirp4netns", "exit 1")
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

func (s imageScript) command(env, script string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.dir, script), args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Join(s.dir, "bin")+":"+os.Getenv("PATH"), "HERE="+s.dir,
		"AGENTBOX_CACHE="+filepath.Join(s.dir, "cache"))
	cmd.Env = append(cmd.Env, strings.Fields(env)...)
	return cmd
}

// run returns what the script prints, and what it says.
func (s imageScript) run(env string, args ...string) (out, said string, err error) {
	cmd := s.command(env, "vm-image.sh", args...)
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
	const from = "AGENTBOX_VM_SID=http://sid.example"
	usual := s.made(from, "--image", "trixie")
	if c := s.calls(); strings.Contains(c, " sid ") || !strings.Contains(c, "linux-image-cloud-amd64") {
		t.Errorf("trixie is made of %s", c)
	}
	if again := s.made(from); again != usual || s.calls() != "" {
		t.Errorf("without a name it is %s, not %s, or was made again", again, usual)
	}
	other := s.made(from, "--image", "docker28")
	if c := s.calls(); !strings.Contains(c, "\ndeb http://sid.example sid main\n") ||
		!strings.Contains(c, "\nhttp://deb.debian.org/debian\n") {
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
		s.made("FREE=0 "+from, "--image", i.name)
	}
	if c := s.calls(); c != "" {
		t.Errorf("what is there was made again: %s", c)
	}
	sid := s.made("AGENTBOX_VM_SID=http://snapshot.example", "--image", "docker28")
	if sid == other || s.calls() == "" {
		t.Error("sid from another place makes no other image")
	}
}

// The image of another tree stays, the last one and any that is at work: two trees would
// make each other's anew for ever, and a machine that boots again would not find its disk.
func TestImagesOfOtherTrees(t *testing.T) {
	s := newImageScript(t)
	path := filepath.Join(s.dir, "vm-image.sh")
	original, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	used := time.Now().Add(-time.Hour)
	tree := func(n int) string {
		if err := os.WriteFile(path, fmt.Appendf(original, "# of tree %d\n", n), 0o700); err != nil {
			t.Fatal(err)
		}
		dir := s.made("X=")
		used = used.Add(time.Second)
		if err := os.Chtimes(dir, used, used); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	usual := s.made("X=", "--image", "docker28")
	a, b := tree(1), tree(2)
	s.calls()
	if tree(1) != a || tree(2) != b || s.calls() != "" {
		t.Error("two trees make each other's image anew")
	}
	f, err := os.Open(a)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	c := tree(3) // b was used after a
	d := tree(4)
	for dir, want := range map[string]bool{usual: true, a: true, b: false, c: true, d: true} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s is there: %v, want %v", filepath.Base(dir), err == nil, want)
		}
	}
}

// An image of which something is missing is made anew, in its place.
func TestHalfAnImage(t *testing.T) {
	s := newImageScript(t)
	dir := s.made("X=")
	for _, name := range []string{"disk.img", "vmlinuz"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		s.calls()
		if again := s.made("X="); again != dir || s.calls() == "" {
			t.Errorf("without %s: %s, want %s, made anew", name, again, dir)
		}
		if found, _ := filepath.Glob(filepath.Join(dir, "*")); len(found) != 3 {
			t.Errorf("in it are %v", found)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(s.dir, "cache/vm/*")); len(left) != 2 {
		t.Errorf("in the cache are %v", left)
	}
}

// A directory that was removed while one waited for its lock is not locked.
func TestLocked(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	for _, again := range []bool{false, true} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := locked(f, syscall.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		if again {
			if err := os.Mkdir(dir, 0o700); err != nil {
				t.Fatal(err)
			}
		}
		if err := locked(f, syscall.LOCK_EX); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("made again %v: %v", again, err)
		}
	}
}

// However the making of an image or a root ends, nothing of it runs, and nothing of it is
// mounted on the host, where it would be in the next one's way.
func TestInterrupted(t *testing.T) {
	for _, script := range [][]string{
		{"vm-image.sh", "--qemu"}, {"debian-image.sh", "trixie", "http://mirror.example"},
		{"fresh-root.sh", "--mirror", "http://mirror.example", "trixie", "true"},
	} {
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
			if sig == syscall.SIGINT && script[0] != "vm-image.sh" {
				continue // a terminal sends it to mmdebstrap, too, which they wait for
			}
			t.Run(script[0]+" "+sig.String(), func(t *testing.T) {
				newImageScript(t).interrupted(sig, script[0], script[1:]...)
			})
		}
	}
}

func (s imageScript) interrupted(sig syscall.Signal, script string, args ...string) {
	cmd := s.command("HANGS=1", script, args...)
	var said strings.Builder
	cmd.Stderr = &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		s.Fatal(err)
	}
	defer func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }()
	eventually(s.T, "it mounts", func() bool { _, err := os.Stat(filepath.Join(s.dir, "hangs")); return err == nil })
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		s.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], s.dir) {
			s.Errorf("it mounts on the host: %s", f[4])
			defer func() { _ = syscall.Unmount(f[4], syscall.MNT_DETACH) }()
		}
	}
	_ = cmd.Process.Signal(sig)
	if err := cmd.Wait(); err == nil {
		s.Error("it ended well")
	}
	if script == "vm-image.sh" && sig != syscall.SIGKILL && !strings.Contains(said.String(), "interrupted") {
		s.Errorf("it says %q", said.String())
	}
	eventually(s.T, "nothing runs", func() bool {
		// The sleep has it in its environment.
		out, _ := exec.Command("sh", "-c", `grep -lsaF "$1" /proc/[0-9]*/environ`, "-", "HERE="+s.dir).Output()
		return len(out) == 0
	})
	left := func() []string {
		list, _ := filepath.Glob(filepath.Join(s.dir, "cache/*/tmp*"))
		more, _ := filepath.Glob(filepath.Join(s.dir, "cache/tmp*"))
		return append(list, more...)
	}
	if script == "vm-image.sh" && sig != syscall.SIGKILL && len(left()) > 0 {
		s.Errorf("left behind: %v", left())
	}
	if out, err := s.command("AGAIN=1", script, args...).CombinedOutput(); err != nil && script != "fresh-root.sh" {
		s.Errorf("the next run: %v: %s", err, out)
	}
	if len(left()) > 0 {
		s.Errorf("the next run leaves %v", left())
	}
}

// A root whose network does not come up is not waited for: what slirp4netns said is told.
func TestFreshWithoutNetwork(t *testing.T) {
	s := newImageScript(t)
	s.program("mmdebstrap", `for a; do case $a in */fresh/tmp.tar) file=$a ;; esac; done
mkdir -p "$HERE/r/proc" "$HERE/r/sys" "$HERE/r/dev" "$HERE/r/run" "$HERE/r/etc" && tar -C "$HERE/r" -cf "$file" .`)
	s.program("slirp4netns", `echo "no tap here" >&2; exit 1`)
	// It calls itself by its place in the tree.
	if err := os.Mkdir(filepath.Join(s.dir, "scripts"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(s.dir, "fresh-root.sh"),
		filepath.Join(s.dir, "scripts/fresh-root.sh")); err != nil {
		t.Fatal(err)
	}
	cmd := s.command("X=", "scripts/fresh-root.sh", "--mirror", "http://mirror.example", "trixie", "true")
	var said strings.Builder
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &said, &said, 5*time.Second
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	bound := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	err := cmd.Wait()
	if !bound.Stop() {
		t.Error("it did not end by itself")
	}
	if err == nil || !strings.Contains(said.String(), "no tap here") ||
		!strings.Contains(said.String(), "slirp4netns made no network") {
		t.Errorf("it ended with %v and says %q", err, said.String())
	}
	if left, _ := filepath.Glob(filepath.Join(s.dir, "cache/fresh/run.*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so within 20 s: %s", what)
		}
	}
}

// An image that cannot be made is refused, and leaves nothing.
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
		{"EXPIRED=1", []string{"--image", "docker28"}, true, "AGENTBOX_VM_SID='[check-valid-until=no] URL'"},
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
