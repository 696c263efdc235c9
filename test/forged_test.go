package test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentbox/agentbox/criu/wall/walltest"
)

// forging stands in for agentbox-runtime: it keeps the images of the first restore, and has
// each further one begin with what was forged of them.
const forging = `#!/bin/sh
case " $* " in *" create "*)
	for staged in %[1]s/run/restore/*/restore.json; do
		images=$(sed -n 's/.*"images":"\([^"]*\)".*/\1/p' "$staged")
		[ -d "$images" ] || continue
		if [ -d %[2]s/forged ]; then
			find "$images" -mindepth 1 -delete
			cp -a %[2]s/forged/. "$images/"
			chown -hR --reference="$images" "$images"
		elif [ ! -d %[2]s/kept ]; then
			cp -a "$images" %[2]s/kept
		fi
	done
esac
exec %[3]s/agentbox-runtime "$@"
`

// TestForged restores forged images of processes. Each restore is refused, and what the
// images reach for on the host is as it was.
func TestForged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b := memoryBox(t)
	b.bin = filepath.Join(dir, "bin")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(b.bin, 0o755))
	for _, d := range []string{dir, filepath.Dir(dir)} {
		must(os.Chmod(d, 0o755)) // the runtime is looked at by the root of a user namespace, too
	}
	program, err := os.ReadFile(filepath.Join(bin, "agentbox"))
	must(err)
	must(os.WriteFile(filepath.Join(b.bin, "agentbox"), program, 0o755))
	must(os.WriteFile(filepath.Join(b.bin, "agentbox-runtime"), fmt.Appendf(nil, forging, b.root, dir, bin), 0o755))

	v, look := victims(b, dir)
	b.start("c", "-v", v.Dir+":"+v.Bound+":ro", "busybox", "sh", "-c", "while :; do sleep 60; done")
	one := b.checkpoint("c")
	b.ok("restore", "c", one) // what is not forged is restored
	before := look()
	masks := b.sh("c", tryMasks)
	for _, f := range walltest.Forgeries(v) {
		forged := filepath.Join(dir, "forged")
		must(os.RemoveAll(forged))
		must(exec.Command("cp", "-a", filepath.Join(dir, "kept"), forged).Run())
		if err := f.Forge(forged, v); errors.Is(err, fs.ErrNotExist) {
			t.Logf("%s: there is no such image", f.Name)
			continue // of another kind of container
		} else if err != nil {
			t.Fatalf("%s: %v", f.Name, err)
		}
		r := b.try(nil, "restore", "c", one)
		if f.Image == "" && f.Late == "" && r.code != 0 {
			t.Fatalf("%s: exit %d: %s", f.Name, r.code, r.err)
		}
		if f.Image == "" && f.Late == "" { // it is as harmless as what is not forged
			equal(b, f.Name, fmt.Sprint(r.code, b.sh("c", tryMasks)), fmt.Sprint(0, masks))
			equal(b, f.Name+": the host", look(), before)
			continue
		}
		if r.code == 0 || !strings.Contains(r.err, "not what") && !f.Damage || !strings.Contains(r.err, f.Late) {
			t.Errorf("%s: exit %d: %s", f.Name, r.code, r.err)
		}
		if now := look(); now != before {
			t.Errorf("%s: the host has changed:\n%s\nwas\n%s", f.Name, now, before)
		}
		if s := b.inspect("c"); s.Pid != 0 {
			t.Errorf("%s: process %d is there", f.Name, s.Pid)
		}
	}
	must(os.RemoveAll(filepath.Join(dir, "forged")))
	b.ok("restore", "c", one) // it is as good as before
}

// tryMasks is what a sandbox may not do with /proc.
const tryMasks = "cat /proc/keys; echo x >/proc/sys/kernel/core_pattern; head -c 1 /proc/kcore; true"

// victims makes what forged images reach for. look says how that is.
func victims(b *box, dir string) (v walltest.Victims, look func() string) {
	b.Helper()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	v = walltest.Victims{
		File: filepath.Join(dir, "victim", "file"), Dir: filepath.Join(dir, "victim"),
		Cgroup: "/" + filepath.Base(b.root) + "-victim", Bound: "/bound",
	}
	must(os.Mkdir(v.Dir, 0o700))
	must(os.WriteFile(v.File, []byte("whole"), 0o600))
	groups := victimCgroups(b.T, v.Cgroup)
	return v, func() string {
		b.Helper()
		text := []string{b.read(v.File)}
		for _, path := range append([]string{v.File, v.Dir}, groups...) {
			text = append(text, owned(b.T, path))
		}
		entries, err := os.ReadDir(v.Dir)
		must(err)
		for _, e := range entries {
			text = append(text, e.Name())
		}
		for _, g := range groups {
			procs, err := os.ReadFile(filepath.Join(g, "cgroup.procs"))
			must(err)
			text = append(text, string(procs))
		}
		for _, name := range []string{"kernel/core_pattern", "kernel/modprobe"} {
			text = append(text, b.read("/proc/sys/"+name))
		}
		return strings.Join(text, "\n")
	}
}

// A container that may mount, with the host's ids, comes back with what it has mounted.
func TestMounterComesBack(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	dir := t.TempDir()
	for _, ids := range []string{"host", "auto"} {
		c := "c" + ids
		b.start(c, "--policy", "trusted", "--cap-add", "SYS_ADMIN", "--userns", ids, "-v",
			dir+":/bound:ro", "busybox", "sh", "-c",
			"mkdir /a /b && mount -t tmpfs none /a && mkdir /a/x && mount --bind /a/x /b && echo there >/b/f; while :; do sleep 60; done")
		b.eventually("it has mounted", func() bool { return b.sh(c, "cat /b/f 2>&1; true") == "there" })
		one := b.checkpoint(c)
		b.ok("restore", c, one)
		equal(b, ids, b.sh(c, "cat /a/x/f"), "there")
		b.ok("rm", "-f", c)
	}
}

// victimCgroups makes a cgroup in each hierarchy that it can be made in.
func victimCgroups(t *testing.T, name string) (list []string) {
	t.Helper()
	tops, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		t.Fatal(err)
	}
	for _, top := range append(tops, "/sys/fs/cgroup/cgroup.procs") {
		if _, err := os.Lstat(filepath.Join(filepath.Dir(top), "cgroup.clone_children")); err != nil &&
			top != "/sys/fs/cgroup/cgroup.procs" {
			continue // a cgroup of v2's, no hierarchy
		}
		if _, err := os.Lstat(top); err != nil {
			continue // v1's are mounted on a tmpfs
		}
		dir := filepath.Join(filepath.Dir(top), name)
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			if err := syscall.Rmdir(dir); err != nil {
				t.Error(err)
			}
		})
		list = append(list, dir)
	}
	return list
}

// owned says what a forger would change of a file.
func owned(t *testing.T, path string) string {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	s := st.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%s %v %d:%d", path, st.Mode(), s.Uid, s.Gid)
}
